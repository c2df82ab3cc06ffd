"""Traces as JSON lines: written whole, appended step by step, and read back, even a stranger's."""

import gzip
import json
import math
import reprlib
import warnings
import zlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Self, get_args, get_origin, get_type_hints

from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.step import DecodeRun
from cbresearch.trace.files import write_whole
from cbresearch.trace.records import RequestRecord, StepRecord
from cbresearch.trace.run import Origin, Trace
from cbresearch.trace.steps import Part, Steps

_FORMAT = {"format": "cbresearch.trace", "version": 1}

_type_hints = cache(get_type_hints)


@dataclass(frozen=True)
class _Line:
    """What one line behind the header holds; `tokens` are those that the requests got from the step."""

    step: StepRecord | None = None
    run: DecodeRun | None = None
    queued: RequestRecord | None = None
    request: RequestRecord | None = None
    tokens: Mapping[str, tuple[int, ...]] | None = None


class TraceWriter:
    """Write a trace step by step; what is written survives a kill of the process.

    Each line is flushed. `load` gives a request that was queued and has not ended the tokens of its steps.

    Args:
        path: Where; a file that is there is replaced.
        policy: Name of the policy, options included.
        scheduler: The limits of a step.
        cache: The KV pool.
        origin: What records the trace.
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
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._file = Path(path).open("w", buffering=1, newline="\n")  # noqa: SIM115 - close() closes it
        self._write({**_FORMAT, **_plain(Trace(policy, scheduler, cache, origin=origin or Origin()))})

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
        self._write(_Line(queued=record))

    def request(self, record: RequestRecord) -> None:
        """Write a request that has ended or was refused."""
        self._write(_Line(request=record))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, content: object) -> None:
        self._file.write(_encoded(content))


def save(trace: Trace, path: str | Path) -> Path:
    """Write a whole trace; see `Trace.save`."""
    path, head = Path(path), _plain(replace(trace, steps=(), requests=()))
    lines = [{**_FORMAT, **head}, *map(_line, trace.parts), *(_Line(request=it) for it in trace.requests)]
    text = "".join(map(_encoded, lines))
    # No time inside, so that the same trace gives the same bytes.
    write_whole(path, gzip.compress(text.encode(), mtime=0) if path.suffix == ".gz" else text)
    return path


def load(path: str | Path) -> Trace:
    """Read a trace that `Trace.save` or a `TraceWriter` wrote.

    A last line that is cut off, as a kill of the writer leaves it, is left out with a warning.

    Args:
        path: The file; with the ending ".gz" it is decompressed.

    Raises:
        ValueError: It is no trace; the message names the file, the line and what is wrong there.
    """
    trace, lines = _parsed(Path(path))
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
            # A refused request may have the id of another one.
            place = None if line.request.is_refused else unfinished.pop(line.request.id, None)
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
    return replace(trace, steps=Steps(parts), requests=tuple(records))


def _parsed(path: Path) -> tuple[Trace, list[_Line]]:
    """Return the header, as a trace without steps and requests, and the lines behind it."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: this is no whole gzip file: {error}") from error
    *lines, rest = data.split(b"\n")
    found: list[Any] = []
    for number, line in enumerate([*lines, rest] if rest else lines, start=1):
        try:
            content = json.loads(line)
            found.append(_read(_Line, content) if found else _read(Trace, _without_format(content)))
        except (ValueError, OverflowError, RecursionError) as error:
            if not found or number <= len(lines):
                raise ValueError(f"{path}, line {number}: {error}") from error
            warnings.warn(f"{path}, line {number}: the line is cut off and left out", stacklevel=3)
    if not found:
        raise ValueError(f"{path}: the file is empty; a trace begins with a header")
    return found[0], found[1:]


def _without_format(content: Any) -> Any:
    given = {name: content.pop(name, None) for name in _FORMAT} if isinstance(content, dict) else None
    if given != _FORMAT:
        raise ValueError(f"the file begins with {reprlib.repr(given)}; a trace's header has {_FORMAT}")
    return content


def _line(part: Part, tokens: Mapping[str, tuple[int, ...]] | None = None) -> _Line:
    return _Line(part, tokens=tokens) if isinstance(part, StepRecord) else _Line(run=part, tokens=tokens)


def _encoded(content: object) -> str:
    return json.dumps(content, default=_plain, separators=(",", ":")) + "\n"


def _plain(value: Any) -> Any:
    """Return a dataclass as a dict of what is not its default, and a number of numpy's as Python's."""
    if not is_dataclass(value):
        return value.item()
    given = {field.name: (getattr(value, field.name), field.default) for field in fields(value)}
    return {name: item for name, (item, default) in given.items() if item != default}


def _read(kind: Any, value: Any) -> Any:
    """Return a parsed JSON value as a value of a type.

    Raises:
        ValueError: It is none; the message says where and why.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return _read_any_of(arguments, value)
    if origin is tuple and isinstance(value, list) and arguments[-1] is ...:
        if {arguments[0]} == set(map(type, value)) and (
            arguments[0] is not float or all(map(math.isfinite, value))
        ):
            return tuple(value)
        return tuple([_read(arguments[0], item) for item in value])
    if origin is tuple and isinstance(value, list) and len(value) == len(arguments):
        return tuple(map(_read, arguments, value))
    if origin is Mapping and isinstance(value, dict):
        return {key: _read(arguments[1], item) for key, item in value.items()}
    if is_dataclass(kind) and isinstance(value, dict):
        return _build(kind, value)
    if hasattr(kind, "_fields") and isinstance(value, list) and len(value) <= len(kind._fields):
        return _build(kind, dict(zip(kind._fields, value, strict=False)))
    if kind is float and type(value) in (int, float) and value < math.inf:
        return float(value)
    if type(value) is kind:
        return value
    raise ValueError(f"{reprlib.repr(value)} is no {getattr(kind, '__name__', kind)}")


def _read_any_of(kinds: Sequence[Any], value: Any) -> Any:
    if value is None and NoneType in kinds:
        return None
    errors = []
    for kind in [kind for kind in kinds if kind is not NoneType]:
        try:
            return _read(kind, value)
        except ValueError as error:
            errors.append(str(error))
    raise ValueError(", and ".join(errors))


def _build(kind: Any, values: Mapping[str, Any]) -> Any:
    given, hints = {}, _type_hints(kind)
    for name, value in values.items():
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
