"""Files that appear whole or not at all."""

import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby, starmap
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["write_columns", "write_json", "write_whole"]

_NUM_ROWS = 4096


def write_whole(path: Path, content: str | bytes | Iterable[str]) -> None:
    """Write a file so that it appears whole or not at all.

    Args:
        path: Where, perhaps beginning with `~`; its folder is made if it is not there.
        content: A text or its parts, which are written as UTF-8 with their newlines as they are, or bytes.
    """
    parts = [content] if isinstance(content, str | bytes) else content
    path = Path(path).expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines(part.encode() if isinstance(part, str) else part for part in parts)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file; a number that JSON cannot hold raises."""
    write_whole(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def write_columns(path: Path, tables: Mapping[str, Mapping[str, npt.NDArray[Any]]], label: str) -> None:
    """Write tables of equal columns below each other as a CSV file; None and NaN become empty cells.

    Args:
        path: The CSV file.
        tables: The columns of each table by its name.
        label: Header of the first column, which holds the names of the tables.
    """
    header = [label, *next(iter(tables.values()), ())]
    write_whole(path, chain([",".join(header) + "\n"], *starmap(_lines, tables.items())))


def _lines(name: str, columns: Mapping[str, npt.NDArray[Any]]) -> Iterator[str]:
    """Yield a table's lines part by part, so that each part finds the memory that the last one gave back."""
    for begin in range(0, max(map(len, columns.values())), _NUM_ROWS):
        part = [values[begin : begin + _NUM_ROWS] for values in columns.values()]
        yield "\n".join(map(",".join, zip(*_cells(name, part), strict=True))) + "\n"


def _cells(name: str, columns: Sequence[npt.NDArray[Any]]) -> Iterator[Sequence[str]]:
    """Yield the texts of columns; those of neighbours that seldom change are one text a row."""
    number = len(columns[0])
    yield [_text(name)] * number
    for is_constant, group in groupby(columns, _seldom_changes):
        neighbours = list(group)
        if not is_constant:
            yield from map(_texts, neighbours)
            continue
        first = np.flatnonzero(np.append(True, np.any([np.diff(values) for values in neighbours], axis=0)))
        texts = map(",".join, zip(*[_texts(values[first]) for values in neighbours], strict=True))
        yield np.repeat(np.array(list(texts), dtype=object), np.diff(first, append=number)).tolist()


def _seldom_changes(values: npt.NDArray[Any]) -> bool:
    return values.dtype.kind == "i" and 4 * int(np.count_nonzero(np.diff(values))) < len(values)


def _texts(values: npt.NDArray[Any]) -> list[str]:
    if values.dtype.kind == "f":
        if np.isnan(values).all():
            return [""] * len(values)
        texts = list(map(repr, values.tolist()))
        return [text.replace("nan", "") for text in texts] if np.isnan(values).any() else texts
    return list(map(str if values.dtype.kind == "i" else _text, values.tolist()))


def _text(value: Any) -> str:
    text = "" if value is None else str(value)
    return '"' + text.replace('"', '""') + '"' if set(text) & set(',"\r\n') else text
