"""Continuous batching: one scheduler and one block manager drive a real model and a simulator."""

from importlib import import_module
from typing import Any

_EXPORTS = {
    "BlockManager": "blocks",
    "CacheConfig": "config",
    "Claims": "experiments",
    "Hardware": "config",
    "ModelShape": "config",
    "QueueLimits": "config",
    "SchedulerConfig": "config",
    "compare": "experiments",
    "capacity": "experiments",
    "sweep": "experiments",
    "Engine": "engine",
    "ModelExecutor": "engine",
    "Policy": "policies",
    "Refusal": "request",
    "Request": "request",
    "SamplingParams": "request",
    "parallel_samples": "request",
    "Scheduler": "scheduler",
    "Executor": "serve",
    "Linear": "costs",
    "CostExecutor": "simulator",
    "replay": "simulator",
    "simulate": "simulator",
    "Trace": "trace",
}

_MODULES = ("experiments", "formulas", "metrics", "models", "policies", "simulator", "viz", "workloads")

__all__ = list(_EXPORTS)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import an exported name when it is first asked for: a simulation never loads a model library."""
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
