"""Plan a call of the paged attention on the host: which program computes which queries over which keys."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

# Columns of a work item, in the order in which the kernel reads them.
ITEM_FIELDS = ("sequence", "token", "num_queries", "position", "begin", "end", "partial", "is_first")
MERGE_FIELDS = ("token", "first_partial", "stride", "num_splits")

# Bytes that a multiprocessor must have under way to keep the memory busy: bandwidth times latency, 4.8e12 B/s
# times about 1 us on an H200, over its 132 multiprocessors.
_BYTES_UNDER_WAY = 36_000
_MOST_RESIDENT = 8

# A split shorter than this reads less than its partial result costs to write, read and merge.
_LEAST_SPLIT_KEYS = 128


@dataclass(frozen=True, slots=True)
class Device:
    """Say what the launch choices depend on.

    Attributes:
        backend: "cuda", "hip", or "interpreter".
        arch: Compute capability times ten on NVIDIA: 90 is Hopper, as which the interpreter poses; 0 on AMD.
        num_multiprocessors: Units that run programs side by side.
    """

    backend: str
    arch: int
    num_multiprocessors: int

    @classmethod
    def of(cls, device: torch.device) -> "Device":
        """Describe a torch device; anything but a GPU means the interpreter and its one program at a time."""
        if device.type != "cuda":
            return cls("interpreter", 90, 1)
        properties = torch.cuda.get_device_properties(device)
        if torch.version.hip:
            return cls("hip", 0, properties.multi_processor_count)
        return cls("cuda", properties.major * 10 + properties.minor, properties.multi_processor_count)


@dataclass(frozen=True, slots=True)
class Launch:
    """Hold the launch choices for one kernel.

    Attributes:
        tile_rows: Rows of a query tile: queries times the query heads of a KV head, up to a power of two.
        tile_keys: Keys of a K/V tile.
        num_warps: Warps of a program.
        num_stages: Depth of the software pipeline over K/V tiles.
    """

    tile_rows: int
    tile_keys: int
    num_warps: int
    num_stages: int


# Launches of prefill chunks by arithmetic, "exact" for float32 without tensor cores: the elements of the
# widest head that each is for, and the launch, with as many rows as its accumulator leaves registers for.
_CHUNK_LAUNCHES = {
    "exact": ((math.inf, Launch(32, 16, 8, 1)),),
    "hip": ((128, Launch(128, 32, 4, 1)), (math.inf, Launch(64, 32, 4, 1))),
    "ampere": ((64, Launch(128, 64, 8, 3)), (128, Launch(128, 32, 8, 3)), (math.inf, Launch(64, 32, 8, 2))),
    "hopper": ((128, Launch(128, 64, 8, 3)), (math.inf, Launch(128, 32, 8, 3))),
}


def power_of_two(number: int) -> int:
    """Return the least power of two that is not below `number`."""
    return 1 << max(number - 1, 0).bit_length()


def choose_launch(head_dim: int, group: int, num_queries: int, dtype: torch.dtype, device: Device) -> Launch:
    """Choose tile sizes, warps and stages.

    A decode is bound by bandwidth: its tile is as narrow as tensor cores allow (16 rows) and small, so that
    several programs share a multiprocessor and hide each other's waits. A prefill chunk is bound by compute:
    its tile is as tall as its accumulator fits into registers, so that a loaded key meets many queries.

    Args:
        head_dim: Elements of a head.
        group: Query heads of one KV head.
        num_queries: Most queries of a sequence in this launch.
        dtype: Of queries, keys and values.
        device: Where it runs.
    """
    narrow_rows = max(16, power_of_two(group))
    rows = power_of_two(num_queries * group)
    width = max(16, power_of_two(head_dim))
    is_hip = device.backend == "hip"
    # The interpreter has no registers to run out of, and its float32 stands in for the half precisions.
    is_exact = dtype == torch.float32 and device.backend != "interpreter"
    if rows <= narrow_rows:
        # Each thread loads 16 bytes of K and of V, on AMD twice that.
        tile_keys = max(16, 128 * 16 * (1 + is_hip) // (width * dtype.itemsize))
        return Launch(narrow_rows, tile_keys, 4, 1 if is_hip or is_exact else 3)
    arithmetic = "exact" if is_exact else "hip" if is_hip else "hopper" if device.arch >= 90 else "ampere"
    launch = next(launch for widest, launch in _CHUNK_LAUNCHES[arithmetic] if width <= widest)
    return replace(launch, tile_rows=max(narrow_rows, min(rows, launch.tile_rows)))


def choose_split_keys(num_keys: np.ndarray, num_heads: int, programs: int) -> int:
    """Choose the keys of one split, such that the splits of all tiles fill the device once.

    All tiles share one length, so a long sequence is cut into more pieces than a short one and no program
    runs much longer than another. Where the tiles fill the device by themselves, the length comes out
    longer than most of them, and they stay whole.

    Args:
        num_keys: int64 `[num_tiles]`: keys that each query tile reads.
        num_heads: KV heads, each of which has a program per tile.
        programs: How many the device runs side by side.
    """
    most = max(programs // num_heads, 1)
    # Each tile may end in a part of a split. While tiles are few, that many fewer are planned, so that no
    # program is left to start when the others are done.
    spare = most - len(num_keys)
    return max(_LEAST_SPLIT_KEYS, -(-int(num_keys.sum()) // (spare if 2 * spare > most else most)))


def resident_programs(launch: Launch, head_dim: int, itemsize: int, is_wide: bool, device: Device) -> int:
    """Return the programs that the device should run side by side.

    Args:
        launch: Their tile sizes.
        head_dim: Elements of a head.
        itemsize: Bytes of a cached element.
        is_wide: Whether they are bound by compute, and one fills a multiprocessor.
        device: Where they run.
    """
    tile_bytes = 2 * launch.tile_keys * head_dim * itemsize
    each = 1 if is_wide else min(-(-_BYTES_UNDER_WAY // tile_bytes), _MOST_RESIDENT)
    return device.num_multiprocessors * each


@dataclass(frozen=True, slots=True)
class Work:
    """Hold one launch of the attention kernel.

    Attributes:
        launch: Its tile sizes.
        items: int32 `[num_items, 8]`, columns `ITEM_FIELDS`; a program per row and KV head.
        is_split: Whether some item writes a partial result.
        is_wide: Whether a tile holds more queries than the narrowest tile has room for.
    """

    launch: Launch
    items: Tensor
    is_split: bool
    is_wide: bool


@dataclass(frozen=True, slots=True)
class WorkPlan:
    """Hold the work of one call, made once per step and used by every layer of one shape and window.

    Attributes:
        works: The launches: sequences whose rows fit the narrowest tile, then the others.
        merges: int32 `[num_merged, 4]`, columns `MERGE_FIELDS`: the tokens whose partial results are merged.
        num_partials: Rows of the partial results.
        window: Keys that a query sees at most, itself included; None for all.
        num_tokens: Queries.
        num_seqs: Sequences.
        longest: Tokens of the longest sequence.
        heads: Query heads, KV heads, and elements of a head.
    """

    works: tuple[Work, ...]
    merges: Tensor
    num_partials: int
    window: int | None
    num_tokens: int
    num_seqs: int
    longest: int
    heads: tuple[int, int, int]


def plan_work(
    seq_lens: Tensor | np.ndarray | Sequence[int],
    cu_seqlens_q: Tensor | np.ndarray | Sequence[int],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    window: int | None = None,
    device: torch.device | str = "cpu",
    target: Device | None = None,
    split_keys: int | None = None,
    num_splits: int | None = None,
) -> WorkPlan:
    """Plan one call of `paged_attention`.

    A query tile holds the query heads of one KV head for as many queries as fit, so that a K/V tile is loaded
    once for all of them. Tiles come longest first, so that no long one starts last.

    Args:
        seq_lens: `[num_seqs]`: tokens of each sequence, those of this call included. On the host, at best.
        cu_seqlens_q: `[num_seqs + 1]`: where each sequence's queries begin among all.
        num_heads: Query heads.
        num_kv_heads: KV heads.
        head_dim: Elements of a head.
        dtype: Of queries, keys and values.
        window: Keys that a query sees at most, itself included.
        device: Where the kernel runs.
        target: What to choose for; what `device` is by default.
        split_keys: Keys of one split; `choose_split_keys` by default.
        num_splits: Splits of every tile, some of them empty, in place of a number of keys.

    Raises:
        ValueError: A length cannot be; its argument is named.
    """
    target = target or Device.of(torch.device(device))
    lens = _on_host("seq_lens", seq_lens)
    cu = _on_host("cu_seqlens_q", cu_seqlens_q)
    if (lens < 0).any():
        raise ValueError(f"seq_lens holds a negative length: {lens.min()}")
    if len(cu) != len(lens) + 1 or cu[0] != 0 or (np.diff(cu) < 0).any():
        raise ValueError(f"cu_seqlens_q must rise from 0 in {len(lens) + 1} steps, and is {cu.tolist()}")
    counts = np.diff(cu)
    group = num_heads // num_kv_heads
    narrow_rows = choose_launch(head_dim, group, 1, dtype, target).tile_rows
    works = []
    merges = [np.empty((0, len(MERGE_FIELDS)), np.int32)]
    num_partials = 0
    for is_wide in (False, True):
        sequences = np.flatnonzero((counts > 0) & ((counts * group > narrow_rows) == is_wide))
        if not len(sequences):
            continue
        launch = choose_launch(head_dim, group, int(counts[sequences].max()), dtype, target)
        tiles = _tiles(sequences, lens, cu, launch.tile_rows // group, window)
        keys = split_keys
        if keys is None and num_splits is None:
            programs = resident_programs(launch, head_dim, dtype.itemsize, is_wide, target)
            keys = choose_split_keys(tiles["end"] - tiles["begin"], num_kv_heads, programs)
        items, merged, num_partials = _split(tiles, launch.tile_keys, keys, num_splits, num_partials)
        is_split = bool((items[:, ITEM_FIELDS.index("partial")] >= 0).any())
        works.append(Work(launch, torch.from_numpy(items).to(device), is_split, is_wide))
        merges.append(merged)
    return WorkPlan(
        works=tuple(works),
        merges=torch.from_numpy(np.concatenate(merges)).to(device),
        num_partials=num_partials,
        window=window,
        num_tokens=int(cu[-1]),
        num_seqs=len(lens),
        longest=int(lens.max(initial=0)),
        heads=(num_heads, num_kv_heads, head_dim),
    )


def _on_host(name: str, values: Tensor | np.ndarray | Sequence[int]) -> np.ndarray:
    """Return int64 values, of which a tensor must hold integers in one row."""
    array = values.cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    if array.ndim != 1 or not (np.issubdtype(array.dtype, np.integer) or not array.size):
        raise ValueError(f"{name} must be one row of integers, and is {array.dtype} of shape {array.shape}")
    if array.max(initial=0) > 2**30:
        raise ValueError(f"{name} holds {array.max()}, and the kernels count to {2**30}")
    return array.astype(np.int64)


def _expand(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return, for `counts[n]` elements of each group n, the group of each element and its place in there."""
    group = np.repeat(np.arange(len(counts)), counts)
    return group, np.arange(len(group)) - (np.cumsum(counts) - counts)[group]


def _tiles(
    sequences: np.ndarray, lens: np.ndarray, cu: np.ndarray, tile_queries: int, window: int | None
) -> dict[str, np.ndarray]:
    """Cut the queries of some sequences into tiles, and find the keys that each tile reads."""
    of, place = _expand(-(-np.diff(cu)[sequences] // tile_queries))
    sequence, first = sequences[of], place * tile_queries
    counts = np.diff(cu)[sequence]
    num_queries = np.minimum(counts - first, tile_queries)
    position = lens[sequence] - counts + first
    end = np.maximum(position + num_queries, 0)
    begin = np.zeros_like(end) if window is None else np.clip(position - window + 1, 0, end)
    order = np.argsort(begin - end, kind="stable")
    token = cu[sequence] + first
    columns = (sequence, token, num_queries, position, begin, end)
    return {name: column[order] for name, column in zip(ITEM_FIELDS, columns, strict=False)}


def _split(
    tiles: dict[str, np.ndarray],
    tile_keys: int,
    split_keys: int | None,
    num_splits: int | None,
    num_partials: int,
) -> tuple[np.ndarray, np.ndarray, int]:
    """Cut the keys of each tile into splits, and return the items, the merges and the partial rows so far."""
    # Splits begin at whole tiles, so that only a sequence's last tile is part empty.
    first = tiles["begin"] // tile_keys * tile_keys
    num_keys = tiles["end"] - first
    length = np.full_like(first, split_keys) if num_splits is None else -(-num_keys // num_splits)
    length = np.maximum(-(-length // tile_keys), 1) * tile_keys
    splits = np.maximum(-(-num_keys // length), 1)
    if num_splits is not None:
        splits[:] = num_splits
    tile, i_split = _expand(splits)
    queries = tiles["num_queries"]
    rows = np.where(splits > 1, splits * queries, 0)
    first_partial = num_partials + np.cumsum(rows) - rows
    items = {name: column[tile] for name, column in tiles.items()}
    low = first[tile] + i_split * length[tile]
    items["begin"] = np.maximum(low, items["begin"])
    items["end"] = np.minimum(low + length[tile], items["end"])
    items["partial"] = np.where(splits[tile] > 1, first_partial[tile] + i_split * queries[tile], -1)
    items["is_first"] = i_split == 0
    merged = np.flatnonzero(splits > 1)
    of, i_query = _expand(queries[merged])
    of = merged[of]
    merges = (tiles["token"][of] + i_query, first_partial[of] + i_query, queries[of], splits[of])
    columns = np.stack([items[name] for name in ITEM_FIELDS], axis=1)
    return columns.astype(np.int32), np.stack(merges, axis=1).astype(np.int32), num_partials + int(rows.sum())
