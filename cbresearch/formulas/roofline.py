"""Arithmetic of a model's forward pass. N is the number of its parameters."""

from cbresearch.config import ModelShape
from cbresearch.formulas.checks import Lengths, lengths_array, non_negative, positive


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
