"""Continuous batching: one scheduler and one block manager drive a real model and a simulator."""

from importlib import import_module
from typing import Any

_EXPORTS = {
    "BlockManager": "blocks",
    "CacheConfig": "config",
    "ModelShape": "config",
    "SchedulerConfig": "config",
    "compare": "experiments",
    "ModelExecutor": "engine",
    "Policy": "policies",
    "Request": "request",
    "SamplingParams": "request",
    "Scheduler": "scheduler",
    "Executor": "serve",
    "CostExecutor": "simulator",
    "replay": "simulator",
    "simulate": "simulator",
    "Trace": "trace",
}

__all__ = list(_EXPORTS)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import an exported name when it is first asked for: a simulation never loads a model library."""
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
