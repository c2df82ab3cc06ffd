"""Rounding errors and flips of tokens against sums in float32 and draws by brute force."""

import numpy as np
import pytest

from cbresearch import formulas

EPSILON = 2.0**-23


def in_turn(terms):
    return np.cumsum(terms, axis=-1, dtype=np.float32)[..., -1]


def test_one_rounding_is_off_by_what_the_formula_says():
    # Numbers whose logarithms are spread evenly, as leading digits of many results are.
    numbers = 2 ** np.random.default_rng(0).uniform(0, 8, size=200_000)
    relative = numbers.astype(np.float32) / numbers - 1
    assert np.sqrt(np.mean(relative**2)) == pytest.approx(formulas.rounding_error(EPSILON), rel=0.01)


@pytest.mark.parametrize(("num_terms", "num_lanes"), [(256, 1), (1024, 1), (256, 16), (1024, 16)])
def test_a_sum_is_off_by_what_the_formula_says(num_terms, num_lanes):
    terms = np.random.default_rng(1).standard_normal((20_000, num_terms)).astype(np.float32)
    sums = in_turn(terms.reshape(len(terms), -1, num_lanes).transpose(0, 2, 1))
    while sums.shape[1] > 1:
        sums = sums[:, ::2] + sums[:, 1::2]
    error = sums[:, 0] - terms.sum(1, dtype=np.float64)
    measured = np.sqrt(np.mean(error**2) / num_terms)
    assert measured == pytest.approx(formulas.summation_error(num_terms, EPSILON, num_lanes), rel=0.08)


@pytest.mark.parametrize(("vocab_size", "std"), [(1000, 1.0), (4096, 1.6)])
def test_the_gap_of_normal_logits_has_the_density(vocab_size, std):
    rng = np.random.default_rng(2)
    logits = std * rng.standard_normal((3000, vocab_size), dtype=np.float32)
    best = np.partition(logits, -2, axis=1)[:, -2:]
    gaps = best[:, 1] - best[:, 0]
    density = formulas.top_gap_density(vocab_size, std)
    width = 0.25 / density
    assert -np.log(1 - (gaps < width).mean()) / width == pytest.approx(density, rel=0.12)
    assert gaps.mean() == pytest.approx(1 / density, rel=0.1)


def test_greedy_flips_as_often_as_gap_and_drift_say():
    rng = np.random.default_rng(3)
    density, drift, num = 2.0, 0.01, 1_000_000
    gaps = rng.exponential(1 / density, size=num)
    changes = drift * (rng.standard_normal(num) - rng.standard_normal(num))
    flips = (gaps + changes < 0).mean()
    assert flips == pytest.approx(formulas.greedy_flip_probability(density, drift), rel=0.05)
    assert formulas.greedy_flip_probability(density, 0) == 0


DISTRIBUTIONS = {
    "two": np.array([0.5, 0.5]),
    "uneven": np.array([0.6, 0.25, 0.1, 0.05]),
    "many": np.full(200, 1 / 200),
    "drawn": np.random.default_rng(4).dirichlet(np.ones(60)) * 0.94 + 0.001,
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_samples_flip_as_often_as_the_formulas_say(name):
    p, drift, num = DISTRIBUTIONS[name], 1e-4, 300
    by_gumbel = by_inverse = 0.0
    rng = np.random.default_rng(5)
    for _ in range(num):
        q = p * np.exp(drift * rng.standard_normal(len(p)))
        q /= q.sum()
        # With equal noise token i wins in both runs as often as against the larger of both runs' others.
        by_gumbel += 1 - sum(1 / np.maximum(p / p[i], q / q[i]).sum() for i in range(len(p)))
        upper, other = np.cumsum(p), np.cumsum(q)
        overlap = np.minimum(upper, other) - np.maximum(upper - p, other - q)
        by_inverse += 1 - np.clip(overlap, 0, None).sum()
    assert by_gumbel / num == pytest.approx(formulas.gumbel_flip_probability(p, drift), rel=0.15)
    assert by_inverse / num == pytest.approx(formulas.inverse_cdf_flip_probability(p, drift), rel=0.15)


def test_inversion_flips_with_the_root_of_the_number_of_tokens():
    for num_tokens in (100, 10_000):
        flips = formulas.inverse_cdf_flip_probability(np.full(num_tokens, 1 / num_tokens), 1e-6)
        assert flips == pytest.approx(np.sqrt(num_tokens * np.pi / 32) * 1e-6, rel=0.02)


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda: formulas.rounding_error(0), "epsilon is 0"),
        (lambda: formulas.summation_error(0, EPSILON), "num_terms is 0"),
        (lambda: formulas.summation_error(8, EPSILON, 0), "num_lanes is 0"),
        (lambda: formulas.top_gap_density(1, 1.0), "vocab_size is 1"),
        (lambda: formulas.top_gap_density(10, -1.0), "std is -1.0"),
        (lambda: formulas.greedy_flip_probability(1.0, -1.0), "drift is -1.0"),
        (lambda: formulas.gumbel_flip_probability([], 1.0), "probabilities has shape"),
        (lambda: formulas.gumbel_flip_probability([0.5, 0.6], 1.0), "sum to 1|the sum 1"),
        (lambda: formulas.inverse_cdf_flip_probability([1.5, -0.5], 1.0), "probabilities has"),
        (lambda: formulas.inverse_cdf_flip_probability([0.5, 0.5], -1.0), "drift is -1.0"),
    ],
)
def test_values_out_of_range_are_rejected(call, complaint):
    with pytest.raises(ValueError, match=complaint):
        call()
