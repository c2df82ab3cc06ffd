"""Finished runs in a folder, one file each, known by all that they depend on."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cbresearch.trace import write_json


@dataclass(frozen=True, slots=True)
class RunStore:
    """The finished runs of sweeps; several processes may use one folder at once.

    Attributes:
        folder: Where the files are.
    """

    folder: Path

    def load(self, key: str) -> Mapping[str, Any] | None:
        """Return the metrics of a finished run, or None where there is none.

        Raises:
            ValueError: The file is damaged.
        """
        path = self._path(key)
        try:
            stored = json.loads(path.read_bytes())
            metrics: dict[str, Any] = stored["metrics"]
            whole = stored["key"] == key and stored["sha256"] == _checksum(metrics)
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):
            whole = False
        if not whole:
            raise ValueError(f"{path.name} is damaged")
        return metrics

    def save(self, key: str, facts: Mapping[str, Any], metrics: Mapping[str, Any]) -> None:
        """Write a finished run's file, whole or not at all.

        Args:
            key: What the run is known by.
            facts: What a person knows it by.
            metrics: What it gave.
        """
        content = {"key": key, "sha256": _checksum(metrics), **facts, "metrics": dict(metrics)}
        # Who writes the same file at the same time writes the same numbers.
        write_json(self._path(key), content)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"


def _checksum(metrics: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(metrics).encode()).hexdigest()
