"""The mechanism between policies and executors."""

from cbresearch.scheduler.scheduler import DecodeBatch, Scheduler

__all__ = ["DecodeBatch", "Scheduler"]
