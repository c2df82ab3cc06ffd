"""Arrivals, lengths, prefixes and sessions have the moments that they state; a seed gives the same bytes."""

import math
from statistics import NormalDist

import numpy as np
import pytest
from helpers.drawing import rng, standard_errors_off
from hygiene import printed_by_two_processes

from cbresearch import workloads
from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.costs import Linear
from cbresearch.request import Rejected, Request
from cbresearch.simulator import simulate
from cbresearch.workloads import (
    AtOnce,
    Coupled,
    Empirical,
    Exponential,
    Fixed,
    Gamma,
    Geometric,
    Joint,
    Lognormal,
    OnOff,
    Poisson,
    Prefixes,
    Quantiles,
    Recorded,
    Uniform,
    Zipf,
    closed_loop,
    conversations,
    make_requests,
)

SEEDS = range(3)
N = 100_000
TABLE = Quantiles(211.13, ((0, 7), (0.5, 129), (0.9, 424), (0.99, 601), (1, 1000)))


# Arrivals. The seeds are fixed, so the bound of 4 standard errors decides once and for all.


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("burstiness", [0.25, 0.836, 1.0, 4.0, 100.0])
def test_gamma_arrivals_have_the_rate_and_the_variation_of_vllm(burstiness, seed):
    times = Gamma(5.0, burstiness)(rng(seed), N)
    gaps = np.diff(times, prepend=0.0)
    assert standard_errors_off(gaps, 1 / 5) < 4
    assert standard_errors_off((gaps * 5 - 1) ** 2, 1 / burstiness) < 4
    assert times[-1] == pytest.approx(N / 5, rel=4 / math.sqrt(N * burstiness))


@pytest.mark.parametrize("rate", [0.2, 4.0, 200.0])
def test_poisson_arrivals_are_sums_of_exponential_gaps_whatever_their_number(rate):
    times = Poisson(rate)(rng(), 1000)
    assert times.tolist() == np.cumsum(rng().exponential(1 / rate, 1000)).tolist()
    assert Poisson(rate)(rng(), 10).tolist() == times[:10].tolist()


def test_poisson_arrivals_have_the_tail_that_a_truncated_exponential_lacks():
    gaps = np.diff(Poisson(1.0)(rng(), N), prepend=0.0)
    # A simulator that clips gaps at 3 means has a rate 5.24 % too high and a squared variation of 0.774.
    beyond = np.count_nonzero(gaps > 3)
    assert abs(beyond - N * math.exp(-3)) < 4 * math.sqrt(N * math.exp(-3))
    clipped = np.minimum(gaps, 3)
    assert clipped.mean() == pytest.approx(1 - math.exp(-3), abs=0.01)
    assert 1 / (1 - math.exp(-3)) == pytest.approx(1.0524, abs=1e-4)


@pytest.mark.parametrize("num_requests", [1, 10, 1000])
def test_gamma_arrivals_of_an_exact_span_end_at_n_over_rate(num_requests):
    times = Gamma(5.0, 0.5, exact_span=True)(rng(), num_requests)
    assert times[-1] == pytest.approx(num_requests / 5, rel=1e-12)
    free = Gamma(5.0, 0.5)(rng(), num_requests)
    assert np.allclose(times / times[-1], free / free[-1])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("off_rate", [0.0, 1.0, 4.0])
def test_on_off_arrivals_have_the_rate_and_the_dispersion_of_the_closed_form(off_rate, seed):
    process = OnOff(4.0, on_seconds=2.0, off_seconds=6.0, off_rate=off_rate)
    times = process(rng(seed), 400_000)
    span = times[-1]
    # The variance of the count over a long time is its mean times the dispersion.
    spread = 4 * math.sqrt(process.dispersion(1e9) / 400_000)
    assert 400_000 / span == pytest.approx(4.0, rel=spread)
    for window in (0.5, 3.0, 20.0):
        counts = np.bincount((times / window).astype(int))[:-1]
        assert counts.var() / counts.mean() == pytest.approx(process.dispersion(window), rel=0.12)


@pytest.mark.parametrize("seed", SEEDS)
def test_on_off_gaps_vary_as_kuczura_says(seed):
    process = OnOff(4.0, on_seconds=2.0, off_seconds=6.0)
    gaps = np.diff(process(rng(seed), 400_000))
    leave_on, leave_off = 1 / 2, 1 / 6
    squared = 1 + 2 * process.on_rate * leave_on / (leave_on + leave_off) ** 2
    assert gaps.var() / gaps.mean() ** 2 == pytest.approx(squared, rel=0.05)


def test_on_off_arrivals_of_equal_rates_are_poisson():
    process = OnOff(4.0, 2.0, 6.0, off_rate=4.0)
    assert process.on_rate == pytest.approx(4.0)
    assert process.dispersion(10.0) == pytest.approx(1.0)
    gaps = np.diff(process(rng(), N), prepend=0.0)
    assert gaps.var() / gaps.mean() ** 2 == pytest.approx(1.0, abs=4 * math.sqrt(8 / N))


def test_on_off_arrivals_begin_in_equilibrium():
    # The mean number of arrivals in the first second is the rate, however long the periods are.
    process = OnOff(4.0, on_seconds=5.0, off_seconds=15.0)
    counts = [np.count_nonzero(process(rng(seed), 60) < 1) for seed in range(2000)]
    assert standard_errors_off(counts, 4.0) < 4


def test_at_once_and_recorded_arrivals_are_what_was_given():
    assert AtOnce(2.5)(rng(), 3).tolist() == [2.5] * 3
    assert Recorded((0.0, 1.0, 1.0, 5.0))(rng(), 3).tolist() == [0.0, 1.0, 1.0]
    with pytest.raises(ValueError, match="5 arrivals are asked for, and 4 were recorded"):
        Recorded((0.0, 1.0, 1.0, 5.0))(rng(), 5)


@pytest.mark.parametrize(
    "process",
    [Poisson(2.0), Gamma(2.0, 0.3), Gamma(2.0, 0.3, exact_span=True), OnOff(2.0, 1.0, 9.0), AtOnce()],
)
@pytest.mark.parametrize("num_requests", [0, 1, 2, 1000])
def test_arrival_process_returns_as_many_times_as_asked_for_in_order(process, num_requests):
    times = process(rng(), num_requests)
    assert times.shape == (num_requests,)
    assert np.all(np.diff(times, prepend=0.0) >= 0)


@pytest.mark.parametrize(
    "process", [Poisson, lambda rate: Gamma(rate, 0.3), lambda rate: OnOff(rate, 1.0, 9.0)]
)
def test_arrival_process_halves_the_intervals_or_the_span_at_twice_the_rate(process):
    slow, fast = process(2.0)(rng(), 5000), process(4.0)(rng(), 5000)
    if isinstance(process(2.0), OnOff):
        # Bursts keep their length, so only the long run scales.
        assert slow[-1] / fast[-1] == pytest.approx(2, rel=0.2)
    else:
        assert np.allclose(slow, 2 * fast)


# Lengths.

DISTRIBUTIONS = {
    "fixed": (Fixed(7), 7, 0),
    "uniform": (Uniform(4, 12), 8, 60 / 9),
    "geometric": (Geometric(20.0), 20, 19 * 20),
    "geometric from 5": (Geometric(9.5, minimum=5), 9.5, 4.5 * 5.5),
    "zipf": (Zipf(1.2, 50), None, None),
    "zipf from 10": (Zipf(2.0, 40, minimum=10), None, None),
    "zipf of 0 is uniform": (Zipf(0.0, 12, minimum=4), 8, 60 / 9),
    "lognormal": (Lognormal(54, 1.0, 384), 54, None),
    "lognormal, narrow": (Lognormal(9.5, 0.1, 40, 8), 9.5, None),
    "lognormal, mostly clipped": (Lognormal(300, 2.0, 384), 300, None),
    "lognormal, clipped from below": (Lognormal(1.01, 3, 9), 1.01, None),
    "lognormal of sigma 0": (Lognormal(54.25, 0, 384), 54.25, 0.1875),
    "lognormal, not by inversion": (Lognormal(54, 1.0, 384, by_inversion=False), 54, None),
    "empirical": (Empirical((5, 1, 1, 9)), 4, 11),
    "percentiles": (TABLE, 211.13, None),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_length_distribution_has_the_mean_and_the_variance_of_the_closed_form(name):
    lengths, mean, variance = DISTRIBUTIONS[name]
    drawn = lengths(rng(1), N)
    assert drawn.dtype == np.int64 and drawn.min() >= 1
    assert mean is None or lengths.mean == pytest.approx(mean, rel=1e-12)
    if variance == 0:
        assert set(drawn.tolist()) == {mean}
        return
    assert standard_errors_off(drawn, lengths.mean) < 4
    if variance is not None:
        assert standard_errors_off((drawn - lengths.mean) ** 2, variance) < 4


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_length_distribution_has_growing_quantiles_that_integrate_to_its_mean(name):
    lengths = DISTRIBUTIONS[name][0]
    values = lengths.quantile((np.arange(200_000) + 0.5) / 200_000)
    assert np.all(np.diff(values) >= 0)
    assert values.mean() == pytest.approx(lengths.mean, rel=2e-3)


@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.5])
def test_zipf_lengths_have_odds_that_fall_with_the_power(exponent):
    drawn = Zipf(exponent, 4)(rng(), N)
    odds = np.array([k**-exponent for k in range(1, 5)])
    expected = N * odds / odds.sum()
    counts = np.bincount(drawn, minlength=5)[1:]
    assert ((counts - expected) ** 2 / expected).sum() < 20


def test_geometric_lengths_are_memoryless():
    drawn = Geometric(20.0)(rng(), N)
    for least in (10, 50):
        assert standard_errors_off(drawn[drawn > least] - least, 20) < 4


@pytest.mark.parametrize("mean", [110.0, 211.13, 285.0])
def test_quantiles_have_the_published_percentiles_under_any_mean_that_these_allow(mean):
    points = ((0, 7), (0.5, 129), (0.9, 424), (0.99, 601), (1, 1000))
    lengths = Quantiles(mean, points)
    assert lengths.quantile(np.array([u for u, _ in points[:-1]])) == pytest.approx(
        [x for _, x in points[:-1]]
    )
    drawn = lengths(rng(), N)
    assert standard_errors_off(drawn, mean) < 4
    assert drawn.min() >= 7 and drawn.max() <= 1000


def test_quantiles_on_a_straight_line_are_the_uniform_distribution():
    lengths = Quantiles(50.5, ((0, 1), (1, 100)))
    assert lengths.quantile(np.array([0.25, 0.5])) == pytest.approx([25.75, 50.5])


def test_lognormal_logarithms_have_the_sigma_that_was_asked_for():
    for by_inversion in (True, False):
        lengths = Lognormal(1e6, 0.5, 10**9, by_inversion=by_inversion)(rng(), 20_000)
        # The deviation of a normal sample's deviation is sigma / sqrt(2 n).
        assert abs(np.std(np.log(lengths)) - 0.5) < 4 * 0.5 / math.sqrt(40_000)


def test_lognormal_without_inversion_takes_the_scores_of_the_random_generator():
    scores = rng(3).standard_normal(500)
    lengths = Lognormal(160, 0.8, 1000, by_inversion=False)(rng(3), 500)
    assert np.all(np.diff(lengths[np.argsort(scores)]) >= -1)


def test_lengths_without_any_spread_are_allowed():
    no_spread = (
        Lognormal(54, 0, 54),
        Geometric(54, minimum=54),
        Uniform(54, 54),
        Quantiles(54, ((0, 54), (1, 54))),
    )
    for lengths in no_spread:
        assert lengths(rng(), 50).tolist() == [54] * 50


def test_uniform_lengths_cover_their_range():
    assert set(Uniform(4, 12)(rng(), 9_000).tolist()) == set(range(4, 13))


def test_length_does_not_depend_on_how_many_follow():
    for lengths in (Uniform(4, 12), Geometric(20.0), Zipf(1.2, 50)):
        assert lengths(rng(), 10).tolist() == lengths(rng(), 100)[:10].tolist()


@pytest.mark.parametrize("correlation", [-1.0, -0.6, 0.0, 0.5, 1.0])
def test_coupled_lengths_keep_both_distributions_and_correlate_their_ranks(correlation):
    prompts, outputs = Coupled(Lognormal(300, 1.0, 4096), TABLE, correlation)(rng(2), N)
    assert standard_errors_off(prompts, 300) < 4
    assert standard_errors_off(outputs, 211.13) < 4
    ranks = np.corrcoef(np.argsort(np.argsort(prompts)), np.argsort(np.argsort(outputs)))[0, 1]
    # Spearman's correlation of a Gaussian copula (Pearson 1907).
    assert ranks == pytest.approx(6 / math.pi * math.asin(correlation / 2), abs=0.012)


def test_joint_lengths_draw_the_pairs_of_a_trace_equally_often():
    trace = [
        Request("a", 10, 1),
        Rejected("b", "no"),
        Request("c", 20, 9, output_length=2),
        Request("d", 30, 3),
    ]
    joint = Joint.of(trace)
    assert (joint.prompts, joint.outputs) == ((10, 20, 30), (1, 2, 3))
    prompts, outputs = joint(rng(), 30_000)
    assert set(zip(prompts.tolist(), outputs.tolist(), strict=True)) == {(10, 1), (20, 2), (30, 3)}
    assert np.abs(np.bincount(outputs)[1:] - 10_000).max() < 4 * math.sqrt(30_000 * 2 / 9)


def test_scaled_lengths_have_the_scaled_mean():
    for lengths in (Lognormal(300, 1.0, 4096), TABLE):
        for factor in (0.05, 0.5, 3.0):
            assert lengths.scaled(factor).mean == pytest.approx(lengths.mean * factor)
            assert standard_errors_off(lengths.scaled(factor)(rng(), N), lengths.mean * factor) < 4


IMPOSSIBLE = {
    "rate": (lambda: Poisson(0), "rate is 0; it must be a positive number"),
    "burstiness": (lambda: Gamma(1.0, -1), "burstiness is -1; it must be a positive number"),
    "on": (lambda: OnOff(1.0, 0, 1), "on_seconds is 0"),
    "off": (lambda: OnOff(1.0, 1, math.inf), "off_seconds is inf"),
    "off rate": (lambda: OnOff(1.0, 1, 1, off_rate=2.0), "off_rate is 2.0; it must be a number from 0 to 1"),
    "at": (lambda: AtOnce(-1.0), "at is -1.0; it must be a finite number of seconds"),
    "unsorted": (lambda: Recorded((1.0, 0.5)), "arrival 1 is 0.5, behind 1.0"),
    "no time": (lambda: Recorded((1.0, math.nan)), "arrival 1 is nan"),
    "fixed": (lambda: Fixed(0), "minimum of the lengths is 0; it must be an integer from 1"),
    "uniform": (lambda: Uniform(5, 4), "maximum of the lengths is 4; it must be an integer from 5"),
    "geometric": (lambda: Geometric(0.5), "mean is 0.5; it must be a number from 1 to"),
    "zipf": (lambda: Zipf(-1, 5), "exponent is -1"),
    "lognormal": (
        lambda: Lognormal(500, 1.0, 384),
        "mean is 500; it must lie between 1 and 384, and off both",
    ),
    "lognormal at its bound": (lambda: Lognormal(384, 1.0, 384), "mean is 384; .* between 1 and 384"),
    "lognormal of no spread": (
        lambda: Lognormal(0.5, 0, 384),
        "mean is 0.5; it must be a number from 1 to 384",
    ),
    "lognormal of no mean": (lambda: Lognormal(math.nan, 1.0, 384), "mean is nan"),
    "sigma": (lambda: Lognormal(54, math.nan, 384), "sigma is nan; it must be a number from 0 to 10"),
    "minimum": (lambda: Lognormal(54, 1.0, 384, minimum=0), "minimum of the lengths is 0"),
    "infinite rate": (lambda: Poisson(math.inf), "rate is inf"),
    "nothing": (lambda: Empirical(()), "number of lengths to draw from is 0; give at least one"),
    "half a token": (lambda: Empirical((5, 1.5)), "length 1 is 1.5; lengths are whole numbers"),
    "no pairs": (lambda: Joint((1, 2), (1,)), "2 prompts and 1 outputs"),
    "fractions": (lambda: Quantiles(5, ((0, 1), (0.9, 9))), r"fractions are .*; they must grow from 0 to 1"),
    "falling": (lambda: Quantiles(5, ((0, 1), (0.5, 9), (1, 8))), "at least 1 and grow"),
    "mean": (lambda: Quantiles(900, ((0, 7), (0.5, 129), (1, 1000))), r"mean is 900; .* between \d"),
    "correlation": (
        lambda: Coupled(Fixed(1), Fixed(1), 1.5),
        "correlation is 1.5; it must be a number from -1 to 1",
    ),
    "prefixes": (
        lambda: Prefixes(0, Fixed(1)),
        "count of prefixes is 0; it must be an integer of at least 1",
    ),
    "pause": (lambda: Exponential(0), "mean is 0"),
    "users": (lambda: closed_loop(0, 1, (Fixed(1), Fixed(1)), rng()), "num_users is 0"),
    "think": (
        lambda: closed_loop(1, 1, (Fixed(1), Fixed(1)), rng(), think=-1.0),
        "think is -1.0; it must be a finite number, 0 or more",
    ),
    "factor": (lambda: workloads.scale_rate([], 0), "factor is 0"),
    "own arrivals": (
        lambda: make_requests(lambda rng, n: np.ones(n + 1), (Fixed(1), Fixed(1)), 3, rng()),
        r"the arrivals are float64 of the shape \(4,\); draw 3 numbers",
    ),
    "own order": (
        lambda: make_requests(lambda rng, n: -np.arange(n), (Fixed(1), Fixed(1)), 3, rng()),
        "arrival 1 is -1; times are finite seconds",
    ),
    "own lengths": (
        lambda: make_requests(AtOnce(), (Fixed(1), lambda rng, n: rng.random(n)), 3, rng()),
        r"length 0 is 0\.\d+; lengths are whole numbers",
    ),
    "own zero": (
        lambda: make_requests(AtOnce(), (Fixed(1), lambda rng, n: np.zeros(n, int)), 3, rng()),
        "length 0 is 0; lengths are whole numbers of at least 1 token",
    ),
}


PAIR = (Fixed(1), Fixed(1))
SESSION = {"turns": Fixed(1), "texts": Fixed(1), "outputs": Fixed(1), "think": 0.0}
OF_NO_NUMBER = {
    "rate": Poisson,
    "burstiness": lambda it: Gamma(1.0, it),
    "on_seconds": lambda it: OnOff(1.0, it, 1),
    "off_seconds": lambda it: OnOff(1.0, 1, it),
    "off_rate": lambda it: OnOff(1.0, 1, 1, it),
    "window_seconds": lambda it: OnOff(1.0, 1, 1).dispersion(it),
    "at": AtOnce,
    "factor": lambda it: workloads.scale_rate([], it),
    "tick": lambda it: workloads.spread_arrivals([], rng(), it),
    "minimum of the lengths": lambda it: Uniform(it, 5),
    "maximum of the lengths": lambda it: Uniform(1, it),
    "mean of Geometric": Geometric,
    "mean of Lognormal": lambda it: Lognormal(it, 1.0, 384),
    "mean of Quantiles": lambda it: Quantiles(it, ((0, 1), (1, 9))),
    "mean of Exponential": Exponential,
    "sigma": lambda it: Lognormal(54, it, 384),
    "sigma of noisy": workloads.PREDICTORS["noisy"],
    "token_seconds of history": workloads.PREDICTORS["history"],
    "width": workloads.PREDICTORS["buckets"],
    "tokens": workloads.PREDICTORS["constant"],
    "exponent": lambda it: Zipf(it, 5),
    "points": lambda it: Quantiles(5, it),
    "correlation": lambda it: Coupled(*PAIR, it),
    "prompts": lambda it: Coupled(it, Fixed(1)),
    "count of prefixes": lambda it: Prefixes(it, Fixed(1)),
    "lengths of Prefixes": lambda it: Prefixes(1, it).draw(rng(), 1),
    "lengths of turns": lambda it: conversations(AtOnce(), 1, rng(), **(SESSION | {"turns": it})),
    "lengths of texts": lambda it: conversations(AtOnce(), 1, rng(), **(SESSION | {"texts": it})),
    "max_context": lambda it: conversations(AtOnce(), 1, rng(), **SESSION, max_context=it),
    "size": lambda it: workloads.chat(rng(), size=it),
    "size of rag": lambda it: workloads.rag(rng(), size=it),
    "rate of a preset": lambda it: workloads.agents(rng(), rate=it),
    "the number of requests": lambda it: workloads.code(rng(), n=it),
    "arrivals": lambda it: make_requests(it, PAIR, 3, rng()),
    "lengths": lambda it: make_requests(AtOnce(), it, 3, rng()),
    "lengths of both": lambda it: make_requests(AtOnce(), (it, it), 3, rng()),
    "num_users": lambda it: closed_loop(it, 1, PAIR, rng()),
    "requests_per_user": lambda it: closed_loop(1, it, PAIR, rng()),
    "think": lambda it: closed_loop(1, 1, PAIR, rng(), think=it),
    "token_seconds": lambda it: closed_loop(1, 1, PAIR, rng()).flat(it),
    "vocab_size": lambda it: workloads.resolve_prompts([], None, it, rng()),
    "predictor": lambda it: workloads.predict([], it, rng()),
    "rng": lambda it: workloads.load("chat", it),
    "rng of requests": lambda it: make_requests(AtOnce(), PAIR, 3, it),
    "rng of prompts": lambda it: workloads.resolve_prompts([], None, 9, it),
    "the workload": lambda it: workloads.load(it, rng()),
}


@pytest.mark.parametrize("value", [[], math.nan, -1.5, {}, False], ids=repr)
@pytest.mark.parametrize("name", OF_NO_NUMBER)
def test_parameter_of_another_kind_raises_a_line_that_names_it_and_its_value(name, value):
    with pytest.raises(ValueError, match=f"{name.partition(' of ')[0]}.* is ") as caught:
        OF_NO_NUMBER[name](value)
    said = str(caught.value)
    assert repr(value) in said and "; " in said and "\n" not in said


@pytest.mark.parametrize("value", [[], math.nan, -1.5, {}, False], ids=repr)
@pytest.mark.parametrize(
    "function",
    [
        workloads.merge,
        lambda requests: workloads.scale_rate(requests, 2),
        lambda requests: workloads.resolve_prompts(requests, None, 9, rng()),
        lambda requests: workloads.predict(requests, "oracle", rng()),
        lambda requests: workloads.spread_arrivals(requests, rng(), 3.0),
        Joint.of,
    ],
)
def test_workload_of_something_else_than_requests_raises_a_line_that_shows_it(function, value):
    with pytest.raises(TypeError, match="entry 0 of the requests is ") as caught:
        function([value])
    said = str(caught.value)
    assert repr(value) in said and "; " in said and "\n" not in said


def test_lengths_of_a_single_distribution_are_no_pair():
    with pytest.raises(ValueError, match=r"give those of prompts and of outputs, such as \(Fixed"):
        make_requests(AtOnce(), Fixed(5), 3, rng())


def test_long_geometric_tail_keeps_its_mean():
    # 1 - 1 / mean is 1 in floats.
    lengths = Geometric(2.0**39)(rng(), N)
    assert lengths.min() >= 1 and standard_errors_off(lengths, 2.0**39) < 4
    for build in (lambda: Geometric(1e30), lambda: Uniform(1, 10**30), lambda: Zipf(1.0, 10**12)):
        with pytest.raises(ValueError, match="it must be "):
            build()


def test_measured_times_and_lengths_may_come_from_an_iterator():
    assert Recorded(iter([0.0, 1.5])) == Recorded((0.0, 1.5))
    assert Empirical(length for length in (3, 2)) == Empirical((3, 2))


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible_workload_raises_with_value_and_limit(name):
    build, said = IMPOSSIBLE[name]
    with pytest.raises(ValueError, match=said):
        build()


# Requests.


def test_make_requests_takes_drawn_arrivals_and_lengths_and_runs_to_the_end():
    requests = make_requests(Recorded((0.0, 1.5, 2.0)), (Uniform(3, 9), Fixed(5)), 3, rng())
    assert [request.arrival for request in requests] == [0.0, 1.5, 2.0]
    assert all(3 <= request.prompt <= 9 and request.max_tokens == 5 for request in requests)
    assert all(request.sampling.ignore_eos for request in requests)
    assert [request.id for request in requests] == ["0", "1", "2"]


def test_make_requests_draws_the_same_lengths_under_any_arrival_process():
    lengths = (Uniform(3, 900), Geometric(50.0))
    slow, fast, bursty = (
        make_requests(arrivals, lengths, 50, rng(4))
        for arrivals in (Poisson(1.0), Poisson(3.0), OnOff(1.0, 1.0, 5.0))
    )
    assert [(r.prompt, r.max_tokens) for r in slow] == [(r.prompt, r.max_tokens) for r in fast]
    assert [(r.prompt, r.max_tokens) for r in slow] == [(r.prompt, r.max_tokens) for r in bursty]
    assert [r.arrival for r in slow] == pytest.approx([3 * r.arrival for r in fast])


def test_merge_orders_workloads_of_several_clients_by_arrival():
    chat = make_requests(Poisson(2.0), (Fixed(3), Fixed(2)), 20, rng(1), client="chat")
    job = make_requests(AtOnce(4.0), (Fixed(3), Fixed(2)), 5, rng(2), client="job")
    merged = workloads.merge(chat, job)
    assert len(merged) == 25
    assert [request.arrival for request in merged] == sorted(request.arrival for request in merged)
    assert {request.id for request in job} == {f"job/{place}" for place in range(5)}
    with pytest.raises(ValueError, match="id 'job/0' is in two workloads"):
        workloads.merge(job, job)


def test_scale_rate_divides_the_intervals_and_keeps_what_a_deadline_allows():
    requests = [Request("a", 1, 1, 2.0, deadline=3.0), Rejected("b", "no", 4.0), Request("c", 1, 1, 10.0)]
    fast = workloads.scale_rate(requests, 4.0)
    assert [request.arrival for request in fast] == [0.5, 1.0, 2.5]
    assert fast[0].deadline == 1.5
    assert workloads.scale_rate(requests, 1) == requests


@pytest.mark.parametrize("process", [Poisson(200.0), Gamma(200.0, 0.3), OnOff(200.0, 1.0, 4.0)])
def test_make_requests_serves_all_requests_of_any_arrival_process(process):
    requests = make_requests(process, (Fixed(4), Fixed(3)), 1000, rng())
    trace = simulate(requests, cost=Linear(step=1e-4), scheduler=SchedulerConfig(64, 512))
    assert len(trace.served) == 1000
    # Arrivals are absolute, so a slow server delays none.
    slow = simulate(requests, cost=Linear(step=0.1), scheduler=SchedulerConfig(64, 512))
    assert [r.arrival for r in slow.requests] == [r.arrival for r in trace.requests]


def test_make_requests_keeps_the_drawn_prompt_lengths_behind_a_prefix_and_through_a_vocabulary():
    lengths = (Lognormal(60, 0.8, 400), Fixed(3))
    plain = make_requests(Poisson(1.0), lengths, 200, rng(3))
    prefixed = make_requests(Poisson(1.0), lengths, 200, rng(3), prefixes=Prefixes(4, Fixed(32)))
    assert [len(p.prompt) - 32 for p in prefixed] == [request.prompt for request in plain]
    for requests in (plain, prefixed):
        resolved = workloads.resolve_prompts(requests, None, 256, rng())
        assert [len(r.prompt) for r in resolved] == [r.num_prompt_tokens for r in requests]


@pytest.mark.parametrize("exponent", [0.0, 1.0])
@pytest.mark.parametrize("prefix", [16, 64, 250])
def test_prefixes_are_all_that_prompts_share(prefix, exponent):
    prefixes = Prefixes(5, Fixed(prefix), exponent)
    requests = make_requests(Poisson(1e-3), (Fixed(100), Fixed(2)), 80, rng(), prefixes=prefixes)
    distinct = len({request.prompt[:prefix] for request in requests})
    trace = simulate(
        requests, scheduler=SchedulerConfig(4, 2048), cache=CacheConfig(4096, 16, prefix_caching=True)
    )
    # Whole blocks are found, and each prefix is computed once; a prefix never swallows a prompt of its own.
    found = [record.num_cached_tokens for record in trace.requests]
    assert sum(found) == (80 - distinct) * (prefix // 16 * 16)
    assert max(found) <= prefix


def test_make_requests_without_prefixes_shares_nothing():
    requests = workloads.resolve_prompts(
        make_requests(Poisson(1e-3), (Fixed(100), Fixed(2)), 50, rng()), None, 4096, rng()
    )
    trace = simulate(requests, cache=CacheConfig(4096, 16, prefix_caching=True))
    assert sum(record.num_cached_tokens for record in trace.requests) == 0


# Sessions.


def test_closed_loop_has_the_throughput_of_the_response_time_law():
    # Alone in its seat, a request of 1 prompt token and 4 output tokens takes 4 steps of a second.
    sessions = closed_loop(5, 40, (Fixed(1), Fixed(4)), rng(), think=6.0)
    requests, on_finish = sessions.start()
    trace = simulate(requests, scheduler=SchedulerConfig(8, 100), cache=CacheConfig(100), on_finish=on_finish)
    assert sessions.num_requests == len(trace.requests) == 200
    assert {record.latency for record in trace.requests} == {4.0}
    assert max(record.finish for record in trace.requests) == 40 * (4 + 6)
    assert max(step.num_running for step in trace.steps) == 5


def test_closed_loop_never_has_more_requests_under_way_than_users():
    sessions = closed_loop(6, 20, (Uniform(1, 9), Geometric(8.0)), rng(), think=Exponential(3.0))
    requests, on_finish = sessions.start()
    trace = simulate(
        requests, "sjf", scheduler=SchedulerConfig(3, 20), cache=CacheConfig(200), on_finish=on_finish
    )
    assert len(trace.requests) == 120
    assert max(step.num_running + step.num_waiting for step in trace.steps) <= 6
    by_id = {record.id: record for record in trace.requests}
    for session in sessions.sessions:
        for place, turn in enumerate(session.turns[1:], start=1):
            before, record = (by_id[f"{session.client}/{k}"] for k in (place - 1, place))
            assert record.arrival == pytest.approx(before.finish + turn.pause)


def chats(seed=0, **changed):
    options = {
        "turns": Geometric(4.0),
        "texts": Uniform(5, 40),
        "outputs": Uniform(3, 30),
        "think": Exponential(2.0),
        "prefixes": Prefixes(2, Fixed(32)),
    }
    return conversations(Poisson(0.5), 12, rng(seed), **options | changed)


@pytest.mark.parametrize("is_open", [False, True])
def test_conversation_finds_all_but_its_new_text_in_the_prefix_cache(is_open):
    sessions = chats()
    requests, on_finish = (sessions.flat(100.0), None) if is_open else sessions.start()
    cache = CacheConfig(4000, 1, prefix_caching=True)
    trace = simulate(requests, scheduler=SchedulerConfig(16, 4000), cache=cache, on_finish=on_finish)
    assert len(trace.requests) == sessions.num_requests
    by_id = {record.id: record for record in trace.requests}
    for session in sessions.sessions:
        said = 0
        for place, turn in enumerate(session.turns):
            record = by_id[f"{session.client}/{place}"]
            assert record.num_prompt_tokens == said + len(turn.text)
            # The KV of the last token of an answer is never computed.
            assert place == 0 or record.num_cached_tokens == said - 1
            said += len(turn.text) + turn.max_tokens


def test_conversation_prompts_hold_the_tokens_that_were_generated():
    (session,) = chats().sessions[1:2]
    requests, on_finish = workloads.Sessions((session,)).start()

    class Record:
        id, tokens, finish = requests[0].id, (9, 8, 7), 50.0

    (following,) = on_finish(Record())
    assert following.prompt == (*requests[0].prompt, 9, 8, 7, *session.turns[1].text)
    assert following.arrival == 50.0 + session.turns[1].pause


def test_closed_loop_client_stops_after_a_rejection_and_ignores_other_requests():
    sessions = closed_loop(2, 5, (Fixed(50), Fixed(4)), rng())
    requests, on_finish = sessions.start()
    stranger = Request("stranger/7", 3, 2)
    trace = simulate([*requests, stranger], cache=CacheConfig(2, 16), on_finish=on_finish)
    assert [record.error is None for record in trace.requests] == [False, False, True]


def test_sessions_are_the_same_under_every_policy():
    sessions = chats()
    runs = []
    for policy in ("fcfs", "sjf", "static"):
        requests, on_finish = sessions.start()
        trace = simulate(requests, policy, cache=CacheConfig(4000, 1), on_finish=on_finish)
        runs.append({(record.id, record.num_prompt_tokens, record.max_tokens) for record in trace.requests})
    assert runs[0] == runs[1] == runs[2]


def test_conversation_ends_before_its_context_is_full():
    full = chats(turns=Fixed(50), max_context=300)
    assert full.max_context <= 300
    assert all(
        32 + sum(len(t.text) + t.max_tokens for t in session.turns) - 32 <= 300 for session in full.sessions
    )
    assert all(0 < len(session.turns) < 50 for session in full.sessions)


SHOW_ALL = """
import numpy as np
from cbresearch import workloads as w

rng = np.random.default_rng(3)
print(w.make_requests(w.OnOff(2.0, 1.0, 5.0), w.Coupled(w.Zipf(1.1, 90), w.Geometric(9.0), 0.4), 30, rng))
print(w.make_requests(w.Gamma(2.0, 0.4), (w.Uniform(1, 9), w.Empirical((3, 1))), 30, rng,
                      prefixes=w.Prefixes(3, w.Fixed(9), 1.0), client="c"))
print(w.closed_loop(3, 4, w.Joint((1, 2), (3, 4)), rng, think=w.Exponential(2.0)))
print(w.agents_sessions(rng, n=4, size=0.05).flat(0.01))
print(w.multi_turn_sessions(rng, n=4, size=0.05).start()[0])
"""


def test_draws_give_the_same_bytes_in_another_process_under_another_hash_seed():
    first, second = printed_by_two_processes(SHOW_ALL)
    assert first == second
    assert len(first) > 20_000


def test_coupled_lengths_have_normal_scores():
    # The error function against the standard library's other way to the same number.
    prompts, _ = Coupled(Quantiles(500.5, ((0, 1), (1, 1000))), Fixed(1))(rng(3), 2000)
    scores = rng(3).standard_normal((2, 2000))[0]
    expected = [1 + 999 * NormalDist().cdf(score) for score in scores]
    assert np.abs(prompts - expected).max() <= 1


def test_moved_arrivals_leave_no_deadline_behind_an_arrival():
    requests = [Request("a", 1, 1, 10.0, deadline=10.5), Request("b", 1, 1, 10.0, deadline=10.0)]
    slow = workloads.scale_rate(requests, 0.25)
    assert [(request.arrival, request.deadline) for request in slow] == [(40.0, 40.5), (40.0, 40.0)]
    spread = workloads.spread_arrivals(requests, np.random.default_rng(0), 60.0)
    assert all(request.arrival <= request.deadline for request in spread)
    assert spread[1].deadline == spread[1].arrival > 10.5
