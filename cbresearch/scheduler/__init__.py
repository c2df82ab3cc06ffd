"""The mechanism between policies and executors."""

from cbresearch.scheduler.ahead import look_ahead
from cbresearch.scheduler.core import Scheduler
from cbresearch.scheduler.stride import Ahead, Foresight

__all__ = ["Ahead", "Foresight", "Scheduler", "look_ahead"]
