"""Bytes of the KV cache, how many requests fit, and which share of the memory holds what.

Letters: b tokens per block, κ KV bytes of a token, n tokens of a request, W tokens of a sliding window, P a
request's prompt, X its output, R the tokens that are reserved for it.
"""

from typing import NamedTuple

from cbresearch.config import ModelShape
from cbresearch.formulas.checks import Lengths, count, lengths_array, non_negative, paired_lengths, positive

__all__ = [
    "MemoryShares", "contiguous_memory_shares", "fragmentation", "kv_bytes_per_request",
    "kv_bytes_per_token", "mean_reserved_tokens", "num_kv_blocks", "num_requests_that_fit",
    "paged_fragmentation", "time_mean_held_tokens", "weight_bytes",
]  # fmt: skip


def kv_bytes_per_token(
    shape: ModelShape, *, cache_dtype_bytes: int | None = None, scale_bytes: int = 0, tensor_parallel: int = 1
) -> int:
    """Return κ, the bytes of one token that all layers hold: layers · KV heads · (d_k + d_v) · element bytes.

    - Multi-head, grouped-query (Ainslie et al., EMNLP'23) and multi-query attention (Shazeer, 2019) differ
      in the KV heads alone. Multi-head latent attention (DeepSeek-V2, 2024, section 2.1) holds one vector of
      `latent_dim` elements for keys and values of all heads: layers · latent · element bytes.
    - A scale per token, head, and key or value adds 2 · layers · KV heads · scale bytes (a latent has one
      scale); scales per tensor or channel do not grow with the tokens, and count as 0.
    - Tensor parallelism divides by min(TP, KV heads), for a rank holds at least one head; a latent belongs
      to all heads, so each rank holds it whole.

    A layer with a sliding window holds a token for W steps only: see `kv_bytes_per_request`.
    Source: vLLM (PagedAttention), SOSP'23, section 3, extended as said.

    Args:
        shape: The model.
        cache_dtype_bytes: Bytes of one cached element, such as 1 for fp8 or int8; the model's own by default.
        scale_bytes: Bytes of one scale, such as 4 for float32.
        tensor_parallel: Devices that share the heads; the result is for one of them.
    """
    return shape.num_layers * _layer_bytes(shape, cache_dtype_bytes, scale_bytes, tensor_parallel)


def kv_bytes_per_request(
    shape: ModelShape,
    num_tokens: int,
    block_size: int | None = None,
    *,
    cache_dtype_bytes: int | None = None,
    scale_bytes: int = 0,
    tensor_parallel: int = 1,
) -> int:
    """Return the bytes that a request holds while the last of its n cached tokens attends.

    A layer that sees all holds n tokens, in ⌈n/b⌉ whole blocks. A windowed one holds the last min(n, W), in
    the blocks that these lie in, ⌈n/b⌉ − ⌊max(0, n − W)/b⌋, if blocks that fell out of the window are freed;
    where they are not, it holds what the others do.
    Source: vLLM (PagedAttention), SOSP'23, section 4: whole blocks only; the window is counted out here.

    Args:
        shape: The model.
        num_tokens: Cached tokens n; at most prompt + output − 1, since the last token is never fed back.
        block_size: Tokens per block b, or None for memory to the exact token.
        cache_dtype_bytes: As in `kv_bytes_per_token`.
        scale_bytes: As in `kv_bytes_per_token`.
        tensor_parallel: As in `kv_bytes_per_token`.
    """
    tokens = count("num_tokens", num_tokens)
    block = 1 if block_size is None else count("block_size", block_size)
    blocks = -(-tokens // block)
    windowed = blocks - max(0, tokens - (shape.sliding_window or tokens)) // block
    layer_blocks = (
        shape.num_layers - shape.num_sliding_layers
    ) * blocks + shape.num_sliding_layers * windowed
    return layer_blocks * block * _layer_bytes(shape, cache_dtype_bytes, scale_bytes, tensor_parallel)


def num_kv_blocks(
    memory: float,
    bytes_per_token: float,
    block_size: int,
    *,
    utilization: float = 0.9,
    weights: float = 0.0,
    activations: float = 0.0,
) -> int:
    """Return the blocks that a device has room for, ⌊(utilization · memory − weights − activations)/(κ·b)⌋.

    Source: how vLLM sizes its pool (`gpu_memory_utilization`).

    Args:
        memory: Memory of the device in bytes.
        bytes_per_token: κ, from `kv_bytes_per_token`.
        block_size: Tokens per block b.
        utilization: Share of the memory that may be used at all.
        weights: Bytes of the weights on this device, from `weight_bytes`.
        activations: Most bytes that a step takes beside weights and cache.
    """
    positive(memory=memory, bytes_per_token=bytes_per_token, utilization=utilization)
    if utilization > 1:
        raise ValueError(f"utilization is {utilization!r}; it must be a share, at most 1")
    per_block = bytes_per_token * count("block_size", block_size)
    non_negative(weights=weights, activations=activations)
    return max(0, int((utilization * memory - weights - activations) // per_block))


def weight_bytes(shape: ModelShape) -> int:
    """Return the bytes of a model's weights, N · element bytes. Source: definition."""
    return shape.num_parameters * shape.dtype_bytes


def num_requests_that_fit(capacity: float, per_request: float, reserved: float = 0.0) -> int:
    """Return how many requests fit, ⌊(capacity − reserved)/per request⌋. Source: definition.

    Args:
        capacity: Memory in bytes, or a pool in tokens.
        per_request: What each holds, in the same unit: at its longest, or `time_mean_held_tokens` on average.
        reserved: What is not for the cache, in the same unit, such as `weight_bytes`.
    """
    positive(capacity=capacity, per_request=per_request)
    non_negative(reserved=reserved)
    return max(0, int((capacity - reserved) // per_request))


def paged_fragmentation(mean_held: float, block_size: int) -> float:
    """Return the expected empty share of held blocks, ((b − 1)/2)/(E[held] + (b − 1)/2).

    Only a request's last block is part empty, by (b − 1)/2 tokens if its length mod b is uniform.
    Source: vLLM (PagedAttention), SOSP'23, sections 3.1 and 4; the mean is ours.

    Args:
        mean_held: Mean cached tokens of a running request, over time.
        block_size: Tokens per block b.
    """
    positive(mean_held=mean_held)
    empty = (count("block_size", block_size) - 1) / 2
    return float(empty / (mean_held + empty))


def fragmentation(valid: float, capacity: float) -> float | None:
    """Return the empty share of held memory, 1 − valid/capacity; None if none is held.

    Source: vLLM (PagedAttention), SOSP'23, section 3.1 (reserved and internal waste together).

    Args:
        valid: Tokens whose keys and values are needed.
        capacity: Tokens for which memory is held.
    """
    non_negative(valid=valid, capacity=capacity)
    if valid > capacity:
        raise ValueError(f"valid is {valid!r}, above capacity {capacity!r}")
    return float(1 - valid / capacity) if capacity else None


def time_mean_held_tokens(prompts: Lengths, outputs: Lengths) -> float:
    """Return the cached tokens of a running request, averaged over time: E[XP]/E[X] + E[X²]/(2E[X]).

    A request holds P + x after x of its X equal steps: PX + X²/2 in sum. A time average sees it X times, so
    the sum over requests is divided by ΣX. Counted at the end of each step, the first of which computes the
    prompt, it is 1/2 token less: P + x − 1 after x steps. Source: own derivation (length-biased sampling).

    Args:
        prompts: Prompt lengths P in tokens.
        outputs: Output lengths X in tokens, of the same requests.
    """
    prompt, output = paired_lengths(prompts=prompts, outputs=outputs)
    return float((output @ prompt + output @ output / 2) / output.sum())


def mean_reserved_tokens(outputs: Lengths) -> float:
    """Return the tokens that a running request will still write, averaged over time: E[X²]/(2E[X]).

    X − x are left after x of X equal steps: X²/2 in sum, of which a time average sees ΣX terms. A server
    that reserves ahead holds empty memory for just these, whatever its rule (vLLM's "reservation").
    Source: own derivation (mean residual life, renewal theory); vLLM (PagedAttention), SOSP'23, section 3.1.

    Args:
        outputs: Output lengths X in tokens.
    """
    output = lengths_array("outputs", outputs)
    return float(output @ output / (2 * output.sum()))


class MemoryShares(NamedTuple):
    """Shares of a KV memory; they add up to 1.

    Attributes:
        token_states: Holds keys and values of tokens.
        reservation: Is empty, and will be written by the request that holds it.
        internal: Is held by a request that will never write it.
        external: Belongs to no request.
    """

    token_states: float
    reservation: float
    internal: float
    external: float


def contiguous_memory_shares(
    prompts: Lengths, outputs: Lengths, reserved: Lengths, num_running: float, capacity: float
) -> MemoryShares:
    """Return what a memory holds, averaged over time, if each request reserves one run of R tokens.

    All means are length-biased, for a time average sees a request X times. Per request it is E[XR]/E[X] held,
    of which `time_mean_held_tokens` are token states, `mean_reserved_tokens` reservation, and the rest,
    E[X(R − P − X)]/E[X], internal.
    Source: the categories are those of vLLM (PagedAttention), SOSP'23, section 3.1 and figure 2; the means
    are our own derivation.

    Args:
        prompts: Prompt lengths P in tokens.
        outputs: Output lengths X in tokens, of the same requests.
        reserved: Tokens R reserved for each of them, at least P + X.
        num_running: Mean number of requests that run, over time.
        capacity: Tokens that the memory has room for.
    """
    positive(num_running=num_running, capacity=capacity)
    room, prompt, output = paired_lengths(reserved=reserved, prompts=prompts, outputs=outputs)
    states, to_come = time_mean_held_tokens(prompts, outputs), mean_reserved_tokens(outputs)
    for length in room[room < prompt + output]:
        raise ValueError(f"reserved holds {float(length)!r}, less than the prompt and output of its request")
    held = float(output @ room / output.sum())
    if num_running * held > capacity * (1 + 1e-9):
        raise ValueError(
            f"num_running is {num_running!r}; at {held:.6g} tokens each, {capacity!r} are too few"
        )
    share = num_running / capacity
    return MemoryShares(
        token_states=share * states,
        reservation=share * to_come,
        internal=share * max(0.0, held - states - to_come),
        external=max(0.0, 1 - share * held),
    )


def _layer_bytes(
    shape: ModelShape, cache_dtype_bytes: int | None, scale_bytes: int, tensor_parallel: int
) -> int:
    """Return the bytes of one token in one layer on one device."""
    element = (
        shape.dtype_bytes if cache_dtype_bytes is None else count("cache_dtype_bytes", cache_dtype_bytes)
    )
    devices = count("tensor_parallel", tensor_parallel)
    scale = count("scale_bytes", scale_bytes) if scale_bytes else 0
    if shape.latent_dim is not None:
        return shape.latent_dim * element + scale
    heads = shape.num_kv_heads
    if heads % devices and devices % heads:
        raise ValueError(
            f"tensor_parallel is {tensor_parallel!r}; {heads} KV heads do not spread evenly over so many"
        )
    elements = shape.head_dim + (shape.value_head_dim or shape.head_dim)
    return heads // min(devices, heads) * (elements * element + 2 * scale)
