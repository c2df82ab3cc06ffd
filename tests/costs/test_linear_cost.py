"""Linear step times: fitted to runs, read from text, told beforehand."""

from dataclasses import replace

import numpy as np
import pytest

from cbresearch import ModelShape, Request, simulate
from cbresearch.costs import CARDS, Linear, Roofline
from cbresearch.step import Plan, Scheduled


@pytest.mark.parametrize(
    "coefficients", [(0.02, 0.003, 0.0001), (0.0, 0.5, 0.0), (1.0, 0.0, 0.0), (0.0, 0.0, 0.7)]
)
def test_linear_fit_recovers_the_coefficients_of_simulated_runs(coefficients):
    requests = [Request(str(place), 1 + 7 * place % 30, 3 + 5 * place % 17) for place in range(20)]
    traces = [simulate(requests, name, cost=Linear(*coefficients)) for name in ("fcfs", "static")]
    fitted = Linear.fit(*traces, context=True)
    assert (fitted.step, fitted.token, fitted.context) == pytest.approx(coefficients, abs=1e-9)


def test_linear_fit_without_context_leaves_that_term_out():
    requests = [Request(str(place), 1 + 7 * place % 30, 3 + 5 * place % 17) for place in range(20)]
    fitted = Linear.fit(simulate(requests, cost=Linear(0.02, 0.003)))
    assert (fitted.step, fitted.token, fitted.context) == pytest.approx((0.02, 0.003, 0.0), abs=1e-9)


def trace_of(rows):
    """Return a trace of steps with one request each: (tokens, tokens before them, seconds)."""
    (template,) = simulate([Request("a", 1, 1)]).steps
    (entry,) = template.plan.scheduled
    steps = [
        replace(
            template,
            duration=seconds,
            plan=Plan(place, (entry._replace(start=start, num_tokens=tokens),)),
        )
        for place, (tokens, start, seconds) in enumerate(rows)
    ]
    return replace(simulate([]), steps=tuple(steps))


@pytest.mark.parametrize("context", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_linear_fit_gives_no_negative_coefficient_however_the_steps_lie(context, seed):
    noise = np.random.default_rng(seed)
    rows = [
        (int(noise.integers(1, 50)), int(noise.integers(0, 500)), float(noise.exponential(1.0)) + 1e-3)
        for _ in range(int(noise.integers(3, 12)))
    ]
    fitted = Linear.fit(trace_of(rows), context=context)
    assert min(fitted.step, fitted.token, fitted.context) >= 0


def test_linear_fit_of_steps_that_get_faster_with_more_tokens_is_a_constant():
    fitted = Linear.fit(trace_of([(1, 0, 3.0), (2, 0, 2.0), (3, 0, 1.0)]))
    assert fitted.token == 0
    # The constant whose relative errors have the least squares.
    ratios = [1 / 3, 1 / 2, 1]
    assert fitted.step == pytest.approx(sum(ratios) / sum(ratio**2 for ratio in ratios))


@pytest.mark.parametrize(("num_steps", "context"), [(0, False), (1, False), (0, True), (2, True)])
def test_linear_fit_needs_a_step_for_each_coefficient(num_steps, context):
    trace = trace_of([(1 + place, place, 1.0) for place in range(num_steps)])
    with pytest.raises(ValueError, match=f"{num_steps} steps are too few"):
        Linear.fit(trace, context=context)


def test_linear_fit_passes_over_steps_without_duration():
    rows = [(tokens, 0, 0.5 + 0.1 * tokens) for tokens in (1, 2, 3, 4)]
    fitted = Linear.fit(trace_of([*rows, (1, 0, 0.0)]))
    assert (fitted.step, fitted.token) == pytest.approx((0.5, 0.1))


@pytest.mark.parametrize(
    ("text", "cost"),
    [
        ("linear:1", Linear(1.0)),
        ("linear:1e-3,0.5", Linear(0.001, 0.5)),
        ("linear: 0, 2 ,3", Linear(0.0, 2.0, 3.0)),
    ],
)
def test_linear_is_read_from_one_to_three_numbers(text, cost):
    assert Linear.parse(text) == cost


@pytest.mark.parametrize(
    "text",
    [
        "",
        "linear",
        "linear:",
        "linear:x",
        "linear:1,2,3,4,5",
        "linear:1,,2",
        "roofline:1",
        "1,2,3",
        "Linear:1",
    ],
)
def test_linear_parse_rejects_what_it_cannot_read_by_value_and_remedy(text):
    with pytest.raises(ValueError, match="linear:T0,T_TOKEN,T_CONTEXT") as rejection:
        Linear.parse(text)
    assert repr(text) in str(rejection.value)


@pytest.mark.parametrize(
    "text",
    [
        "linear:-1",
        "linear:1,-2",
        "linear:1,2,-1e-9",
        "linear:nan",
        "linear:1,inf",
        "linear:0",
        "linear:0,0,0",
    ],
)
def test_linear_rejects_coefficients_that_no_step_can_have(text):
    with pytest.raises(ValueError, match="finite seconds, none negative and not all 0"):
        Linear.parse(text)


def test_linear_seconds_told_beforehand_are_those_of_the_step():
    cost = Linear(0.5, 0.25, 0.125)
    trace = simulate([Request("a", 7, 3)], cost=cost)
    for step in trace.steps:
        assert cost.seconds(step.plan.num_tokens, step.plan.num_context_tokens) == step.duration


def test_durations_of_a_cost_are_the_very_seconds_that_plans_cost():
    # A small model, so that overhead, weights and cache all matter.
    roofline = Roofline(ModelShape(2, 8, 8, 64, 10**6, 2), CARDS["l4"], overhead=1e-6)
    linear = (Linear(0.3, 0.01, 0.0007), Linear(0.1), Linear(0.0, 0.3), Linear(0.1, 0.2, 0.3, 0.4))
    contexts = range(7, 7 + 3 * 50, 3)
    plans = [
        Plan(
            0,
            tuple(
                Scheduled(str(row), row, start, 1, False, True, ())
                for row, start in enumerate((context - 5, 1, 1))
            ),
        )
        for context in contexts
    ]
    for cost in (*linear, roofline):
        assert cost.durations(3, contexts) == [cost(plan) for plan in plans]
