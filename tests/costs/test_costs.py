"""Step-time models against closed forms, and against steps whose time is known."""

from dataclasses import replace

import numpy as np
import pytest
from cbresearch.plan import Padding, Plan, Scheduled, Transfer

from cbresearch import CacheConfig, Hardware, ModelShape, Request, SchedulerConfig, formulas, simulate
from cbresearch.costs import CARDS, FEATURES, Calibrated, Linear, Replayed, Roofline

SHAPE = ModelShape(
    num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, num_parameters=8 * 10**9, dtype_bytes=2
)
CARD = Hardware("card", peak_flops=1e15, bandwidth=3e12, link_bandwidth=5e10)


def decodes(num_rows, context):
    entries = [Scheduled(str(n), n, context - 1, 1, False, True, ()) for n in range(num_rows)]
    return Plan(0, tuple(entries))


def chunk(start, num_tokens, **fields):
    return Plan(0, (Scheduled("a", 0, start, num_tokens, True, True, ()),), **fields)


@pytest.mark.parametrize("num_rows", [1, 64, 1000])
@pytest.mark.parametrize("context", [1, 4096])
def test_roofline_of_a_decode_step_is_what_the_formula_says(num_rows, context):
    expected = sum(formulas.decode_step_seconds(SHAPE, num_rows, context, 1e15, 3e12))
    assert Roofline(SHAPE, CARD)(decodes(num_rows, context)) == pytest.approx(expected)
    assert Roofline(SHAPE, CARD).seconds(num_rows, num_rows * context) == pytest.approx(expected)


def test_roofline_of_linear_layers_turns_to_arithmetic_at_the_ridge():
    ridge = formulas.ridge_tokens(1e15, 3e12, 2)
    cost = Roofline(replace(SHAPE, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=1), CARD)
    few, at, many = (cost(chunk(0, int(tokens))) for tokens in (ridge / 4, ridge, 4 * ridge))
    assert few == pytest.approx(at, rel=1e-2)
    assert many == pytest.approx(4 * at, rel=1e-2)


def test_roofline_of_a_prompt_is_the_same_in_one_chunk_or_two():
    # Where arithmetic binds, chunks only add up; their queries see what they would have seen in one.
    cost = Roofline(SHAPE, replace(CARD, bandwidth=1e30))
    whole = cost(chunk(0, 8192))
    assert cost(chunk(0, 4096)) + cost(chunk(4096, 4096)) == pytest.approx(whole)
    # 2N a token, and 2 · layers · heads · (d_k + d_v) a query and key.
    flops = 2 * 8e9 * 8192 + 2 * 32 * 32 * 256 * 8192 * 8193 / 2
    assert whole == pytest.approx(flops / 1e15)


def test_roofline_scales_with_efficiencies_and_adds_the_overhead():
    base, plan = Roofline(SHAPE, CARD)(decodes(8, 100)), decodes(8, 100)
    assert Roofline(SHAPE, CARD, overhead=0.5)(plan) == pytest.approx(base + 0.5)
    slow = Roofline(SHAPE, CARD, flops_efficiency=0.5, bandwidth_efficiency=0.5)
    assert slow(plan) == pytest.approx(2 * base)
    padded = replace(plan, padding=(Padding("z", 8, 100),))
    assert Roofline(SHAPE, CARD)(padded) == pytest.approx(Roofline(SHAPE, CARD)(decodes(9, 100)))


def test_roofline_charges_swaps_to_the_link_and_copies_to_the_memory():
    cost, plan = Roofline(SHAPE, CARD, block_size=16), decodes(2, 10)
    block_bytes = 16 * formulas.kv_bytes_per_token(SHAPE)
    swapped = replace(plan, transfers=(Transfer("swap_out", 0, 0), Transfer("swap_in", 1, 1)))
    copied = replace(plan, transfers=(Transfer("copy", 0, 1),))
    assert cost(swapped) - cost(plan) == pytest.approx(2 * block_bytes / 5e10)
    assert cost(copied) - cost(plan) == pytest.approx(2 * block_bytes / 3e12)
    only_room = Plan(0, (), transfers=(Transfer("swap_out", 0, 0),))
    assert cost(only_room) == pytest.approx(block_bytes / 5e10)
    with pytest.raises(ValueError, match="link_bandwidth of 'card' is unknown"):
        Roofline(SHAPE, replace(CARD, link_bandwidth=None))(swapped)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"flops_efficiency": 0}, "flops_efficiency is 0"),
        ({"bandwidth_efficiency": 1.1}, r"bandwidth_efficiency is 1\.1"),
        ({"overhead": -1.0}, r"overhead is -1\.0"),
        ({"block_size": 0}, "block_size is 0"),
        ({"shape": replace(SHAPE, latent_dim=576)}, "caches latents"),
    ],
)
def test_roofline_rejects_numbers_out_of_range(fields, problem):
    with pytest.raises(ValueError, match=problem):
        Roofline(**{"shape": SHAPE, "hardware": CARD, **fields})


@pytest.mark.parametrize("name", ["peak_flops", "bandwidth", "memory_bytes", "link_bandwidth"])
def test_hardware_rejects_a_number_that_is_not_positive(name):
    with pytest.raises(ValueError, match=f"Hardware: {name} is 0"):
        Hardware(**{"name": "x", "peak_flops": 1.0, "bandwidth": 1.0, name: 0})


def test_cards_have_the_published_ridge_points():
    ridges = {
        name: formulas.ridge_tokens(CARDS[name].peak_flops, CARDS[name].bandwidth, 2)
        for name in ("h100-sxm", "h200-sxm", "a100-80gb")
    }
    assert {name: round(ridge) for name, ridge in ridges.items()} == {
        "h100-sxm": 295,
        "h200-sxm": 206,
        "a100-80gb": 153,
    }


def recorded(seed, cost, **limits):
    rng = np.random.default_rng(seed)
    requests = [
        Request(str(n), int(rng.integers(1, 60)), int(rng.integers(1, 30)), arrival=float(n) * 0.05)
        for n in range(60)
    ]
    return simulate(requests, "fcfs", cost=cost, scheduler=SchedulerConfig(6, 40, **limits))


def test_calibrated_fit_finds_the_coefficients_that_made_the_steps():
    true = (0.01, 0.004, 0.003, 0.002, *[0.0] * 4, 0.002, 0.001, 0.003, 1e-5, 2e-5, 1e-6, 0.0)

    def cost(plan):
        from cbresearch.costs.calibrated import features_of

        return float(np.dot(features_of(plan), true))

    fitted = Calibrated.fit(recorded(1, cost), recorded(2, cost))
    assert fitted.held_out_error < 1e-3
    assert abs(fitted.held_out_bias) < 1e-3
    assert fitted.num_fitted == pytest.approx(4 * fitted.num_held_out, rel=0.05)
    other = recorded(3, cost)
    again = [fitted(step.plan) for step in other.steps]
    np.testing.assert_allclose(again, [step.duration for step in other.steps], rtol=5e-3)


def test_calibrated_may_charge_a_single_row_less_than_the_line():
    trace = recorded(7, lambda plan: 0.01 + 0.001 * plan.num_tokens - 0.002 * (plan.num_tokens == 1))
    fitted = Calibrated.fit(trace)
    assert fitted(decodes(1, 10)) == pytest.approx(0.009, rel=1e-2)
    assert fitted(decodes(2, 10)) == pytest.approx(0.012, rel=1e-2)


def test_calibrated_has_a_time_of_its_own_for_few_tokens_only_if_seen():
    def cost(plan):
        return 0.01 + 0.001 * plan.num_tokens + 0.005 * (plan.num_tokens == 3)

    fitted = Calibrated.fit(recorded(7, cost), recorded(8, cost))
    assert [fitted(decodes(number, 10)) for number in (2, 3, 4)] == pytest.approx(
        [0.012, 0.018, 0.014], rel=1e-2
    )
    alike = [Request(str(n), 9, 5) for n in range(36)]
    unseen = Calibrated.fit(
        *(simulate(alike, "static", cost=cost, scheduler=SchedulerConfig(number)) for number in (1, 4, 6))
    )
    assert unseen(decodes(3, 10)) == pytest.approx(0.013, rel=2e-2)


def test_calibrated_measures_its_error_on_held_out_steps():
    noise = np.random.default_rng(9)
    base = Linear(0.01, 0.001)
    trace = recorded(4, lambda plan: base(plan) * float(np.exp(noise.normal(0, 0.2))))
    fitted = Calibrated.fit(trace)
    # The median of |N(0, 0.2)| is 0.135.
    assert 0.08 < fitted.held_out_error < 0.2
    assert fitted == Calibrated.fit(trace)
    assert fitted != Calibrated.fit(trace, rng=np.random.default_rng(1))


def test_calibrated_rejects_a_step_beyond_what_was_seen_unless_asked():
    fitted = Calibrated.fit(recorded(5, Linear(0.01, 0.001, 1e-5)))
    with pytest.raises(ValueError, match=r"step 0 has 100 decode rows, and the runs .* had 6 at most"):
        fitted(decodes(100, 10))
    bold = replace(fitted, may_extrapolate=True)
    assert bold(decodes(100, 10)) == pytest.approx(Linear(0.01, 0.001, 1e-5)(decodes(100, 10)), rel=0.02)
    trace = recorded(5, fitted)
    with pytest.raises(ValueError, match="decode rows"):
        simulate(
            [Request(str(n), 1, 5) for n in range(50)],
            cost=fitted,
            scheduler=SchedulerConfig(50),
            cache=CacheConfig(100),
        )
    assert trace.duration == pytest.approx(recorded(5, Linear(0.01, 0.001, 1e-5)).duration, rel=0.01)


def test_calibrated_rejects_too_few_steps_and_a_share_out_of_range():
    short = simulate([Request("a", 1, 5)], cost=Linear(1.0))
    with pytest.raises(ValueError, match=f"5 steps are too few to fit {len(FEATURES)} coefficients"):
        Calibrated.fit(short)
    for share in (0, 1):
        with pytest.raises(ValueError, match=f"hold_out is {share}"):
            Calibrated.fit(recorded(6, Linear(1.0)), hold_out=share)


def test_linear_is_read_by_the_names_of_its_terms_too():
    assert Linear.parse("linear:step=0.01,context=1e-7") == Linear.parse("linear:0.01,0,1e-7")
    with pytest.raises(ValueError, match="cost 'linear' has no option 'tokens'; did you mean 'token'"):
        Linear.parse("linear:step=1,tokens=2")
    with pytest.raises(ValueError, match="cost 'linear' needs the option 'step'"):
        Linear.parse("linear:token=2")


def test_replayed_steps_take_what_was_recorded_and_no_step_beyond():
    cost = Replayed([0.5, 0.25])
    assert [cost(Plan(step, ())) for step in (1, 0)] == [0.25, 0.5]
    with pytest.raises(ValueError, match="step 2 was never recorded; the run had 2 steps"):
        cost(Plan(2, ()))


def test_roofline_reads_the_bytes_of_a_token_that_the_formula_gives():
    for shape in (SHAPE, replace(SHAPE, value_head_dim=64), replace(SHAPE, latent_dim=576)):
        assert shape.kv_bytes_per_token == formulas.kv_bytes_per_token(shape)
