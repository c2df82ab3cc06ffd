"""Random numbers that depend on a request and a place in its output, and on nothing else."""

import hashlib

import torch
from torch import Tensor

# Odd increment and multipliers of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), as signed 64-bit numbers.
_GAMMA = -7046029254386353131
_FIRST = -4658895280553007687
_SECOND = -7723592293110705685


def noise_key(*parts: str | int) -> int:
    """Return a signed 64-bit key that stands for the parts, the same in every process."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def gumbel(keys: Tensor, places: Tensor, num_tokens: int) -> Tensor:
    """Return Gumbel noise for each token of a vocabulary, counter-based: nothing is drawn in an order.

    Added to log-probabilities, its largest sum is a draw from them (Maddison, Tarlow and Minka, NeurIPS
    2014). A small change of the logits changes the draw only if the two largest sums are as close; the
    inverse of a cumulative distribution would change it wherever the sum over the tokens before it does.

    Args:
        keys: int64 `[num_rows]`, one a request.
        places: int64 `[num_rows]`: the number of the output token, from 0.
        num_tokens: Size of the vocabulary.

    Returns:
        float64 `[num_rows, num_tokens]`.
    """
    rows = _mixed(_mixed(keys) + places * _GAMMA)
    tokens = torch.arange(1, num_tokens + 1, device=keys.device)
    bits = _mixed(rows[:, None] + tokens * _GAMMA)
    # Between 0 and 1, never one of them: with 52 bits the half still fits into a float64.
    uniform = (_shifted(bits, 12).double() + 0.5) * 2.0**-52
    return -torch.log(-torch.log(uniform))


def _mixed(values: Tensor) -> Tensor:
    """Return the output function of SplitMix64; products wrap around."""
    values = (values ^ _shifted(values, 30)) * _FIRST
    values = (values ^ _shifted(values, 27)) * _SECOND
    return values ^ _shifted(values, 31)


def _shifted(values: Tensor, places: int) -> Tensor:
    """Return the bits moved right, zeros coming in: int64's own shift brings in the sign."""
    shifted: Tensor = (values >> places) & (2 ** (64 - places) - 1)
    return shifted
