"""Arithmetic of a model's forward pass, and its time on a machine. N is the number of the model's parameters.

A machine does C FLOP/s and moves W bytes/s. Work of a FLOP and y bytes takes at least max(a/C, y/W), so what
has fewer FLOP per byte than the ridge point C/W is bound by bandwidth (Williams et al., CACM 2009).
"""

from cbresearch.config import ModelShape
from cbresearch.formulas.checks import Lengths, count, lengths_array, non_negative, paired_lengths, positive
from cbresearch.formulas.memory import kv_bytes_per_token

__all__ = [
    "decode_attention_intensity", "decode_step_seconds", "flop_utilization", "flops_per_token",
    "linear_intensity", "max_request_rate", "ridge_tokens",
]  # fmt: skip


def flops_per_token(shape: ModelShape, context_length: float) -> float:
    """Return the FLOP of one token's forward pass, 2N + 2 · layers · query heads · (d_k + d_v) · context.

    Each query head multiplies and adds d_k times a key and d_v times a value; with d_k = d_v = d, the second
    term is 4 · layers · heads · d · context.

    Source: PaLM, 2022, appendix B, the forward third. N should leave out an embedding table that is only
    looked up (one that also serves as output layer counts).

    Args:
        shape: The model.
        context_length: Tokens that the token attends to, itself included; a mean is welcome.
    """
    non_negative(context_length=context_length)
    per_head = shape.head_dim + (shape.value_head_dim or shape.head_dim)
    attention_width = shape.num_layers * shape.num_heads * per_head
    return float(2 * (shape.num_parameters + attention_width * context_length))


def flop_utilization(lengths: Lengths, flops_per_token: float, peak_flops: float, seconds: float) -> float:
    """Return the share of the peak arithmetic that the output needed, Σ Lᵢ·f/(C·T).

    Source: model FLOPs utilization, PaLM, 2022, appendix B, with the output tokens as the useful work.

    Args:
        lengths: Output lengths Lᵢ of the requests served, in tokens.
        flops_per_token: FLOP f of one token, from `flops_per_token`.
        peak_flops: C in FLOP/s, measured (the best matrix product) or from the data sheet; say which.
        seconds: Time T that the run took.
    """
    positive(flops_per_token=flops_per_token, peak_flops=peak_flops, seconds=seconds)
    return float(lengths_array("lengths", lengths).sum() * flops_per_token / (peak_flops * seconds))


def linear_intensity(num_tokens: float, dtype_bytes: float) -> float:
    """Return the FLOP per byte of a step's linear layers, 2n/β.

    Each weight is read once and multiplied and added once per token. The tokens' own vectors are left out:
    they are few beside the weights.

    Args:
        num_tokens: Tokens n in the step.
        dtype_bytes: Bytes β of a weight.
    """
    positive(num_tokens=num_tokens, dtype_bytes=dtype_bytes)
    return 2 * num_tokens / dtype_bytes


def decode_attention_intensity(shape: ModelShape) -> float:
    """Return the FLOP per byte of decode attention, 2g/β with g query heads a KV head, whatever the batch.

    Each cached key and value meets the g query heads of its KV head once. A model with latent attention has
    one cached vector for all its heads (absorbed form: scores over the whole latent, values over the
    compressed part, whose width the shape does not hold), so it is rejected.

    Args:
        shape: The model; `dtype_bytes` is that of the cache.

    Raises:
        ValueError: The model caches latents.
    """
    if shape.latent_dim is not None:
        raise ValueError(
            f"shape has a latent_dim of {shape.latent_dim}; the intensity is for keys and values"
        )
    return 2 * shape.num_heads / shape.num_kv_heads / shape.dtype_bytes


def ridge_tokens(peak_flops: float, bandwidth: float, dtype_bytes: float) -> float:
    """Return the tokens in a step from which its linear layers are bound by arithmetic, n* = C·β/(2W).

    Args:
        peak_flops: C in FLOP/s, measured or from the data sheet; say which.
        bandwidth: W in bytes/s.
        dtype_bytes: Bytes β of a weight.
    """
    positive(peak_flops=peak_flops, bandwidth=bandwidth, dtype_bytes=dtype_bytes)
    return peak_flops * dtype_bytes / (2 * bandwidth)


def decode_step_seconds(
    shape: ModelShape, num_seqs: int, context_length: float, peak_flops: float, bandwidth: float
) -> tuple[float, float]:
    """Return the least seconds of a decode step in linear layers and in attention.

    Linear layers take max(2Nn/C, Nβ/W). Attention of n sequences takes the larger of its FLOP over C and its
    bytes n·context·κ/W, with κ bytes per token from `kv_bytes_per_token`.

    Args:
        shape: The model, with one data type for weights and cache; windows count as whole contexts.
        num_seqs: Sequences n, each with one token in the step.
        context_length: Tokens that each attends to, itself included; a mean is welcome.
        peak_flops: C in FLOP/s.
        bandwidth: W in bytes/s.

    Raises:
        ValueError: A number is out of range, or the model caches latents.
    """
    n = count("num_seqs", num_seqs)
    non_negative(context_length=context_length)
    positive(peak_flops=peak_flops, bandwidth=bandwidth)
    linear_flops = 2 * shape.num_parameters * n
    linear = max(linear_flops / peak_flops, shape.num_parameters * shape.dtype_bytes / bandwidth)
    cached_bytes = n * context_length * kv_bytes_per_token(shape)
    attention_flops = cached_bytes * decode_attention_intensity(shape)
    return linear, max(attention_flops / peak_flops, cached_bytes / bandwidth)


def max_request_rate(
    shape: ModelShape,
    prompts: Lengths,
    outputs: Lengths,
    num_seqs: float,
    peak_flops: float,
    bandwidth: float,
    *,
    mixed: bool,
) -> float:
    """Return a bound on the requests per second of a server with at most n running: one over its device time.

    A request is decoded X − 1 times, for its prompt's step yields the first token. It reads
    κ·(X − 1)(P + X/2) bytes of KV and has a share of at least 1/n in X − 1 readings of the weights, Nβ bytes
    each. The linear layers also take 2N(P + X − 1) FLOP. In a step, the longer of the two counts, and a sum
    of maxima is at least the maximum of the sums:
    - mixed steps: max(2N(P + X − 1)/C, (X − 1)·Nβ/(W·n));
    - prompts in steps of their own: 2NP/C + (X − 1)·max(2N/C, Nβ/(W·n)).
    What is left out only takes longer: attention's arithmetic, short prompt steps, preemption.
    Source: own derivation from `decode_step_seconds`.

    Args:
        shape: The model, with one data type for weights and cache; windows count as whole contexts.
        prompts: Prompt lengths P in tokens.
        outputs: Output lengths X in tokens, of the same requests.
        num_seqs: Most requests n that run at once: seats, or what the memory holds on average.
        peak_flops: C in FLOP/s.
        bandwidth: W in bytes/s.
        mixed: Whether prompts and decodes may share a step.
    """
    positive(num_seqs=num_seqs, peak_flops=peak_flops, bandwidth=bandwidth)
    prompt, output = paired_lengths(prompts=prompts, outputs=outputs)
    decodes, context = output.mean() - 1, ((output - 1) * (prompt + output / 2)).mean()
    token = 2 * shape.num_parameters / peak_flops
    weights = shape.num_parameters * shape.dtype_bytes / bandwidth / num_seqs
    if mixed:
        linear = max(token * (prompt.mean() + decodes), weights * decodes)
    else:
        linear = token * prompt.mean() + decodes * max(token, weights)
    return float(1 / (linear + context * kv_bytes_per_token(shape) / bandwidth))
