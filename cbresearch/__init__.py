"""Continuous batching: one scheduler and one block manager drive a real model and a simulator."""

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

# What type checkers read; a running program imports each name when it is first asked for.
if TYPE_CHECKING:
    from cbresearch.attention import PagedCache as PagedCache
    from cbresearch.config import CacheConfig as CacheConfig
    from cbresearch.config import Hardware as Hardware
    from cbresearch.config import QueueLimits as QueueLimits
    from cbresearch.config import SchedulerConfig as SchedulerConfig
    from cbresearch.costs import CARDS as CARDS
    from cbresearch.costs import Calibrated as Calibrated
    from cbresearch.costs import Linear as Linear
    from cbresearch.costs import Roofline as Roofline
    from cbresearch.engine import Engine as Engine
    from cbresearch.engine import ModelExecutor as ModelExecutor
    from cbresearch.experiments.capacity import capacity as capacity
    from cbresearch.experiments.claims import Claims as Claims
    from cbresearch.experiments.compare import compare as compare
    from cbresearch.experiments.sweep import sweep as sweep
    from cbresearch.kv import BlockManager as BlockManager
    from cbresearch.model_shape import ModelShape as ModelShape
    from cbresearch.policies import Policy as Policy
    from cbresearch.request import Rejected as Rejected
    from cbresearch.request import Request as Request
    from cbresearch.request import SamplingParams as SamplingParams
    from cbresearch.request import parallel_samples as parallel_samples
    from cbresearch.scheduler import Scheduler as Scheduler
    from cbresearch.serve import Executor as Executor
    from cbresearch.simulator import CostExecutor as CostExecutor
    from cbresearch.simulator import replay as replay
    from cbresearch.simulator import simulate as simulate
    from cbresearch.trace import Trace as Trace

_EXPORTS = {
    "attention": ("PagedCache",),
    "config": ("CacheConfig", "Hardware", "QueueLimits", "SchedulerConfig"),
    "costs": ("CARDS", "Calibrated", "Linear", "Roofline"),
    "engine": ("Engine", "ModelExecutor"),
    "experiments": ("Claims", "capacity", "compare", "sweep"),
    "kv": ("BlockManager",),
    "model_shape": ("ModelShape",),
    "policies": ("Policy",),
    "request": ("Rejected", "Request", "SamplingParams", "parallel_samples"),
    "scheduler": ("Scheduler",),
    "serve": ("Executor",),
    "simulator": ("CostExecutor", "replay", "simulate"),
    "trace": ("Trace",),
}
_HOMES = {name: module for module, names in _EXPORTS.items() for name in names}
_MODULES = [module.name for module in iter_modules(__path__) if not module.name.startswith("_")]

__all__ = list(_HOMES)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import an exported name or a module when it is first asked for: a simulation never loads torch."""
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(
        [*_HOMES, *_MODULES, "__all__", "__doc__", "__file__", "__name__", "__path__", "__version__"]
    )
