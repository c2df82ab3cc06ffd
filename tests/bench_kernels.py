"""The attention kernels on a GPU: first whether they are right, then how fast, as tidy CSV.

    python tests/bench_kernels.py [--output FILE.csv]

A row's `ratio` is the speed over the card's own: a decode's bytes of K and V per second over those of a
measured copy, a prefill's FLOP/s over those of a measured bfloat16 matrix product. Without a GPU nothing is
done. It needs torch, triton and numpy alone; whatever of flash-attn, flashinfer and vLLM can be imported is
measured beside.
"""

import argparse
import csv
import importlib.util
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import torch
import triton
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cbresearch.kernels import paged_attention, plan_work, reference_attention

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
BLOCK_SIZE = 16
DECODES = ((1, 8192), (1, 131072), (8, 8192), (64, 4096), (256, 2048))
PREFILLS = ((1, 2048), (1, 16384), (8, 2048))


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        card: The GPU's name.
        versions: Of torch and Triton.
        case: What is computed.
        contestant: The library that computes it.
        microseconds: Median of the runs.
        low: 20th percentile of the runs, in microseconds.
        high: 80th percentile.
        rate: TB/s of a decode, TFLOP/s of a prefill.
        ratio: `rate` over that of the card's own copy or matrix product.
    """

    card: str
    versions: str
    case: str
    contestant: str
    microseconds: float
    low: float
    high: float
    rate: float
    ratio: float


def milliseconds(run: Callable[[], object]) -> tuple[float, float, float]:
    """Return the 20th, 50th and 80th percentile, with the cache flushed before each run."""
    low, median, high = triton.testing.do_bench(run, warmup=25, rep=100, quantiles=[0.2, 0.5, 0.8])
    return low, median, high


def pool(
    lengths: np.ndarray, dtype: torch.dtype, head_dim: int, num_kv_heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return K, V and permuted block tables; what no sequence owns is NaN."""
    counts = -(-lengths // BLOCK_SIZE)
    total = int(counts.sum()) + 8
    tables = torch.zeros(len(lengths), int(counts.max(initial=1)), dtype=torch.int32)
    order = torch.randperm(total, dtype=torch.int32)
    ends = np.cumsum(counts)
    for row, (end, count) in enumerate(zip(ends, counts, strict=True)):
        tables[row, :count] = order[end - count : end]
    caches = []
    for _ in "kv":
        shape = (total, BLOCK_SIZE, num_kv_heads, head_dim)
        cache = torch.randn(shape, device="cuda", dtype=dtype)
        cache[order[ends[-1] :].long().cuda()] = math.nan
        for row, length in enumerate(lengths):
            if length % BLOCK_SIZE:
                cache[int(tables[row, length // BLOCK_SIZE]), length % BLOCK_SIZE :] = math.nan
        caches.append(cache)
    return *caches, tables.cuda()


def make(
    lengths: list[int], queries: list[int], *, dtype: torch.dtype = torch.bfloat16,
    heads: tuple[int, int, int] = (NUM_HEADS, NUM_KV_HEADS, HEAD_DIM), **options: object,
) -> tuple[list[torch.Tensor], dict[str, object]]:  # fmt: skip
    """Return the positional arguments and the options of one call, its plan included."""
    torch.manual_seed(0)
    num_heads, num_kv_heads, head_dim = heads
    k_cache, v_cache, tables = pool(np.array(lengths), dtype, head_dim, num_kv_heads)
    cu = np.cumsum([0, *queries])
    plan = plan_work(
        lengths, cu, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype,
        window=options.get("window"), device="cuda",
    )  # fmt: skip
    q = torch.randn(int(cu[-1]), num_heads, head_dim, device="cuda", dtype=dtype)
    on_device = [torch.tensor(row, dtype=torch.int32, device="cuda") for row in (lengths, cu)]
    return [q, k_cache, v_cache, tables, *on_device], {**options, "plan": plan}


def errors(tensors: list[torch.Tensor], options: dict[str, object]) -> float:
    """Return our largest error against float64 over that of PyTorch, and reject what is not finite."""
    out = torch.full_like(tensors[0], math.nan)
    ours = paged_attention(*tensors, **options, out=out)
    plain = {name: value for name, value in options.items() if name != "plan"}
    exact = reference_attention(*tensors, **plain)
    low = reference_attention(*tensors, **plain, dtype=tensors[0].dtype)
    if not ours.isfinite().all():
        raise SystemExit("the kernel's result is not finite")
    rounding = torch.finfo(tensors[0].dtype).eps * float(exact.abs().max())
    return float((ours - exact).abs().max()) / (float((low - exact).abs().max()) + rounding)


def correctness() -> Iterator[tuple[str, float]]:
    """Yield what was tried and its error over PyTorch's."""
    mixed = {"lengths": [1, 700, 64, 0, 257, 3000], "queries": [1, 1, 64, 1, 40, 200]}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for heads in (
            (32, 8, 128),
            (8, 1, 64),
            (6, 2, 80),
            (5, 1, 96),
            (17, 1, 112),
            (48, 1, 128),
            (4, 4, 256),
        ):
            name = f"{dtype}".removeprefix("torch.")
            yield f"{name}, heads {heads}", errors(*make(**mixed, dtype=dtype, heads=heads))
    for options in ({"window": 100}, {"softcap": 30.0}, {"sinks": torch.ones(32, device="cuda")}):
        yield f"bfloat16, {next(iter(options))}", errors(*make(**mixed, **options))


def sdpa(tensors: list[torch.Tensor], length: int, queries: int) -> Callable[[], object]:
    """Return PyTorch's own attention on contiguous K and V of the same sizes."""
    num_seqs = len(tensors[4])
    q = tensors[0].view(num_seqs, queries, NUM_HEADS, HEAD_DIM).transpose(1, 2).contiguous()
    shape = (num_seqs, NUM_KV_HEADS, length, HEAD_DIM)
    k, v = (torch.randn(shape, device="cuda", dtype=q.dtype) for _ in "kv")
    return lambda: scaled_dot_product_attention(q, k, v, is_causal=queries > 1, enable_gqa=True)


def others(
    tensors: list[torch.Tensor], length: int, queries: int
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield whatever paged attention can be imported, by name."""
    q, k_cache, v_cache, tables, lengths, cu = tensors
    if importlib.util.find_spec("flash_attn"):
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

        if queries == 1 and BLOCK_SIZE % 256 == 0:
            yield (
                "flash-attn",
                lambda: flash_attn_with_kvcache(
                    q[:, None], k_cache, v_cache, cache_seqlens=lengths, block_table=tables, causal=True
                ),
            )
        elif queries > 1:
            k = torch.randn(len(q), NUM_KV_HEADS, HEAD_DIM, device="cuda", dtype=q.dtype)
            yield (
                "flash-attn, contiguous",
                lambda: flash_attn_varlen_func(q, k, k, cu, cu, queries, length, causal=True),
            )
    if importlib.util.find_spec("flashinfer"):
        import flashinfer

        counts = -(-lengths // BLOCK_SIZE)
        indptr = torch.cat((torch.zeros(1, device="cuda", dtype=torch.int32), counts.cumsum(0).int()))
        indices = torch.cat([row[:count] for row, count in zip(tables, counts.tolist(), strict=True)])
        last = (lengths - 1) % BLOCK_SIZE + 1
        space = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        pages = torch.stack((k_cache, v_cache), 1)
        heads = (NUM_HEADS, NUM_KV_HEADS, HEAD_DIM)
        if queries == 1:
            decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(space, "NHD", use_tensor_cores=True)
            decode.plan(indptr, indices, last, *heads, BLOCK_SIZE, q_data_type=q.dtype, kv_data_type=q.dtype)
            yield "flashinfer", lambda: decode.run(q, pages)
        else:
            prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(space, "NHD")
            prefill.plan(cu, indptr, indices, last, *heads, BLOCK_SIZE, causal=True, q_data_type=q.dtype)
            yield "flashinfer", lambda: prefill.run(q, pages)
    if importlib.util.find_spec("vllm"):
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention

        out = torch.empty_like(q)
        yield "vLLM", lambda: unified_attention(
            q=q, k=k_cache, v=v_cache, out=out, cu_seqlens_q=cu, max_seqlen_q=queries, seqused_k=lengths,
            max_seqlen_k=length, softmax_scale=HEAD_DIM**-0.5, causal=True, window_size=(-1, -1),
            block_table=tables, softcap=0.0, q_descale=None, k_descale=None, v_descale=None,
        )  # fmt: skip


def measure_copy(num_bytes: int) -> tuple[tuple[float, float, float], float]:
    """Return the times of a copy and its TB/s, read and written."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = milliseconds(lambda: target.copy_(source))
    return times, 2 * num_bytes / times[1] / 1e9


def measure_product(size: int) -> tuple[tuple[float, float, float], float]:
    """Return the times of a square bfloat16 matrix product and its TFLOP/s."""
    a = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    times = milliseconds(lambda: a @ a)
    return times, 2 * size**3 / times[1] / 1e9


def contestants(num_seqs: int, length: int, queries: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield every way to compute one batch, by name."""
    tensors, options = make([length] * num_seqs, [queries] * num_seqs)
    yield "ours", lambda: paged_attention(*tensors, **options)
    yield "SDPA, contiguous", sdpa(tensors, length, queries)
    yield from others(tensors, length, queries)


def measure(card: str) -> Iterator[Row]:
    """Yield all measurements."""
    versions = f"torch {torch.__version__}, triton {triton.__version__}"
    copy, peak_bytes = measure_copy(1 << 30)
    product, peak_flops = measure_product(8192)

    def row(case: str, contestant: str, times: tuple[float, float, float], work: float, peak: float) -> Row:
        low, median, high = (1e3 * time for time in times)
        rate = work / times[1] / 1e9
        return Row(card, versions, case, contestant, median, low, high, rate, rate / peak)

    yield row("copy of 1 GiB", "torch", copy, 2 << 30, peak_bytes)
    yield row("matrix product of 8192 cubed, bfloat16", "torch", product, 2 * 8192**3, peak_flops)
    for num_seqs, length in DECODES:
        size = 2 * num_seqs * length * NUM_KV_HEADS * HEAD_DIM * torch.bfloat16.itemsize
        for name, run in contestants(num_seqs, length, 1):
            yield row(f"decode, {num_seqs} x {length}, bfloat16", name, milliseconds(run), size, peak_bytes)
    for num_seqs, length in PREFILLS:
        # Half of the square, in each of two products.
        flops = 2 * num_seqs * length * (length + 1) * NUM_HEADS * HEAD_DIM
        for name, run in contestants(num_seqs, length, length):
            yield row(f"prefill, {num_seqs} x {length}, bfloat16", name, milliseconds(run), flops, peak_flops)


def main() -> None:
    """Check, measure, and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("out/kernels.csv"), help="where the CSV goes")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: nothing to measure")
        return
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise SystemExit("TRITON_INTERPRET is set, which would measure the interpreter; unset it")
    card = torch.cuda.get_device_name()
    worst = 0.0
    for case, error in correctness():
        worst = max(worst, error)
        print(f"  {case}: {error:.2f} of PyTorch's error", flush=True)
    if worst > 2:
        raise SystemExit(f"the kernel errs {worst:.2f} times as much as PyTorch: no speed of a wrong result")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with options.output.open("w") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
        writer.writeheader()
        for row in measure(card):
            writer.writerow(asdict(row))
            file.flush()
            print(f"  {row.case}, {row.contestant}: {row.microseconds:.1f} us, {row.ratio:.2f} of the card")
    print(f"{card}: largest error {worst:.2f} of PyTorch's; {options.output}")


if __name__ == "__main__":
    main()
