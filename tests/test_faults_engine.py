"""Kinds of faults that other engines had against the model they ran; each test's name is the claim."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import generate_alone
from sampling_cases import EOS, plain_answer, small_model

from cbresearch import export, metrics, policies
from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.engine import ModelExecutor
from cbresearch.experiments import compare
from cbresearch.request import Request, SamplingParams, TokenLogprobs
from cbresearch.scheduler import Scheduler
from cbresearch.serve import serve
from cbresearch.simulator import UNIT_STEP, replay, simulate

SPOILT = 7
POLICIES = ("fcfs", "static", "static:release", "prefill_first", "vllm_v1")


@pytest.fixture(scope="module")
def small():
    return replace(small_model(), eos_token_ids=EOS)


@pytest.fixture(scope="module")
def spoilt():
    return replace(small_model(spoil=SPOILT), eos_token_ids=frozenset())


def start(loaded, limits=None, cache=None, **options):
    limits = limits or SchedulerConfig()
    cache = cache or CacheConfig(100, 3)
    return limits, cache, ModelExecutor(loaded, limits, cache, fill=math.nan, **options)


def run(loaded, requests, policy="fcfs", limits=None, cache=None, **options):
    """Serve on pools full of NaN, with every invariant checked after every step."""
    limits, cache, executor = start(loaded, limits, cache, **options)
    scheduler = Scheduler(policies.get(policy), limits, cache)
    trace = serve(requests, scheduler, executor, on_step=lambda record: scheduler.check())
    assert scheduler.blocks.num_free_blocks == cache.num_blocks
    assert scheduler.blocks.num_held_blocks == scheduler.blocks.num_held_host_blocks == 0
    return trace


def hot(name, prompt, max_tokens=8, **sampling):
    return Request(
        name, prompt, max_tokens, sampling=SamplingParams(**{"temperature": 1.0, "seed": 3, **sampling})
    )


def distinct(first, length):
    return tuple((first + 3 * n) % 90 + 6 for n in range(length))


# --- the model is as it was, and every result is there


def test_a_second_run_a_plain_forward_and_generate_give_what_they_gave_before(small):
    prompts = [distinct(10 * n, 4 + n) for n in range(5)]
    requests = [hot(f"r{n}", prompt, seed=n) for n, prompt in enumerate(prompts)]
    ids = torch.tensor([prompts[4]])
    with torch.inference_mode():
        before = small.model(ids, use_cache=False).logits
    limits, cache, executor = start(small)
    traces = [serve(requests, Scheduler(policies.get("fcfs"), limits, cache), executor) for _ in range(2)]
    with torch.inference_mode():
        after = small.model(ids, use_cache=False).logits
    assert torch.equal(after, before)
    config = small.model.generation_config
    config.eos_token_id, kept = None, config.eos_token_id
    greedy = generate_alone(small.model, prompts[4], 6)
    config.eos_token_id = kept
    assert (
        greedy
        == plain_answer(small, Request("g", prompts[4], 6, sampling=SamplingParams(ignore_eos=True)))[0]
    )
    assert traces[0].outputs == traces[1].outputs


@pytest.mark.parametrize("policy", POLICIES)
def test_each_request_has_its_own_result_in_the_place_in_which_it_was_given(policy, small):
    # Shortest last, so that they finish in another order than they were given in.
    requests = [hot(f"r{n}", distinct(9 * n, 3 + n % 4), 9 - n, seed=n) for n in range(8)]
    trace = run(small, requests, policy, SchedulerConfig(3, 9))
    assert [record.id for record in trace.requests] == [request.id for request in requests]
    for request, record in zip(requests, trace.requests, strict=True):
        assert (record.tokens, record.finish_reason) == plain_answer(small, request)[:2]
        # Reading one result takes nothing from another.
        assert trace.outputs[request.id] == record.tokens


# --- eos


@pytest.mark.parametrize("place", [2, 5])
def test_each_of_a_list_of_ends_in_the_generation_config_ends_an_output_unless_it_is_ignored(place):
    from cbresearch import models

    loaded = small_model()
    prompt = distinct(0, 5)
    free = plain_answer(loaded, Request("a", prompt, 12, sampling=SamplingParams(ignore_eos=True)))[0]
    loaded.model.generation_config.eos_token_id = [95, free[place], 94]
    loaded = models.wrap("small", loaded.model)
    requests = [Request("stops", prompt, 12)]
    requests += [Request("goes on", prompt, 12, sampling=SamplingParams(ignore_eos=True))]
    trace = run(loaded, requests)
    assert trace.outputs == {"stops": free[: free.index(free[place]) + 1], "goes on": free}
    loaded.model.generation_config.eos_token_id = free[place]
    assert run(models.wrap("small", loaded.model), requests).outputs == trace.outputs


# --- budget, and the prefix cache's hits


def test_drawn_tokens_do_not_depend_on_the_token_budget(small):
    requests = [hot(f"r{n}", distinct(20 * n, 11), seed=n) for n in range(4)]
    expected = {request.id: plain_answer(small, request)[0] for request in requests}
    for budget in (1, 2, 3, 5, 11, 13, 44):
        assert run(small, requests, limits=SchedulerConfig(4, budget)).outputs == expected, budget


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_hit_gives_the_tokens_and_log_probabilities_of_a_miss_with_every_backend(backend):
    loaded = replace(small_model(torch.float32), eos_token_ids=frozenset())
    requests = [
        replace(hot(f"at {arrival}", distinct(5, 14), 5, num_logprobs=4), arrival=arrival)
        for arrival in (0.0, 1000.0)
    ]
    trace = run(loaded, requests, cache=CacheConfig(40, 4, prefix_caching=True), backend=backend)
    miss, hit = trace.requests
    assert (miss.num_cached_tokens, hit.num_cached_tokens) == (0, 12)
    assert hit.tokens == miss.tokens == plain_answer(loaded, requests[0])[0]
    for one, other in zip(miss.logprobs, hit.logprobs, strict=True):
        assert one.top_ids == other.top_ids
        np.testing.assert_allclose(one.top_logprobs, other.top_logprobs, rtol=0, atol=1e-5)


def test_log_probabilities_of_the_prompt_cannot_be_asked_for():
    with pytest.raises(TypeError, match="prompt_logprobs"):
        SamplingParams(prompt_logprobs=1)


# --- a request that fails


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("budget", [4, 2048])
@pytest.mark.parametrize("place", [0, 4, 8])
def test_a_request_that_meets_a_spoilt_weight_fails_alone_under_any_policy(place, budget, policy, spoilt):
    sick = [*distinct(40, 9)]
    sick[place] = SPOILT
    requests = [
        hot("before", distinct(0, 7), seed=1, stop_token_ids=(SPOILT,)),
        hot("sick", tuple(sick), seed=2),
        Request("beside", distinct(0, 5), 8, sampling=SamplingParams(stop_token_ids=(SPOILT,))),
        replace(hot("again", tuple(sick), seed=4), arrival=1000.0),
        replace(hot("after", distinct(2, 8), seed=5, stop_token_ids=(SPOILT,)), arrival=2000.0),
    ]
    cache = CacheConfig(100, 3, prefix_caching=True)
    trace = run(spoilt, requests, policy, SchedulerConfig(3, budget), cache)
    for request, record in zip(requests, trace.requests, strict=True):
        if SPOILT not in request.prompt:
            assert (record.tokens, record.finish_reason) == plain_answer(spoilt, request)[:2]
            assert record.error is None
        else:
            assert (record.finish_reason, record.tokens, record.finish) == ("error", (), None)
            assert f"request {request.id!r} failed in step" in record.error
            assert "no logit is finite" in record.error
            # Nothing that the first one computed was given to the second.
            assert record.num_cached_tokens == 0
    summary = metrics.summary(trace)
    assert (summary["num_failed"], summary["num_finished"], summary["num_rejected"]) == (2, 3, 0)
    assert summary["latency_n"] == summary["ttft_n"] == 3
    again = replay(trace, requests, policy)
    assert [step.plan for step in again.steps] == [step.plan for step in trace.steps]
    assert again.requests == trace.requests
    told = export.explain(trace, "sick")
    assert f"failed, with 0 tokens: {trace.requests[1].error}" in told
    assert "for 1 new token" not in told
    for use in trace.memory():
        assert min(use) >= 0


def test_a_request_that_draws_a_spoilt_token_fails_behind_its_tokens(spoilt):
    free = hot("free", distinct(0, 7), 30, temperature=3.0)
    seed = next(
        seed
        for seed in range(200)
        if plain_answer_until(spoilt, replace(free, sampling=replace(free.sampling, seed=seed)))[-1] == SPOILT
    )
    request = replace(free, sampling=replace(free.sampling, seed=seed, num_logprobs=1))
    tokens = plain_answer_until(spoilt, request)
    trace = run(spoilt, [request, hot("other", distinct(3, 5), stop_token_ids=(SPOILT,))], "static")
    record = trace.requests[0]
    assert record.tokens == tokens
    assert (record.finish_reason, len(record.logprobs)) == ("error", len(tokens))
    assert metrics.summary(trace)["latency_n"] == 1
    assert f"failed, with {len(tokens)} tokens" in export.explain(trace, "free")
    for use in trace.memory():
        assert min(use) >= 0
    assert replay(trace, [request, hot("other", distinct(3, 5))], "static").requests == trace.requests


def plain_answer_until(loaded, request):
    """Return the plain answer up to the spoilt token, which ends it here."""
    ended = replace(request, sampling=replace(request.sampling, stop_token_ids=(SPOILT,)))
    return plain_answer(loaded, ended)[0]


class BrittleTokenizer:
    """Fail at a text in which some token stands."""

    def __init__(self, decode, token):
        self.decode, self.token = decode, token

    def __call__(self, token_ids):
        if self.token in token_ids:
            raise RuntimeError("no such piece")
        return self.decode(token_ids)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_text_that_cannot_be_decoded_fails_its_request_alone(policy, small):
    request = hot("sick", distinct(0, 5), 10, stop=("never there",), ignore_eos=True)
    tokens = plain_answer(small, request)[0]
    place = next(place for place in range(2, 10) if tokens[place] not in tokens[:place])
    loaded = replace(small, decode=BrittleTokenizer(small.decode, tokens[place]))
    others = [hot(f"r{n}", distinct(9 * n, 4), 12, seed=n) for n in range(3)]
    trace = run(loaded, [others[0], request, *others[1:]], policy, SchedulerConfig(3, 64))
    record = trace.requests[1]
    assert (record.tokens, record.finish_reason) == (tokens[:place], "error")
    assert "'sick' failed" in record.error
    assert "could not be decoded: RuntimeError: no such piece" in record.error
    for other in others:
        assert trace.outputs[other.id] == plain_answer(small, other)[0]
    assert replay(trace, [others[0], request, *others[1:]], policy).requests == trace.requests


def test_a_request_that_may_choose_no_token_fails_alone(small):
    nothing = tuple(range(96))
    requests = [
        hot("none", distinct(0, 5), stop_token_ids=nothing, min_tokens=2),
        Request(
            "none, greedy", distinct(0, 5), 4, sampling=SamplingParams(min_tokens=1, stop_token_ids=nothing)
        ),
        hot("one", distinct(0, 5)),
    ]
    trace = run(small, requests)
    assert [record.finish_reason for record in trace.requests[:2]] == ["error"] * 2
    assert all("allowed to be chosen" in record.error for record in trace.requests[:2])
    assert trace.outputs["one"] == plain_answer(small, requests[2])[0]


def test_a_token_outside_the_vocabulary_cannot_be_waited_for(small):
    requests = [hot("typo", (1, 2), stop_token_ids=(5, 96)), hot("fine", distinct(0, 5))]
    trace = run(small, requests)
    assert "token id 96 is outside the vocabulary of 'small', 0 to 95" in trace.requests[0].error
    assert trace.requests[0].is_rejected
    assert trace.outputs["fine"] == plain_answer(small, requests[1])[0]


# --- several answers


def test_a_scheduler_rejects_several_answers_at_once_with_the_remedy(small):
    requests = [hot("many", (1, 2, 3), n=2), hot("one", distinct(0, 5))]
    for trace in (run(small, requests), simulate(requests)):
        many, one = trace.requests
        assert many.is_rejected
        assert "'many' wants 2 answers" in many.error
        assert "parallel_samples(request)" in many.error
        assert len(one.tokens) >= 1


def test_a_comparison_serves_each_of_several_answers(small, tmp_path):
    workload = tmp_path / "w.jsonl"
    workload.write_text(
        '{"id": "a", "prompt": [8, 9, 10, 11], "max_tokens": 6, "n": 3, "seed": 5, "temperature": 1.0}\n'
        '{"id": "b", "prompt": [8, 9], "max_tokens": 2}\n'
    )
    real = compare(str(workload), ["fcfs", "static"], model=small)
    expected = {f"a/{k}": plain_answer(small, hot("x", (8, 9, 10, 11), 6, seed=5 + k))[0] for k in range(3)}
    assert len(set(expected.values())) == 3
    for trace in real.traces.values():
        assert [record.id for record in trace.requests] == ["a/0", "a/1", "a/2", "b"]
        assert {name: trace.outputs[name] for name in expected} == expected
    assert [set(texts.values()) for _, texts in real.answers[:3]] == [
        {small.decode(tokens)} for tokens in expected.values()
    ]
    simulated = compare(str(workload), ["fcfs"], cost=UNIT_STEP).traces["fcfs"]
    assert [len(record.tokens) for record in simulated.requests] == [6, 6, 6, 2]


def test_log_probabilities_are_in_the_record_and_a_comparison_of_records_ignores_them(small):
    trace = run(small, [hot("a", distinct(0, 5), num_logprobs=2), hot("b", distinct(0, 5))])
    with_them, without = trace.requests
    assert all(isinstance(every, TokenLogprobs) for every in with_them.logprobs)
    assert without.logprobs == ()
    assert replace(with_them, id="b") == without
