"""Check the arguments of the kernels before a launch; every ValueError names the argument."""

import torch
from torch import Tensor

from cbresearch.kernels.work_plan import WorkPlan

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def check_tensor(
    name: str, tensor: Tensor, sizes: tuple[int | str, ...], dtypes: tuple[torch.dtype, ...], first: Tensor
) -> None:
    """Reject a tensor of another dtype, shape or device, or with another last stride than 1.

    Args:
        name: What the caller calls it.
        tensor: The tensor.
        sizes: What its sizes must be; where a name stands, any size from 1 on, and for the first axis also 0.
        dtypes: What its dtype may be.
        first: The first argument of the call, whose device it must share.
    """
    if tensor.dtype not in dtypes:
        allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name} is {tensor.dtype}, and must be {allowed}")
    fits = tensor.dim() == len(sizes) and all(
        size == wanted if isinstance(wanted, int) else size > 0 or axis == 0
        for axis, (size, wanted) in enumerate(zip(tensor.shape, sizes, strict=True))
    )
    if not fits or tensor.stride(-1) != 1:
        raise ValueError(
            f"{name} must be [{', '.join(map(str, sizes))}] with a last stride of 1, and has shape "
            f"{tuple(tensor.shape)} and strides {tensor.stride()}"
        )
    if tensor.device != first.device:
        raise ValueError(f"{name} is on {tensor.device}, and must be on {first.device}")


def check_pools(k_cache: Tensor, v_cache: Tensor, head: tuple[int | str, int], first: Tensor) -> None:
    """Reject pools that are not `[num_blocks, block_size, *head]` in the dtype of `first`."""
    check_tensor("k_cache", k_cache, ("num_blocks", "block_size", *head), (first.dtype,), first)
    check_tensor("v_cache", v_cache, tuple(k_cache.shape), (first.dtype,), first)


def check_plan(plan: WorkPlan, q: Tensor, k_cache: Tensor, block_tables: Tensor, window: int | None) -> None:
    """Reject lengths, or a plan made for others, that do not fit the tensors of `paged_attention`."""
    num_tokens, num_heads, head_dim = q.shape
    if plan.num_tokens != num_tokens:
        raise ValueError(f"cu_seqlens_q ends at {plan.num_tokens}, and q has {num_tokens} tokens")
    if plan.num_seqs != len(block_tables):
        raise ValueError(f"block_tables has {len(block_tables)} rows, and seq_lens {plan.num_seqs}")
    needed = -(-plan.longest // k_cache.shape[1])
    if needed > block_tables.shape[1]:
        raise ValueError(
            f"block_tables has {block_tables.shape[1]} blocks per sequence, and a length of "
            f"{plan.longest} in seq_lens needs {needed}"
        )
    heads = (num_heads, k_cache.shape[2], head_dim)
    if plan.heads != heads or plan.window != window:
        raise ValueError(
            f"plan is for heads of {plan.heads} and a window of {plan.window}, not of {heads} and {window}"
        )
