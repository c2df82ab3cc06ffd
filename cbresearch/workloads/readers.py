"""Read JSON and the CSV files of public traces; a bad line is rejected by itself.

Traces of Mooncake (Qin et al., FAST'25) and of Qwen (Wang et al., ATC'25) tell which prompts begin alike,
without the prompts.
"""

import csv
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields as fields_of
from functools import partial
from itertools import chain, pairwise
from typing import Any

from cbresearch.checks import count
from cbresearch.names import suggestion
from cbresearch.request import Rejected, Request, SamplingParams
from cbresearch.workloads.common import check_text, numbered_lines, relative_seconds, require, shown
from cbresearch.workloads.requests import TO_THE_END, estimated_tokens

Fields = dict[str, Any]
"""What one JSON object holds."""

BLOCKS: Mapping[str, tuple[int, str, int]] = {"mooncake": (512, "ms", 3), "qwen": (16, "s", 0)}
"""The kinds whose ids stand for blocks: tokens of a block, and the unit of times, 10^3 or 10^0 a second."""

TABLES: Mapping[str, tuple[str | None, str, str]] = {
    "azure": ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    "burstgpt": ("Timestamp", "Request tokens", "Response tokens"),
    "vidur": ("arrived_at", "num_prefill_tokens", "num_decode_tokens"),
    "vidur_lengths": (None, "num_prefill_tokens", "num_decode_tokens"),
}
"""The kinds of CSV files: the columns of arrivals, prompt lengths and output lengths in tokens."""

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

_HALF, _ALL_IDS = 2**32, range(2**64)

_STAMP = re.compile(r"(199|20\d)\d-\d\d-\d\d[ T]\d\d:\d\d:\d\d(\.\d{1,9})?(Z| ?[+-]\d\d(:?\d\d)?)?", re.ASCII)
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
    """Return the kind of a file: one of `TABLES` by its header, or one of `EXAMPLES` by its first keys.

    Args:
        name: The file's name, for error messages.
        content: What it holds.

    Raises:
        ValueError: The first line is no header of a known trace, and no line begins an object, or the file's
            name ends in .csv.
    """
    lines = numbered_lines(content)
    header = lines[0][1] if lines else b""
    columns = _cells(header, _delimiter(header))
    if not lines:
        return "workload"
    for kind, names in TABLES.items():
        if {column for column in names if column} <= set(columns):
            return kind
    is_json = any(line.lstrip()[:1] in (b"{", b"[") for _, line in lines)
    if not is_json or name.lower().endswith(".csv"):
        # Each once, in the order of the table: two kinds may share a column.
        known = dict.fromkeys(column for names in TABLES.values() for column in names[1:])
        near = next((suggestion(column, known) for column in columns if column not in known), "")
        line = f"the first line, {shown(','.join(columns))}, is no header of a known trace"
        also = "" if is_json else f", and no line is an object such as {EXAMPLES['workload']}"
        raise ValueError(f"workload {name!r}: {line}{also}; {near}")
    for _, value in records_of(content):
        for mark, kind in _MARKS.items():
            if isinstance(value, dict) and mark in value:
                return kind
    return "workload"


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
    text, place, number = content.decode("utf-8-sig", errors="surrogateescape"), 0, 1
    while found := _VALUE.search(text, place):
        number += text.count("\n", place, found.start())
        try:
            value, place = _DECODER.raw_decode(text, found.start())
        except (ValueError, RecursionError):
            # The next line may be whole again.
            place = text.find("\n", found.start()) + 1 or len(text)
            value = _decoded(text[found.start() : place].rstrip().encode(errors="surrogateescape"))
        yield number, value
        number += text.count("\n", found.start(), place)
    if text.lstrip().startswith("[") and not text.rstrip().endswith("]"):
        yield number, ValueError("the array has no end")


def read_json(
    records: Iterable[tuple[int, Any]], kind: str, tokens_per_id: int | None = None
) -> list[Request | Rejected]:
    """Return the requests of a JSON file, in their order, with a `Rejected` in the place of each bad value.

    Args:
        records: What the file holds, see `records_of`.
        kind: A key of `EXAMPLES`.
        tokens_per_id: Tokens that an id of a trace stands for; by default those of its block.

    Raises:
        ValueError: `tokens_per_id` is not from 1 to the tokens of a block.
    """
    records = list(records)
    builders = {"sharegpt": sharegpt_request, "openai_batch": openai_request}
    build: Callable[[Fields, str], Request] = builders.get(kind, workload_request)
    if kind in BLOCKS:
        block, unit, power = BLOCKS[kind]
        num_tokens = count("tokens_per_id", block if tokens_per_id is None else tokens_per_id, 1, block)
        build = partial(_block_request, block, num_tokens, unit)
        objects = [value for _, value in records if isinstance(value, dict)]
        times = [fields.get("timestamp") for fields in objects]
        for fields, arrival in zip(objects, relative_seconds(times, power, since_first=False), strict=True):
            fields["arrival"] = arrival
    requests: list[Request | Rejected] = []
    taken: dict[str, tuple[int, int]] = {}
    for position, (number, value) in enumerate(records):
        try:
            if not isinstance(value, dict):
                said = value if isinstance(value, ValueError) else f"{shown(value)} is not an object"
                raise ValueError(f"{said}; write one object a line, such as {EXAMPLES[kind]}")
            request = build(value, str(position))
            if (first := taken.setdefault(request.id, (number, position))) != (number, position):
                remedy = "give it one of its own"
                raise ValueError(f"id {request.id!r} belongs to line {first[0]} already; {remedy}")
            requests.append(request)
        except ValueError as error:
            said = str(error)
            said = said if len(said) <= 300 else f"{said[:150]} … {said[-150:]}"
            fields = value if isinstance(value, dict) else {}
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


def sharegpt_request(fields: Fields, position: str) -> Request:
    """Return the request of a ShareGPT conversation, see `read_trace`; raises ValueError."""
    try:
        turns = [(turn["from"] in ("human", "user"), turn["value"]) for turn in fields["conversations"]]
        places = [place for place, (one, after) in enumerate(pairwise(turns), start=1) if one[0] > after[0]]
        asked, answer = "\n\n".join(text for _, text in turns[: places[0]]), turns[places[0]][1]
        max_tokens = estimated_tokens("the answer", answer)
    except (AttributeError, IndexError, KeyError, TypeError):
        given = shown(fields.get("conversations"))
        remedy = f"give a user's text and an answer to it, such as {EXAMPLES['sharegpt']}"
        raise ValueError(f"conversations is {given}; {remedy}") from None
    made = {"prompt": asked, "max_tokens": max_tokens, "ignore_eos": True}
    name = fields.get("id")
    return workload_request({"id": None if name is None else str(name)} | made, position)


def openai_request(fields: Fields, position: str) -> Request:
    """Return the request of a line of an OpenAI batch file, see `read_trace`; raises ValueError."""
    body = fields.get("body")
    if not isinstance(body, dict):
        raise ValueError(f"body is {shown(body)}; give an object, such as {EXAMPLES['openai_batch']}")
    keys = {"messages": "prompt", "input": "prompt", "prompt": "prompt", "max_tokens": "max_tokens"}
    keys |= {"max_completion_tokens": "max_tokens", "max_output_tokens": "max_tokens"}
    keys |= {key: key for key in _SAMPLING_KEYS}
    made = {keys[key]: value for key, value in body.items() if key in keys and value is not None}
    messages = made.get("prompt")
    if isinstance(messages, list) and messages and isinstance(messages[0], dict):
        try:
            contents = [message["content"] for message in messages]
            parts = [part for it in contents for part in ([it] if isinstance(it, str) else it)]
            made["prompt"] = "\n\n".join(part if isinstance(part, str) else part["text"] for part in parts)
        except (KeyError, TypeError):
            raise ValueError(f"messages is {shown(messages)}; only text is read, as content") from None
    return workload_request({"id": fields.get("custom_id")} | made, position)


def _block_request(block: int, tokens_per_id: int, unit: str, fields: Fields, position: str) -> Request:
    """Return the request of a line whose ids stand for blocks of tokens; raises ValueError."""
    is_time = not math.isnan(fields["arrival"])
    require(is_time, "timestamp", fields.get("timestamp"), f"it must be a number of {unit}, 0 or more")
    length, output = (count(key, fields.get(key)) for key in ("input_length", "output_length"))
    hash_ids: Any = fields.get("hash_ids")
    require(isinstance(hash_ids, list), "hash_ids", hash_ids, "it must be a list of integers")
    if len(hash_ids) != (num_ids := -(-length // block)):
        wanted = f"input_length {length} makes {num_ids} blocks of {block} tokens; give one id a block"
        raise ValueError(f"hash_ids has {len(hash_ids)} ids, but {wanted}")
    for place, hash_id in enumerate(hash_ids):
        if type(hash_id) is not int or hash_id not in _ALL_IDS:
            limits = f"ids are integers from 0 to {_ALL_IDS[-1]}"
            raise ValueError(f"hash_ids has {hash_id!r} at place {place}; {limits}")
    # The tokens depend on the ids alone, so prompts share KV just where their ids are equal.
    tokens = chain.from_iterable(_tokens(hash_id, tokens_per_id) for hash_id in hash_ids)
    prompt = tuple(tokens)[: -(-length * tokens_per_id // block)]
    return Request(position, prompt, output, fields["arrival"], TO_THE_END, output_length=output)


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
        text = shown(line.decode(errors="replace"))
        return ValueError(f"{text} is not JSON in UTF-8 ({error})")


def _rejection(fields: Fields, position: str, error: str) -> Rejected:
    name = fields.get("id", fields.get("custom_id"))
    # Half a surrogate pair cannot be written to a file, so no result may be named by it.
    if not isinstance(name, str) or not name or name.encode(errors="ignore").decode() != name:
        name = position
    time: Any = fields.get("arrival")
    is_time = isinstance(time, int | float) and not isinstance(time, bool) and 0 <= time < math.inf
    return Rejected(name, error, float(time) if is_time else 0.0)


# CSV files.


def read_rows(
    lines: list[tuple[int, bytes]], kind: str, failures: str = "skip"
) -> tuple[list[Request | Rejected], dict[str, int]]:
    """Return the requests of a trace's rows, and how often which repair was made.

    Arrivals count from the earliest row. Outputs run to their full length, as recorded. Two repairs are made
    and counted: rows out of order are sorted by arrival, and failed requests (BurstGPT records them with 0
    output tokens) are left out. Any other bad row is rejected.

    Args:
        lines: Numbers and lines of the file without blank ones, the header first.
        kind: A key of `TABLES`.
        failures: "skip" leaves failed requests out, "reject" puts a `Rejected` in their place.

    Returns:
        The requests in order of arrival, with a `Rejected` in the place of each bad row; and the repairs.

    Raises:
        ValueError: `failures` is none of the two.
    """
    import pandas as pd

    require(failures in ("skip", "reject"), "failures", failures, "it must be 'skip' or 'reject'")
    delimiter = _delimiter(lines[0][1])
    header, *rows = (_cells(line, delimiter) for _, line in lines)

    def column(name: str) -> Any:
        place = header.index(name)
        return pd.Series([row[place] if len(row) == len(header) else "" for row in rows], dtype=str)

    time_name, prompt_name, output_name = TABLES[kind]
    frame = pd.DataFrame({"prompt": _counts(column(prompt_name)), "output": _counts(column(output_name))})
    frame["client"] = column("Session ID") if "Session ID" in header else ""
    if kind == "burstgpt" and failures == "skip":
        frame = frame[(frame.output != 0) | frame.prompt.isna()]
    frame["time"] = 0.0 if time_name is None else relative_seconds(_times(column(time_name)[frame.index]))
    # A row of unknown time stays with the row before it.
    frame["arrival"] = frame.time.ffill().fillna(0.0)
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


def _counts(texts: Any) -> Any:
    """Return numbers of tokens as a pandas series of floats, NaN where a text is none."""
    import pandas as pd

    counts = pd.to_numeric(texts, errors="coerce").astype(float)
    return counts.where((counts >= 0) & (counts < 2**53) & (counts % 1 == 0))


def _times(texts: Any) -> list[str]:
    """Return the times of a column with nanoseconds since 1970 in the place of dates."""
    import pandas as pd

    stamps = texts.where([_STAMP.fullmatch(text) is not None for text in texts.tolist()])
    times = pd.to_datetime(stamps, format="ISO8601", utc=True, errors="coerce").astype("datetime64[ns, UTC]")
    pairs = zip(times.astype("int64").tolist(), texts.tolist(), strict=True)
    return [text if time == pd.NaT.value else str(time) for time, text in pairs]


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
