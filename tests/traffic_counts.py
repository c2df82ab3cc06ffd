"""Count the lengths in four public traces, and write the counts that notebook 14 draws from.

Azure 2023: CC-BY 4.0; Patel et al., Splitwise, ISCA 2024. Mooncake: Apache-2.0; Qin et al., FAST'25. The
traces are not part of this repository: name their folder in CBRESEARCH_DATA, or have them downloaded, and run

    python tests/traffic_counts.py
"""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbresearch import workloads

FOLDER = Path(__file__).resolve().parents[1] / "notebooks" / "counts"
LENGTHS = FOLDER / "traffic_lengths.csv"
PAIRS = FOLDER / "azure_conv_pairs.csv"

# Where the coupling of prompts and outputs is needed, and how finely it is kept.
COUPLED = "azure_conv"
NUM_BINS = 16

Tokens = NDArray[np.int64]


def read(trace: str) -> tuple[Tokens, Tokens]:
    """Return the prompt and the output lengths of a trace in tokens, as its requests arrived.

    Of a Mooncake trace, the prompts are in blocks of 512 tokens.
    """
    option = ":tokens_per_id=1" if trace.startswith("mooncake") else ""
    drawn = workloads.Joint.of(workloads.load(trace + option, np.random.default_rng(0)))
    return np.array(drawn.prompts), np.array(drawn.outputs)


def count_pairs(prompts: Tokens, outputs: Tokens) -> NDArray[np.int64]:
    """Count the requests by the 16th of all prompts that theirs is in, and the 16th of all outputs.

    Equal lengths are told apart by the order of arrival, so that all parts are of equal size but for 1.
    """
    ranks = [np.argsort(np.argsort(lengths, kind="stable")) for lengths in (prompts, outputs)]
    pairs: NDArray[np.int64] = np.zeros((NUM_BINS, NUM_BINS), dtype=np.int64)
    np.add.at(pairs, tuple(rank * NUM_BINS // len(rank) for rank in ranks), 1)
    return pairs


def committed_lengths(trace: str, part: str) -> Tokens:
    """Return all "prompt" or "output" lengths of a trace, shortest first."""
    rows = [row for row in _rows(LENGTHS) if (row["trace"], row["part"]) == (trace, part)]
    return np.repeat(*(np.array([int(row[name]) for row in rows]) for name in ("tokens", "requests")))


def committed_pairs() -> NDArray[np.int64]:
    """Return what `count_pairs` counted."""
    pairs: NDArray[np.int64] = np.zeros((NUM_BINS, NUM_BINS), dtype=np.int64)
    for row in _rows(PAIRS):
        pairs[int(row["prompt_bin"]), int(row["output_bin"])] = int(row["requests"])
    return pairs


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _write(path: Path, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(rows)


def main() -> None:
    """Write both files."""
    rows: list[tuple[Any, ...]] = []
    for trace in workloads.TRACES:
        prompts, outputs = read(trace)
        if trace == COUPLED:
            pairs = count_pairs(prompts, outputs)
            _write(
                PAIRS,
                ("prompt_bin", "output_bin", "requests"),
                [(*place, number) for place, number in np.ndenumerate(pairs)],
            )
        for part, lengths in (("prompt", prompts), ("output", outputs)):
            # Prompts matter only where they are drawn.
            if part == "output" or trace == COUPLED:
                values, counts = np.unique(lengths, return_counts=True)
                rows += [(trace, part, *pair) for pair in zip(values.tolist(), counts.tolist(), strict=True)]
    _write(LENGTHS, ("trace", "part", "tokens", "requests"), rows)


if __name__ == "__main__":
    main()
