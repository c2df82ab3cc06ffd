"""The Triton kernels in Triton's interpreter, against plain PyTorch in float64."""

import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from kernel_cases import POOLS, Batch, Case, make, oracle, plan_of, random_case, run
from torch import Tensor

from cbresearch import kernels
from cbresearch.kernels import attend, paged_attention

NUM_BATCHES, BATCH = 10, 20


def branches(case: Case) -> set[str]:
    """Return what the launches of a case do, by its plan."""
    found = set()
    for work in plan_of(case).works:
        found.add("wide" if work.is_wide else "narrow")
        if work.is_split:
            found.add("split")
    return found


@pytest.fixture
def launches(monkeypatch) -> Counter:
    """Count the programs that really run, by branch."""
    counts: Counter = Counter()

    def watch(name, branches_of):
        kernel = getattr(attend, name)

        class Watched:
            def __getitem__(self, grid):
                def launch(*args, **kwargs):
                    for branch in branches_of(kwargs):
                        counts[branch] += grid[0]
                    kernel[grid](*args, **kwargs)

                return launch

        monkeypatch.setattr(attend, name, Watched())

    watch(
        "attend_kernel",
        lambda kwargs: ["wide" if kwargs["IS_WIDE"] else "narrow"] + ["split"] * kwargs["IS_SPLIT"],
    )
    watch("merge_kernel", lambda kwargs: ["merge"])
    return counts


def reordered(batch: Batch, order: int) -> Batch:
    """Return a batch of the same scores, summed in another order; order 0 is its own."""
    q, k_cache, *rest = batch.tensors
    if order:
        places = torch.randperm(q.shape[2], generator=torch.Generator().manual_seed(order))
        q, k_cache = q[..., places], k_cache[..., places]
    return Batch((q, k_cache, *rest), batch.options)


def assert_as_exact_as_pytorch(cases: Sequence[Case]) -> None:
    """Hold the kernel's error to twice that of PyTorch in the same precision, both against float64.

    On a case of few numbers PyTorch may happen to be exact, so its largest error is the worst over three
    orders of summation, and the kernel may add one rounding of the result. Over all cases together the
    root mean square has no such allowance.
    """
    ours = theirs = 0.0
    for case in cases:
        batch = make(case)
        exact = oracle(case, batch)
        result = run(case, batch)
        assert result.isfinite().all(), case
        error = (result.double() - exact).abs()
        errors_of_pytorch = [
            (oracle(case, reordered(batch, order), case.dtype).double() - exact).abs() for order in range(3)
        ]
        rounding = torch.finfo(case.dtype).eps * float(exact.abs().max())
        assert float(error.max()) <= 2 * max(float(each.max()) for each in errors_of_pytorch) + rounding, case
        # Relative to the format, so that a float16 case does not drown the others.
        scale = torch.finfo(case.dtype).eps ** -2
        ours += float(error.square().mean()) * scale
        theirs += float(errors_of_pytorch[0].square().mean()) * scale
    assert math.sqrt(ours) <= 2 * math.sqrt(theirs)


@pytest.mark.parametrize("batch", range(NUM_BATCHES))
def test_paged_attention_is_as_exact_as_pytorch_in_random_cases(batch):
    assert_as_exact_as_pytorch([random_case(batch * BATCH + place) for place in range(BATCH)])


def test_random_cases_cover_every_option_and_branch():
    cases = [random_case(seed) for seed in range(NUM_BATCHES * BATCH)]
    seen = Counter()
    for case in cases:
        seen.update(branches(case))
        seen.update({case.pool, case.dtype, *case.options, ("head_dim", case.head_dim)})
        seen.update({("group", case.group), ("block_size", case.block_size)})
        edges = {0: "0", 1: "1", case.block_size - 1: "b-1", case.block_size: "b", case.block_size + 1: "b+1"}
        seen.update({("length", edges[length]) for length in case.lengths if length in edges})
        if len({min(count, 2) for count in case.queries if count}) == 2:
            seen["decodes and chunks"] += 1
    wanted = {
        *("narrow", "wide", "split", "decodes and chunks", "window", "softcap", "sinks"),
        *(torch.float32, torch.float16, *POOLS),
        *(("length", edge) for edge in ("0", "1", "b-1", "b", "b+1")),
        *(("group", group) for group in (1, 3, 5, 7, 17, 48)),
        *(("block_size", size) for size in (1, 3, 8, 16, 48, 256)),
        *(("head_dim", size) for size in (64, 80, 96, 112, 128)),
    }
    assert min((seen[value], str(value)) for value in wanted)[0] >= 12


@pytest.mark.parametrize("block_size", [1, 3, 8, 16, 48, 256])
def test_paged_attention_is_exact_for_lengths_around_a_block(block_size):
    lengths = [0, 1, block_size - 1, block_size, block_size + 1]
    decode = Case(lengths, [1] * 5, block_size, group=5, head_dim=16)
    chunk = Case(lengths, [min(length, 2) for length in lengths], block_size, group=3, head_dim=16)
    assert_as_exact_as_pytorch([decode, chunk])


@pytest.mark.parametrize("group", [1, 3, 5, 7, 17, 48])
def test_every_group_size_takes_its_branch_and_is_exact(group, launches):
    case = Case([37, 70], [1, 70 // group + 3], num_kv_heads=2, group=group, head_dim=80)
    assert_as_exact_as_pytorch([case])
    assert launches.keys() == {"narrow", "wide"}
    assert launches["narrow"] == 2


def test_a_window_of_4_at_length_9_sees_four_keys(launches):
    case = Case([9, 9], [1, 9], group=4, head_dim=16, options={"window": 4})
    batch = make(case)
    values = torch.zeros(9, 1, 16)
    values[range(9), 0, range(9)] = 1
    _, k_cache, v_cache, tables, *_ = batch.tensors
    for row in tables:
        k_cache[row[0], :9] = 0
        v_cache[row[0], :9] = values
    # All scores are equal, so each key that is seen has the weight 1 / number of keys, in its own column.
    seen = run(case, batch) > 0
    i, j = torch.arange(9)[:, None], torch.arange(16)[None]
    expected = (j <= i) & (j > i - 4)
    assert torch.equal(seen[0], expected[8].expand(4, -1))
    assert torch.equal(seen[1:], expected[:, None].expand(-1, 4, -1))
    assert launches.keys() == {"narrow", "wide"}


@pytest.mark.parametrize("queries", [1, 20])
def test_a_soft_cap_holds_scores_of_ten_thousand(queries):
    case = Case(
        [40], [queries], group=2, head_dim=16, query_scale=1e4, options={"softcap": 50.0, "scale": 1.0}
    )
    scores = torch.einsum("qhd,bskd->hqbs", make(case).tensors[0], make(case).tensors[1].nan_to_num(0))
    assert scores.max() > 1e4 and scores.min() < -1e4
    assert_as_exact_as_pytorch([case])
    uncapped = replace(case, options={"scale": 1.0})
    assert (run(case) - run(uncapped)).abs().max() > 0.1


def test_small_scores_keep_their_digits_below_a_soft_cap():
    assert_as_exact_as_pytorch(
        [
            Case([40], [20], group=2, query_scale=scale, options={"softcap": 50.0})
            for scale in (0.01, 1.0, 30.0)
        ]
    )


@pytest.mark.parametrize("split_keys", [None, 32])
def test_paged_attention_is_exact_for_scores_below_minus_1e5(split_keys):
    case = Case([70, 70], [1, 30], group=1, head_dim=16, split_keys=split_keys)
    batch = make(case)
    q, k_cache, *_ = batch.tensors
    q.abs_().add_(1.0).mul_(1e4)
    k_cache.copy_(-k_cache.abs() - 10)
    scores = torch.einsum("qhd,bskd->hqbs", q.double(), k_cache.double()) / 4
    assert scores.nan_to_num(-math.inf).max() < -1e5
    exact, low = oracle(case, batch), oracle(case, batch, torch.float32)
    result = run(case, batch)
    assert exact.abs().max() > 0.1
    assert (result - exact).abs().max() <= 2 * (low - exact).abs().max()


@pytest.mark.parametrize("options", [{}, {"sinks": True}, {"window": 2}, {"softcap": 5.0}])
def test_a_query_without_keys_gets_zero_and_changes_no_other(options):
    case = Case([5, 0, 3, 0, 2], [1, 1, 2, 40, 4], block_size=4, group=4, head_dim=16, options=options)
    result = run(case)
    # The third sequence holds 2 tokens and asks with 4 queries, two of which lie before its first token.
    blind = torch.tensor([0, 1, 0, 0] + [1] * 40 + [1, 1, 0, 0], dtype=torch.bool)
    assert (result[blind] == 0).all()
    assert (result[~blind].abs().amax((1, 2)) > 0).all()
    assert_as_exact_as_pytorch([case])


@pytest.mark.parametrize("options", [{}, {"window": 50, "sinks": True}])
@pytest.mark.parametrize(("queries", "sizes"), [(1, (16, 48, 128)), (5, (64, 128))])
def test_the_number_of_splits_does_not_change_the_answer(queries, sizes, options, launches):
    whole = Case([200, 20], [queries, 1], group=4, options=options)
    expected = run(whole)
    assert "merge" not in launches
    cases = [replace(whole, split_keys=keys) for keys in sizes]
    assert len({plan_of(case).num_partials for case in cases}) == len(cases)
    for case in cases:
        before = launches["merge"]
        # Two roundings on either side: of the parts and of their sum.
        torch.testing.assert_close(run(case), expected, rtol=0, atol=4 * torch.finfo(torch.float32).eps)
        assert (launches["merge"] > before) == bool(plan_of(case).num_partials)
    assert_as_exact_as_pytorch(cases)
    assert ("wide" in launches) == (queries > 1)


def test_more_splits_than_one_tile_of_the_merge_are_merged():
    case = Case([600], [1], group=1, split_keys=16)
    assert plan_of(case).num_partials > 2 * attend.TILE_SPLITS
    assert_as_exact_as_pytorch([case])


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_any_layout_of_the_pool_gives_the_same_bits(pool, dtype):
    case = Case([40, 33], [1, 9], num_kv_heads=2, group=3, head_dim=80, dtype=dtype)
    assert torch.equal(run(replace(case, pool=pool)), run(case))


def test_keys_and_values_may_lie_side_by_side_in_one_tensor():
    case = Case([40, 33], [1, 9], num_kv_heads=2, group=3, head_dim=16)
    batch = make(case)
    q, k_cache, v_cache, *rest = batch.tensors
    both = torch.stack((k_cache, v_cache), dim=2)
    result = paged_attention(q, both[:, :, 0], both[:, :, 1], *rest)
    assert torch.equal(result, run(case, batch))


def test_q_and_out_may_be_strided():
    case = Case([40, 33], [1, 30], num_kv_heads=2, group=3, head_dim=16)
    q, *rest = make(case).tensors
    wide = torch.full((*q.shape[:2], 48), math.nan)
    wide[..., 16:32] = q
    out = torch.full((q.shape[1], q.shape[0], 16), math.nan).transpose(0, 1)
    assert paged_attention(wide[..., 16:32], *rest, out=out) is out
    assert torch.equal(out, run(case))


def test_an_empty_batch_gives_an_empty_result():
    case = Case([7, 0], [0, 0], head_dim=16)
    assert run(case).shape == (0, 1, 16)


def retyped(tensors: list[Tensor], place: int, change) -> list[Tensor]:
    return [change(tensor) if index == place else tensor for index, tensor in enumerate(tensors)]


@pytest.mark.parametrize(
    ("place", "change", "message"),
    [
        (0, lambda t: t.double(), "^q is torch.float64"),
        (0, lambda t: t[0], "^q must be .* shape"),
        (0, lambda t: t[:, :3], "^q has 3 heads"),
        (0, lambda t: t.transpose(1, 2).contiguous().transpose(1, 2), "^q must be .* last stride of 1"),
        (0, lambda t: t[:1], "^cu_seqlens_q ends at 3"),
        (1, lambda t: t.half(), "^k_cache is torch.float16"),
        (1, lambda t: t.to("meta"), "^k_cache is on meta"),
        (1, lambda t: t[..., :8], "^k_cache must be"),
        (2, lambda t: t[:, :2], "^v_cache must be"),
        (2, lambda t: t.repeat_interleave(2, 3)[..., ::2], "^v_cache must be .* last stride of 1"),
        (2, lambda t: t.to(torch.float8_e5m2), "^v_cache is torch.float8_e5m2"),
        (3, lambda t: t.long(), "^block_tables is torch.int64, and must be int32"),
        (3, lambda t: t[:, :1], "^block_tables has 1 blocks"),
        (3, lambda t: t[:1], "^block_tables has 1 rows"),
        (3, lambda t: t.to("meta"), "^block_tables is on meta"),
        (4, lambda t: -t, "^seq_lens holds a negative length: -9"),
        (4, lambda t: t.float(), "^seq_lens must be one row of integers"),
        (4, lambda t: t[:1], "^cu_seqlens_q must rise from 0 in 2 steps"),
        (5, lambda t: t.flip(0), "^cu_seqlens_q must rise"),
        (5, lambda t: t[None], "^cu_seqlens_q must be one row"),
    ],
)
def test_paged_attention_names_a_bad_tensor_before_any_launch(place, change, message, launches):
    tensors = list(make(Case([9, 6], [1, 2], block_size=4, num_kv_heads=2, group=2, head_dim=16)).tensors)
    with pytest.raises(ValueError, match=message):
        paged_attention(*retyped(tensors, place, change))
    assert not launches


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": 0.0}, "^scale must be above 0"),
        ({"scale": math.nan}, "^scale must be above 0"),
        ({"window": 0}, "^window must be above 0"),
        ({"softcap": -1.0}, "^softcap must be above 0"),
        ({"sinks": torch.ones(3)}, r"^sinks must be \[4\]"),
        ({"sinks": torch.ones(4).half()}, "^sinks is torch.float16, and must be float32"),
        ({"sinks": torch.ones(8)[::2]}, "^sinks must be .* last stride of 1"),
        ({"out": torch.ones(3, 4, 16).half()}, "^out is torch.float16, and must be float32"),
        ({"out": torch.ones(3, 4, 32)[..., ::2]}, "^out must be .* last stride of 1"),
        ({"window": 3, "plan": plan_of(Case([9, 6], [1, 2], num_kv_heads=2, group=2))}, "^plan is for"),
    ],
)
def test_paged_attention_names_a_bad_option_before_any_launch(options, message, launches):
    tensors = make(Case([9, 6], [1, 2], block_size=4, num_kv_heads=2, group=2, head_dim=16)).tensors
    with pytest.raises(ValueError, match=message):
        paged_attention(*tensors, **options)
    assert not launches


def test_kernels_say_so_where_triton_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "cbresearch.kernels.attend")
    with pytest.raises(ImportError, match=r"kernels\.paged_attention needs Triton, which is not installed"):
        from cbresearch.kernels import paged_attention as missing  # noqa: F401
    with pytest.raises(AttributeError, match="no attribute 'page_attention'"):
        kernels.page_attention  # noqa: B018
