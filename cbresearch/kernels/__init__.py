"""Triton kernels over a paged KV cache, the plan of their work, and their oracle in plain PyTorch."""

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


def __getattr__(name: str) -> Any:
    # Triton is imported when a kernel is first asked for: a computer without a GPU may lack it.
    try:
        if name == "paged_attention":
            from cbresearch.kernels.attend import paged_attention

            return paged_attention
        if name == "write_kv":
            from cbresearch.kernels.kv_write import write_kv

            return write_kv
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ImportError(
            f"cbresearch.kernels.{name} needs Triton, which is not installed; run: pip install triton (Linux "
            "only), or use the attention backend 'torch'"
        ) from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
