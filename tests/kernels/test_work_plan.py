"""The plan of a paged-attention call: who computes what, and how much of a card that fills."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from kernel_cases import plan_of, random_case

from cbresearch.kernels import ITEM_FIELDS, MERGE_FIELDS, Device, WorkPlan, plan_work
from cbresearch.kernels.work_plan import choose_launch

H100 = Device("cuda", 90, 132)
LLAMA = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": torch.bfloat16}


def columns(plan: WorkPlan) -> list[dict[str, np.ndarray]]:
    """Return the items of each launch, by field."""
    return [dict(zip(ITEM_FIELDS, work.items.numpy().T, strict=True)) for work in plan.works]


def num_programs(plan: WorkPlan) -> int:
    return sum(len(work.items) for work in plan.works) * plan.heads[1]


def covered(plan: WorkPlan) -> dict[tuple[int, int], int]:
    """Return how often each (token, key) pair is computed."""
    pairs: dict[tuple[int, int], int] = {}
    for items in columns(plan):
        for row in zip(*items.values(), strict=True):
            item = dict(zip(items, map(int, row), strict=True))
            for query in range(item["num_queries"]):
                position = item["position"] + query
                for key in range(item["begin"], min(item["end"], position + 1)):
                    if plan.window is None or key > position - plan.window:
                        pair = item["token"] + query, key
                        pairs[pair] = pairs.get(pair, 0) + 1
    return pairs


@pytest.mark.parametrize("seed", range(40))
def test_every_query_meets_every_key_that_it_sees_exactly_once(seed):
    case = random_case(seed)
    window = case.options.get("window")
    plan = plan_of(replace(case, split_keys=16))
    expected = {}
    token = 0
    for length, queries in zip(case.lengths, case.queries, strict=True):
        for position in range(length - queries, length):
            first = 0 if window is None else max(0, position - window + 1)
            expected.update({(token, key): 1 for key in range(first, position + 1)})
            token += 1
    assert covered(plan) == expected


@pytest.mark.parametrize("seed", range(40))
def test_every_token_is_written_once_and_merges_name_its_parts(seed):
    case = random_case(seed)
    plan = plan_of(replace(case, split_keys=16))
    direct, parts = [], []
    for items in columns(plan):
        for token, count, partial in zip(items["token"], items["num_queries"], items["partial"], strict=True):
            for query in range(count):
                if partial < 0:
                    direct.append(token + query)
                else:
                    parts.append((partial + query, token + query))
    merges = [dict(zip(MERGE_FIELDS, row, strict=True)) for row in plan.merges.numpy()]
    assert sorted(direct + [merge["token"] for merge in merges]) == list(range(plan.num_tokens))
    named = [
        (merge["first_partial"] + split * merge["stride"], merge["token"])
        for merge in merges
        for split in range(merge["num_splits"])
    ]
    assert sorted(named) == sorted(parts)
    assert sorted(partial for partial, _ in parts) == list(range(plan.num_partials))


@pytest.mark.parametrize("length", [16_384, 100_000, 1_000_000])
def test_a_single_long_sequence_fills_a_card_of_132_multiprocessors_once(length):
    plan = plan_work([length], [0, 1], **LLAMA, target=H100)
    resident = num_programs(plan) / H100.num_multiprocessors
    # As many as keep the memory busy: 36 kB under way, 8 kB in a program's tile of K and V.
    assert 4 < resident <= math.ceil(36_000 / 8192)
    (items,) = columns(plan)
    keys = items["end"] - items["begin"]
    assert np.ptp(np.sort(keys)[1:]) == 0


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_programs_of_any_head_size_keep_the_memory_busy(head_dim):
    plan = plan_work([1_000_000], [0, 1], **{**LLAMA, "head_dim": head_dim}, target=H100)
    launch = plan.works[0].launch
    tile_bytes = 2 * launch.tile_keys * head_dim * 2
    under_way = num_programs(plan) / H100.num_multiprocessors * tile_bytes
    assert min(36_000, 8 * tile_bytes) * 0.95 <= under_way


def test_a_large_batch_is_not_split():
    plan = plan_work([4096] * 256, range(257), **LLAMA, target=H100)
    assert not len(plan.merges) and not plan.works[0].is_split


def test_one_long_sequence_among_short_ones_is_split_alone():
    plan = plan_work([65536, *[512] * 63], range(65), **LLAMA, target=H100)
    assert plan.merges[:, 0].tolist() == [0]
    (items,) = columns(plan)
    keys = items["end"] - items["begin"]
    assert keys.max() < 65536 / 10


def test_a_short_sequence_is_not_split_for_the_sake_of_a_merge():
    assert not len(plan_work([128], [0, 1], **LLAMA, target=H100).merges)


def test_long_programs_start_first():
    plan = plan_work([100, 5000, 900, 3000], [0, 1, 2, 3, 4], **LLAMA, target=H100, split_keys=10**6)
    (items,) = columns(plan)
    assert items["sequence"].tolist() == [1, 3, 2, 0]


def test_decodes_and_chunks_of_one_batch_get_tiles_of_their_own():
    plan = plan_work([100, 300, 70], [0, 1, 257, 260], **LLAMA, target=H100)
    narrow, wide = plan.works
    assert (narrow.is_wide, wide.is_wide) == (False, True)
    # Three queries of four heads each still fit the narrowest tile.
    assert set(narrow.items[:, 0].tolist()) == {0, 2}
    assert narrow.launch.tile_rows == 16 and wide.launch.tile_rows == 128


@pytest.mark.parametrize("group", [1, 3, 7, 8, 17, 48])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
@pytest.mark.parametrize(
    "device", [H100, Device("cuda", 80, 108), Device("hip", 0, 304), Device("interpreter", 90, 1)]
)
def test_a_tile_holds_a_whole_group_in_powers_of_two(group, head_dim, device):
    for num_queries in (1, 2, 9, 4096):
        for dtype in (torch.float32, torch.bfloat16):
            launch = choose_launch(head_dim, group, num_queries, dtype, device)
            assert launch.tile_rows >= max(16, group)
            for size in (launch.tile_rows, launch.tile_keys, launch.num_warps):
                assert size & (size - 1) == 0
            assert launch.tile_keys >= 16


@pytest.mark.parametrize("window", [None, 300])
def test_a_fixed_number_of_splits_covers_every_key_and_leaves_some_empty(window):
    lengths = [0, 1, 17, 500]
    plan = plan_work(lengths, range(5), **LLAMA, window=window, target=H100, num_splits=3)
    assert len(plan.works[0].items) == plan.num_partials == 12 and len(plan.merges) == 4
    expected = {
        (row, key): 1
        for row, length in enumerate(lengths)
        for key in range(max(0, length - (window or length)), length)
    }
    assert covered(plan) == expected


def test_an_empty_batch_is_no_work():
    plan = plan_work([], [0], **LLAMA)
    assert plan.works == () and plan.num_partials == 0 and plan.merges.shape == (0, 4)
