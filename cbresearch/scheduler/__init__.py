"""The mechanism between policies and executors."""

from cbresearch.scheduler.core import Scheduler

__all__ = ["Scheduler"]
