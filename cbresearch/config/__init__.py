"""Frozen configurations, validated when they are built: limits, the shape of a model, a machine."""

from cbresearch.config.hardware import Hardware
from cbresearch.config.limits import PREEMPTIONS, RESERVATIONS, CacheConfig, QueueLimits, SchedulerConfig
from cbresearch.config.shape import ModelShape

__all__ = [
    "PREEMPTIONS",
    "RESERVATIONS",
    "CacheConfig",
    "Hardware",
    "ModelShape",
    "QueueLimits",
    "SchedulerConfig",
]
