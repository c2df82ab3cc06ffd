"""Plan a call of the paged attention on the host: which program computes which queries over which keys."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# Columns of a work item, in the order in which the kernel reads them.
ITEM_FIELDS = ("sequence", "token", "num_queries", "position", "begin", "end", "partial", "is_first")
MERGE_FIELDS = ("token", "first_partial", "stride", "num_splits")

# Programs of the narrow kernel that a multiprocessor holds at once; fewer leave memory bandwidth unused.
_NARROW_RESIDENT = 4
_WIDE_RESIDENT = 1

# A split shorter than this reads less than its partial result costs to write, read and merge.
_LEAST_SPLIT_KEYS = 128


@dataclass(frozen=True, slots=True)
class Device:
    """Say what the launch choices depend on.

    Attributes:
        backend: "cuda", "hip", or "interpreter".
        arch: Compute capability times ten on NVIDIA (90 is Hopper); 0 elsewhere.
        num_multiprocessors: Units that run programs side by side.
    """

    backend: str
    arch: int
    num_multiprocessors: int

    @classmethod
    def of(cls, device: torch.device) -> "Device":
        """Describe a torch device; anything but a GPU means the interpreter, which runs one program at a time."""
        if device.type != "cuda":
            return cls("interpreter", 0, 1)
        properties = torch.cuda.get_device_properties(device)
        if torch.version.hip:
            return cls("hip", 0, properties.multi_processor_count)
        return cls("cuda", properties.major * 10 + properties.minor, properties.multi_processor_count)


@dataclass(frozen=True, slots=True)
class Launch:
    """Hold the launch choices for one kernel.

    Attributes:
        tile_rows: Rows of a query tile: queries times the query heads of one KV head, padded to a power of two.
        tile_keys: Keys of a K/V tile.
        num_warps: Warps of a program.
        num_stages: Depth of the software pipeline over K/V tiles.
    """

    tile_rows: int
    tile_keys: int
    num_warps: int
    num_stages: int


def power_of_two(number: int) -> int:
    """Return the least power of two that is not below `number`."""
    return 1 << max(number - 1, 0).bit_length()


def choose_launch(head_dim: int, group: int, num_queries: int, itemsize: int, device: Device) -> Launch:
    """Choose tile sizes, warps and stages.

    Args:
        head_dim: Elements of a head.
        group: Query heads of one KV head.
        num_queries: Most queries of a sequence in this launch.
        itemsize: Bytes of a cached element.
        device: Where it runs.
    """
    narrow_rows = max(16, power_of_two(group))
    rows = power_of_two(num_queries * group)
    if num_queries * group <= narrow_rows:
        return Launch(narrow_rows, 16, 4, 1)
    tile_rows = max(narrow_rows, min(rows, 128))
    return Launch(tile_rows, 32, 4, 1)


def choose_split_keys(num_keys: np.ndarray, num_heads: int, is_narrow: bool, device: Device) -> int:
    """Choose the keys of one split, such that the splits of all tiles fill the device once.

    All tiles share one length, so a long sequence is cut into more pieces than a short one and no program
    runs much longer than another. Where the tiles fill the device by themselves, the length comes out
    longer than most of them, and they stay whole.

    Args:
        num_keys: int64 `[num_tiles]`: keys that each query tile reads.
        num_heads: KV heads, each of which has a program per tile.
        is_narrow: Whether the programs are bound by bandwidth, and several share a multiprocessor.
        device: Where it runs.
    """
    programs = device.num_multiprocessors * (_NARROW_RESIDENT if is_narrow else _WIDE_RESIDENT)
    return max(_LEAST_SPLIT_KEYS, math.ceil(int(num_keys.sum()) * num_heads / programs))


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
class Layout:
    """Hold the work of one call, made once per step and used by every layer with the same window.

    Attributes:
        works: The launches: sequences whose rows fit the narrowest tile, then the others.
        merges: int32 `[num_merged, 4]`, columns `MERGE_FIELDS`: tokens whose partial results are merged.
        num_partials: Rows of the partial results.
        window: Keys that a query sees at most, itself included; None for all.
        num_seqs: Sequences.
        num_tokens: Queries.
    """

    works: tuple[Work, ...]
    merges: Tensor
    num_partials: int
    window: int | None
    num_seqs: int
    num_tokens: int


def check_lengths(
    seq_lens: np.ndarray, cu_seqlens_q: np.ndarray, num_tokens: int, max_blocks: int, block_size: int
) -> None:
    """Raise a ValueError that names the argument whose values cannot be."""
    if (seq_lens < 0).any():
        raise ValueError(f"seq_lens holds a negative length: {int(seq_lens.min())}")
    if cu_seqlens_q[0] != 0 or (np.diff(cu_seqlens_q) < 0).any() or cu_seqlens_q[-1] != num_tokens:
        raise ValueError(
            f"cu_seqlens_q must rise from 0 to the {num_tokens} tokens of q, and is {cu_seqlens_q.tolist()}"
        )
    needed = -(-int(seq_lens.max(initial=0)) // block_size)
    if needed > max_blocks:
        raise ValueError(
            f"block_tables has {max_blocks} blocks per sequence, and {int(seq_lens.max())} tokens need {needed}"
        )


def lay_out(
    seq_lens: Tensor | np.ndarray | Sequence[int],
    cu_seqlens_q: Tensor | np.ndarray | Sequence[int],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    itemsize: int,
    window: int | None = None,
    device: torch.device | str = "cpu",
    target: Device | None = None,
    split_keys: int | None = None,
) -> Layout:
    """Plan one call.

    A query tile holds the query heads of one KV head for as many queries as fit, so that each K/V tile is
    loaded once for all of them. Tiles come longest first, so that no long one starts last.

    Args:
        seq_lens: `[num_seqs]`: tokens of each sequence, those of this call included.
        cu_seqlens_q: `[num_seqs + 1]`: where each sequence's queries begin among all.
        num_heads: Query heads.
        num_kv_heads: KV heads.
        head_dim: Elements of a head.
        itemsize: Bytes of a cached element.
        window: Keys that a query sees at most, itself included.
        device: Where the kernel runs.
        target: What to choose for; what `device` is by default.
        split_keys: Keys of one split; chosen by `choose_split_keys` by default.
    """
    target = target or Device.of(torch.device(device))
    lens = np.asarray(seq_lens.cpu() if isinstance(seq_lens, Tensor) else seq_lens, dtype=np.int64)
    cu = np.asarray(cu_seqlens_q.cpu() if isinstance(cu_seqlens_q, Tensor) else cu_seqlens_q, dtype=np.int64)
    counts = np.diff(cu)
    group = num_heads // num_kv_heads
    narrow_rows = choose_launch(head_dim, group, 1, itemsize, target).tile_rows
    is_narrow = counts * group <= narrow_rows
    works: list[tuple[Launch, np.ndarray, bool]] = []
    merges = []
    num_partials = 0
    for narrow in (True, False):
        sequences = np.flatnonzero((is_narrow == narrow) & (counts > 0))
        if not len(sequences):
            continue
        launch = choose_launch(head_dim, group, int(counts[sequences].max()), itemsize, target)
        tiles = _tiles(sequences, lens, cu, launch.tile_rows // group, window)
        keys = tiles["end"] - tiles["begin"]
        length = split_keys or choose_split_keys(keys, num_kv_heads, narrow, target)
        items, merged, num_partials = _split(tiles, length, launch.tile_keys, num_partials)
        works.append((launch, items, not narrow))
        merges.append(merged)
    merge_rows = np.concatenate(merges) if merges else np.empty((0, len(MERGE_FIELDS)), np.int64)
    # One copy to the device for everything.
    parts = [*(items for _, items, _ in works), merge_rows]
    flat = torch.from_numpy(np.concatenate([part.ravel() for part in parts]).astype(np.int32)).to(device)
    tensors = [
        piece.view(part.shape)
        for piece, part in zip(flat.split([part.size for part in parts]), parts, strict=True)
    ]
    return Layout(
        tuple(
            Work(launch, tensor, bool((items[:, ITEM_FIELDS.index("partial")] >= 0).any()), is_wide)
            for (launch, items, is_wide), tensor in zip(works, tensors[:-1], strict=True)
        ),
        tensors[-1],
        num_partials,
        window,
        len(lens),
        int(cu[-1]),
    )


def _tiles(
    sequences: np.ndarray, lens: np.ndarray, cu: np.ndarray, tile_queries: int, window: int | None
) -> dict[str, np.ndarray]:
    """Cut the queries of some sequences into tiles, and find the keys that each tile reads."""
    counts = np.diff(cu)[sequences]
    tiles = -(-counts // tile_queries)
    sequence = np.repeat(sequences, tiles)
    first = (np.arange(len(sequence)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * tile_queries
    num_queries = np.minimum(np.repeat(counts, tiles) - first, tile_queries)
    position = lens[sequence] - np.repeat(counts, tiles) + first
    end = np.maximum(position + num_queries, 0)
    begin = np.zeros_like(end) if window is None else np.clip(position - window + 1, 0, end)
    order = np.argsort(begin - end, kind="stable")
    columns = {
        "sequence": sequence,
        "token": cu[sequence] + first,
        "num_queries": num_queries,
        "position": position,
        "begin": begin,
        "end": end,
    }
    return {name: column[order] for name, column in columns.items()}


def _split(
    tiles: dict[str, np.ndarray], length: int, tile_keys: int, num_partials: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """Cut the keys of each tile into splits, and return the items, the merges and the partial rows so far."""
    # Splits begin at whole tiles, so that only a sequence's last tile is part empty.
    length = -(-length // tile_keys) * tile_keys
    start = tiles["begin"] // tile_keys * tile_keys
    splits = np.maximum(-(-(tiles["end"] - start) // length), 1)
    tile = np.repeat(np.arange(len(splits)), splits)
    i_split = np.arange(len(tile)) - np.repeat(np.cumsum(splits) - splits, splits)
    begin = np.maximum(start[tile] + i_split * length, tiles["begin"][tile])
    end = np.minimum(start[tile] + (i_split + 1) * length, tiles["end"][tile])
    rows = np.where(splits > 1, splits * tiles["num_queries"], 0)
    first_partial = num_partials + np.cumsum(rows) - rows
    partial = np.where(splits[tile] > 1, first_partial[tile] + i_split * tiles["num_queries"][tile], -1)
    items = np.stack(
        [tiles[name][tile] for name in ("sequence", "token", "num_queries", "position")]
        + [begin, end, partial, (i_split == 0).astype(np.int64)],
        axis=1,
    )
    merged = np.flatnonzero(splits > 1)
    queries = tiles["num_queries"][merged]
    of = np.repeat(merged, queries)
    i_query = np.arange(len(of)) - np.repeat(np.cumsum(queries) - queries, queries)
    merges = np.stack(
        [tiles["token"][of] + i_query, first_partial[of] + i_query, tiles["num_queries"][of], splits[of]],
        axis=1,
    )
    return items, merges, num_partials + int(rows.sum())
