"""Traces as JSON lines: written whole, appended step by step, and read back, even a stranger's."""

import gzip
import json
import math
import reprlib
import warnings
import zlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.step import DecodeRun
from cbresearch.trace.records import Origin, RequestRecord, StepRecord
from cbresearch.trace.steps import Part

__all__ = ["TraceWriter"]

_STRICT = {"extra": "forbid", "allow_inf_nan": False}


@dataclass(frozen=True)
class Header:
    """What the first line holds; readers know the file by `format` and `version`.

    A window of a run is kept as the run, with its `window`.
    """

    format: Literal["cbresearch.trace"]
    version: Literal[1]
    policy: str
    scheduler: SchedulerConfig
    cache: CacheConfig
    origin: Origin
    window: tuple[float, float] | None = None

    __pydantic_config__: ClassVar = _STRICT


@dataclass(frozen=True)
class TraceLine:
    """One line behind the header; `tokens` are those that requests got from the step or decode run."""

    step: StepRecord | None = None
    run: DecodeRun | None = None
    queued: RequestRecord | None = None
    request: RequestRecord | None = None
    tokens: Mapping[str, tuple[int, ...]] | None = None

    __pydantic_config__: ClassVar = _STRICT


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
        self._write(Header("cbresearch.trace", 1, policy, scheduler, cache, origin or Origin()))

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
    lines = [header, *map(_line, parts), *(TraceLine(request=it) for it in requests)]
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
    if not data:
        raise ValueError(f"{path}: the file is empty; a trace begins with a header")
    first, *others = data.split(b"\n")
    try:
        header: Header = _read(Header, first)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}, line 1: this is no header of a trace: {error}") from None
    lines: list[TraceLine] = []
    for number, line in enumerate(others, start=2):
        try:
            if line or number <= len(others):
                lines.append(_checked(_read(TraceLine, line)))
        except (ValueError, RecursionError) as error:
            if number <= len(others):
                raise ValueError(f"{path}, line {number}: {error}") from None
            warnings.warn(f"{path}, line {number}: the line is cut off and left out", stacklevel=4)
    return header, lines


def _checked(line: TraceLine) -> TraceLine:
    """Reject columns of unequal length, and numbers of a request that are none."""
    tables: list[tuple[Sized, ...]] = []
    for record in filter(None, (line.queued, line.request)):
        tables.append((record.tokens, record.token_times))
        logprobs = (value for one in record.logprobs for value in (one.logprob, *one.top_logprobs))
        for value in (record.arrival, record.queued, record.first_scheduled, *record.token_times, *logprobs):
            # The logarithm of a probability of 0 is -inf.
            if value is not None and not value < math.inf:
                raise ValueError(f"{value} is no number that a trace holds")
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


@cache
def _adapter(kind: Any) -> Any:
    # Loaded when a file is first read: a simulation starts without it.
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _read(kind: Any, line: bytes) -> Any:
    """Return a line of JSON as a value of a type.

    Raises:
        ValueError: It is none; the message says where and why.
    """
    from pydantic import ValidationError

    try:
        if b"\\ud" in line:
            # The strict reader rejects half a surrogate pair, which an id or a message may hold.
            return _adapter(kind).validate_python(json.loads(line))
        return _adapter(kind).validate_json(line, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = "".join(f"{place}: " for place in first["loc"])
        reason = first["msg"].removeprefix("Value error, ")
        raise ValueError(f"{where}{reason}; it is {reprlib.repr(first['input'])}") from None
