"""Count how Mooncake's traces share blocks, and write the counts that notebook 05 shows.

The traces are public, but not part of this repository: name their folder in CBRESEARCH_DATA, then run

    python tests/mooncake_counts.py
"""

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from cbresearch.blocks import BlockManager
from tqdm import tqdm

from cbresearch import formulas, workloads
from cbresearch.config import CacheConfig

FOLDER = Path(__file__).resolve().parents[1] / "notebooks" / "counts"
SIZES = FOLDER / "mooncake_hits_by_cache_size.csv"
REFERENCES = FOLDER / "mooncake_blocks_by_references.csv"

FILES = {name: f"mooncake_{name}_trace.jsonl" for name in ("conversation", "synthetic")}

# The least is more than the longest prompt has, the largest more than all prompts have.
NUM_BLOCKS = (500, 1_000, 2_000, 3_000, 5_000, 7_000, 10_000, 15_000, 20_000, 30_000, 50_000, 70_000, 100_000)
NUM_BLOCKS += (150_000, 200_000, 400_000)


def measured_hits(chains: Sequence[Sequence[int]], num_blocks: int) -> int:
    """Return the hits of one request after the other in a block manager whose blocks stand for 512 tokens."""
    blocks = BlockManager(CacheConfig(num_blocks, 1, prefix_caching=True))
    num_hits = 0
    for chain in chains:
        # A prompt's last token is never found; here the token behind the last id is the one to go without.
        matched = blocks.match((*chain, -1))
        num_hits += len(matched)
        blocks.share("r", matched)
        assert blocks.allocate("r", len(chain)) is not None
        blocks.enter("r", chain, len(chain))
        blocks.free("r")
    blocks.check()
    return num_hits


def count_references(chains: Sequence[Sequence[int]]) -> np.ndarray:
    """Return how many blocks are asked for 0, 1, 2, … times."""
    ids, times = np.unique(np.concatenate(chains), return_counts=True)
    assert ids.size
    return np.bincount(times)


def committed_sizes() -> dict[str, dict[int, int]]:
    """Return the hits by trace and number of blocks, predicted in one pass and measured alike."""
    found: dict[str, dict[int, int]] = {name: {} for name in FILES}
    for row in _rows(SIZES):
        assert row["predicted_hits"] == row["measured_hits"]
        found[row["trace"]][int(row["cache_blocks"])] = int(row["measured_hits"])
    return found


def committed_references() -> dict[str, np.ndarray]:
    """Return, by trace, how many blocks are asked for 0, 1, 2, … times."""
    found: dict[str, dict[int, int]] = {name: {} for name in FILES}
    for row in _rows(REFERENCES):
        found[row["trace"]][int(row["references"])] = int(row["blocks"])
    return {
        name: np.array([times.get(number, 0) for number in range(max(times) + 1)])
        for name, times in found.items()
    }


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _write(path: Path, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(rows)


def main() -> None:
    """Write both files."""
    sizes: list[tuple[object, ...]] = []
    references: list[tuple[object, ...]] = []
    for name, file in FILES.items():
        requests = workloads.read_trace(file, tokens_per_id=1).requests
        chains = [request.prompt for request in requests]
        depths = formulas.reuse_depths(chains)
        for num_blocks in tqdm(NUM_BLOCKS, desc=name):
            predicted = np.count_nonzero(depths <= num_blocks)
            sizes.append((name, num_blocks, predicted, measured_hits(chains, num_blocks)))
        times = count_references(chains)
        references += [(name, number, blocks) for number, blocks in enumerate(times.tolist()) if blocks]
    _write(SIZES, ("trace", "cache_blocks", "predicted_hits", "measured_hits"), sizes)
    _write(REFERENCES, ("trace", "references", "blocks"), references)


if __name__ == "__main__":
    main()
