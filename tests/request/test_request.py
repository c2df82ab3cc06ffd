"""A request is checked where it is made: the message names the request, the value and the remedy."""

import math
from dataclasses import FrozenInstanceError

import numpy as np
import pytest

from cbresearch.request import (
    Rejected,
    Request,
    RequestState,
    SamplingParams,
    expand,
    listed,
    parallel_samples,
)
from cbresearch.simulator import simulate

NOT_A_COUNT = [0, -1, True, False, 1.0, 2.5, math.nan, math.inf, "3"]
NOT_SECONDS = [-1, -1e-9, math.nan, math.inf, -math.inf, True, False, "0", 10**400, -(10**400)]


@pytest.mark.parametrize("identity", ["", None, 7, b"a", True])
def test_request_rejects_an_id_that_is_no_text(identity):
    with pytest.raises(ValueError, match=r"id is .*must be a text that is not empty") as rejection:
        Request(identity, 1, 1)
    assert repr(identity) in str(rejection.value)


@pytest.mark.parametrize(
    "prompt",
    ["", 0, -1, -(10**30), [], (), True, False, None, 1.0, math.nan, [1.0], ["1"], [None], [[1]], Exception],
    ids=repr,
)
def test_request_rejects_a_prompt_without_a_token(prompt):
    with pytest.raises(ValueError, match=r"request 'a': the prompt is .*; give ") as rejection:
        Request("a", prompt, 1)
    assert repr(prompt) in str(rejection.value) or "empty" in str(rejection.value)


@pytest.mark.parametrize("value", [*NOT_A_COUNT, None], ids=repr)
def test_request_rejects_max_tokens_that_is_no_count(value):
    with pytest.raises(
        ValueError, match=r"request 'a': max_tokens is .*an integer of at least 1"
    ) as rejection:
        Request("a", 1, value)
    assert repr(value) in str(rejection.value)


@pytest.mark.parametrize("name", ["arrival", "deadline"])
@pytest.mark.parametrize("value", NOT_SECONDS, ids=lambda value: repr(value)[:12])
def test_request_rejects_a_time_that_is_no_finite_number_of_seconds(name, value):
    with pytest.raises(ValueError, match=f"request 'a': {name} is .*finite number of seconds") as rejection:
        Request("a", 1, 1, **{name: value})
    assert repr(value) in str(rejection.value)


def test_request_needs_an_arrival_and_no_deadline():
    assert Request("a", 1, 1, deadline=None).deadline is None
    with pytest.raises(ValueError, match="arrival is None"):
        Request("a", 1, 1, arrival=None)


@pytest.mark.parametrize("name", ["predicted_output", "output_length"])
@pytest.mark.parametrize("value", NOT_A_COUNT, ids=repr)
def test_request_rejects_a_length_that_is_no_count(name, value):
    with pytest.raises(ValueError, match=f"request 'a': {name} is .*at least 1") as rejection:
        Request("a", 1, 1, **{name: value})
    assert repr(value) in str(rejection.value)


@pytest.mark.parametrize(
    ("prompt", "kept"),
    [
        ("some text", "some text"),
        (7, 7),
        (10**30, 10**30),
        ([5, 0, 9], (5, 0, 9)),
        (np.array([5, 0, 9]), (5, 0, 9)),
        (iter([5, 0, 9]), (5, 0, 9)),
    ],
    ids=["text", "length", "huge length", "list", "array", "iterator"],
)
def test_request_prompt_is_text_or_a_length_or_a_tuple_of_plain_integers(prompt, kept):
    request = Request("a", prompt, 1)
    assert request.prompt == kept
    if isinstance(kept, tuple):
        assert [type(token) for token in request.prompt] == [int] * len(kept)


def test_request_counts_the_tokens_of_its_prompt():
    assert Request("a", 7, 1).num_prompt_tokens == 7
    assert Request("a", [4, 4, 4], 1).num_prompt_tokens == 3


def test_request_does_not_know_the_length_of_a_text_prompt():
    request = Request("a", "four", 1)
    with pytest.raises(ValueError, match=r"request 'a': .*text.*resolve_prompts"):
        _ = request.num_prompt_tokens


def test_a_request_does_not_change_with_the_list_that_it_was_made_from():
    tokens = [1, 2, 3]
    request = Request("a", tokens, 1)
    tokens.append(4)
    assert request.prompt == (1, 2, 3)


@pytest.mark.parametrize(
    ("thing", "name"),
    [
        (Request("a", 1, 1), "max_tokens"),
        (Request("a", 1, 1), "arrival"),
        (SamplingParams(), "ignore_eos"),
        (Rejected("a", "why"), "error"),
    ],
)
def test_request_and_sampling_params_are_frozen(thing, name):
    with pytest.raises(FrozenInstanceError):
        setattr(thing, name, 2)
    assert hash(thing) == hash(thing)


def test_request_state_starts_with_nothing_computed():
    state = RequestState(Request("a", [3, 3], 5, predicted_output=4), order=6)
    assert (state.id, state.order, state.seat, state.finish_reason) == ("a", 6, None, None)
    assert (state.num_tokens, state.num_computed_tokens, state.num_pending_tokens) == (2, 0, 2)
    assert state.is_prefill
    assert state.first_scheduled is None
    assert "'a'" in repr(state)


@pytest.mark.parametrize(
    ("predicted", "generated", "remaining"),
    [(None, 0, 5), (None, 2, 3), (2, 0, 2), (2, 1, 1), (2, 2, 1), (2, 4, 1), (9, 1, 8)],
)
def test_request_state_predicts_the_rest_of_the_output_as_at_least_one_token(predicted, generated, remaining):
    state = RequestState(Request("a", 1, 5, predicted_output=predicted, output_length=3), order=0)
    state.output_token_ids.extend([0] * generated)
    assert state.predicted_remaining == remaining


@pytest.mark.parametrize(
    ("computed", "generated", "is_prefill"),
    [(0, 0, True), (2, 0, True), (3, 1, False), (2, 1, True), (0, 1, True), (4, 2, False)],
)
def test_request_state_prefills_until_only_the_newest_output_lacks_its_kv(computed, generated, is_prefill):
    state = RequestState(Request("a", 3, 5), order=0)
    state.output_token_ids.extend([0] * generated)
    state.num_tokens += generated
    state.num_computed_tokens = computed
    assert state.is_prefill == is_prefill


def test_request_takes_numpy_numbers_as_plain_ones():
    request = Request("a", np.int64(5), np.int32(3), arrival=np.float32(0.5), predicted_output=np.int8(2))
    assert (request.prompt, request.max_tokens, request.arrival, request.predicted_output) == (5, 3, 0.5, 2)
    kinds = [type(value) for value in (request.prompt, request.max_tokens, request.arrival)]
    assert kinds == [int, int, float]
    assert type(Request("a", np.arange(3), 1).prompt[0]) is int


NUMBERS = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0, 100),
    "presence_penalty": (-100, 100),
    "frequency_penalty": (-100, 100),
}
NO_NUMBERS = [math.nan, math.inf, -math.inf, "1", True, None, 1j, [1], 10**400]
COUNTS = {"top_k": 1, "seed": 0, "n": 1, "min_tokens": 0, "num_logprobs": 0}
OPTIONAL = {"top_k", "seed", "num_logprobs"}


@pytest.mark.parametrize("name", NUMBERS)
def test_sampling_params_reject_a_number_out_of_range(name):
    least, most = NUMBERS[name]
    for value in [least - 1e-9, most + 1e-9, *NO_NUMBERS]:
        with pytest.raises(ValueError, match=f"{name} is .*a number from {least} to {most}") as rejection:
            SamplingParams(**{name: value})
        assert repr(value) in str(rejection.value)


@pytest.mark.parametrize("name", COUNTS)
def test_sampling_params_reject_a_count_out_of_range(name):
    least = COUNTS[name]
    values = [least - 1, -(10**30), 1.0, 2.5, math.nan, math.inf, "3", True, False, [1], np.bool_(True)]
    for value in values if name in OPTIONAL else [*values, None]:
        with pytest.raises(ValueError, match=f"{name} is .*an integer .*{least}") as rejection:
            SamplingParams(**{name: value})
        assert repr(value) in str(rejection.value)


def test_sampling_params_reject_more_than_ten_thousand_answers():
    assert SamplingParams(n=10_000).n == 10_000
    with pytest.raises(ValueError, match="n is 10001; it must be an integer from 1 to 10000"):
        SamplingParams(n=10_001)


@pytest.mark.parametrize("value", [1e-12, 5e-324, 9.99e-4])
def test_sampling_params_reject_a_temperature_that_overflows_the_logits(value):
    with pytest.raises(ValueError, match=r"temperature is .*at least 0\.001, or 0") as rejection:
        SamplingParams(temperature=value)
    assert repr(value) in str(rejection.value)


@pytest.mark.parametrize("name", ["top_p", "repetition_penalty"])
@pytest.mark.parametrize("value", [0, 0.0, -0.0])
def test_sampling_params_reject_a_zero_that_leaves_no_token(name, value):
    with pytest.raises(ValueError, match=f"{name} is 0; it must be above 0"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"stop": ""}, "stop has ''"),
        ({"stop": ["a", ""]}, "stop has ''"),
        ({"stop": ["a", 5]}, "stop has 5"),
        ({"stop": b"ab"}, "stop has 97"),
        ({"stop": None}, "stop is None"),
        ({"stop": 5}, "stop is 5"),
        ({"stop_token_ids": 5}, "stop_token_ids is 5"),
        ({"stop_token_ids": None}, "stop_token_ids is None"),
        ({"stop_token_ids": "12"}, "stop_token_ids is '12'"),
        ({"stop_token_ids": [1.0]}, r"stop_token_ids is \[1.0\]"),
        ({"stop_token_ids": [3, -1]}, "stop_token_ids has -1"),
        ({"stop_token_ids": [3, True]}, "stop_token_ids has True"),
        ({"ignore_eos": "no"}, "ignore_eos is 'no'"),
        ({"ignore_eos": 1}, "ignore_eos is 1"),
        ({"ignore_eos": None}, "ignore_eos is None"),
    ],
)
def test_sampling_params_reject_stops_that_cannot_end_an_output(given, said):
    with pytest.raises(ValueError, match=said):
        SamplingParams(**given)


def test_sampling_params_take_the_ends_of_their_ranges():
    for name, ends in NUMBERS.items():
        for value in ends:
            if value or name not in ("top_p", "repetition_penalty"):
                assert getattr(SamplingParams(**{name: value}), name) == value
    for name, least in COUNTS.items():
        assert getattr(SamplingParams(**{name: least}), name) == least
    assert SamplingParams(top_k=10**30, seed=10**30).top_k == 10**30
    assert SamplingParams(temperature=1e-3).temperature == 1e-3


def test_sampling_params_of_any_number_type_become_plain_and_hashable():
    given = SamplingParams(
        temperature=np.float32(0.5),
        top_k=np.int64(3),
        top_p=1,
        seed=np.uint8(4),
        stop="END",
        stop_token_ids=np.array([3, 4]),
    )
    plain = SamplingParams(temperature=0.5, top_k=3, seed=4, stop=("END",), stop_token_ids=(3, 4))
    assert given == plain
    assert hash(given) == hash(plain)
    kinds = [type(value) for value in (given.temperature, given.top_k, given.top_p, given.seed)]
    assert kinds == [float, int, float, int]
    assert all(type(token) is int for token in given.stop_token_ids)
    assert SamplingParams(stop=iter(["a", "b"])).stop == ("a", "b")


def test_request_rejects_min_tokens_over_max_tokens():
    assert Request("a", 1, 3, sampling=SamplingParams(min_tokens=3)).max_tokens == 3
    with pytest.raises(ValueError, match="request 'a': min_tokens is 4, over max_tokens of 3"):
        Request("a", 1, 3, sampling=SamplingParams(min_tokens=4))


def test_parallel_samples_have_ids_seeds_and_a_group_and_ask_for_one_answer_each():
    request = Request("a", 5, 3, sampling=SamplingParams(seed=7, n=3, temperature=1.0))
    samples = parallel_samples(request)
    assert [sample.id for sample in samples] == ["a/0", "a/1", "a/2"]
    assert [sample.sampling.seed for sample in samples] == [7, 8, 9]
    assert [(sample.group, sample.sampling.n) for sample in samples] == [("a", 1)] * 3
    assert [sample.id for sample in parallel_samples(request, 2)] == ["a/0", "a/1"]
    unseeded = parallel_samples(Request("b", 5, 3, sampling=SamplingParams(n=2)))
    assert [sample.sampling.seed for sample in unseeded] == [None, None]


def test_expand_keeps_the_order_and_requests_for_one_answer():
    one, two = Request("one", 5, 3), Request("two", 5, 3, sampling=SamplingParams(n=2))
    rejection = Rejected("bad", "why")
    expanded = expand([one, rejection, two, one])
    assert [every.id for every in expanded] == ["one", "bad", "two/0", "two/1", "one"]
    assert expanded[0] is one
    assert expanded[1] is rejection


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"client": None}, "client is None; it must be a text"),
        ({"client": 3}, "client is 3; it must be a text"),
        ({"client": "c\ud800"}, r"client has '\\ud800', half a surrogate pair; write the whole character"),
        ({"id": "a\udc00"}, r"id has '\\udc00', half a surrogate pair"),
        ({"prompt": "a\ud800"}, r"the prompt has '\\ud800', half a surrogate pair; write the whole"),
        ({"cache_salt": 5}, "cache_salt is 5; it must be a text"),
        ({"cache_salt": "\udfff"}, "cache_salt has .* half a surrogate pair"),
        ({"group": ("g",)}, r"group is \('g',\); it must be a text"),
        ({"priority": "high"}, "priority is 'high'; it must be an integer"),
        ({"priority": 0.5}, "priority is 0.5; it must be an integer"),
        ({"priority": None}, "priority is None; it must be an integer"),
        ({"priority": True}, "priority is True; it must be an integer"),
        ({"sampling": {}}, r"sampling is \{\}; give SamplingParams"),
        ({"sampling": None}, "sampling is None; give SamplingParams"),
        ({"sampling": SamplingParams}, "sampling is .*; give SamplingParams"),
        ({"arrival": 3.0, "deadline": 2.5}, "deadline is 2.5, before the arrival at 3.0; count both"),
        ({"predicted_output": 10**400}, "predicted_output is .*from 1 to 9007199254740992"),
        ({"max_tokens": -(10**5000)}, "max_tokens is an integer of 16610 bits; it must be"),
        ({"prompt": b"text"}, "the prompt is b'text'; give text, a list of token ids, or a length"),
        ({"prompt": bytearray(b"text")}, "the prompt is bytearray.*; give text"),
        ({"prompt": memoryview(b"text")}, "the prompt is <memory.*; give text"),
        ({"prompt": {5, 6}}, "the prompt is {5, 6}; give"),
        ({"prompt": frozenset([5])}, "the prompt is frozenset.*; give"),
        ({"prompt": {5: 6}}, "the prompt is {5: 6}; give"),
        ({"prompt": [5, True]}, "the prompt has True; token ids are integers of at least 0"),
        ({"prompt": np.array([True])}, "the prompt has True; token ids are integers"),
        ({"prompt": np.array([[5], [6]])}, "the prompt is array.*; give"),
        ({"prompt": np.array([[5, 6]])}, "the prompt is array.*; give"),
        ({"prompt": np.array(5.0)}, "the prompt is array.*; give"),
        ({"prompt": [5, -1]}, "the prompt has -1; token ids are integers of at least 0 and below"),
        ({"prompt": [2**64]}, "the prompt has 18446744073709551616; token ids are integers of at least 0"),
        ({"prompt": np.array([5, -1])}, "the prompt has -1; token ids are integers of at least 0 and below"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_request_rejects_a_field_that_would_fail_in_mid_run(fields, said):
    with pytest.raises(ValueError, match=f"(?s)request '.*': {said}"):
        Request(**{"id": "a", "prompt": 1, "max_tokens": 1, **fields})


def test_request_takes_a_tensor_of_token_ids_and_rejects_a_batch_of_them():
    torch = pytest.importorskip("torch")
    assert Request("a", torch.tensor([5, 6]), 1).prompt == (5, 6)
    for tensor in (
        torch.tensor([[5], [6]]),
        torch.tensor([[5, 6]]),
        torch.tensor([0.5]),
    ):
        with pytest.raises(ValueError, match=r"(?s)the prompt is tensor.*; give text, a list of token ids"):
            Request("a", tensor, 1)


def test_request_takes_odd_names_and_large_numbers_as_they_are():
    name = 'a,"b"\nc' * 10_000
    request = Request(name, [2**64 - 1, 0], 1, priority=np.int8(-3), client="\u2028", arrival=5, deadline=5)
    assert (request.id, request.priority, request.deadline) == (name, -3, 5.0)
    assert [type(request.priority), type(request.deadline), type(request.arrival)] == [int, float, float]
    assert Request("a", 1, 1, priority=-(10**30)).priority == -(10**30)


def test_a_tensor_of_flags_is_no_prompt():
    torch = pytest.importorskip("torch")
    with pytest.raises(ValueError, match="the prompt has True; token ids are integers"):
        Request("a", torch.tensor([True]), 1)


@pytest.mark.parametrize(("deadline", "moved"), [(None, None), (3.0, 7.0), (7.0, 7.0), (9.0, 9.0)])
def test_a_request_that_is_moved_behind_its_deadline_misses_it_on_arrival(deadline, moved):
    request = Request("a", 5, 3, arrival=2.0, deadline=deadline)
    assert request.moved(7.0) == Request("a", 5, 3, arrival=7.0, deadline=moved)
    assert Rejected("a", "no").moved(7.0) == Rejected("a", "no", 7.0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([5, 6], "entry 0 of the requests is 5; give a list of requests"),
        ([Request("a", 1, 1), "b"], "entry 1 of the requests is 'b'; give a list of requests"),
        (Request("a", 1, 1), "the requests are Request.*; give a list of requests"),
        (None, "the requests are None; give a list of requests"),
        ({"a": Request("a", 1, 1)}, "entry 0 of the requests is 'a'"),
    ],
    ids=["numbers", "text", "one request", "none", "a mapping"],
)
def test_what_is_no_list_of_requests_is_rejected_before_a_run(given, said):
    for take in (listed, expand, simulate):
        with pytest.raises(TypeError, match=said):
            take(given)
    assert listed(iter([Request("a", 1, 1)])) == [Request("a", 1, 1)]
