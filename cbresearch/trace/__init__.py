"""What happened in a run, a record a step and one a request: all that metrics, figures and reports read."""

from cbresearch.trace.files import write_csv, write_json, write_whole
from cbresearch.trace.records import RequestRecord, StepRecord
from cbresearch.trace.run import MemoryUse, Stay, Trace
from cbresearch.trace.steps import Steps, column

__all__ = [
    "MemoryUse",
    "RequestRecord",
    "Stay",
    "StepRecord",
    "Steps",
    "Trace",
    "column",
    "write_csv",
    "write_json",
    "write_whole",
]
