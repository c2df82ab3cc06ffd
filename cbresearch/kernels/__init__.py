"""Triton kernels over a paged KV cache, the plan of their work, and their oracle in plain PyTorch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cbresearch.kernels.reference import reference_attention
from cbresearch.kernels.work_plan import ITEM_FIELDS, MERGE_FIELDS, Device, WorkPlan, plan_work

if TYPE_CHECKING:
    from cbresearch.kernels.attend import paged_attention
    from cbresearch.kernels.kv_write import write_kv

__all__ = [
    "ITEM_FIELDS",
    "MERGE_FIELDS",
    "Device",
    "WorkPlan",
    "paged_attention",
    "plan_work",
    "reference_attention",
    "write_kv",
]

# Triton is imported when a kernel is first asked for: a computer without a GPU may lack it.
_KERNELS = {"paged_attention": "attend", "write_kv": "kv_write"}


def __getattr__(name: str) -> Any:
    if name not in _KERNELS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{_KERNELS[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ImportError(
            f"cbresearch.kernels.{name} needs Triton, which is not installed; run: pip install triton (Linux "
            "only), or use the attention backend 'torch'"
        ) from error
