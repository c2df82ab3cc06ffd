"""Files that appear whole or not at all."""

import csv
import json
import os
import tempfile
from collections.abc import Iterable
from io import StringIO
from pathlib import Path
from typing import Any


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file so that it appears whole or not at all.

    Args:
        path: Where; its folder is made if it is not there.
        content: A text, which is written as UTF-8 with its newlines as they are, or bytes.
    """
    content = content.encode() if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_csv(path: Path, columns: Iterable[str], rows: Iterable[dict[str, Any]]) -> None:
    """Write rows as a CSV file with a header, even if there are none; None becomes an empty cell."""
    text = StringIO()
    writer = csv.DictWriter(text, fieldnames=list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_whole(path, text.getvalue())


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file; a number that JSON cannot hold raises."""
    write_whole(path, json.dumps(value, indent=1, allow_nan=False) + "\n")
