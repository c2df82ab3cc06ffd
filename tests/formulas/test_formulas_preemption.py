"""What a preemption costs, against the scheduler's plans priced step by step, and how memory runs out."""

import math

import numpy as np
import pytest

from cbresearch import formulas, policies
from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.metrics import num_preemptions
from cbresearch.request import Request
from cbresearch.scheduler import Scheduler
from cbresearch.simulator import CostExecutor, simulate

T0, TOKEN, PAIR, LINK, COPY = 0.5, 0.01, 0.0003, 400.0, 0.02


def step_cost(overlaps):
    """Price a plan: weights and tokens, query-key pairs, and blocks of 4 tokens of 1 byte that move."""

    def cost(plan):
        pairs = sum(e.num_tokens * e.start + e.num_tokens * (e.num_tokens + 1) / 2 for e in plan.scheduled)
        tokens = TOKEN * plan.num_tokens
        work = (max(T0, tokens) if overlaps else T0 + tokens) if plan.scheduled else 0.0
        return work + PAIR * pairs + len(plan.transfers) * (4 / LINK + COPY)

    return cost


def seconds(mode, prompt, budget, others, cost):
    """Run until the victim has 6 tokens, preempted at its second or not; return the time and the steps."""
    limits = SchedulerConfig(max_num_seqs=others + 1, max_num_batched_tokens=budget)
    scheduler = Scheduler(policies.get("fcfs"), limits, CacheConfig(2000, 4, num_host_blocks=500))
    executor = CostExecutor(cost)
    for place in range(others):
        scheduler.submit(Request(f"o{place}", 1, 500))
    victim = scheduler.submit(Request("victim", prompt, 6))
    now, num_steps = 0.0, 0
    while victim.finish_reason is None:
        if mode is not None and victim.num_output_tokens == 2 and not victim.num_preemptions:
            scheduler.preempt("victim", mode)
        plan = scheduler.schedule(now)
        result = executor.execute(plan)
        now += result.duration
        num_steps += 1
        scheduler.commit(plan, result, now)
    return now, num_steps


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("budget", [16, 64, 1000])
@pytest.mark.parametrize("prompt", [1, 15, 16, 40, 62, 63, 150])
def test_a_preemption_costs_what_the_formulas_say(prompt, budget, overlaps):
    cost = step_cost(overlaps)
    plain, num_steps = seconds(None, prompt, budget, 0, cost)
    again, num_more = seconds("recompute", prompt, budget, 0, cost)
    moved, num_same = seconds("swap", prompt, budget, 0, cost)
    num_tokens = prompt + 1
    predicted = formulas.recompute_seconds(
        num_tokens, TOKEN, pair_seconds=PAIR, step_seconds=T0, token_budget=budget, overlaps=overlaps
    )
    assert again - plain == pytest.approx(predicted)
    assert moved - plain == pytest.approx(formulas.swap_seconds(num_tokens, 4, 1, LINK, COPY))
    assert num_same == num_steps
    assert num_more == num_steps - 1 + -(-(num_tokens + 1) // budget)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("budget", [16, 70, 1000])
def test_others_share_the_step_of_a_recompute(budget, overlaps):
    def cost(plan):
        pairs_free = step_cost(overlaps)(plan)
        return pairs_free - PAIR * sum(
            e.num_tokens * e.start + e.num_tokens * (e.num_tokens + 1) / 2 for e in plan.scheduled
        )

    others = 7
    plain, num_steps = seconds(None, 60, budget, others, cost)
    again, num_more = seconds("recompute", 60, budget, others, cost)
    # Steps that are there only because of the chunks would have served the others alone.
    alone = max(T0, TOKEN * others) if overlaps else T0 + TOKEN * others
    predicted = formulas.recompute_seconds(
        61, TOKEN, step_seconds=T0, token_budget=budget, num_others=others, overlaps=overlaps
    )
    assert again - plain - (num_more - num_steps) * alone == pytest.approx(predicted)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("pair", [0.0, 1e-6, 1e-4])
@pytest.mark.parametrize("moved", [0.001, 0.008, 0.0098, 0.012])
def test_at_the_crossover_both_cost_the_same(moved, pair, overlaps):
    step = {"pair_seconds": pair, "step_seconds": T0, "overlaps": overlaps}
    crossover = formulas.swap_crossover_tokens(TOKEN, moved, **step)

    def is_swap_cheaper(num_tokens):
        return moved * num_tokens < formulas.recompute_seconds(num_tokens, TOKEN, **step)

    if crossover == math.inf:
        assert not is_swap_cheaper(10**6)
    else:
        assert is_swap_cheaper(math.floor(crossover * (1 + 1e-9)) + 1)
        assert crossover < 1 or not is_swap_cheaper(max(1, math.floor(crossover * (1 - 1e-9))))


def test_swap_wins_beyond_the_crossover_block_size():
    again, bytes_per_token, bandwidth, copy = 150e-6, 819_200, 25e9, 800e-6
    size = formulas.swap_crossover_block_size(again, bytes_per_token, bandwidth, copy)
    for block, is_cheaper in ((int(size), False), (int(size) + 1, True)):
        moved = formulas.swap_seconds(1000 * block, block, bytes_per_token, bandwidth, copy)
        assert (moved < 1000 * block * again) is is_cheaper
    assert formulas.swap_crossover_block_size(60e-6, bytes_per_token, bandwidth, copy) == math.inf
    assert formulas.swap_crossover_block_size(again, bytes_per_token, bandwidth, 0) == 0


def test_the_spread_is_that_of_every_token_step():
    prompts, outputs = [3, 50, 20], [400, 90, 700]
    held = np.concatenate([p + np.arange(x) + 0.5 for p, x in zip(prompts, outputs, strict=True)])
    assert formulas.spread_held_tokens(prompts, outputs) == pytest.approx(held.std(), rel=1e-5)
    assert formulas.time_mean_held_tokens(prompts, outputs) == pytest.approx(held.mean())


def test_the_overshoot_solves_its_equation_and_is_what_a_walk_shows():
    rng = np.random.default_rng(3)
    prompts, outputs = rng.integers(50, 150, 5000), rng.exponential(200, 5000) + 1
    rate = 1 / formulas.overshoot_tokens(prompts, outputs)
    assert 1 - np.exp(-rate * (prompts + outputs)).mean() == pytest.approx(rate * outputs.mean())
    # From where admission stops: growth until an end, then what the one that ends gives back.
    rises, levels = np.zeros(20_000), np.zeros(20_000)
    while levels.max() > -6 / rate:
        levels += rng.exponential(outputs.mean(), len(levels))
        rises = np.maximum(rises, levels)
        ended = rng.integers(5000, size=len(levels))
        levels -= prompts[ended] + outputs[ended]
    assert rises.mean() == pytest.approx(1 / rate, rel=0.05)
    assert np.mean(rises > 2 / rate) == pytest.approx(math.exp(-2), rel=0.1)


def test_a_watermark_makes_preemptions_rarer_at_that_rate():
    rng = np.random.default_rng(4)
    prompts, outputs = rng.integers(20, 200, 300), np.ceil(rng.exponential(150, 300))
    requests = [
        Request(str(i), int(p), int(x)) for i, (p, x) in enumerate(zip(prompts, outputs, strict=True))
    ]
    spare = formulas.overshoot_tokens(prompts, outputs)
    limits, pool = SchedulerConfig(max_num_seqs=300, max_num_batched_tokens=8192), 8000
    shares = []
    for watermark in (0.0, 2 * spare / pool):
        trace = simulate(
            requests, f"vllm_v0:watermark={watermark}", scheduler=limits, cache=CacheConfig(pool, 1)
        )
        shares.append(num_preemptions(trace) / sum(len(step.plan.admitted) for step in trace.steps))
    assert shares[1] / shares[0] == pytest.approx(math.exp(-2), abs=0.08)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: formulas.swap_seconds(0, 16, 1, 1), "num_tokens"),
        (lambda: formulas.swap_seconds(1, 0, 1, 1), "block_size"),
        (lambda: formulas.swap_seconds(1, 1, 1, 0), "bandwidth"),
        (lambda: formulas.swap_seconds(1, 1, 1, 1, -1), "copy_seconds"),
        (lambda: formulas.recompute_seconds(0, 1), "num_tokens"),
        (lambda: formulas.recompute_seconds(1, -1), "token_seconds"),
        (lambda: formulas.recompute_seconds(1, 1, token_budget=4, num_others=4), "token_budget"),
        (lambda: formulas.swap_crossover_tokens(1, 0), "swap_token_seconds"),
        (lambda: formulas.swap_crossover_block_size(1, 1, math.inf, 0), "bandwidth"),
        (lambda: formulas.spread_held_tokens([1], [1, 2]), "prompts"),
        (lambda: formulas.overshoot_tokens([1], []), "outputs"),
    ],
)
def test_a_false_argument_is_named(call, name):
    with pytest.raises(ValueError, match=name):
        call()
