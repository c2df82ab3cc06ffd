"""What a request draws does not depend on the schedule: any way to serve it against a plain answer alone."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from sampling_cases import EOS, MAX_TOKENS, assert_answers, cases, decode, plain_answer, small_model, softmax

from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.engine import ModelExecutor
from cbresearch.policies import get
from cbresearch.request import Request, SamplingParams, expand, parallel_samples
from cbresearch.scheduler import Scheduler
from cbresearch.serve import serve
from cbresearch.simulator import replay

POLICIES = ("static", "static:release", "fcfs", "prefill_first", "sjf", "vllm_v1", "vllm_v1:priority")
MODES = ("recompute", "swap")
NUM_SCHEDULES = 30


@pytest.fixture(scope="module")
def small():
    return replace(small_model(), eos_token_ids=EOS)


@pytest.fixture(scope="module")
def answers(small):
    return cases(small)


def least_pool(requests, block_size):
    return max(-(-(request.num_prompt_tokens + request.max_tokens - 1) // block_size) for request in requests)


def run(loaded, requests, policy, limits, cache, between=None, seed=0):
    """Serve on pools full of NaN, with every invariant checked after every step."""
    scheduler = Scheduler(get(policy), limits, cache)
    executor = ModelExecutor(loaded, limits, cache, seed=seed, fill=math.nan)

    def on_step(record):
        scheduler.check()
        if between is not None:
            between(scheduler, record)
            scheduler.check()

    trace = serve(requests, scheduler, executor, on_step=on_step)
    assert scheduler.kv.num_free_blocks == cache.num_blocks
    return trace


def num_transfers(trace, kind):
    return sum(step.plan.num_transfers(kind) for step in trace.steps)


def storm(mode):
    """Return what preempts everyone who runs, after every step."""

    def between(scheduler, record):
        for state in list(scheduler.running):
            scheduler.preempt(state.id, mode or ("swap", "recompute")[record.plan.step % 2])

    return between


def test_the_plain_answers_end_in_every_way(answers):
    by_id = {request.id: (request, answer) for request, answer in answers.items()}
    for name in ("greedy to the end", "likely", "few"):
        assert by_id[name][1][0][-1] in EOS
    for name in ("hot, stops", "nucleus, stops", "unseeded"):
        request, (tokens, reason, _) = by_id[name]
        assert reason == "stop"
        assert tokens[-1] not in EOS
        # The stop text is spread over tokens.
        (stop,) = [text for text in request.sampling.stop if text in decode(tokens)][:1]
        assert not any(stop in decode([token]) for token in tokens)
    for name in ("token ends", "token ends though", "not yet"):
        request, (tokens, _, _) = by_id[name]
        assert tokens[-1] in request.sampling.stop_token_ids
    assert set(by_id["greedy"][1][0]) & EOS
    delayed = by_id["no repeats, stops"]
    assert delayed[1][1] == "length"
    assert delayed[0].sampling.stop[0] in decode(delayed[1][0])
    reasons = Counter(answer[1] for answer in answers.values())
    assert min(reasons.values()) >= 6


def test_each_request_alone_gives_the_plain_answer(small, answers):
    for request in answers:
        trace = run(small, [request], "fcfs", SchedulerConfig(), CacheConfig(10))
        assert_answers(trace, answers)


@pytest.mark.parametrize("shard", range(3))
def test_each_request_gives_the_plain_answer_under_random_schedules(shard, small, answers):
    seen: Counter[str] = Counter()
    for seed in range(shard, NUM_SCHEDULES, 3):
        rng = np.random.default_rng(seed)
        chosen = [list(answers)[place] for place in rng.permutation(len(answers))[: rng.integers(2, 12)]]
        requests = [replace(request, arrival=float(rng.choice([0, rng.random() / 20]))) for request in chosen]
        block_size = int(rng.choice([1, 3, 16]))
        mode = MODES[int(rng.integers(2))]
        limits = SchedulerConfig(int(rng.integers(1, 9)), int(rng.choice([7, 40, 2048])), preemption=mode)
        cache = CacheConfig(
            least_pool(requests, block_size) + int(rng.choice([0, 1, 4, 1000])),
            block_size,
            bool(rng.integers(2)),
            num_host_blocks=int(rng.choice([0, 3, 200])),
        )
        trace = run(small, requests, POLICIES[seed % len(POLICIES)], limits, cache)
        assert_answers(trace, answers)
        seen.update({kind: num_transfers(trace, kind) for kind in ("swap_out", "swap_in")})
        seen["preempted"] += sum(record.num_preemptions for record in trace.requests)
        seen["cached"] += sum(record.num_cached_tokens for record in trace.requests)
    assert min(seen[kind] for kind in ("swap_out", "swap_in", "preempted", "cached")) > 0, seen


@pytest.mark.parametrize("mode", [*MODES, None])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("policy", ["fcfs", "static"])
def test_each_request_gives_the_plain_answer_although_all_are_preempted_after_every_step(
    policy, caching, mode, small, answers
):
    limits = SchedulerConfig(20, 300)
    cache = CacheConfig(200, 3, caching, num_host_blocks=200)
    trace = run(small, list(answers), policy, limits, cache, storm(mode))
    assert_answers(trace, answers)
    assert [record.num_preemptions for record in trace.requests] == [
        # After its last token nobody runs any more.
        len(tokens) - 1
        for tokens, _, _ in answers.values()
    ]
    assert (num_transfers(trace, "swap_in") > 0) == (mode != "recompute")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("step", range(MAX_TOKENS))
def test_each_request_gives_the_plain_answer_although_all_are_preempted_after_one_step(
    step, mode, small, answers
):
    limits, cache = SchedulerConfig(20, 300), CacheConfig(200, 3, step % 2 > 0, num_host_blocks=200)

    def between(scheduler, record):
        if record.plan.step == step:
            storm(mode)(scheduler, record)

    trace = run(small, list(answers), "fcfs", limits, cache, between)
    assert_answers(trace, answers)
    assert sum(record.num_preemptions for record in trace.requests) == sum(
        len(tokens) > step + 1 for tokens, _, _ in answers.values()
    )


@pytest.mark.parametrize("mode", MODES)
def test_a_preemption_within_a_prompt_changes_no_draw(mode, small, answers):
    limits, cache = SchedulerConfig(6, 4, preemption=mode), CacheConfig(200, 3, num_host_blocks=200)

    def between(scheduler, record):
        if record.plan.step < 60:
            storm(mode)(scheduler, record)

    trace = run(small, list(answers), "fcfs", limits, cache, between)
    assert_answers(trace, answers)


@pytest.mark.parametrize("mode", MODES)
def test_float32_draws_what_it_draws_alone_although_all_are_preempted_after_every_step(mode, tiny, answers):
    # Here rounding may differ with the schedule, so a draw may flip if two sums are close; none does.
    rng = np.random.default_rng(5)
    requests = [
        replace(request, prompt=tuple(rng.integers(3, 4096, size=5 + 3 * place).tolist()))
        for place, request in enumerate(answers)
        if not request.sampling.stop
    ]
    alone = {}
    for request in requests:
        trace = run(tiny, [request], "fcfs", SchedulerConfig(), CacheConfig(10))
        alone |= {request.id: trace.requests[0]}
    cache = CacheConfig(300, 5, num_host_blocks=300)
    for limits in (SchedulerConfig(20, 2048), SchedulerConfig(3, 64)):
        trace = run(tiny, requests[::-1], "fcfs", limits, cache, storm(mode))
        assert len(trace.requests) == len(alone)
        for record in trace.requests:
            assert (record.tokens, record.finish_reason) == (
                alone[record.id].tokens,
                alone[record.id].finish_reason,
            )
            assert len(record.logprobs) == len(alone[record.id].logprobs)
            for one, other in zip(record.logprobs, alone[record.id].logprobs, strict=True):
                assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
                np.testing.assert_allclose(one.top_logprobs, other.top_logprobs, rtol=0, atol=1e-4)


def test_a_replay_repeats_a_sampled_run_step_for_step(small, answers):
    requests = [replace(request, arrival=0.002 * n) for n, request in enumerate(answers)]
    limits, cache = SchedulerConfig(5, 30, preemption="swap"), CacheConfig(14, 3, num_host_blocks=9)
    trace = run(small, requests, "fcfs", limits, cache)
    assert sum(record.num_preemptions for record in trace.requests) > 0
    again = replay(trace, requests, "fcfs")
    assert [step.plan for step in again.steps] == [step.plan for step in trace.steps]
    assert again.requests == trace.requests


def test_an_answer_does_not_depend_on_the_global_generators_and_leaves_them_alone(small, answers):
    for seed in (0, 1):
        torch.manual_seed(seed)
        np.random.seed(seed)
        before = torch.random.get_rng_state(), np.random.get_state()[1].tolist()
        trace = run(small, list(answers), "fcfs", SchedulerConfig(), CacheConfig(100))
        assert_answers(trace, answers)
        assert torch.equal(torch.random.get_rng_state(), before[0])
        assert np.random.get_state()[1].tolist() == before[1]


# --- several answers to one prompt


def hot(request_id="a", max_tokens=8, **sampling):
    sampling = SamplingParams(**{"temperature": 1.2, "ignore_eos": True, **sampling})
    return Request(request_id, (3, 1, 4, 1, 5), max_tokens, sampling=sampling)


@pytest.mark.parametrize("mode", [None, *MODES])
def test_parallel_samples_differ_and_each_is_the_request_of_its_own_seed_alone(mode, small):
    samples = parallel_samples(hot(seed=20, n=5))
    limits, cache = SchedulerConfig(8, 64), CacheConfig(60, 3, num_host_blocks=60)
    trace = run(small, samples, "fcfs", limits, cache, storm(mode) if mode else None)
    outputs = list(trace.outputs.values())
    assert len(set(outputs)) == 5
    assert outputs == [plain_answer(small, hot(f"other {k}", seed=20 + k))[0] for k in range(5)]


def test_parallel_samples_without_a_seed_differ_by_their_ids(small):
    samples = expand([hot(n=4)])
    trace = run(small, samples, "fcfs", SchedulerConfig(8, 64), CacheConfig(60, 3))
    outputs = list(trace.outputs.values())
    assert len(set(outputs)) == 4
    assert outputs == [plain_answer(small, hot(f"a/{k}"))[0] for k in range(4)]


def test_without_a_seed_the_executors_seed_and_the_id_decide(small):
    def served(request, seed):
        trace = run(small, [request], "fcfs", SchedulerConfig(), CacheConfig(10), seed=seed)
        return trace.outputs[request.id]

    for seed in (0, 1, 2**70):
        assert served(hot(), seed) == plain_answer(small, hot(), seed)[0]
        assert served(hot(seed=9), seed) == plain_answer(small, hot(seed=9))[0]
    assert len({served(hot(name), seed) for name in "ab" for seed in (0, 1)}) == 4
    assert served(hot("a", seed=9), 0) == served(hot("b", seed=9), 1)


def test_a_first_token_of_many_samples_follows_the_models_probabilities(small):
    number = 2000
    samples = [hot(str(seed), max_tokens=1, temperature=1.0, seed=seed) for seed in range(number)]
    limits, cache = SchedulerConfig(64, 4096), CacheConfig(64)
    trace = serve(samples, Scheduler(get("fcfs"), limits, cache), ModelExecutor(small, limits, cache))
    counts = np.bincount([record.tokens[0] for record in trace.requests], minlength=96)
    with torch.inference_mode():
        logits = small.model(torch.tensor([samples[0].prompt]), use_cache=False).logits[0, -1]
    expected = softmax(logits.numpy()) * number
    # Where fewer than five are expected, they are counted together.
    rare = expected < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    degrees = len(counts) - 1
    # By Wilson and Hilferty: one sample in ten thousand passes it.
    assert chi_squared < degrees * (1 - 2 / (9 * degrees) + 3.72 * (2 / (9 * degrees)) ** 0.5) ** 3
