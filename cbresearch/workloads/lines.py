"""Read requests from JSON lines; a bad line costs itself alone."""

import codecs
import difflib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields as fields_of
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple

from cbresearch.request import Refusal, Request, SamplingParams

Fields = dict[str, Any]
"""What one line of a file holds."""

EXAMPLE = '{"prompt": "Hello", "max_tokens": 32}'
"""The shortest useful line of a workload file."""


class Form(NamedTuple):
    """What the lines of a kind of file say.

    Attributes:
        build: Makes a request of what a line holds, given the request's position as text; raises ValueError.
        arrival: Finds the arrival in seconds of a line that is no request; anything else is taken for 0.
        example: A line, for error messages.
    """

    build: Callable[[Fields, str], Request]
    arrival: Callable[[Fields], Any]
    example: str


# What each key of a workload file may hold. The types are exact: to JSON, true is no number.
_KEYS: Mapping[str, tuple[tuple[type, ...], str]] = MappingProxyType(
    {
        "id": ((str,), 'text, such as "a"'),
        "arrival": ((int, float), "a number of seconds since the start of the run"),
        "prompt": ((str, list, int), "text, a list of token ids, or a length in tokens"),
        "max_tokens": ((int,), "an integer of at least 1"),
        "ignore_eos": ((bool,), "true or false"),
        "temperature": ((int, float), "a number; 0 takes the most likely token"),
        "top_k": ((int,), "an integer of at least 1"),
        "top_p": ((int, float), "a number above 0 and at most 1"),
        "min_p": ((int, float), "a number from 0 to 1"),
        "seed": ((int,), "an integer of at least 0"),
        "n": ((int,), "an integer of at least 1"),
        "repetition_penalty": ((int, float), "a number above 0; 1 changes nothing"),
        "presence_penalty": ((int, float), "a number"),
        "frequency_penalty": ((int, float), "a number"),
        "min_tokens": ((int,), "an integer of at least 0"),
        "stop": ((str, list), "a text or a list of texts"),
        "stop_token_ids": ((list,), "a list of token ids"),
        "priority": ((int,), "an integer; a smaller one is more urgent"),
        "client": ((str,), 'text, such as "c1"'),
        "deadline": ((int, float), "a number of seconds since the start of the run"),
    }
)

_SAMPLING_KEYS = tuple(field.name for field in fields_of(SamplingParams) if field.name in _KEYS)


def parse(content: bytes, form: Form | None = None, n: int | None = None) -> list[Request | Refusal]:
    """Return the requests of a file's lines, in their order, with a `Refusal` in the place of each bad one.

    Args:
        content: The file's bytes.
        form: How a line becomes a request; by default as `workloads.load` says of a workload file.
        n: Read so many requests only; None for all.
    """
    form = form or WORKLOAD
    requests: list[Request | Refusal] = []
    lines_by_id: dict[str, int] = {}
    for number, line in islice(_lines(content), n):
        fields: Fields = {}
        position = str(len(requests))
        try:
            fields = _fields(line, form.example)
            request = form.build(fields, position)
            if request.id in lines_by_id:
                taken = lines_by_id[request.id]
                raise ValueError(f"id {request.id!r} belongs to line {taken} already; give it one of its own")
        except ValueError as error:
            requests.append(_refusal(fields, position, form.arrival(fields), f"line {number}: {error}"))
        else:
            lines_by_id[request.id] = number
            requests.append(request)
    return requests


def first_keys(content: bytes) -> frozenset[str]:
    """Return the keys of the first line that is an object, which tell what kind of file it is."""
    for _, line in _lines(content):
        try:
            return frozenset(_fields(line, EXAMPLE))
        except ValueError:
            continue
    return frozenset()


def seconds(value: Any) -> Any:
    """Return a number as a float, one too large for a float as infinity, and anything else as it is."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    try:
        return float(value)
    except OverflowError:
        return math.inf


def check_text(key: str, text: str) -> bytes:
    """Return a text in UTF-8; raises ValueError where it cannot be written so."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise ValueError(f"{key} has {half!r}, half a surrogate pair; write the whole character") from None


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return what somebody may have meant, or else all that there is."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return (
        f"did you mean {' or '.join(map(repr, near))}?" if near else f"there is {', '.join(map(repr, known))}"
    )


def shown(value: object) -> str:
    """Return a value as an error message shows it, cut short if it is long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _lines(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, with their numbers from 1."""
    # Split as bytes: one line that is not UTF-8 must not cost the others.
    for number, line in enumerate(content.removeprefix(codecs.BOM_UTF8).split(b"\n"), start=1):
        if line.strip():
            yield number, line


def _fields(line: bytes, example: str) -> Fields:
    try:
        fields = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{shown(line.decode(errors='replace'))} is not JSON in UTF-8 ({error}); "
            f"write one object a line, such as {example}"
        ) from None
    if not isinstance(fields, dict):
        raise ValueError(f"{shown(fields)} is not an object; write one a line, such as {example}")
    return fields


def _request(fields: Fields, position: str) -> Request:
    for key in fields:
        if key not in _KEYS:
            raise ValueError(f"unknown key {key!r}; {suggestion(key, _KEYS)}")
    given: Fields = {key: value for key, value in fields.items() if value is not None}
    for key in ("prompt", "max_tokens"):
        if key not in given:
            raise ValueError(f"{key} is missing; a line needs both, such as {EXAMPLE}")
    for key, value in given.items():
        kinds, remedy = _KEYS[key]
        if type(value) not in kinds:
            raise ValueError(f"{key} is {shown(value)}; it must be {remedy}")
        for text in value if key == "stop" else [value]:
            if isinstance(text, str):
                check_text(key, text)
        if key in ("prompt", "stop_token_ids") and isinstance(value, list):
            _check_token_ids(key, value)
    given |= {key: seconds(value) for key, value in given.items() if float in _KEYS[key][0]}
    given.setdefault("id", position)
    sampling = SamplingParams(**{key: given.pop(key) for key in _SAMPLING_KEYS if key in given})
    request = Request(sampling=sampling, **given)
    if request.deadline is not None and request.deadline < request.arrival:
        raise ValueError(
            f"deadline is {request.deadline!r}, before the arrival at {request.arrival!r}; "
            "count both in seconds since the start of the run"
        )
    return request


def _refusal(fields: Fields, position: str, arrival: Any, error: str) -> Refusal:
    name = fields.get("id")
    # Half a surrogate pair cannot be written to a file, so no result may be named by it.
    if not isinstance(name, str) or not name or name.encode(errors="ignore").decode() != name:
        name = position
    timed = isinstance(arrival, float) and 0 <= arrival < math.inf
    return Refusal(name, error, arrival if timed else 0.0)


def _check_token_ids(key: str, token_ids: list[Any]) -> None:
    for place, token in enumerate(token_ids):
        if type(token) is not int or token < 0:
            raise ValueError(
                f"the {key}'s token {place} is {shown(token)}; token ids are integers of at least 0"
            )


WORKLOAD = Form(_request, lambda fields: seconds(fields.get("arrival")), EXAMPLE)
"""A workload file, as `workloads.load` describes it."""
