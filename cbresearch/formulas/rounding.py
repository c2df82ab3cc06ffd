"""How far rounding moves a number, and how often that changes which token is chosen.

Letters: ε the spacing of a floating-point type just above 1, K terms of a sum, V tokens of a vocabulary, z
their logits, σ the logits' standard deviation, d their drift from one run to another: its root mean square.
"""

import math
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from cbresearch.formulas.checks import count, non_negative, positive

__all__ = [
    "greedy_flip_probability", "gumbel_flip_probability", "inverse_cdf_flip_probability", "rounding_error",
    "summation_error", "top_gap_density",
]  # fmt: skip


def rounding_error(epsilon: float) -> float:
    """Return the root mean square relative error of one rounding, ε·√(1/(32·ln 2)) = 0.212 ε.

    The error is uniform within half a spacing, ε/√12 of the power of two below the number. Leading digits of
    results of many operations are spread as 1/m (Benford), so that power is √E[1/m²] = √(3/(8·ln 2)) of the
    number on average. Source: Benford, Proc. American Philosophical Society 78, 1938; the mean is ours.

    Args:
        epsilon: Spacing ε of the type just above 1: 2⁻²³ for float32, 2⁻⁷ for bfloat16.
    """
    positive(epsilon=epsilon)
    return epsilon / math.sqrt(32 * math.log(2))


def summation_error(num_terms: int, epsilon: float, num_lanes: int = 1) -> float:
    """Return the error of a sum relative to the sum, both root mean squares: 0.212 ε·√((K/L + 1)/2 + log₂ L).

    Of K independent terms around 0 the k-th partial sum grows as √k, and each is rounded independently: the
    errors' squares add up to (0.212 ε)²·(1 + 2 + … + K) of a term, over K of the sum. With L lanes each adds
    K/L terms, and together they err like one, relative to the sum. Joining them pair by pair rounds the whole
    log₂ L times.
    Source: own derivation; the worst case is in Wilkinson, Rounding Errors in Algebraic Processes, 1963.

    Args:
        num_terms: Terms K of the sum.
        epsilon: Spacing ε of the type in which it is accumulated.
        num_lanes: Partial sums L that are kept side by side.
    """
    lanes = count("num_lanes", num_lanes)
    in_lane = count("num_terms", num_terms) / lanes
    return rounding_error(epsilon) * math.sqrt((in_lane + 1) / 2 + math.log2(lanes))


def top_gap_density(vocab_size: int, std: float) -> float:
    """Return the density at 0 of the gap between the two best logits, V·φ(u)/σ with Φ(u) = 1 − 1/V.

    Above its quantile u the tail of a normal distribution is nearly exponential, with the hazard V·φ(u), and
    the gap between the two largest of exponential variables is exponential with the same rate. So its mean is
    the inverse of this density. It holds for logits that are independent and normal, as a random model's.
    Source: Rényi's representation of spacings (1953); extreme values as in Gumbel, 1958.

    Args:
        vocab_size: Tokens V of the vocabulary, at least 2.
        std: Standard deviation σ of the logits.

    Returns:
        Per unit of a logit.
    """
    size = count("vocab_size", vocab_size)
    if size < 2:
        raise ValueError(f"vocab_size is {vocab_size!r}; one token has no second best")
    positive(std=std)
    normal = NormalDist()
    return size * normal.pdf(normal.inv_cdf(1 - 1 / size)) / std


def greedy_flip_probability(gap_density: float, drift: float) -> float:
    """Return how often two runs' best tokens differ, f(0)·E[D⁺] = f(0)·d/√π.

    The tokens differ if the gap between the two best is less than the difference D of their drifts against
    it. If the gap's density f is flat where D is, this is ∫ f(0)·P(D > g) dg. D is normal with a variance of
    2d². Source: own derivation.

    Args:
        gap_density: Density f(0) of the gap at 0, per unit of a logit.
        drift: Root mean square d of the drift of a logit.
    """
    non_negative(gap_density=gap_density, drift=drift)
    return gap_density * drift / math.sqrt(math.pi)


def gumbel_flip_probability(probabilities: npt.ArrayLike, drift: float) -> float:
    """Return how often two runs' tokens differ that are drawn by Gumbel-max with equal noise, (1 − Σp²)·d/√π.

    Token i is drawn where zᵢ + Gᵢ is largest. The best of all others is a Gumbel variable too, so the gap is
    logistic: of density pᵢ(1 − pᵢ) at 0 where i wins, in sum 1 − Σp². The rest is as for the greedy choice.
    Source: the Gumbel-max trick (Gumbel, 1954; Maddison et al., arXiv 1411.0030); the probability is ours.

    Args:
        probabilities: Probability p of each token.
        drift: Root mean square d of the drift of a logit.
    """
    return greedy_flip_probability(1 - float((_distribution(probabilities) ** 2).sum()), drift)


def inverse_cdf_flip_probability(probabilities: npt.ArrayLike, drift: float) -> float:
    """Return how often two runs' tokens differ that are drawn by inverting the cumulative distribution F.

    One uniform number picks token i in (Fᵢ₋₁, Fᵢ]; both runs have the same. Drifts dᵢ move a probability by
    pᵢ(dᵢ − d̄), and so the i-th boundary by a normal variable of the variance

        d²·((1 − Fᵢ)²·Σ_{j≤i} pⱼ² + Fᵢ²·Σ_{j>i} pⱼ²) .

    The numbers between a boundary's two places change their token, so the moves' mean sizes add up, as long
    as they are small against the tokens they separate. Of n tokens alike it is √n·d/√(32/π).
    Source: own derivation.

    Args:
        probabilities: Probability p of each token, in the order of the cumulative distribution.
        drift: Root mean square d of the drift of a logit.
    """
    shares = _distribution(probabilities)
    non_negative(drift=drift)
    below, squares = np.cumsum(shares)[:-1], np.cumsum(shares**2)
    variances = (1 - below) ** 2 * squares[:-1] + below**2 * (squares[-1] - squares[:-1])
    return float(drift * math.sqrt(2 / math.pi) * np.sqrt(variances).sum())


def _distribution(probabilities: npt.ArrayLike) -> npt.NDArray[np.float64]:
    shares = np.asarray(probabilities, dtype=np.float64)
    if shares.ndim != 1 or not shares.size or not (shares >= 0).all() or not np.isclose(shares.sum(), 1):
        raise ValueError(
            f"probabilities has shape {shares.shape} and the sum {shares.sum()}; give a list of numbers of 0 "
            "or more with the sum 1"
        )
    return shares
