"""Traces as JSON lines: written whole, appended step by step, and read back, even a stranger's."""

import gzip
import json
import math
import reprlib
import warnings
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Self, get_args, get_origin, get_type_hints

from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.step import DecodeRun
from cbresearch.trace.records import Origin, RequestRecord, StepRecord
from cbresearch.trace.steps import Part

__all__ = ["TraceWriter"]

_FORMAT = {"format": "cbresearch.trace", "version": 1}

_type_hints = cache(get_type_hints)


@dataclass(frozen=True)
class Header:
    """What the first line holds, beside the format and its version."""

    policy: str
    scheduler: SchedulerConfig
    cache: CacheConfig
    origin: Origin


@dataclass(frozen=True)
class TraceLine:
    """One line behind the header; `tokens` are those that requests got from the step or decode run."""

    step: StepRecord | None = None
    run: DecodeRun | None = None
    queued: RequestRecord | None = None
    request: RequestRecord | None = None
    tokens: Mapping[str, tuple[int, ...]] | None = None


class TraceWriter:
    """Write a trace step by step; what is written survives a kill of the process.

    Each line is flushed. `load` gives a request that was queued and has not ended the tokens of its steps.

    Args:
        path: Where, not compressed; a file that is there is replaced.
        policy: Name of the policy, options included.
        scheduler: The limits of a step.
        cache: The KV pool.
        origin: What records the trace.

    Raises:
        ValueError: The path ends with ".gz".
    """

    def __init__(
        self,
        path: str | Path,
        *,
        policy: str,
        scheduler: SchedulerConfig,
        cache: CacheConfig,
        origin: Origin | None = None,
    ) -> None:
        if Path(path).suffix == ".gz":
            raise ValueError(f"{path}: what is appended is not compressed; give a name that ends otherwise")
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._file = Path(path).open("w", buffering=1, newline="\n")  # noqa: SIM115 - close() closes it
        self._write({**_FORMAT, **vars(Header(policy, scheduler, cache, origin or Origin()))})

    def step(self, part: Part, tokens: Mapping[str, int | Sequence[int]] | None = None) -> None:
        """Write a step or a decode run.

        Args:
            part: The step's record, or the run.
            tokens: Tokens that requests got from it by request id: one, or one for each step that served it.
        """
        got = {name: (new,) if isinstance(new, int) else tuple(new) for name, new in (tokens or {}).items()}
        self._write(_line(part, got or None))

    def queued(self, record: RequestRecord) -> None:
        """Write a request that the scheduler got to know."""
        self._write(TraceLine(queued=record))

    def request(self, record: RequestRecord) -> None:
        """Write a request that has ended or was rejected."""
        self._write(TraceLine(request=record))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, content: object) -> None:
        self._file.write(_encoded(content))


def written(path: Path, header: Header, parts: Sequence[Part], requests: Sequence[RequestRecord]) -> bytes:
    """Return the content of a trace's file, compressed if its name ends so."""
    lines = [{**_FORMAT, **vars(header)}, *map(_line, parts), *(TraceLine(request=it) for it in requests)]
    data = "".join(map(_encoded, lines)).encode()
    # No time inside, so that the same trace gives the same bytes.
    return gzip.compress(data, mtime=0) if path.suffix == ".gz" else data


def read(path: Path) -> tuple[Header, list[Part], tuple[RequestRecord, ...]]:
    """Return the header of a trace's file, its steps and its requests; see `trace.load`."""
    header, lines = _parsed(path)
    parts: list[Part] = []
    records: list[RequestRecord] = []
    unfinished: dict[str, int] = {}
    seated: dict[str, float] = {}
    preempted: Counter[str] = Counter()
    got: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for line in lines:
        if line.queued is not None:
            unfinished[line.queued.id] = len(records)
            records.append(line.queued)
        if line.request is not None:
            # A rejected request may have the id of another one.
            place = None if line.request.is_rejected else unfinished.pop(line.request.id, None)
            place = len(records) if place is None else place
            records[place : place + 1] = [line.request]
        part = line.run if line.step is None else line.step
        if part is None:
            continue
        parts.append(part)
        if isinstance(part, StepRecord):
            preempted.update(part.plan.preempted)
            for admission in part.plan.admitted:
                seated.setdefault(admission.request.id, part.start)
        ends = (part.end,) if isinstance(part, StepRecord) else part.ends
        for request_id, tokens in (line.tokens or {}).items():
            got[request_id] += zip(tokens, ends, strict=False)
    for request_id, place in unfinished.items():
        records[place] = replace(
            records[place],
            first_scheduled=seated.get(request_id),
            tokens=tuple(token for token, _ in got[request_id]),
            token_times=tuple(seconds for _, seconds in got[request_id]),
            num_preemptions=preempted[request_id],
        )
    return header, parts, tuple(records)


def _parsed(path: Path) -> tuple[Header, list[TraceLine]]:
    """Return the header and the lines behind it."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: this is no whole gzip file: {error}") from error
    *whole, rest = data.split(b"\n")
    head: Header | None = None
    lines: list[TraceLine] = []
    for number, line in enumerate([*whole, rest] if rest else whole, start=1):
        try:
            content = json.loads(line)
            if head is not None:
                lines.append(_checked(_read(TraceLine, content)))
            elif isinstance(content, dict) and _FORMAT.items() <= content.items():
                head = _read(Header, {name: value for name, value in content.items() if name not in _FORMAT})
            else:
                raise ValueError(f"this is no header of a trace, which has {_FORMAT}")
        except (ValueError, OverflowError, RecursionError) as error:
            if head is None or number <= len(whole):
                raise ValueError(f"{path}, line {number}: {error}") from error
            warnings.warn(f"{path}, line {number}: the line is cut off and left out", stacklevel=4)
    if head is None:
        raise ValueError(f"{path}: the file is empty; a trace begins with a header")
    return head, lines


def _checked(line: TraceLine) -> TraceLine:
    """Reject columns of unequal length."""
    tables: list[tuple[Sized, ...]] = []
    for record in filter(None, (line.queued, line.request)):
        tables.append((record.tokens, record.token_times))
    if (run := line.run) is not None:
        tables += [(run.durations, run.ends), (run.taken_in, run.taken_by, run.blocks)]
        tables.append((run.request_ids, run.seats, run.starts, run.num_steps))
    for lengths in ([*map(len, table)] for table in tables):
        if len(set(lengths)) > 1:
            raise ValueError(f"columns that belong together have {lengths} values")
    return line


def _line(part: Part, tokens: Mapping[str, tuple[int, ...]] | None = None) -> TraceLine:
    step, run = (part, None) if isinstance(part, StepRecord) else (None, part)
    return TraceLine(step, run, tokens=tokens)


def _encoded(content: object) -> str:
    return json.dumps(content, default=_plain, separators=(",", ":")) + "\n"


def _plain(value: Any) -> Any:
    """Return a dataclass as a dict of what is not its default, and a number of numpy's as Python's."""
    if not is_dataclass(value):
        return value.item()
    given = {field.name: (getattr(value, field.name), field.default) for field in fields(value)}
    return {name: item for name, (item, default) in given.items() if item != default}


def _json_type(kind: Any) -> Any:
    """Return the type that a value of some type has in parsed JSON."""
    if is_dataclass(kind) or get_origin(kind) is Mapping:
        return dict
    return list if get_origin(kind) is tuple or hasattr(kind, "_fields") else kind


def _read(kind: Any, value: Any) -> Any:
    """Return a parsed JSON value as a value of a type.

    Raises:
        ValueError: It is none; the message says where and why.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is UnionType:
        fitting = [choice for choice in arguments if _json_type(choice) is type(value)]
        return _read((fitting or arguments)[0], value)
    if type(value) is not _json_type(kind) and (kind, type(value)) != (float, int):
        raise ValueError(f"{reprlib.repr(value)} is no {getattr(kind, '__name__', kind)}")
    if kind is float and not value < math.inf:
        raise ValueError(f"{value} is no number that a trace holds")
    if origin is Mapping:
        return {name: _read(arguments[1], item) for name, item in value.items()}
    if origin is tuple and arguments[-1] is ...:
        each = arguments[0]
        if each in (int, float) and {each}.issuperset(map(type, value)) and all(map(math.isfinite, value)):
            return tuple(value)
        return tuple([_read(each, item) for item in value])
    if _json_type(kind) is list:
        names = arguments or kind._fields
        if len(names) != len(value):
            raise ValueError(f"{reprlib.repr(value)} has {len(value)} values, not {len(names)}")
        pairs = zip(names, value, strict=True)
        return tuple([_read(each, item) for each, item in pairs]) if origin else _build(kind, pairs)
    if is_dataclass(kind):
        return _build(kind, value.items())
    return float(value) if kind is float else value


def _build(kind: Any, values: Iterable[tuple[str, Any]]) -> Any:
    """Return a dataclass or a named tuple from parsed JSON values by name."""
    given, hints = {}, _type_hints(kind)
    for name, value in values:
        if name not in hints:
            raise ValueError(f"a {kind.__name__} has no {name!r}")
        try:
            given[name] = _read(hints[name], value)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    try:
        return kind(**given)
    except TypeError as error:
        raise ValueError(str(error)) from None
