"""Choose the next tokens of a batch, each row as its own request asks."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from cbresearch.engine.noise import gumbel, noise_key
from cbresearch.request import Request, SamplingParams, TokenLogprobs


class Row(NamedTuple):
    """A request whose next token is wanted.

    Attributes:
        seat: Its seat.
        token_ids: int64: its prompt and its output so far.
    """

    seat: int
    token_ids: np.ndarray


class Choice(NamedTuple):
    """The next token of a row.

    Attributes:
        token: The token, or None where there is none to choose.
        logprobs: Its log-probabilities, where they were asked for.
        error: Why there is no token.
    """

    token: int | None
    logprobs: TokenLogprobs | None = None
    error: str | None = None


class Sampler:
    """Choose tokens from logits; what is chosen for a request does not depend on the others in the batch.

    Args:
        num_seats: Rows of the largest batch.
        eos_token_ids: Tokens that end an output.
        seed: For requests that have none of their own.
    """

    def __init__(self, num_seats: int, eos_token_ids: frozenset[int], seed: int = 0) -> None:
        self._eos_token_ids = eos_token_ids
        self._seed = seed
        self._seats: list[_Seat | None] = [None] * num_seats

    def seat(self, seat: int, request: Request) -> None:
        """Note how a seat's tokens are to be chosen from now on."""
        sampling = request.sampling
        ends = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            ends |= self._eos_token_ids
        recipe = None
        if sampling.temperature or sampling.min_tokens or _has_penalty(sampling):
            # What all requests of one recipe share; the rest is each one's own.
            recipe = replace(
                sampling, seed=None, n=1, min_tokens=0, stop=(), stop_token_ids=(), num_logprobs=None
            )
        key = noise_key("seed", sampling.seed)
        if sampling.seed is None:
            key = noise_key("request", self._seed, request.id)
        self._seats[seat] = _Seat(sampling, recipe, ends, request.num_prompt_tokens, key)

    def ends(self, seat: int, token: int) -> bool:
        """Return whether a token ends the output of a seat."""
        return token in self._at(seat).ends

    def choose(self, logits: Tensor, rows: Sequence[Row]) -> list[Choice]:
        """Choose a token for each row.

        Args:
            logits: `[num_rows, vocab_size]`.
            rows: Whose.
        """
        if not rows:
            return []
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        best = logits.argmax(-1)
        is_finite = logits.gather(-1, best[:, None])[:, 0].isfinite()
        tokens = best
        recipes: dict[SamplingParams, list[int]] = {}
        for place, row in enumerate(rows):
            recipe = self._at(row.seat).recipe
            if recipe is not None:
                recipes.setdefault(recipe, []).append(place)
        for recipe, places in recipes.items():
            where = torch.tensor(places, device=logits.device)
            scores = self._scores(recipe, logits[where], [rows[place] for place in places])
            chosen = scores.argmax(-1)
            tokens = tokens.index_copy(0, where, chosen)
            is_finite = is_finite.index_copy(
                0, where, is_finite[where] & scores.gather(-1, chosen[:, None])[:, 0].isfinite()
            )
        logprobs = self._logprobs(logits, rows, tokens)
        return [
            Choice(token, logprobs.get(place))
            if is_fine
            else Choice(None, error="no logit is finite and allowed to be chosen")
            for place, (token, is_fine) in enumerate(zip(tokens.tolist(), is_finite.tolist(), strict=True))
        ]

    def _at(self, seat: int) -> "_Seat":
        row = self._seats[seat]
        assert row is not None, f"seat {seat} is empty"
        return row

    def _scores(self, recipe: SamplingParams, scores: Tensor, rows: Sequence[Row]) -> Tensor:
        """Return what the largest of is chosen, `[num_rows, vocab_size]`, of rows of one recipe."""
        seats = [self._at(row.seat) for row in rows]
        device = scores.device
        num_outputs = [
            len(row.token_ids) - seat.num_prompt_tokens for row, seat in zip(rows, seats, strict=True)
        ]
        known = scores.new_zeros((len(rows), 0), dtype=torch.int64)
        if recipe.repetition_penalty != 1:
            known = _padded([row.token_ids for row in rows]).to(device)
            scores = RepetitionPenaltyLogitsProcessor(recipe.repetition_penalty)(known, scores)
        if recipe.presence_penalty or recipe.frequency_penalty:
            outputs = [row.token_ids[seat.num_prompt_tokens :] for row, seat in zip(rows, seats, strict=True)]
            counts = _counts(outputs, scores.shape[-1]).to(device=device, dtype=scores.dtype)
            scores = scores - recipe.frequency_penalty * counts - recipe.presence_penalty * (counts > 0)
        banned = [
            (place, token)
            for place, (seat, num_output) in enumerate(zip(seats, num_outputs, strict=True))
            if num_output < seat.sampling.min_tokens
            for token in seat.ends
            # Some models name an end that they cannot emit.
            if token < scores.shape[-1]
        ]
        if banned:
            places, tokens = torch.tensor(banned, device=device).T
            scores = scores.index_put((places, tokens), scores.new_tensor(-torch.inf))
        if not recipe.temperature:
            return scores
        scores = _warpers(recipe, scores.shape[-1])(known, scores)
        keys = torch.tensor([seat.key for seat in seats], device=device)
        return scores.double() + gumbel(keys, torch.tensor(num_outputs, device=device), scores.shape[-1])

    def _logprobs(self, logits: Tensor, rows: Sequence[Row], tokens: Tensor) -> dict[int, TokenLogprobs]:
        wanted = {
            place: min(number, logits.shape[-1])
            for place, row in enumerate(rows)
            if (number := self._at(row.seat).sampling.num_logprobs) is not None
        }
        if not wanted:
            return {}
        where = torch.tensor(list(wanted), device=logits.device)
        logprobs = logits[where].log_softmax(-1)
        chosen = logprobs.gather(-1, tokens[where, None])[:, 0].tolist()
        return {
            place: TokenLogprobs(chosen[k], *_most_likely(logprobs[k], number))
            for k, (place, number) in enumerate(wanted.items())
        }


class _Seat(NamedTuple):
    """How a seat's tokens are chosen.

    Attributes:
        sampling: What its request asks for.
        recipe: What is to be done to its logits, or None where the largest is chosen.
        ends: Tokens that end its output.
        num_prompt_tokens: Tokens of its prompt.
        key: Of its noise.
    """

    sampling: SamplingParams
    recipe: SamplingParams | None
    ends: frozenset[int]
    num_prompt_tokens: int
    key: int


def _has_penalty(sampling: SamplingParams) -> bool:
    return bool(sampling.repetition_penalty != 1 or sampling.presence_penalty or sampling.frequency_penalty)


def _warpers(recipe: SamplingParams, vocab_size: int) -> LogitsProcessorList:
    """Return what `generate` does to logits before it draws, in its order."""
    warpers = LogitsProcessorList()
    if recipe.temperature != 1:
        warpers.append(TemperatureLogitsWarper(recipe.temperature))
    if recipe.top_k is not None and recipe.top_k < vocab_size:
        warpers.append(TopKLogitsWarper(recipe.top_k))
    if recipe.top_p < 1:
        warpers.append(TopPLogitsWarper(recipe.top_p))
    if recipe.min_p > 0:
        warpers.append(MinPLogitsWarper(recipe.min_p))
    return warpers


def _most_likely(logprobs: Tensor, number: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return the ids and values of the largest of a row, of equal ones the smallest ids first."""
    if not number:
        return (), ()
    # `topk` alone leaves open which of equal ones it takes; 16-bit logits are often equal.
    ids = (logprobs >= logprobs.topk(number).values[-1]).nonzero()[:, 0]
    values, order = logprobs[ids].sort(descending=True, stable=True)
    return tuple(ids[order[:number]].tolist()), tuple(values[:number].tolist())


def _padded(token_ids: Sequence[np.ndarray]) -> Tensor:
    """Return int64 `[num_rows, longest]`; a row is filled up with its own last token, which adds nothing."""
    padded = np.empty((len(token_ids), max(map(len, token_ids))), dtype=np.int64)
    for row, ids in zip(padded, token_ids, strict=True):
        row[: len(ids)] = ids
        row[len(ids) :] = ids[-1]
    return torch.from_numpy(padded)


def _counts(token_ids: Sequence[np.ndarray], vocab_size: int) -> Tensor:
    """Return int64 `[num_rows, vocab_size]`: how often each token is in each row."""
    rows = np.repeat(np.arange(len(token_ids)), [len(ids) for ids in token_ids])
    flat = rows * vocab_size + np.concatenate(token_ids)
    counts = np.bincount(flat, minlength=len(token_ids) * vocab_size)
    return torch.from_numpy(counts.reshape(len(token_ids), vocab_size))
