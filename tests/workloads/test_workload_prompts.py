"""Prompts become token ids for a model and lengths for a simulation."""

import numpy as np
import pytest
from helpers.drawing import rng

from cbresearch import workloads
from cbresearch.request import Rejected, Request


def by_characters(text):
    return [ord(character) for character in text]


def test_resolve_prompts_encodes_text_and_keeps_ids():
    requests = [Request("a", "Hi", 3, 1.5, client="c"), Request("b", (5, 6), 3)]
    assert workloads.resolve_prompts(requests, by_characters, 128, rng()) == [
        Request("a", (72, 105), 3, 1.5, client="c"),
        Request("b", (5, 6), 3),
    ]


@pytest.mark.parametrize(
    ("text", "length"), [("a", 1), ("abcd", 1), ("abcde", 2), ("世界", 2), ("🙂" * 3, 3)]
)
@pytest.mark.parametrize("vocab_size", [None, 100])
def test_resolve_prompts_without_a_tokenizer_takes_a_quarter_of_the_bytes(text, length, vocab_size):
    (request,) = workloads.resolve_prompts([Request("a", text, 3)], None, vocab_size, rng())
    assert request.prompt == length


def test_resolve_prompts_without_a_vocabulary_keeps_lengths_and_ids():
    requests = [Request("a", 5, 3), Request("b", (10**9,), 3)]
    assert workloads.resolve_prompts(requests, by_characters, None, rng()) == requests


@pytest.mark.parametrize("vocab_size", [1, 2, 4096])
def test_resolve_prompts_draws_ids_from_the_whole_vocabulary(vocab_size):
    lengths = [1, 2, 500]
    requests = [Request(str(length), length, 3) for length in lengths]
    resolved = workloads.resolve_prompts(requests, None, vocab_size, rng())
    assert [len(request.prompt) for request in resolved] == lengths
    assert all(0 <= token < vocab_size for request in resolved for token in request.prompt)
    assert len(set(resolved[-1].prompt)) >= min(vocab_size, 400)


def test_resolve_prompts_draws_ids_independent_of_the_other_requests():
    requests = [Request(str(position), 20, 3) for position in range(4)]
    other = [Request("x", 7, 9), Rejected("y", "no"), requests[2], Request("z", "text", 1)]
    alone = workloads.resolve_prompts(requests, by_characters, 4096, rng(5))
    mixed = workloads.resolve_prompts(other, by_characters, 4096, rng(5))
    assert mixed[2] == alone[2]
    assert len({request.prompt for request in alone}) == 4
    assert workloads.resolve_prompts(requests, by_characters, 4096, rng(6))[2] != alone[2]


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ((1, 100), "token 1 is 100; use ids from 0 to 99"),
        ((5, 2**64 - 1), "token 1 is 18446744073709551615; use ids from 0 to 99"),
        ("é", "token 0 is 233; use ids from 0 to 99"),
        ("   ", "the prompt is '   '; it encodes to no token; give at least one"),
        (10**12, "length is 1000000000000; give at most 16777216"),
    ],
)
def test_resolve_prompts_rejects_what_cannot_be_resolved_and_keeps_the_others(prompt, said):
    requests = [Request("before", 3, 3), Request("bad", prompt, 3, arrival=4.0), Request("after", 3, 3)]
    before, rejected, after = workloads.resolve_prompts(
        requests, lambda text: by_characters(text.strip()), 100, rng()
    )
    assert len(before.prompt) == len(after.prompt) == 3
    assert (rejected.id, rejected.arrival) == ("bad", 4.0)
    assert rejected.error.startswith("request 'bad': ")
    assert said in rejected.error


def test_resolve_prompts_passes_a_rejection_on():
    rejection = Rejected("a", "line 1: no", 2.0)
    assert workloads.resolve_prompts([rejection], None, 100, rng()) == [rejection]


def test_resolve_prompts_takes_numpy_integers_from_an_encoder():
    (request,) = workloads.resolve_prompts(
        [Request("a", "Hi", 3)], lambda text: np.array(by_characters(text)), 128, rng()
    )
    assert request.prompt == (72, 105)
    assert {type(token) for token in request.prompt} == {int}


@pytest.mark.parametrize("vocab_size", [0, -1])
def test_resolve_prompts_raises_without_any_token_id(vocab_size):
    with pytest.raises(ValueError, match=f"vocab_size is {vocab_size}; it must be an integer of at least 1"):
        workloads.resolve_prompts([], None, vocab_size, rng())


@pytest.mark.parametrize("entries", [[Request("a", 3, 3), "b"], 5])
@pytest.mark.parametrize(
    ("function", "rest"),
    [
        (workloads.scale_rate, (2.0,)),
        (workloads.merge, ()),
        (workloads.spread_arrivals, (rng(), 3.0)),
        (workloads.resolve_prompts, (None, None, rng())),
        (workloads.predict, ("oracle", rng())),
        (workloads.Joint.of, ()),
    ],
)
def test_entry_that_is_no_request_is_an_error_of_the_type_that_is_documented(function, rest, entries):
    with pytest.raises(TypeError, match="give a list of requests"):
        function(entries, *rest)
    assert "TypeError: An entry is no request" in function.__doc__
