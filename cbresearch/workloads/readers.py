"""Read JSON and the CSV files of public traces; a bad line is rejected by itself.

Traces of Mooncake (Qin et al., FAST'25) and of Qwen (Wang et al., ATC'25) tell which prompts begin alike,
without the prompts.
"""

import csv
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields as fields_of
from functools import partial
from itertools import chain, islice, pairwise
from typing import Any

from cbresearch.checks import count
from cbresearch.names import suggestion
from cbresearch.request import Prompt, Rejected, Request, SamplingParams
from cbresearch.workloads.common import numbered_lines, relative_seconds, require
from cbresearch.workloads.requests import TO_THE_END, estimated_tokens

Fields = dict[str, Any]
"""What one JSON object holds."""

_STAMP = "a UTC time such as 2023-11-16 18:15:46.6805900"
_SECONDS = "seconds, 0 or more, such as 4.25"

LAYOUTS: Mapping[str, tuple[str | None, str, str, str, int, int]] = {
    "azure": ("TIMESTAMP", "ContextTokens", "GeneratedTokens", _STAMP, 0, 0),
    "burstgpt": ("Timestamp", "Request tokens", "Response tokens", _SECONDS, 0, 0),
    "vidur": ("arrived_at", "num_prefill_tokens", "num_decode_tokens", _SECONDS, 0, 0),
    "vidur_lengths": (None, "num_prefill_tokens", "num_decode_tokens", _SECONDS, 0, 0),
    "mooncake": ("timestamp", "input_length", "output_length", "milliseconds, 0 or more", 3, 512),
    "qwen": ("timestamp", "input_length", "output_length", _SECONDS, 0, 16),
}
"""The kinds that record lengths: the names of arrivals, prompt lengths and output lengths; what an arrival
is; a second has 10^0 or 10^3 of it; and the tokens of a block, for which an id stands; CSV has none."""

EXAMPLES: Mapping[str, str] = {
    "workload": '{"prompt": "Hello", "max_tokens": 32}',
    "mooncake": '{"timestamp": 0, "input_length": 700, "output_length": 32, "hash_ids": [0, 1]}',
    "qwen": '{"chat_id": 1, "timestamp": 0.5, "input_length": 20, "output_length": 32, "hash_ids": [0, 1]}',
    "sharegpt": '{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}',
    "openai_batch": '{"custom_id": "a", "body": {"prompt": "Hello", "max_tokens": 32}}',
}
"""An object of each kind of JSON, for error messages."""

# A file is of the kind of the first of these keys that its first known object has.
_MARKS = {"prompt": "workload", "chat_id": "qwen", "hash_ids": "mooncake"}
_MARKS |= {"conversations": "sharegpt", "body": "openai_batch"}

_REQUEST_KEYS = ("id", "arrival", "prompt", "max_tokens", "priority", "client", "deadline")
_SAMPLING_KEYS = tuple(field.name for field in fields_of(SamplingParams) if field.name != "num_logprobs")

_HALF, _LAST_ID = 2**32, 2**64 - 1

_NUMBER = re.compile(r"\+?\d{1,15}(\.\d*)?(e\+?0?\d)?", re.ASCII | re.IGNORECASE)
_VALUE = re.compile(r"[^\s,\[\]]")


class _Number(float):
    """A number of a JSON file that remembers its digits."""

    def __init__(self, text: str) -> None:
        self.text = text


def _object(pairs: list[tuple[str, Any]]) -> Fields | ValueError:
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        return ValueError(f"the key {max(names, key=names.count)!r} is given twice")
    return dict(pairs)


# An integer past all floats is read as infinity, which every check rejects by name.
_DECODER = json.JSONDecoder(
    parse_int=lambda text: int(text) if len(text) < 300 else math.inf,
    parse_float=_Number,
    object_pairs_hook=_object,
)


def kind_of(name: str, content: bytes) -> str:
    """Return the kind of a file: one of `LAYOUTS` by its header, or one of `EXAMPLES` by its first keys.

    Args:
        name: The file's name, for error messages.
        content: What it holds.

    Raises:
        ValueError: The first line is no header of a known trace, and no line begins an object, or the file's
            name ends in .csv; or the header names a column twice.
    """
    lines = numbered_lines(content)
    if not lines:
        return "workload"
    columns = _cells(lines[0][1], _delimiter(lines[0][1]))
    tables = {kind: layout[:3] for kind, layout in LAYOUTS.items() if not layout[-1]}
    for kind, names in tables.items():
        if {column for column in names if column} <= set(columns):
            if twice := [key for key in (*names, "Session ID") if columns.count(str(key)) > 1]:
                raise ValueError(
                    f"workload {name!r}: the column {twice[0]!r} is given twice; leave one of them"
                )
            return kind
    is_json = any(line.lstrip()[:1] in (b"{", b"[") for _, line in lines)
    if not is_json or name.lower().endswith(".csv"):
        # Each once, in the order of the table: two kinds may share a column.
        known = dict.fromkeys(column for names in tables.values() for column in names[1:])
        near = next((suggestion(column, known) for column in columns if column not in known), "")
        line = f"the first line, {','.join(columns)[:80]!r}, is no header of a known trace"
        also = "" if is_json else f", and no line is an object such as {EXAMPLES['workload']}"
        raise ValueError(f"workload {name!r}: {line}{also}; {near}")
    for _, value in records_of(content):
        for mark, kind in _MARKS.items():
            if isinstance(value, dict) and mark in value:
                return kind
    return "workload"


def remedy_for(kind: str) -> str:
    """Return what to write into a file of a kind, for error messages."""
    return f"write one request a line, such as {EXAMPLES.get(kind, 'a row that the header describes')}"


def read(
    content: bytes, kind: str, n: int | None = None, tokens_per_id: int | None = None, failures: str = "skip"
) -> tuple[list[Request | Rejected], dict[str, int]]:
    """Return the requests of a file, and how often which repair was made.

    Two repairs are made to CSV files and counted: rows out of order are sorted by arrival, and failed
    requests (BurstGPT records them with 0 output tokens) are left out. Any other bad row or value is
    rejected; one of unknown time stays with the one before it.

    Args:
        content: What the file holds.
        kind: Its kind, see `kind_of`.
        n: Read so many requests only.
        tokens_per_id: Tokens that an id of a trace stands for; by default those of its block.
        failures: "skip" leaves failed requests out, "reject" puts a `Rejected` in their place.

    Returns:
        The requests in their order, those of a CSV file in order of arrival, with a `Rejected` in the place
        of each bad one; and the repairs.

    Raises:
        ValueError: `failures` is none of the two, or `tokens_per_id` not from 1 to the tokens of a block.
    """
    require(failures in ("skip", "reject"), "failures", failures, "it must be 'skip' or 'reject'")
    is_table = kind in LAYOUTS and not LAYOUTS[kind][-1]
    found = islice(_rows_of(content, kind) if is_table else records_of(content), n)
    records = [(str(place), number, value) for place, (number, value) in enumerate(found)]
    num_found = len(records)
    if kind == "burstgpt" and failures == "skip":
        records = [record for record in records if not _has_failed(record[2])]
    builders = {"sharegpt": sharegpt_request, "openai_batch": openai_request}
    build: Callable[[Fields, str], Request] = builders.get(kind, workload_request)
    if kind in LAYOUTS:
        time, *_, power, block = LAYOUTS[kind]
        objects = [(position, fields) for position, _, fields in records if isinstance(fields, dict)]
        times = [fields.get(time) if time else 0 for _, fields in objects]
        arrivals = relative_seconds(times, power, since_first=is_table)
        for (position, fields), arrival in zip(objects, arrivals, strict=True):
            fields["id"], fields["arrival"] = position, arrival
        num_tokens = block if tokens_per_id is None else tokens_per_id
        build = partial(_recorded_request, kind, count("tokens_per_id", num_tokens, min(1, block), block))
    elif kind == "workload":
        _count_from_first_arrival([fields for _, _, fields in records if isinstance(fields, dict)])
    requests: list[Request | Rejected] = []
    taken: dict[str, tuple[int, str]] = {}
    for position, number, value in records:
        try:
            if not isinstance(value, dict):
                said = value if isinstance(value, ValueError) else f"{value!r} is not an object"
                raise ValueError(f"{said}; {remedy_for(kind)}")
            request = build(value, position)
            if (first := taken.setdefault(request.id, (number, position)))[1] != position:
                line = f"line {first[0]} already; give it one of its own"
                raise ValueError(f"id {request.id!r} belongs to {line}")
            requests.append(request)
        except ValueError as error:
            fault = str(error)
            fault = fault if len(fault) <= 300 else f"{fault[:100]} … {fault[-200:]}"
            before = requests[-1].arrival if requests and kind in LAYOUTS else 0.0
            fields = value if isinstance(value, dict) else {}
            requests.append(_rejection(fields, position, f"line {number}: {fault}", before))
    if not is_table:
        return requests, {}
    num_moved = sum(after.arrival < before.arrival for before, after in pairwise(requests))
    repairs = {"failed requests left out": num_found - len(records), "rows sorted by arrival": num_moved}
    requests.sort(key=lambda request: request.arrival)
    return requests, {repair: times for repair, times in repairs.items() if times}


# JSON.


def records_of(content: bytes) -> Iterator[tuple[int, Any]]:
    """Yield what a JSON file holds: one value a line, or those of an array, or one behind another.

    Each comes behind the number of its line; a ValueError is in the place of one that cannot be read.
    """
    lines = numbered_lines(content)
    line = lines[0][1].lstrip() if lines else b""
    first, is_open = _decoded(line), line.startswith((b"{", b"["))
    if not isinstance(first, (ValueError if is_open else (), list if len(lines) == 1 else ())):
        yield from ((number, _decoded(line)) for number, line in lines)
        return
    whole, place, number = content.decode("utf-8-sig", errors="surrogateescape"), 0, 1
    while found := _VALUE.search(whole, place):
        number += whole.count("\n", place, found.start())
        try:
            value, place = _DECODER.raw_decode(whole, found.start())
        except (ValueError, RecursionError):
            # The next line may be whole again.
            place = whole.find("\n", found.start()) + 1 or len(whole)
            value = _decoded(whole[found.start() : place].rstrip().encode(errors="surrogateescape"))
        yield number, value
        number += whole.count("\n", found.start(), place)
    if whole.lstrip().startswith("[") and not whole.rstrip().endswith("]"):
        yield number, ValueError("the array has no end")


def workload_request(fields: Fields, position: str, kind: str = "workload") -> Request:
    """Return the request of the keys of a workload file; raises ValueError, with an example of the kind."""
    for key, value in fields.items():
        if isinstance(value, ValueError):
            raise value
        if key not in _REQUEST_KEYS and key not in _SAMPLING_KEYS:
            raise ValueError(f"unknown key {key!r}; {suggestion(key, _REQUEST_KEYS + _SAMPLING_KEYS)}")
    given = {"id": position} | {key: value for key, value in fields.items() if value is not None}
    for key in ("prompt", "max_tokens"):
        if key not in given:
            raise ValueError(f"{key} is missing; a line needs both, such as {EXAMPLES[kind]}")
    sampling = SamplingParams(**{key: given.pop(key) for key in _SAMPLING_KEYS if key in given})
    return Request(sampling=sampling, **given)


def _count_from_first_arrival(objects: list[Fields]) -> None:
    """Put seconds by the arrivals' clock into the place of all times, and an error where there are none."""
    keys = [(fields, key) for key in ("arrival", "deadline") for fields in objects]
    times = [fields[key] if type(fields.get(key)) in (int, _Number) else math.nan for fields, key in keys]
    seconds = relative_seconds(times, since_first=False, num_arrivals=len(objects))
    for (fields, key), time, second in zip(keys, times, seconds, strict=True):
        if 0 <= time < math.inf:
            what = "before the arrival" if second < 0 else "by another clock than the first arrival"
            error = ValueError(f"{key} is {time!r}, {what}; count all times since the start of the run")
            fields[key] = second if second >= 0 else error


def sharegpt_request(fields: Fields, position: str) -> Request:
    """Return the request of a ShareGPT conversation, see `read_trace`; raises ValueError."""
    try:
        turns = [(turn["from"] in ("human", "user"), turn["value"]) for turn in fields["conversations"]]
        places = [place for place, (one, after) in enumerate(pairwise(turns), start=1) if one[0] > after[0]]
        asked, answer = "\n\n".join(text for _, text in turns[: places[0]]), turns[places[0]][1]
        max_tokens = estimated_tokens("the answer", answer)
    except (AttributeError, IndexError, KeyError, TypeError):
        remedy = f"give a user's text and an answer to it, such as {EXAMPLES['sharegpt']}"
        raise ValueError(f"conversations is {fields.get('conversations')!r}; {remedy}") from None
    made = {"prompt": asked, "max_tokens": max_tokens, "ignore_eos": True}
    name = fields.get("id")
    return workload_request({"id": None if name is None else str(name)} | made, position)


def openai_request(fields: Fields, position: str) -> Request:
    """Return the request of a line of an OpenAI batch file, see `read_trace`; raises ValueError."""
    body = fields.get("body")
    if not isinstance(body, dict):
        raise ValueError(f"body is {body!r}; give an object, such as {EXAMPLES['openai_batch']}")
    keys = {"messages": "prompt", "input": "prompt", "prompt": "prompt", "max_tokens": "max_tokens"}
    keys |= {"max_completion_tokens": "max_tokens", "max_output_tokens": "max_tokens"}
    keys |= {key: key for key in _SAMPLING_KEYS}
    made: Fields = {}
    for key, value in body.items():
        if key in keys and value is not None and made.setdefault(keys[key], value) != value:
            raise ValueError(f"{keys[key]} is given twice, by {key} as {value!r}; give it once")
    messages = made.get("prompt")
    if isinstance(messages, list) and messages and isinstance(messages[0], dict):
        try:
            contents = [message["content"] for message in messages]
            parts = [part for it in contents for part in ([it] if isinstance(it, str) else it)]
            made["prompt"] = "\n\n".join(part if isinstance(part, str) else part["text"] for part in parts)
        except (KeyError, TypeError):
            raise ValueError(f"messages is {messages!r}; only text is read, as content") from None
    return workload_request({"id": fields.get("custom_id")} | made, position, "openai_batch")


def _recorded_request(kind: str, tokens_per_id: int, fields: Fields, position: str) -> Request:
    """Return the request of a trace that records lengths; raises ValueError."""
    time, prompt_name, output_name, unit, _, block = LAYOUTS[kind]
    if math.isnan(arrival := fields["arrival"]):
        raise ValueError(f"{time} is {fields.get(str(time))!r}; write {unit}")
    for key in (prompt_name, output_name):
        if isinstance(number := fields.get(key), _Number) and number < 1e15 and number.is_integer():
            fields[key] = int(number)
    length, output = (count(key, fields.get(key)) for key in (prompt_name, output_name))
    prompt: Prompt = length
    if block:
        hash_ids: Any = fields.get("hash_ids")
        require(isinstance(hash_ids, list), "hash_ids", hash_ids, "it must be a list of integers")
        if len(hash_ids) != (num_ids := -(-length // block)):
            wanted = f"input_length {length} makes {num_ids} blocks of {block} tokens; give one id a block"
            raise ValueError(f"hash_ids has {len(hash_ids)} ids, but {wanted}")
        ids = [count("an id of hash_ids", hash_id, 0, _LAST_ID) for hash_id in hash_ids]
        # The tokens depend on the ids alone, so prompts share KV just where their ids are equal.
        tokens = chain.from_iterable(_tokens(hash_id, tokens_per_id) for hash_id in ids)
        prompt = tuple(tokens)[: -(-length * tokens_per_id // block)]
    client = "" if block else fields.get("Session ID", "")
    return Request(position, prompt, output, arrival, TO_THE_END, client=client, output_length=output)


def _tokens(hash_id: int, num_tokens: int) -> tuple[int, ...]:
    """Return the tokens of an id: its bytes over and over, or itself where there is no room for them."""
    if num_tokens < (4 if hash_id < _HALF else 8):
        return (hash_id,) * num_tokens
    # Different for all ids, and for a small one its 4 bytes twice, of which every 4 tokens know it.
    pattern = (hash_id ^ hash_id % _HALF * _HALF).to_bytes(8, "little")
    # Python keeps one object of each number below 257, so a token takes no more than its place in a tuple.
    return tuple((pattern * -(-num_tokens // 8))[:num_tokens])


def _decoded(line: bytes) -> Any:
    try:
        return _DECODER.decode(line.decode())
    except (ValueError, RecursionError) as error:
        return ValueError(f"{line.decode(errors='replace')!r} is not JSON in UTF-8 ({error})")


def _rejection(fields: Fields, position: str, error: str, before: float) -> Rejected:
    name = fields.get("id", fields.get("custom_id"))
    # Half a surrogate pair cannot be written to a file, so no result may be named by it.
    if not isinstance(name, str) or not name or name.encode(errors="ignore").decode() != name:
        name = position
    time: Any = fields.get("arrival")
    return Rejected(name, error, float(time) if isinstance(time, float) and 0 <= time < math.inf else before)


# CSV files.


def _rows_of(content: bytes, kind: str) -> Iterator[tuple[int, Fields | ValueError]]:
    """Yield the rows of a CSV file by their columns, as `records_of` does; numbers of tokens are integers."""
    (_, first), *lines = numbered_lines(content)
    delimiter = _delimiter(first)
    header = _cells(first, delimiter)
    for number, line in lines:
        cells = _cells(line, delimiter)
        if len(cells) != len(header):
            fault = f"{len(cells)} values where the header names {len(header)}"
            yield number, ValueError(f"{fault}: {','.join(cells)!r}")
            continue
        row: Fields = dict(zip(header, cells, strict=True))
        for name in LAYOUTS[kind][1:3]:
            if _NUMBER.fullmatch(row[name]) and (tokens := float(row[name])).is_integer():
                row[name] = int(tokens)
        yield number, row


def _has_failed(row: Any) -> bool:
    return isinstance(row, dict) and row["Response tokens"] == 0 and isinstance(row["Request tokens"], int)


def _delimiter(header: bytes) -> str:
    return max(",;\t", key=lambda delimiter: header.count(delimiter.encode()))


def _cells(line: bytes, delimiter: str) -> list[str]:
    text = line.decode(errors="replace")
    try:
        # Line by line, so that a quote that nothing closes costs its own row alone.
        cells = next(csv.reader([text], delimiter=delimiter)) if '"' in text else text.split(delimiter)
    except csv.Error:
        cells = [text]
    return [cell.strip() for cell in cells]
