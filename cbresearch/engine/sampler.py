"""Choose the next tokens of a batch, each row as its own request asks."""

from collections import defaultdict
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


class SamplerOutput(NamedTuple):
    """The next token of a row.

    Attributes:
        token: The token, or None where there is none to choose.
        logprobs: Its log-probabilities, where they were asked for.
        error: Why there is no token.
    """

    token: int | None
    logprobs: TokenLogprobs | None = None
    error: str | None = None


class _Seat(NamedTuple):
    """How a seat's tokens are chosen.

    Attributes:
        processors: Configuration of the logits processors, or None where the largest logit is chosen. It is
            what the request asks for without what is each request's own, so that rows of one go together.
        ends: Tokens that end its output.
        num_prompt_tokens: Tokens of its prompt.
        min_tokens: Output tokens before which no token ends it.
        num_logprobs: Most likely tokens that are recorded, or None.
        key: Of its noise.
    """

    processors: SamplingParams | None
    ends: frozenset[int]
    num_prompt_tokens: int
    min_tokens: int
    num_logprobs: int | None
    key: int


class Sampler:
    """Choose tokens from logits; what is chosen for a request does not depend on the others in the batch.

    Args:
        eos_token_ids: Tokens that end an output.
        seed: For requests that have none of their own.
    """

    def __init__(self, eos_token_ids: frozenset[int], seed: int = 0) -> None:
        self._eos_token_ids = eos_token_ids
        self._seed = seed
        self._seats: dict[int, _Seat] = {}

    def seat(self, seat: int, request: Request) -> None:
        """Note how a seat's tokens are to be chosen from now on."""
        asked = request.sampling
        processors = replace(
            asked,
            seed=None,
            n=1,
            min_tokens=0,
            stop=(),
            stop_token_ids=(),
            ignore_eos=True,
            num_logprobs=None,
        )
        is_plain = processors == SamplingParams(ignore_eos=True) and not asked.min_tokens
        self._seats[seat] = _Seat(
            None if is_plain else processors,
            frozenset(asked.stop_token_ids) | (frozenset() if asked.ignore_eos else self._eos_token_ids),
            request.num_prompt_tokens,
            asked.min_tokens,
            asked.num_logprobs,
            noise_key("request", self._seed, request.id)
            if asked.seed is None
            else noise_key("seed", asked.seed),
        )

    def ends(self, seat: int, token: int) -> bool:
        """Return whether a token ends the output of a seat."""
        return token in self._seats[seat].ends

    def choose(self, logits: Tensor, rows: Sequence[Row]) -> list[SamplerOutput]:
        """Choose a token for each row.

        Args:
            logits: `[num_rows, vocab_size]`.
            rows: Whose.
        """
        if not rows:
            return []
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        best, tokens = logits.max(-1)
        seats = [self._seats[row.seat] for row in rows]
        places_of: defaultdict[SamplingParams, list[int]] = defaultdict(list)
        for place, seat in enumerate(seats):
            if seat.processors is not None:
                places_of[seat.processors].append(place)
        for processors, places in places_of.items():
            where = torch.tensor(places, device=logits.device)
            some = [(seats[place], rows[place].token_ids) for place in places]
            best_scores, tokens[where] = _scores(processors, logits[where], some).max(-1)
            # Of an infinite logit some processors make NaN, others a number: neither may be chosen.
            best[where] += 0 * best_scores.to(best.dtype)
        logprobs = _logprobs(logits, [seat.num_logprobs for seat in seats], tokens)
        return [
            SamplerOutput(token, logprobs.get(place))
            if is_finite
            else SamplerOutput(None, error="no logit is finite and allowed to be chosen")
            for place, (token, is_finite) in enumerate(
                zip(tokens.tolist(), best.isfinite().tolist(), strict=True)
            )
        ]


def _scores(processors: SamplingParams, scores: Tensor, rows: Sequence[tuple[_Seat, np.ndarray]]) -> Tensor:
    """Return what the largest of is chosen, `[num_rows, vocab_size]`, of rows of one configuration.

    Args:
        processors: The configuration.
        scores: The logits.
        rows: Their seats and tokens, prompt and output.
    """
    vocab_size, device = scores.shape[-1], scores.device
    num_outputs = [len(token_ids) - seat.num_prompt_tokens for seat, token_ids in rows]
    if processors.repetition_penalty != 1:
        longest = max(len(token_ids) for _, token_ids in rows)
        # A row is filled up with its own last token, which adds nothing.
        known = np.stack([np.pad(ids, (0, longest - len(ids)), mode="edge") for _, ids in rows])
        penalize = RepetitionPenaltyLogitsProcessor(processors.repetition_penalty)
        scores = penalize(torch.from_numpy(known).to(device), scores)
    if processors.presence_penalty or processors.frequency_penalty:
        outputs = [token_ids[seat.num_prompt_tokens :] for seat, token_ids in rows]
        counted = np.stack([np.bincount(output, minlength=vocab_size) for output in outputs])
        counts = torch.from_numpy(counted).to(device=device, dtype=scores.dtype)
        scores = scores - processors.frequency_penalty * counts - processors.presence_penalty * (counts > 0)
    banned = [
        (place, token)
        for place, ((seat, _), num_output) in enumerate(zip(rows, num_outputs, strict=True))
        if num_output < seat.min_tokens
        for token in seat.ends
        # Some models name an end that they cannot emit.
        if token < vocab_size
    ]
    if banned:
        places, tokens = torch.tensor(banned, device=device).T
        scores = scores.index_put((places, tokens), scores.new_tensor(-torch.inf))
    if not processors.temperature:
        return scores
    # What `generate` does to logits before it draws, in its order.
    warpers = LogitsProcessorList()
    if processors.temperature != 1:
        warpers.append(TemperatureLogitsWarper(processors.temperature))
    if processors.top_k is not None and processors.top_k < vocab_size:
        warpers.append(TopKLogitsWarper(processors.top_k))
    if processors.top_p < 1:
        warpers.append(TopPLogitsWarper(processors.top_p))
    if processors.min_p > 0:
        warpers.append(MinPLogitsWarper(processors.min_p))
    keys = torch.tensor([seat.key for seat, _ in rows], device=device)
    noise = gumbel(keys, torch.tensor(num_outputs, device=device), vocab_size)
    return warpers(torch.empty(len(rows), 0, dtype=torch.int64), scores).double() + noise


def _logprobs(logits: Tensor, numbers: Sequence[int | None], tokens: Tensor) -> dict[int, TokenLogprobs]:
    """Return the log-probabilities of the places that ask for some of the most likely tokens."""
    wanted = {place: number for place, number in enumerate(numbers) if number is not None}
    if not wanted:
        return {}
    where = torch.tensor(list(wanted), device=logits.device)
    logprobs = logits[where].log_softmax(-1)
    chosen = logprobs.gather(-1, tokens[where, None])[:, 0].tolist()
    return {
        place: TokenLogprobs(one, *_most_likely(row, min(number, len(row))))
        for (place, number), one, row in zip(wanted.items(), chosen, logprobs, strict=True)
    }


def _most_likely(logprobs: Tensor, number: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return the ids and values of the largest of a row, of equal ones the smallest ids first."""
    if not number:
        return (), ()
    # `topk` alone leaves open which of equal ones it takes; 16-bit logits are often equal.
    ids = (logprobs >= logprobs.topk(number).values[-1]).nonzero()[:, 0]
    values, order = logprobs[ids].sort(descending=True, stable=True)
    return tuple(ids[order[:number]].tolist()), tuple(values[:number].tolist())
