"""Read the CSV files of public traces; a bad row costs itself alone."""

import codecs
import csv
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timedelta
from itertools import accumulate, islice, pairwise
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from cbresearch.request import Refusal, Request
from cbresearch.workloads.draws import poisson_arrivals
from cbresearch.workloads.lines import shown, suggestion
from cbresearch.workloads.mix import TO_THE_END


class Table(NamedTuple):
    """What a kind of CSV file looks like.

    Attributes:
        prompt: Column of prompt lengths in tokens.
        output: Column of output lengths in tokens.
        time: Column of arrivals, or None.
        nanoseconds: Turns an arrival's text into nanoseconds since whenever; raises ValueError.
        client: Column of clients, which may be absent.
        failures: Whether an output of 0 tokens means a request that failed, and no error of the file.
    """

    prompt: str
    output: str
    time: str | None
    nanoseconds: Callable[[str], int]
    client: str | None = None
    failures: bool = False


class Rows(NamedTuple):
    """What a file held.

    Attributes:
        requests: The requests in order of arrival, with a `Refusal` in the place of each bad row.
        repairs: How often each kind of repair was made.
    """

    requests: list[Request | Refusal]
    repairs: Mapping[str, int]


def table_of(content: bytes) -> str | None:
    """Return the kind of CSV file that a header in the first line tells, or None."""
    columns = set(_cells(_head(content)))
    for kind, table in TABLES.items():
        if {table.prompt, table.output, *filter(None, [table.time])} <= columns:
            return kind
    return None


def unknown_header(name: str, content: bytes) -> str:
    """Return what to say of a CSV file without a header that is known."""
    columns = _cells(_head(content))
    # Each once, in the order of the table: two kinds may share a column.
    known = dict.fromkeys(column for table in TABLES.values() for column in (table.prompt, table.output))
    missed = [column for column in columns if column not in known]
    near = suggestion(missed[0], known) if missed else ""
    header = shown(",".join(columns))
    return f"workload {name!r}: the first line, {header}, is no header of a known trace; {near}"


def read_table(
    content: bytes,
    kind: str,
    rng: np.random.Generator,
    *,
    n: int | None = None,
    rate: float | None = None,
    failures: str = "skip",
) -> Rows:
    """Return the requests of a trace's rows.

    Arrivals count from the earliest row. Outputs run to their full length, as recorded. These repairs are
    made, and counted: a byte order mark, line ends of CRLF, blank lines, and a last line that no newline
    ends are accepted; rows out of order are sorted by arrival; failed requests (BurstGPT records them with 0
    output tokens) are left out. Any other bad row is refused.

    Args:
        content: The file's bytes.
        kind: A key of `TABLES`.
        rng: Draws arrivals where `rate` asks for them.
        n: Read so many rows only.
        rate: Requests per second of a Poisson process, for a file without arrivals; by default all come at 0.
        failures: "skip" leaves failed requests out, "refuse" puts a `Refusal` in their place.

    Raises:
        ValueError: `failures` is none of the two, or `rate` is not positive.
    """
    if failures not in ("skip", "refuse"):
        raise ValueError(f"failures is {failures!r}; it must be 'skip' or 'refuse'")
    repairs: Counter[str] = Counter()
    lines = _lines(content, repairs)
    table, columns = TABLES[kind], _cells(next(lines)[1])
    places = [columns.index(column) for column in (table.prompt, table.output)]
    time_place = columns.index(table.time) if table.time is not None else None
    client_place = columns.index(table.client) if table.client in columns else None
    rows: list[tuple[str, int, int, str] | tuple[str, str]] = []
    times: list[int | None] = []
    for position, (number, line) in enumerate(islice(lines, n)):
        time: int | None = None
        try:
            cells = _cells(line)
            if len(cells) != len(columns):
                raise ValueError(f"{len(cells)} values where the header names {len(columns)}: {shown(line)}")
            if time_place is not None:
                time = _time(table, columns[time_place], cells[time_place])
            prompt, output = (_count(columns[place], cells[place]) for place in places)
            if table.failures and not output and failures == "skip":
                repairs["failed requests left out"] += 1
                continue
            for column, count in ((table.prompt, prompt), (table.output, output)):
                if not count:
                    raise ValueError(f"{column} is 0; a request has at least 1 token of each")
            client = cells[client_place] if client_place is not None else ""
            rows.append((str(position), prompt, output, client))
        except ValueError as error:
            rows.append((str(position), f"line {number}: {error}"))
        times.append(time)
    if time_place is None:
        arrivals = poisson_arrivals(rng, len(rows), rate) if rate is not None else [0.0] * len(rows)
    else:
        first = min((time for time in times if time is not None), default=0)
        # A row of unknown time stays with the row before it.
        known = accumulate(times, _later_known)
        arrivals = [0.0 if time is None else (time - first) / 1e9 for time in known]
    repairs["rows sorted by arrival"] += sum(later < earlier for earlier, later in pairwise(arrivals))
    order = sorted(range(len(rows)), key=arrivals.__getitem__)
    return Rows([_built(rows[place], arrivals[place]) for place in order], dict(+repairs))


def _later_known(before: int | None, time: int | None) -> int | None:
    return before if time is None else time


def _built(row: tuple[str, int, int, str] | tuple[str, str], arrival: float) -> Request | Refusal:
    if len(row) == 2:
        return Refusal(*row, arrival)
    name, prompt, output, client = row
    return Request(name, prompt, output, arrival, TO_THE_END, client=client, output_length=output)


def _head(content: bytes) -> str:
    return next((line for _, line in _lines(content, Counter())), "")


def _lines(content: bytes, repairs: Counter[str]) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not blank, with their numbers from 1."""
    if content.startswith(codecs.BOM_UTF8):
        repairs["byte order mark"] += 1
        content = content.removeprefix(codecs.BOM_UTF8)
    lines = content.split(b"\n")
    if not lines[-1]:
        lines.pop()
    else:
        repairs["no newline at the end"] += 1
    for number, line in enumerate(lines, start=1):
        if line.endswith(b"\r"):
            repairs["lines ended by CRLF"] += 1
            line = line[:-1]
        if line.strip():
            yield number, line.decode(errors="replace")
        else:
            repairs["blank lines"] += 1


def _cells(line: str) -> list[str]:
    # Line by line, so that a quote that nothing closes costs its own row alone.
    cells = next(csv.reader([line]), []) if '"' in line else line.split(",")
    return [cell.strip() for cell in cells]


def _count(column: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise ValueError(f"{column} is {shown(text)}; it must be a whole number of tokens, 0 or more")
    return int(text)


def _time(table: Table, column: str, text: str) -> int:
    try:
        return table.nanoseconds(text)
    except ValueError as error:
        raise ValueError(f"{column} is {shown(text)}; {error}") from None


_STAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(?:Z|[+]00:00)?")
_NUMBER = re.compile(r"(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_EPOCH = datetime(1970, 1, 1)
_SECOND = timedelta(seconds=1)


def _from_stamp(text: str) -> int:
    """Return nanoseconds since 1970: an integer, as a float cannot tell 100 ns apart so far from 0."""
    match = _STAMP.fullmatch(text)
    try:
        if match is None:
            raise ValueError
        whole = datetime.fromisoformat(match[1])
    except ValueError:
        raise ValueError("write a UTC time such as 2023-11-16 18:15:46.6805900") from None
    return (whole - _EPOCH) // _SECOND * 10**9 + int((match[2] or "").ljust(9, "0"))


def _from_seconds(text: str) -> int:
    seconds = float(text) if _NUMBER.fullmatch(text) else -1.0
    if not 0 <= seconds < 1e12:
        raise ValueError("write seconds, 0 or more, such as 4.25")
    return round(seconds * 1e9)


TABLES: Mapping[str, Table] = MappingProxyType(
    {
        "azure": Table("ContextTokens", "GeneratedTokens", "TIMESTAMP", _from_stamp),
        "burstgpt": Table(
            "Request tokens", "Response tokens", "Timestamp", _from_seconds, "Session ID", failures=True
        ),
        "vidur": Table("num_prefill_tokens", "num_decode_tokens", "arrived_at", _from_seconds),
        "vidur_lengths": Table("num_prefill_tokens", "num_decode_tokens", None, _from_seconds),
    }
)
"""The kinds of CSV files that are read, by name."""
