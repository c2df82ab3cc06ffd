"""Triton kernels over a paged KV cache, the plan of their work, and their oracle in plain PyTorch."""

from typing import TYPE_CHECKING, Any

from cbresearch.kernels.reference import reference_attention as reference_attention
from cbresearch.kernels.work_plan import ITEM_FIELDS as ITEM_FIELDS
from cbresearch.kernels.work_plan import MERGE_FIELDS as MERGE_FIELDS
from cbresearch.kernels.work_plan import Device as Device
from cbresearch.kernels.work_plan import WorkPlan as WorkPlan
from cbresearch.kernels.work_plan import plan_work as plan_work

if TYPE_CHECKING:
    from cbresearch.kernels.attend import paged_attention as paged_attention
    from cbresearch.kernels.kv_write import write_kv as write_kv


def __getattr__(name: str) -> Any:
    # Triton is imported when a kernel is first asked for: a computer without a GPU may lack it.
    if name not in ("paged_attention", "write_kv"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from cbresearch.kernels.attend import paged_attention
        from cbresearch.kernels.kv_write import write_kv
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ImportError(
            f"cbresearch.kernels.{name} needs Triton, which is not installed; run: pip install triton (Linux "
            "only), or use the attention backend 'torch'"
        ) from error
    return {"paged_attention": paged_attention, "write_kv": write_kv}[name]
