"""What happened in a run, as records and as columns: all that metrics, figures and reports read."""

from cbresearch.trace.columns import *  # noqa: F403
from cbresearch.trace.files import *  # noqa: F403
from cbresearch.trace.records import *  # noqa: F403
from cbresearch.trace.run import *  # noqa: F403
from cbresearch.trace.steps import *  # noqa: F403
from cbresearch.trace.storage import *  # noqa: F403
