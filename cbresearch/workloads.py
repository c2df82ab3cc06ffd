"""Whom to serve: presets, workload files, and seeded arrivals and lengths."""

import codecs
import difflib
import json
import math
import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from inspect import getdoc
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from cbresearch.request import Prompt, Refusal, Request, SamplingParams

Encode = Callable[[str], Sequence[int]]

EXAMPLE = '{"prompt": "Hello", "max_tokens": 32}'
"""The shortest useful line of a workload file."""

MAX_DRAWN_TOKENS = 2**24
"""Longest prompt that `resolve_prompts` draws; a typing error in a length must not fill the memory."""

# What each key of a workload file may hold. The types are exact: to JSON, true is no number.
_KEYS: Mapping[str, tuple[tuple[type, ...], str]] = MappingProxyType(
    {
        "id": ((str,), 'text, such as "a"'),
        "arrival": ((int, float), "a number of seconds since the start of the run"),
        "prompt": ((str, list, int), "text, a list of token ids, or a length in tokens"),
        "max_tokens": ((int,), "an integer of at least 1"),
        "ignore_eos": ((bool,), "true or false"),
        "priority": ((int,), "an integer; a smaller one is more urgent"),
        "client": ((str,), 'text, such as "c1"'),
        "deadline": ((int, float), "a number of seconds since the start of the run"),
    }
)
_UNREAD_ENDINGS = (".csv", ".tsv", ".parquet", ".xlsx", ".gz", ".zip", ".zst")


def load(source: str | os.PathLike[str], rng: np.random.Generator) -> list[Request | Refusal]:
    """Return the requests of a preset or of a workload file, in its order.

    A workload file holds one JSON object a line with the keys `id`, `arrival`, `prompt`, `max_tokens`,
    `ignore_eos`, `priority`, `client` and `deadline`; only `prompt` (text, token ids, or a length in
    tokens) and `max_tokens` are needed, and null means not given. Times are seconds since the start of
    the run. A request without an id is named by its position, from "0". Blank lines are skipped.

    Args:
        source: A preset's name, or else a path; "./chat24" is the file where "chat24" is the preset.
        rng: Draws what a preset leaves to chance; a file draws nothing.

    Returns:
        A `Refusal` that names the line, the value and the remedy in the place of each bad line.

    Raises:
        ValueError: There is no such preset or file, or it holds no request at all.
    """
    name = os.fspath(source)
    if name in PRESETS:
        return list(PRESETS[name](rng))
    if name.lower().endswith(_UNREAD_ENDINGS):
        formats = (
            f"a preset ({', '.join(PRESETS)}) or a JSON-lines file (.jsonl) with lines such as {EXAMPLE}"
        )
        raise ValueError(f"workload {name!r}: files with this ending are not read; give {formats}")
    if not os.path.exists(name):
        raise ValueError(f"workload {name!r} is neither a preset nor a file; {_suggestion(name, PRESETS)}")
    try:
        content = Path(name).read_bytes()
    except OSError as error:
        raise ValueError(f"workload {name!r} cannot be read: {error.strerror}; name a file") from error
    requests = _parse(content)
    if not requests:
        raise ValueError(f"workload {name!r} is empty; write one request a line, such as {EXAMPLE}")
    return requests


def presets() -> dict[str, str]:
    """Return the presets' names, each with a one-line description."""
    return {name: (getdoc(preset) or "").partition("\n")[0] for name, preset in PRESETS.items()}


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


def poisson_arrivals(rng: np.random.Generator, num_requests: int, rate: float) -> list[float]:
    """Draw the arrival times of a Poisson process, in seconds from its start.

    The gaps, the first one included, are independent and exponential with mean 1 / rate, and none is
    cut short, so the last of n arrivals is expected at n / rate.

    Args:
        rng: The source of chance.
        num_requests: How many arrivals.
        rate: Requests per second.

    Raises:
        ValueError: The rate is not a positive number.
    """
    if not (math.isfinite(rate) and rate > 0):
        raise ValueError(f"rate is {rate!r}; it must be a positive number of requests per second")
    arrivals: list[float] = np.cumsum(rng.exponential(1 / rate, num_requests)).tolist()
    return arrivals


def lognormal_lengths(
    rng: np.random.Generator, num_requests: int, mean: float, sigma: float, maximum: int, minimum: int = 1
) -> list[int]:
    """Draw whole lengths from a lognormal distribution that is clipped to [minimum, maximum].

    `mean` is the expected length after clipping: the location of the lognormal is solved for it. A
    clipped value is rounded up or down at random by its fraction, which keeps that expectation exact.

    Args:
        rng: The source of chance.
        num_requests: How many lengths.
        mean: Expected length in tokens.
        sigma: Standard deviation of the logarithm before clipping; 0 makes all lengths equal `mean`, up
            to that rounding.
        maximum: Largest length in tokens.
        minimum: Smallest length in tokens.

    Raises:
        ValueError: The arguments admit no such distribution; the message names them.
    """
    _check_range(minimum, maximum)
    if not 0 <= sigma <= 10:
        raise ValueError(f"sigma is {sigma!r}; it must lie between 0 and 10")
    if not (minimum < mean < maximum or (sigma == 0 and minimum <= mean <= maximum)):
        raise ValueError(
            f"mean is {mean!r}; it must lie between minimum = {minimum} and maximum = {maximum}, "
            "and off both unless sigma is 0"
        )
    values = np.full(num_requests, float(mean))
    if sigma:
        location = _clipped_lognormal_location(mean, sigma, minimum, maximum)
        values = np.exp(rng.normal(location, sigma, num_requests)).clip(minimum, maximum)
    whole = np.floor(values)
    lengths: list[int] = (whole + (rng.random(num_requests) < values - whole)).astype(np.int64).tolist()
    return lengths


def uniform_lengths(rng: np.random.Generator, num_requests: int, minimum: int, maximum: int) -> list[int]:
    """Draw whole lengths in tokens, each of minimum, …, maximum equally likely.

    Raises:
        ValueError: The range is empty or begins below 1.
    """
    _check_range(minimum, maximum)
    lengths: list[int] = rng.integers(minimum, maximum, num_requests, endpoint=True).tolist()
    return lengths


def chat24(rng: np.random.Generator) -> Sequence[Request | Refusal]:
    """Send 24 real prompts of mixed length at time 0 and ask for 8 to 96 output tokens each (mean 34).

    The prompts are plain user texts, without a chat template. Answers may end early.
    """
    return _parse(files("cbresearch").joinpath("data", "chat24.jsonl").read_bytes())


def classic60(rng: np.random.Generator) -> Sequence[Request]:
    """Send 60 requests of 1 prompt token at time 0, with 4 to 12 output tokens each, always the same.

    The output lengths are `random.randint(4, 12)` after `random.seed(2024)`: the textbook example.
    """
    source = random.Random(2024)
    return _to_the_end([0.0] * 60, [1] * 60, [source.randint(4, 12) for _ in range(60)])


def lognormal128(rng: np.random.Generator) -> Sequence[Request]:
    """Send 128 requests at time 0, with lognormal prompts (mean 62) and outputs (mean 54, at most 384).

    The logarithm's standard deviation is 0.6 for the prompts (at most 256) and 1 for the outputs.
    """
    prompts = lognormal_lengths(rng, 128, mean=62, sigma=0.6, maximum=256)
    outputs = lognormal_lengths(rng, 128, mean=54, sigma=1.0, maximum=384)
    return _to_the_end([0.0] * 128, prompts, outputs)


def poisson64(rng: np.random.Generator) -> Sequence[Request]:
    """Send 64 requests, 4 a second on average, with lognormal prompts (mean 48) and outputs (mean 32).

    They ask for about 128 output tokens a second during some 16 seconds. Prompts have at most 192 tokens
    and outputs 128; the logarithm's standard deviation is 0.6 and 0.8.
    """
    arrivals = poisson_arrivals(rng, 64, rate=4.0)
    prompts = lognormal_lengths(rng, 64, mean=48, sigma=0.6, maximum=192)
    outputs = lognormal_lengths(rng, 64, mean=32, sigma=0.8, maximum=128)
    return _to_the_end(arrivals, prompts, outputs)


PRESETS: Mapping[str, Callable[[np.random.Generator], Sequence[Request | Refusal]]] = MappingProxyType(
    {preset.__name__: preset for preset in (chat24, classic60, lognormal128, poisson64)}
)
"""The workloads that are known by name."""


def _to_the_end(arrivals: list[float], prompts: list[int], outputs: list[int]) -> list[Request]:
    return [
        Request(str(position), prompt, output, arrival, SamplingParams(ignore_eos=True))
        for position, (arrival, prompt, output) in enumerate(zip(arrivals, prompts, outputs, strict=True))
    ]


def _parse(content: bytes) -> list[Request | Refusal]:
    requests: list[Request | Refusal] = []
    lines_by_id: dict[str, int] = {}
    # Split as bytes: one line that is not UTF-8 must not cost the others.
    for number, line in enumerate(content.removeprefix(codecs.BOM_UTF8).split(b"\n"), start=1):
        if not line.strip():
            continue
        fields: dict[str, Any] = {}
        position = str(len(requests))
        try:
            fields = _fields(line)
            request = _request(fields, position)
            if request.id in lines_by_id:
                taken = lines_by_id[request.id]
                raise ValueError(f"id {request.id!r} belongs to line {taken} already; give it one of its own")
        except ValueError as error:
            requests.append(_refusal(fields, position, f"line {number}: {error}"))
        else:
            lines_by_id[request.id] = number
            requests.append(request)
    return requests


def _fields(line: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{_shown(line.decode(errors='replace'))} is not JSON in UTF-8 ({error}); "
            f"write one object a line, such as {EXAMPLE}"
        ) from None
    if not isinstance(fields, dict):
        raise ValueError(f"{_shown(fields)} is not an object; write one a line, such as {EXAMPLE}")
    return fields


def _request(fields: dict[str, Any], position: str) -> Request:
    for key in fields:
        if key not in _KEYS:
            raise ValueError(f"unknown key {key!r}; {_suggestion(key, _KEYS)}")
    given: dict[str, Any] = {key: value for key, value in fields.items() if value is not None}
    for key in ("prompt", "max_tokens"):
        if key not in given:
            raise ValueError(f"{key} is missing; a line needs both, such as {EXAMPLE}")
    for key, value in given.items():
        kinds, remedy = _KEYS[key]
        if type(value) not in kinds:
            raise ValueError(f"{key} is {_shown(value)}; it must be {remedy}")
        if isinstance(value, str):
            _check_text(key, value)
        if isinstance(value, list):
            _check_token_ids(value)
    given |= {key: _seconds(given[key]) for key in ("arrival", "deadline") if key in given}
    given.setdefault("id", position)
    request = Request(sampling=SamplingParams(ignore_eos=given.pop("ignore_eos", False)), **given)
    if request.deadline is not None and request.deadline < request.arrival:
        raise ValueError(
            f"deadline is {request.deadline!r}, before the arrival at {request.arrival!r}; "
            "count both in seconds since the start of the run"
        )
    return request


def _refusal(fields: dict[str, Any], position: str, error: str) -> Refusal:
    name, arrival = fields.get("id"), _seconds(fields.get("arrival"))
    # Half a surrogate pair cannot be written to a file, so no result may be named by it.
    if not isinstance(name, str) or not name or name.encode(errors="ignore").decode() != name:
        name = position
    timed = isinstance(arrival, float) and 0 <= arrival < math.inf
    return Refusal(name, error, arrival if timed else 0.0)


def _seconds(value: Any) -> Any:
    """Return a number as a float, one too large for a float as infinity, and anything else as it is."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _check_token_ids(token_ids: list[Any]) -> None:
    for place, token in enumerate(token_ids):
        if type(token) is not int or token < 0:
            raise ValueError(
                f"the prompt's token {place} is {_shown(token)}; token ids are integers of at least 0"
            )


def _check_text(key: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise ValueError(f"{key} has {half!r}, half a surrogate pair; write the whole character") from None


def _resolved(prompt: Prompt, encode: Encode | None, vocab_size: int | None, seed: list[int]) -> Prompt:
    if isinstance(prompt, str):
        content = _check_text("the prompt", prompt)
        if encode is None:
            return -(-len(content) // 4)
        text, prompt = prompt, tuple(encode(prompt))
        if not prompt:
            raise ValueError(f"the prompt {_shown(text)} encodes to no token; give at least one")
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


def _clipped_lognormal_location(mean: float, sigma: float, minimum: int, maximum: int) -> float:
    """Return the mu for which exp(N(mu, sigma²)), clipped to [minimum, maximum], has this mean."""

    def cdf(x: float) -> float:
        return math.erfc(-x / math.sqrt(2)) / 2

    low, high = math.log(minimum) - 10 * sigma, math.log(maximum) + 10 * sigma
    # The clipped mean grows with mu, and 100 halvings use up the digits of a float.
    for _ in range(100):
        mu = (low + high) / 2
        below, above = ((math.log(bound) - mu) / sigma for bound in (minimum, maximum))
        inside = math.exp(mu + sigma**2 / 2) * (cdf(above - sigma) - cdf(below - sigma))
        too_low = minimum * cdf(below) + inside + maximum * cdf(-above) < mean
        low, high = (mu, high) if too_low else (low, mu)
    return mu


def _check_range(minimum: int, maximum: int) -> None:
    if not 1 <= minimum <= maximum:
        raise ValueError(f"lengths from {minimum!r} to {maximum!r}: need 1 <= minimum <= maximum")


def _suggestion(name: str, known: Iterable[str]) -> str:
    known = list(known)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return (
        f"did you mean {' or '.join(map(repr, near))}?" if near else f"there is {', '.join(map(repr, known))}"
    )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
