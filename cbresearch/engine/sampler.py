"""Choose the next tokens of a batch, each row as its own request asks."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import Tensor

from cbresearch.engine.noise import gumbel, noise_key
from cbresearch.request import Request, SamplingParams, TokenLogprobs


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
        request: The request.
        processors: Configuration of the logits processors, or None where the largest logit is chosen. It is
            what the request asks for without what is each request's own, so that rows of one go together.
        ends: Tokens that end its output.
        key: Key of its random numbers.
    """

    request: Request
    processors: SamplingParams | None
    ends: frozenset[int]
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
        own: dict[str, Any] = {"seed": None, "n": 1, "min_tokens": 0, "num_logprobs": None}
        own |= {"stop": (), "stop_token_ids": ()}
        processors = replace(asked, ignore_eos=False, **own)
        is_plain = processors == SamplingParams() and not asked.min_tokens
        ends = frozenset(asked.stop_token_ids) | (frozenset() if asked.ignore_eos else self._eos_token_ids)
        source = ("request", self._seed, request.id) if asked.seed is None else ("seed", asked.seed)
        self._seats[seat] = _Seat(request, None if is_plain else processors, ends, noise_key(*source))

    def ends(self, seat: int, token: int) -> bool:
        """Return whether a token ends the output of a seat."""
        return token in self._seats[seat].ends

    def choose(self, logits: Tensor, known: Mapping[int, np.ndarray]) -> dict[int, SamplerOutput]:
        """Choose a token for each row.

        Args:
            logits: `[num_rows, vocab_size]`.
            known: For each row its seat and the int64 tokens so far, prompt and output.

        Returns:
            What is chosen for each seat.
        """
        if not known:
            return {}
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        best, tokens = logits.max(-1)
        rows = [(self._seats[number], token_ids) for number, token_ids in known.items()]
        places_of: defaultdict[SamplingParams, list[int]] = defaultdict(list)
        for place, (seat, _) in enumerate(rows):
            if seat.processors is not None:
                places_of[seat.processors].append(place)
        for processors, places in places_of.items():
            where = torch.tensor(places, device=logits.device)
            scores = _scores(processors, logits[where], [rows[place] for place in places])
            best_scores, tokens[where] = scores.max(-1)
            # Neither the best logit nor the best score may be infinite: the sum is NaN or infinite then.
            best[where] += 0 * best_scores.to(best.dtype)
        logprobs = _logprobs(logits, [seat.request.sampling.num_logprobs for seat, _ in rows], tokens)
        chosen = zip(known, tokens.tolist(), best.isfinite().tolist(), strict=True)
        return {
            number: SamplerOutput(token, logprobs.get(place))
            if is_finite
            else SamplerOutput(None, error="no logit is finite and allowed to be chosen")
            for place, (number, token, is_finite) in enumerate(chosen)
        }


def _scores(processors: SamplingParams, scores: Tensor, rows: Sequence[tuple[_Seat, np.ndarray]]) -> Tensor:
    """Return what the largest of is chosen, `[num_rows, vocab_size]`, of rows of one configuration.

    Args:
        processors: The configuration.
        scores: The logits.
        rows: Their seats and tokens, prompt and output.
    """
    vocab_size, device = scores.shape[-1], scores.device
    outputs = [token_ids[seat.request.num_prompt_tokens :] for seat, token_ids in rows]
    if processors.repetition_penalty != 1:
        longest = max(len(token_ids) for _, token_ids in rows)
        # A row is filled up with its own last token, which adds nothing.
        known = np.stack([np.pad(ids, (0, longest - len(ids)), mode="edge") for _, ids in rows])
        penalize = transformers.RepetitionPenaltyLogitsProcessor(processors.repetition_penalty)
        scores = penalize(torch.from_numpy(known).to(device), scores)
    if processors.presence_penalty or processors.frequency_penalty:
        counted = np.stack([np.bincount(output, minlength=vocab_size) for output in outputs])
        counts = torch.from_numpy(counted).to(device=device, dtype=scores.dtype)
        scores = scores - processors.frequency_penalty * counts - processors.presence_penalty * (counts > 0)
    banned = [
        (place, token)
        for place, (seat, _) in enumerate(rows)
        if len(outputs[place]) < seat.request.sampling.min_tokens
        for token in seat.ends
        # Some models name an end that they cannot emit.
        if token < vocab_size
    ]
    if banned:
        where = tuple(torch.tensor(banned, device=device).T)
        scores = scores.index_put(where, scores.new_tensor(-torch.inf))
    if not processors.temperature:
        return scores
    # What `generate` does to logits before it draws, in its order.
    warpers = transformers.LogitsProcessorList()
    if processors.temperature != 1:
        warpers.append(transformers.TemperatureLogitsWarper(processors.temperature))
    if processors.top_k is not None and processors.top_k < vocab_size:
        warpers.append(transformers.TopKLogitsWarper(processors.top_k))
    if processors.top_p < 1:
        warpers.append(transformers.TopPLogitsWarper(processors.top_p))
    if processors.min_p > 0:
        warpers.append(transformers.MinPLogitsWarper(processors.min_p))
    keys = torch.tensor([seat.key for seat, _ in rows], device=device)
    places = torch.tensor([len(output) for output in outputs], device=device)
    # None of them looks at the tokens that are known.
    nothing = torch.LongTensor(len(rows), 0)
    warped: Tensor = warpers(nothing, scores)
    return warped.double() + gumbel(keys, places, vocab_size)


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
