"""What happened in a run, as records and as columns: all that metrics, figures and reports read."""

from cbresearch.trace.columns import Columns
from cbresearch.trace.files import write_columns, write_json, write_whole
from cbresearch.trace.records import RequestRecord, StepRecord
from cbresearch.trace.run import Origin, Stay, Trace
from cbresearch.trace.steps import Steps, step_of
from cbresearch.trace.storage import TraceWriter, load

__all__ = [
    "Columns",
    "Origin",
    "RequestRecord",
    "Stay",
    "StepRecord",
    "Steps",
    "Trace",
    "TraceWriter",
    "load",
    "step_of",
    "write_columns",
    "write_json",
    "write_whole",
]
