"""Predicted lengths: each predictor against what it may know."""

import statistics

import numpy as np
import pytest
from helpers.drawing import rng

from cbresearch.request import Rejected, Request
from cbresearch.workloads import predict


def requests(number=2000, seed=1):
    draw = rng(seed)
    return [
        Request(
            str(place),
            3,
            500,
            arrival=float(draw.random() * 100),
            client="ab"[int(draw.integers(2))],
            output_length=int(draw.integers(1, 500)) if place % 3 else None,
        )
        for place in range(number)
    ]


def predictions(given, predictor, seed=0):
    return [request.predicted_output for request in predict(given, predictor, rng(seed))]


def truth(given):
    return [request.output_length or request.max_tokens for request in given]


def test_oracle_predicts_the_known_length_or_max_tokens():
    given = [
        Request("a", 1, 9, output_length=4),
        Request("b", 1, 9),
        Request("c", 1, 9, output_length=40),
    ]
    assert predictions(given, "oracle") == [4, 9, 9]


def test_noisy_predictor_of_sigma_0_is_the_oracle():
    given = requests()
    assert predictions(given, "noisy:sigma=0") == truth(given) == predictions(given, "oracle")


@pytest.mark.parametrize("sigma", [0.3, 1.0])
def test_noisy_predictor_is_lognormal_with_median_1_and_the_given_sigma(sigma):
    given = [Request(str(n), 1, 100_000) for n in range(4000)]
    logs = [np.log(length / 100_000) for length in predictions(given, f"noisy:sigma={sigma}")]
    assert abs(statistics.mean(logs)) < 4 * sigma / 4000**0.5
    assert abs(statistics.stdev(logs) / sigma - 1) < 4 / (2 * 4000) ** 0.5


def test_noisy_predictors_of_two_sigmas_differ_by_the_sigma_alone():
    given = [Request(str(n), 1, 100_000) for n in range(50)]
    one, two = (np.log(predictions(given, f"noisy:sigma={sigma}")) for sigma in (0.5, 1.0))
    np.testing.assert_allclose(two - np.log(100_000), 2 * (one - np.log(100_000)), atol=1e-3)


def test_noisy_predictor_errs_both_ways_where_max_tokens_is_the_truth():
    given = [Request(str(n), 1, 100) for n in range(200)]
    lengths = predictions(given, "noisy:sigma=0.5")
    assert min(lengths) < 60
    assert max(lengths) > 150


def test_noisy_predictor_depends_on_the_seed_alone():
    given = requests()
    assert predictions(given, "noisy:sigma=1", 5) == predictions(given, "noisy:sigma=1", 5)
    assert predictions(given, "noisy:sigma=1", 5) != predictions(given, "noisy:sigma=1", 6)


@pytest.mark.parametrize("width", [1, 7, 64, 1000])
def test_buckets_predictor_gives_the_upper_end_of_the_bucket(width):
    given = requests()
    for length, predicted in zip(truth(given), predictions(given, f"buckets:width={width}"), strict=True):
        assert predicted % width == 0
        assert predicted - width < length <= predicted


def test_constant_predictor_is_the_same_for_every_request():
    assert set(predictions(requests(), "constant:tokens=77")) == {77}


def test_history_predictor_is_the_mean_of_the_clients_finished_answers():
    given = requests(300)
    token_seconds = 0.03
    expected = []
    for request in given:
        known = [
            length
            for other, length in zip(given, truth(given), strict=True)
            if other.client == request.client and other.arrival + length * token_seconds <= request.arrival
        ]
        expected.append(round(sum(known) / len(known)) if known else None)
    assert predictions(given, f"history:token_seconds={token_seconds}") == expected
    assert None in expected
    assert len(set(expected)) > 50


def test_history_predictor_ignores_answers_under_way_later_ones_and_other_clients():
    given = [
        Request("later", 1, 9, arrival=5.0, client="a"),
        Request("first", 1, 4, client="a"),
        Request("other", 1, 50, client="b"),
        Request("too soon", 1, 7, arrival=3.9, client="a"),
    ]
    assert predictions(given, "history:token_seconds=1") == [4, None, None, None]


def test_predict_changes_the_prediction_alone_and_keeps_rejections_in_place():
    given = [
        Request("a", (1, 2), 9, 1.5, client="c", priority=2),
        Rejected("line", "no JSON"),
        Request("b", 1, 3),
    ]
    found = predict(given, "constant:tokens=2", rng())
    assert found[1] is given[1]
    assert [getattr(request, "predicted_output", None) for request in found] == [2, None, 2]
    assert predict(found, lambda some, source: [None] * len(some), rng()) == given


def test_predict_reads_an_iterator_once_and_keeps_every_request():
    given = [Request("a", 1, 3), Rejected("b", "no"), Request("c", 1, 5)]
    assert [r.id for r in predict(iter(given), "oracle", rng())] == ["a", "b", "c"]


@pytest.mark.parametrize("answer", [[1], [1, 2, 3], iter([])])
def test_predictor_of_another_number_of_lengths_raises(answer):
    with pytest.raises(ValueError, match=r"\d predictions for 2 requests; give each request one"):
        predict([Request("a", 1, 3), Request("b", 1, 3)], lambda some, source: answer, rng())


@pytest.mark.parametrize(
    ("predictor", "problem"),
    [
        ("oracel", "unknown predictor 'oracel'; did you mean 'oracle'"),
        ("noisy", "predictor 'noisy' needs the option 'sigma'; write noisy:sigma="),
        ("noisy:sigma=-1", "sigma is -1"),
        ("noisy:sigma=wide", "option sigma is 'wide'; it must be a number"),
        ("noisy:width=3", "predictor 'noisy' has no option 'width'; there is 'sigma'"),
        ("buckets:width=0", "width is 0"),
        ("buckets:width=2.5", "option width is 2.5; it must be a whole number"),
        ("somebody", "there is 'oracle', 'noisy', 'buckets', 'history', 'constant'"),
        ("constant:tokens=0", "tokens is 0"),
        ("history:token_seconds=-1", "token_seconds is -1"),
    ],
)
def test_wrong_predictor_raises_with_name_and_remedy(predictor, problem):
    with pytest.raises(ValueError, match=problem):
        predict([Request("a", 1, 1)], predictor, rng())
