"""Presets: what they state is what they send, and a seed gives the same requests for good."""

import inspect
import random

import numpy as np
import pytest
from helpers.drawing import rng, standard_errors_off
from hygiene import printed_by_two_processes

from cbresearch import workloads
from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.request import Request
from cbresearch.simulator import simulate
from cbresearch.workloads import OnOff

APPLICATIONS = ("chat", "code", "rag", "summarization", "multi_turn", "agents", "batch")


# Requests, prompt tokens, output tokens and the last arrival with the seed 0. The notebooks depend on these.
WITH_SEED_0 = {
    "classic60": (60, 60, 510, 0),
    "lognormal128": (128, 8081, 6316, 0),
    "poisson64": (64, 3113, 2077, 16.4976626),
    "chat": (200, 231116, 40691, 36.4187369),
    "code": (200, 421202, 5089, 190.313084),
    "rag": (64, 962118, 7426, 64.3499616),
    "summarization": (200, 528725, 54309, 202.488641),
    "multi_turn": (128, 449903, 42935, 401.577857),
    "agents": (130, 1685760, 22689, 181.035564),
    "batch": (256, 38353, 81010, 0),
}


@pytest.mark.parametrize("name", WITH_SEED_0)
def test_preset_goes_on_to_send_the_same_requests_with_one_seed(name):
    requests = workloads.load(name, rng(0))
    tokens = [
        sum(lengths) for lengths in zip(*((r.num_prompt_tokens, r.max_tokens) for r in requests), strict=True)
    ]
    assert (len(requests), *tokens) == WITH_SEED_0[name][:3]
    assert requests[-1].arrival == pytest.approx(WITH_SEED_0[name][3], rel=1e-8)


def test_presets_list_what_they_send():
    listed = workloads.presets()
    assert list(listed) == [
        *("chat24", "classic60", "lognormal128", "poisson64"),
        *("chat", "code", "rag", "summarization", "multi_turn", "agents", "batch"),
    ]
    for line in listed.values():
        assert line.startswith("Send ") and line.endswith(".")


def test_presets_cannot_be_mutated():
    with pytest.raises(TypeError):
        workloads.PRESETS["chat24"] = workloads.make_requests
    workloads.presets().clear()
    workloads.load("chat24", rng()).clear()
    assert len(workloads.presets()) == 11
    assert len(workloads.load("chat24", rng())) == 24


@pytest.mark.parametrize("name", workloads.PRESETS)
def test_preset_has_distinct_ids_and_no_predictions(name):
    requests = workloads.load(name, rng())
    assert all(isinstance(request, Request) for request in requests)
    assert len({request.id for request in requests}) == len(requests)
    assert all(request.predicted_output is None and request.output_length is None for request in requests)


def test_chat24_has_24_distinct_texts_of_mixed_lengths():
    requests = workloads.load("chat24", rng())
    lengths = sorted(len(request.prompt.split()) for request in requests)
    assert len({request.prompt for request in requests}) == len(requests) == 24
    assert lengths[4] <= 7 and 140 <= lengths[-1] <= 170
    assert sum(length > 60 for length in lengths) >= 4 and sum(15 <= length <= 60 for length in lengths) >= 8
    assert all(request.prompt == request.prompt.strip() for request in requests)
    assert {request.arrival for request in requests} == {0.0}
    assert not any(request.sampling.ignore_eos for request in requests)


def test_chat24_answers_are_so_uneven_that_a_static_batch_of_8_wastes_over_half():
    lengths = [request.max_tokens for request in workloads.load("chat24", rng())]
    assert (min(lengths), max(lengths)) == (8, 96)
    assert np.mean(lengths) == pytest.approx(34, abs=0.5)
    seat_steps = sum(8 * max(lengths[start : start + 8]) for start in (0, 8, 16))
    assert sum(lengths) / seat_steps < 0.45


def test_classic60_has_the_numbers_of_the_module_level_random_functions():
    requests = workloads.load("classic60", rng())
    state = random.getstate()
    try:
        random.seed(2024)
        expected = [random.randint(4, 12) for _ in range(60)]
    finally:
        random.setstate(state)
    assert [request.max_tokens for request in requests] == expected
    assert sum(expected) == 510
    assert {request.prompt for request in requests} == {1}
    assert all(request.sampling.ignore_eos for request in requests)


def test_presets_leave_the_module_level_random_state_alone():
    before, before_numpy = random.getstate(), np.random.get_state()[1].tolist()
    for name in workloads.PRESETS:
        workloads.load(name, rng())
    assert random.getstate() == before
    assert np.random.get_state()[1].tolist() == before_numpy


@pytest.mark.parametrize(
    ("name", "prompt_mean", "output_mean", "largest"),
    [("lognormal128", 62, 54, (256, 384)), ("poisson64", 48, 32, (192, 128))],
)
def test_random_presets_have_the_means_and_limits_that_they_state(name, prompt_mean, output_mean, largest):
    requests = [request for seed in range(50) for request in workloads.load(name, rng(seed))]
    prompts, outputs = [request.prompt for request in requests], [request.max_tokens for request in requests]
    assert standard_errors_off(prompts, prompt_mean) < 4
    assert standard_errors_off(outputs, output_mean) < 4
    assert max(prompts) <= largest[0] and max(outputs) <= largest[1]
    assert all(request.sampling.ignore_eos for request in requests)


def test_lognormal128_arrives_at_once():
    requests = workloads.load("lognormal128", rng())
    assert len(requests) == 128
    assert {request.arrival for request in requests} == {0.0}


def test_poisson64_arrives_over_time_at_4_a_second():
    spans = [workloads.load("poisson64", rng(seed))[-1].arrival for seed in range(50)]
    assert len(workloads.load("poisson64", rng())) == 64
    assert standard_errors_off(spans, 64 / 4) < 4


SHOW_ALL = """
import numpy as np
from cbresearch import workloads

for name, preset in workloads.PRESETS.items():
    rng = np.random.default_rng(3)
    name += ":size=0.05" if preset.__kwdefaults__ else ""
    print(name, workloads.resolve_prompts(workloads.load(name, rng), str.encode, 256, rng))
"""


def test_presets_give_the_same_bytes_in_another_process_under_another_hash_seed():
    first, second = printed_by_two_processes(SHOW_ALL)
    assert first == second
    assert len(first) > 50_000


@pytest.mark.parametrize(
    ("name", "prompts", "outputs", "correlation"),
    [
        ("chat", (1154.70, 1020, 2734.5, 4142), (211.13, 129, 424, 601), -0.11),
        ("code", (2047.85, 1469, 5187.6, 7436), (27.88, 13, 55, 251.5), 0.001),
        ("summarization", (2588.08, 2730, 3702, 3933), (291.43, 167, 372, 3271), -0.46),
    ],
)
def test_preset_has_the_mean_the_percentiles_and_the_correlation_of_its_trace(
    name, prompts, outputs, correlation
):
    requests = workloads.load(f"{name}:n=40000", rng(5))
    drawn = [[r.prompt for r in requests], [r.max_tokens for r in requests]]
    for lengths, published in zip(drawn, (prompts, outputs), strict=True):
        assert standard_errors_off(lengths, published[0]) < 4
        assert np.percentile(lengths, [50, 90, 99]) == pytest.approx(published[1:], rel=0.05)
    assert np.corrcoef(drawn)[0, 1] == pytest.approx(correlation, abs=0.02)


def test_code_preset_has_the_bursts_of_its_trace():
    process = OnOff(2.567, on_seconds=12.7, off_seconds=47.2)
    assert [process.dispersion(window) for window in (10, 60)] == pytest.approx([71.3, 160.5], rel=0.01)
    gaps = np.diff([request.arrival for request in workloads.load("chat:n=20000", rng())])
    assert gaps.std() / gaps.mean() == pytest.approx(1.094, abs=0.03)


@pytest.mark.parametrize("name", APPLICATIONS)
def test_preset_is_scaled_in_number_rate_and_size(name):
    if name == "batch":
        requests = workloads.load("batch:n=50", rng())
        assert len(requests) == 50 and {request.arrival for request in requests} == {0.0}
    else:
        slow, fast = (workloads.load(f"{name}:n=40,rate={rate},size=0.05", rng(1)) for rate in (0.01, 1e6))
        assert len(slow) == len(fast) >= 40
        assert max(r.arrival for r in slow) == pytest.approx(40 / 0.01, rel=0.9)
        assert max(r.arrival for r in fast) < max(r.arrival for r in slow) / 4
    large, small = (workloads.load(f"{name}:n=200,size={size}", rng()) for size in (1.0, 0.1))
    tokens = [sum(r.num_prompt_tokens for r in requests) for requests in (large, small)]
    assert tokens[1] == pytest.approx(0.1 * tokens[0], rel=0.15)


def test_rag_preset_shares_its_documents_through_the_prefix_cache():
    requests = workloads.load("rag:size=0.02", rng())
    length = round(0.64 * 15325.48 * 0.02)
    documents = {request.prompt[:length] for request in requests}
    cache = CacheConfig(60_000, 1, prefix_caching=True)
    spread = [Request(r.id, r.prompt, r.max_tokens, 1000.0 * place) for place, r in enumerate(requests)]
    trace = simulate(spread, scheduler=SchedulerConfig(8, 4000), cache=cache)
    found = sum(record.num_cached_tokens for record in trace.requests)
    assert 1 < len(documents) <= 16
    assert 0 <= found - length * (len(requests) - len(documents)) < 3 * len(requests)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("chat:rat=4", "workload 'chat' has no option 'rat'; did you mean 'rate'?"),
        ("chat:zzz", "there is 'rate', 'n', 'size'"),
        ("classic60:n=3", "workload 'classic60' has no option 'n'; it has none"),
        ("chat:n=3,n=4", "option n is given twice"),
        ("chat:n=2.5", "option n is 2.5; it must be a whole number"),
        ("chat:n", "option n is True; it must be a whole number"),
        ("chat:rate=fast", "option rate is 'fast'; it must be a number"),
        ("chat:rate=-1", "rate is -1"),
        (
            "code:size=0.02",
            "size is 0.02; it makes a mean of 27.88 tokens one of 0.5576; give a size above",
        ),
        ("chat:size=0", "size is 0; it makes"),
        ("rag:size=nan", "option size is 'nan'; it must be a number"),
        ("batch:rate=2", "workload 'batch' has no option 'rate'"),
        ("chat:n=-1", "the number of requests is -1; it must be an integer from 0"),
        ("chat:n=0", "workload 'chat:n=0' has no requests; ask for at least 1"),
        ("agents:n=0", "ask for at least 1"),
    ],
)
def test_preset_option_that_is_wrong_raises_with_the_remedy(name, said):
    with pytest.raises(ValueError) as caught:
        workloads.load(name, rng())
    assert said in str(caught.value)


@pytest.mark.parametrize("name", APPLICATIONS)
def test_preset_says_its_source_and_what_is_assumed(name):
    said = inspect.getdoc(workloads.PRESETS[name])
    assert "Source: " in said and "ssumed" in said


@pytest.mark.parametrize("build", [workloads.multi_turn_sessions, workloads.agents_sessions])
def test_preset_of_sessions_is_served_in_a_closed_loop(build):
    sessions = build(rng(), n=5, size=0.05)
    requests, on_finish = sessions.start()
    trace = simulate(requests, cache=CacheConfig(4000, prefix_caching=True), on_finish=on_finish)
    assert len(trace.requests) == sessions.num_requests > 5
    assert all(record.is_complete for record in trace.requests)
