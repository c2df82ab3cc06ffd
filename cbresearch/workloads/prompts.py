"""Turn prompts into what an executor serves."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from cbresearch.request import Prompt, Refusal, Request
from cbresearch.workloads.lines import check_text, shown

Encode = Callable[[str], Sequence[int]]

MAX_DRAWN_TOKENS = 2**24
"""Longest prompt that `resolve_prompts` draws; a typing error in a length must not fill the memory."""


def resolve_prompts(
    requests: Iterable[Request | Refusal],
    encode: Encode | None,
    vocab_size: int | None,
    rng: np.random.Generator,
) -> list[Request | Refusal]:
    """Turn prompts into what an executor serves: token ids for a model, lengths for a simulation.

    Args:
        requests: Who comes; a `Refusal` is passed on.
        encode: Turns text into token ids. None is for a simulation: a text becomes a length in tokens,
            estimated as a quarter of its UTF-8 bytes, rounded up.
        vocab_size: Number of token ids of the model. A length becomes that many ids drawn uniformly
            below it, and given ids are checked against it. None leaves lengths and ids as they are.
        rng: Gives one number. The ids drawn for a request depend on it and on the request's position
            only, never on the other requests.

    Returns:
        The requests in their order, with a `Refusal` in the place of each that cannot be resolved.

    Raises:
        ValueError: `vocab_size` is below 1.
    """
    if vocab_size is not None and vocab_size < 1:
        raise ValueError(f"vocab_size is {vocab_size!r}; it must be at least 1, or None")
    seed = int(rng.integers(2**63))
    resolved: list[Request | Refusal] = []
    for position, request in enumerate(requests):
        if isinstance(request, Request):
            try:
                prompt = _resolved(request.prompt, encode, vocab_size, [seed, position])
                request = replace(request, prompt=prompt)
            except ValueError as error:
                request = Refusal(request.id, f"request {request.id!r}: {error}", request.arrival)
        resolved.append(request)
    return resolved


def _resolved(prompt: Prompt, encode: Encode | None, vocab_size: int | None, seed: list[int]) -> Prompt:
    if isinstance(prompt, str):
        content = check_text("the prompt", prompt)
        if encode is None:
            return -(-len(content) // 4)
        text, prompt = prompt, tuple(encode(prompt))
        if not prompt:
            raise ValueError(f"the prompt {shown(text)} encodes to no token; give at least one")
    if vocab_size is None:
        return prompt
    if isinstance(prompt, int):
        if prompt > MAX_DRAWN_TOKENS:
            raise ValueError(f"the prompt's length is {prompt}; give at most {MAX_DRAWN_TOKENS}")
        return tuple(np.random.default_rng(seed).integers(vocab_size, size=prompt).tolist())
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        place, token = next(pair for pair in enumerate(prompt) if not 0 <= pair[1] < vocab_size)
        raise ValueError(
            f"the prompt's token {place} is {token}, outside the vocabulary of {vocab_size} tokens; "
            f"use ids from 0 to {vocab_size - 1}"
        )
    return prompt
