"""Read requests from JSON lines and from the CSV files of public traces; a bad line is rejected by itself.

Mooncake's traces (Qin et al., FAST'25) tell which prompts begin alike, without the prompts.
"""

import csv
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import fields as fields_of
from itertools import chain
from typing import Any

from cbresearch.names import suggestion
from cbresearch.request import Rejected, Request, SamplingParams
from cbresearch.workloads.arrivals import Poisson
from cbresearch.workloads.common import Rng, check_text, numbered_lines, require, shown
from cbresearch.workloads.requests import TO_THE_END

Lines = list[tuple[int, bytes]]
"""A file's lines that are not blank, with their numbers from 1."""

Fields = dict[str, Any]
"""What one JSON line holds."""

BLOCK_TOKENS = 512
"""Tokens of a prompt that one id of a Mooncake trace stands for."""

TABLES: Mapping[str, tuple[str | None, str, str]] = {
    "azure": ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    "burstgpt": ("Timestamp", "Request tokens", "Response tokens"),
    "vidur": ("arrived_at", "num_prefill_tokens", "num_decode_tokens"),
    "vidur_lengths": (None, "num_prefill_tokens", "num_decode_tokens"),
}
"""The kinds of CSV files: the columns of arrivals, prompt lengths and output lengths in tokens."""

EXAMPLES: Mapping[str, str] = {
    "mooncake": '{"timestamp": 0, "input_length": 700, "output_length": 32, "hash_ids": [0, 1]}',
    "workload": '{"prompt": "Hello", "max_tokens": 32}',
}
"""A line of each kind of JSON lines, for error messages."""

_REQUEST_KEYS = ("id", "arrival", "prompt", "max_tokens", "priority", "client", "deadline")
_SAMPLING_KEYS = tuple(field.name for field in fields_of(SamplingParams) if field.name != "num_logprobs")

_NUM_DIGITS, _BASE = 4, 256
_ALL_IDS = range(_BASE**_NUM_DIGITS)

# An integer past all floats is read as infinity, which every check rejects by name.
_DECODER = json.JSONDecoder(parse_int=lambda text: int(text) if len(text) < 300 else math.inf)


def kind_of(name: str, lines: Lines) -> str:
    """Return the kind of a file: one of `TABLES` by its header, or one of `EXAMPLES` by its first keys.

    Args:
        name: The file's name, for error messages.
        lines: Numbers and lines of the file.

    Raises:
        ValueError: The file's name ends in .csv, and its first line is no header of a known trace.
    """
    columns = _cells(lines[0][1]) if lines else [""]
    for kind, names in TABLES.items():
        if {column for column in names if column} <= set(columns):
            return kind
    if name.lower().endswith(".csv"):
        # Each once, in the order of the table: two kinds may share a column.
        known = dict.fromkeys(column for names in TABLES.values() for column in names[1:])
        near = next((suggestion(column, known) for column in columns if column not in known), "")
        header = f"the first line, {shown(','.join(columns))}, is no header of a known trace"
        raise ValueError(f"workload {name!r}: {header}; {near}")
    first = next((line for _, line in lines if b'"prompt"' in line or b'"hash_ids"' in line), b'"prompt"')
    return "workload" if b'"prompt"' in first else "mooncake"


# JSON lines.


def read_requests(content: bytes) -> list[Request | Rejected]:
    """Return the requests of a workload file, see `read_trace`, with a `Rejected` for each bad line."""
    return read_json(numbered_lines(content), workload_request, EXAMPLES["workload"])


def read_json(
    lines: Lines, build: Callable[[Fields, str], Request], example: str
) -> list[Request | Rejected]:
    """Return the requests of JSON lines, in their order, with a `Rejected` in the place of each bad one.

    Args:
        lines: Numbers and lines of a file.
        build: Makes a request of a line's fields and its position as text; raises ValueError.
        example: A line, for error messages.
    """
    requests: list[Request | Rejected] = []
    lines_by_id: dict[str, int] = {}
    for position, (number, line) in enumerate(lines):
        fields: Fields = {}
        try:
            fields = _fields(line, example)
            request = build(fields, str(position))
            if (taken := lines_by_id.setdefault(request.id, number)) != number:
                raise ValueError(f"id {request.id!r} belongs to line {taken} already; give it one of its own")
            requests.append(request)
        except ValueError as error:
            said = str(error)
            said = said if len(said) <= 300 else f"{said[:150]} … {said[-150:]}"
            requests.append(_rejection(fields, str(position), f"line {number}: {said}"))
    return requests


def workload_request(fields: Fields, position: str) -> Request:
    """Return the request of a workload file's line; raises ValueError."""
    for key in fields:
        if key not in _REQUEST_KEYS and key not in _SAMPLING_KEYS:
            raise ValueError(f"unknown key {key!r}; {suggestion(key, _REQUEST_KEYS + _SAMPLING_KEYS)}")
    given = {"id": position} | {key: value for key, value in fields.items() if value is not None}
    for key in ("prompt", "max_tokens"):
        if key not in given:
            raise ValueError(f"{key} is missing; a line needs both, such as {EXAMPLES['workload']}")
    priority, client = given.get("priority", 0), given.get("client", "")
    require(
        type(priority) is int, "priority", priority, "it must be an integer; a smaller one is more urgent"
    )
    require(isinstance(client, str), "client", client, 'it must be text, such as "c1"')
    for key, value in given.items():
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str):
                check_text(key, text)
    if isinstance(given["prompt"], list):
        for place, token in enumerate(given["prompt"]):
            if type(token) is not int or token < 0:
                raise ValueError(f"the prompt's token {place} is {token!r}; ids are integers of at least 0")
    sampling = SamplingParams(**{key: given.pop(key) for key in _SAMPLING_KEYS if key in given})
    request = Request(sampling=sampling, **given)
    if request.deadline is not None and request.deadline < request.arrival:
        remedy = "count both in seconds since the start of the run"
        raise ValueError(
            f"deadline is {request.deadline!r}, before the arrival at {request.arrival!r}; {remedy}"
        )
    return request


def mooncake_request(tokens_per_id: int, fields: Fields, position: str) -> Request:
    """Return the request of a Mooncake trace's line, see `read_trace`; raises ValueError."""
    for key, minimum in (("timestamp", 0), ("input_length", 1), ("output_length", 1)):
        value = fields.get(key)
        is_count = type(value) is int and value >= minimum
        require(is_count, key, value, f"it must be an integer of at least {minimum}")
    hash_ids, length, output = fields.get("hash_ids", ()), fields["input_length"], fields["output_length"]
    require(isinstance(hash_ids, list), "hash_ids", hash_ids, "it must be a list of integers")
    if len(hash_ids) != (num_ids := -(-length // BLOCK_TOKENS)):
        wanted = f"input_length {length} makes {num_ids} blocks of {BLOCK_TOKENS} tokens; give one id a block"
        raise ValueError(f"hash_ids has {len(hash_ids)} ids, but {wanted}")
    for place, hash_id in enumerate(hash_ids):
        if type(hash_id) is not int or hash_id not in _ALL_IDS:
            limits = f"ids are integers from 0 to {_ALL_IDS[-1]}"
            raise ValueError(f"hash_ids has {hash_id!r} at place {place}; {limits}")
    # The tokens depend on the ids alone, so prompts share KV just where their ids are equal.
    tokens = chain.from_iterable(_block(hash_id, tokens_per_id) for hash_id in hash_ids)
    prompt = tuple(tokens)[: -(-length * tokens_per_id // BLOCK_TOKENS)]
    return Request(position, prompt, output, fields["timestamp"] / 1000, TO_THE_END, output_length=output)


def _block(hash_id: int, num_tokens: int) -> tuple[int, ...]:
    """Return the tokens of an id: its digits over and over, or itself where there is no room for them."""
    if num_tokens < _NUM_DIGITS:
        return (hash_id,) * num_tokens
    # Python keeps one object of each number below 257, so a token takes no more than its place in a tuple.
    return tuple((hash_id.to_bytes(_NUM_DIGITS, "little") * -(-num_tokens // _NUM_DIGITS))[:num_tokens])


def _fields(line: bytes, example: str) -> Fields:
    try:
        fields = _DECODER.decode(line.decode())
    except (ValueError, RecursionError) as error:
        text = shown(line.decode(errors="replace"))
        hint = f"write one object a line, such as {example}"
        raise ValueError(f"{text} is not JSON in UTF-8 ({error}); {hint}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{shown(fields)} is not an object; write one a line, such as {example}")
    return fields


def _rejection(fields: Fields, position: str, error: str) -> Rejected:
    name = fields.get("id")
    # Half a surrogate pair cannot be written to a file, so no result may be named by it.
    if not isinstance(name, str) or not name or name.encode(errors="ignore").decode() != name:
        name = position
    for key, unit in (("arrival", 1), ("timestamp", 1000)):
        time = fields.get(key)
        if isinstance(time, int | float) and not isinstance(time, bool) and 0 <= time < math.inf:
            return Rejected(name, error, time / unit)
    return Rejected(name, error)


# CSV files.


def read_rows(
    lines: Lines, kind: str, rng: Rng, rate: float | None = None, failures: str = "skip"
) -> tuple[list[Request | Rejected], dict[str, int]]:
    """Return the requests of a trace's rows, and how often which repair was made.

    Arrivals count from the earliest row. Outputs run to their full length, as recorded. Two repairs are made
    and counted: rows out of order are sorted by arrival, and failed requests (BurstGPT records them with 0
    output tokens) are left out. Any other bad row is rejected.

    Args:
        lines: Numbers and lines of the file, the header first.
        kind: A key of `TABLES`.
        rng: Draws arrivals where `rate` asks for them.
        rate: Requests per second of a Poisson process, for a file without arrivals; by default all arrive
            at 0.
        failures: "skip" leaves failed requests out, "reject" puts a `Rejected` in their place.

    Returns:
        The requests in order of arrival, with a `Rejected` in the place of each bad row; and the repairs.

    Raises:
        ValueError: `failures` is none of the two, or `rate` is not positive.
    """
    import pandas as pd

    require(failures in ("skip", "reject"), "failures", failures, "it must be 'skip' or 'reject'")
    header, *rows = (_cells(line) for _, line in lines)

    def column(name: str) -> Any:
        place = header.index(name)
        return pd.Series([row[place] if len(row) == len(header) else "" for row in rows], dtype=str)

    time_name, prompt_name, output_name = TABLES[kind]
    frame = pd.DataFrame({"prompt": _counts(column(prompt_name)), "output": _counts(column(output_name))})
    frame["client"] = column("Session ID") if "Session ID" in header else ""
    if kind == "burstgpt" and failures == "skip":
        frame = frame[(frame.output != 0) | frame.prompt.isna()]
    if time_name is not None:
        frame["time"] = _elapsed(column(time_name)[frame.index], kind)
        # A row of unknown time stays with the row before it.
        frame["arrival"] = frame.time.ffill().fillna(0.0)
    else:
        frame["time"] = frame["arrival"] = Poisson(rate)(rng, len(frame)) if rate is not None else 0.0
    requests: list[Request | Rejected] = []
    in_order = frame.sort_values("arrival", kind="stable").itertuples(name=None)
    for place, prompt, output, client, time, arrival in in_order:
        name = str(place)
        if prompt > 0 and output > 0 and time >= 0:
            prompt, output = int(prompt), int(output)
            fields = {"client": client, "output_length": output}
            requests.append(Request(name, prompt, output, arrival, TO_THE_END, **fields))
        else:
            fault = _fault(kind, header, rows[place], (time, prompt, output))
            requests.append(Rejected(name, f"line {lines[place + 1][0]}: {fault}", arrival))
    num_moved = int((frame.arrival.diff() < 0).sum())
    repairs = {"failed requests left out": len(rows) - len(frame), "rows sorted by arrival": num_moved}
    return requests, {repair: times for repair, times in repairs.items() if times}


def _cells(line: bytes) -> list[str]:
    text = line.decode(errors="replace")
    try:
        # Line by line, so that a quote that nothing closes costs its own row alone.
        cells = next(csv.reader([text])) if '"' in text else text.split(",")
    except csv.Error:
        cells = [text]
    return [cell.strip() for cell in cells]


def _counts(texts: Any) -> Any:
    """Return numbers of tokens as a pandas series of floats, NaN where a text is none."""
    import pandas as pd

    counts = pd.to_numeric(texts, errors="coerce").astype(float)
    return counts.where((counts >= 0) & (counts < 2**53) & (counts % 1 == 0))


def _elapsed(texts: Any, kind: str) -> Any:
    """Return arrivals in seconds since the earliest as a pandas series, NaN where a text is none."""
    import pandas as pd

    # Whole nanoseconds, since the last digit of an Azure stamp is 100 of them.
    if kind == "azure":
        pattern = r"(19|20)\d\d-\d\d-\d\d[ T]\d\d:\d\d:\d\d(\.\d{1,9})?(Z|\+00:00)?"
        stamps = texts.where(texts.str.fullmatch(pattern))
        times = pd.to_datetime(stamps, format="ISO8601", utc=True, errors="coerce")
        nanoseconds = (times - times.min()) / pd.Timedelta(1, "ns")
    else:
        seconds = pd.to_numeric(texts, errors="coerce")
        nanoseconds = (seconds.where((seconds >= 0) & (seconds < 1e12)) * 1e9).round()
    return (nanoseconds - nanoseconds.min()) / 1e9


def _fault(kind: str, header: list[str], cells: list[str], values: tuple[float, float, float]) -> str:
    """Return what is wrong with a row whose arrival, prompt length and output length have these values."""
    if len(cells) != len(header):
        return f"{len(cells)} values where the header names {len(header)}: {shown(','.join(cells))}"
    stamp = "write a UTC time such as 2023-11-16 18:15:46.6805900"
    time = stamp if kind == "azure" else "write seconds, 0 or more, such as 4.25"
    count = "it must be a whole number of tokens, 0 or more"
    for name, value, remedy in zip(TABLES[kind], values, (time, count, count), strict=True):
        if name is not None and math.isnan(value):
            return f"{name} is {shown(cells[header.index(name)])}; {remedy}"
    zero = TABLES[kind][1 if not values[1] else 2]
    return f"{zero} is 0; a request has at least 1 token of each"
