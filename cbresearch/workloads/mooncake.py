"""The trace format of Mooncake (Qin et al., FAST'25): which prompts begin alike, without the prompts."""

import math
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

from cbresearch.request import Request, SamplingParams
from cbresearch.workloads.lines import Fields, Form, seconds, shown

BLOCK_TOKENS = 512
"""Tokens of a prompt that one id stands for."""

EXAMPLE = '{"timestamp": 0, "input_length": 700, "output_length": 32, "hash_ids": [0, 1]}'

_NUM_DIGITS, _BASE = 4, 256
_ALL_IDS = range(_BASE**_NUM_DIGITS)


def form(tokens_per_id: int = BLOCK_TOKENS) -> Form:
    """Return how a line of a trace becomes a request.

    Raises:
        ValueError: `tokens_per_id` is not a whole number from 1 to 512.
    """
    if type(tokens_per_id) is not int or not 1 <= tokens_per_id <= BLOCK_TOKENS:
        raise ValueError(f"tokens_per_id is {tokens_per_id!r}; it must be from 1 to {BLOCK_TOKENS}")
    return Form(partial(_request, tokens_per_id), _arrival, EXAMPLE)


def _request(tokens_per_id: int, fields: Fields, position: str) -> Request:
    for key, minimum in (("timestamp", 0), ("input_length", 1), ("output_length", 1)):
        value = fields.get(key)
        if type(value) is not int or value < minimum:
            raise ValueError(f"{key} is {shown(value)}; it must be an integer of at least {minimum}")
    hash_ids, length, output = fields.get("hash_ids"), fields["input_length"], fields["output_length"]
    if not isinstance(hash_ids, list):
        raise ValueError(f"hash_ids is {shown(hash_ids)}; it must be a list of integers")
    num_ids = -(-length // BLOCK_TOKENS)
    if len(hash_ids) != num_ids:
        raise ValueError(
            f"hash_ids has {len(hash_ids)} ids, but input_length {length} makes {num_ids} blocks of "
            f"{BLOCK_TOKENS} tokens; give one id a block"
        )
    for place, hash_id in enumerate(hash_ids):
        if type(hash_id) is not int or hash_id not in _ALL_IDS:
            raise ValueError(
                f"hash_ids has {shown(hash_id)} at place {place}; ids are integers from 0 to {_ALL_IDS[-1]}"
            )
    return Request(
        position,
        _prompt(hash_ids, length, tokens_per_id),
        max_tokens=output,
        arrival=_arrival(fields),
        sampling=SamplingParams(ignore_eos=True),
        output_length=output,
    )


def _arrival(fields: Fields) -> Any:
    milliseconds = seconds(fields.get("timestamp"))
    return milliseconds / 1000 if isinstance(milliseconds, float) else math.nan


def _prompt(hash_ids: Sequence[int], length: int, tokens_per_id: int) -> tuple[int, ...]:
    """Return a prompt whose tokens depend on the ids alone, `tokens_per_id` for each but the last."""
    if tokens_per_id == 1:
        return tuple(hash_ids)
    blocks = (_block(hash_id, tokens_per_id) for hash_id in hash_ids)
    return tuple(chain.from_iterable(blocks))[: -(-length * tokens_per_id // BLOCK_TOKENS)]


def _block(hash_id: int, num_tokens: int) -> tuple[int, ...]:
    """Return the tokens of an id: its digits over and over, or itself where there is no room for them."""
    if num_tokens < _NUM_DIGITS:
        return (hash_id,) * num_tokens
    # Python keeps one object of each number below 257, so a token takes no more than its place in a tuple.
    digits = tuple(hash_id.to_bytes(_NUM_DIGITS, "little"))
    return (digits * -(-num_tokens // _NUM_DIGITS))[:num_tokens]
