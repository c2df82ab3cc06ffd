"""The roofline's closed forms, against sums over single operations and public data sheets."""

import math
from dataclasses import replace

import numpy as np
import pytest

from cbresearch import Request, SchedulerConfig, formulas, metrics, simulate
from cbresearch.config import Hardware, ModelShape
from cbresearch.costs import Roofline

LLAMA_8B = ModelShape(
    num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, num_parameters=8_030_000_000, dtype_bytes=2
)
# FLOP/s in dense bfloat16 and bytes/s, from the data sheets.
H100, H200, A100 = (989e12, 3.35e12), (989e12, 4.8e12), (312e12, 2.039e12)


@pytest.mark.parametrize(("card", "tokens"), [(H100, 295), (H200, 206), (A100, 153)])
def test_ridges_of_public_cards(card, tokens):
    assert round(formulas.ridge_tokens(*card, 2)) == tokens
    # At the ridge, arithmetic and bandwidth take equally long, and the intensity is C/W.
    ridge = formulas.ridge_tokens(*card, 2)
    assert formulas.linear_intensity(ridge, 2) == pytest.approx(card[0] / card[1])
    # Half the bytes of a weight, half the batch.
    assert formulas.ridge_tokens(*card, 1) == ridge / 2


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8, 32])
@pytest.mark.parametrize("dtype_bytes", [1, 2, 4])
def test_intensity_of_attention_is_what_a_loop_over_keys_counts(num_kv_heads, dtype_bytes):
    shape = replace(LLAMA_8B, num_kv_heads=num_kv_heads, dtype_bytes=dtype_bytes)
    flops = loaded = 0
    for _ in range(5):  # cached tokens
        for _ in range(shape.num_kv_heads):
            loaded += 2 * shape.head_dim * dtype_bytes
            for _ in range(shape.num_heads // shape.num_kv_heads):
                flops += 2 * shape.head_dim  # a score
                flops += 2 * shape.head_dim  # a weighted value
    assert formulas.decode_attention_intensity(shape) == flops / loaded


@pytest.mark.parametrize("num_seqs", [1, 100, 294, 296, 1000])
@pytest.mark.parametrize("context", [0, 1, 4096])
def test_a_step_takes_the_longer_of_its_arithmetic_and_its_bytes(num_seqs, context):
    linear, attention = formulas.decode_step_seconds(LLAMA_8B, num_seqs, context, *H100)
    is_compute_bound = num_seqs > formulas.ridge_tokens(*H100, 2)
    weights = 2 * LLAMA_8B.num_parameters
    assert linear == pytest.approx(weights * num_seqs / H100[0] if is_compute_bound else weights / H100[1])
    cached = num_seqs * context * 2 * 32 * 8 * 128 * 2
    assert attention == pytest.approx(cached / H100[1])
    # All arithmetic is that of flops_per_token, and no step is faster than it.
    flops = num_seqs * formulas.flops_per_token(LLAMA_8B, context)
    assert linear + attention >= flops / H100[0] * (1 - 1e-12)


def test_attention_with_many_heads_per_kv_head_is_bound_by_arithmetic():
    machine = (10.0, 1.0)
    shape = ModelShape(
        num_layers=1, num_heads=64, num_kv_heads=1, head_dim=4, num_parameters=1, dtype_bytes=2
    )
    assert formulas.decode_attention_intensity(shape) == 64
    _, attention = formulas.decode_step_seconds(shape, 3, 5, *machine)
    assert attention == pytest.approx(3 * 5 * 4 * 64 * 4 / machine[0])


@pytest.mark.parametrize(
    ("function", "arguments", "name"),
    [
        (formulas.linear_intensity, (0, 2), "num_tokens"),
        (formulas.linear_intensity, (1, math.nan), "dtype_bytes"),
        (formulas.ridge_tokens, (-1, 1, 2), "peak_flops"),
        (formulas.ridge_tokens, (1, 0, 2), "bandwidth"),
        (formulas.decode_step_seconds, (LLAMA_8B, 0, 1, 1, 1), "num_seqs"),
        (formulas.decode_step_seconds, (LLAMA_8B, 1, -1, 1, 1), "context_length"),
        (formulas.decode_step_seconds, (LLAMA_8B, 1, 1, math.inf, 1), "peak_flops"),
        (formulas.decode_attention_intensity, (replace(LLAMA_8B, latent_dim=576),), "latent_dim"),
    ],
)
def test_what_is_out_of_range_is_named(function, arguments, name):
    with pytest.raises(ValueError, match=name):
        function(*arguments)


def backlog(seed, number):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(50, 1500, number), rng.integers(1, 200, number)
    pairs = zip(*(values.tolist() for values in lengths), strict=True)
    return [Request(str(place), prompt, output) for place, (prompt, output) in enumerate(pairs)], lengths


@pytest.mark.parametrize(("policy", "mixed"), [("prefill_first", False), ("sarathi", True)])
@pytest.mark.parametrize(("seats", "budget"), [(1, 4096), (8, 256), (8, 4096), (64, 1024)])
def test_no_backlog_is_served_faster_than_the_largest_request_rate(policy, mixed, seats, budget):
    requests, lengths = backlog(seats, 60)
    cost = Roofline(LLAMA_8B, Hardware("h100", *H100))
    trace = simulate(requests, policy, cost=cost, scheduler=SchedulerConfig(seats, budget))
    bound = formulas.max_request_rate(LLAMA_8B, *lengths, seats, *H100, mixed=mixed)
    assert metrics.request_throughput(trace) <= bound


def test_full_seats_come_near_the_largest_request_rate():
    requests, lengths = backlog(0, 120)
    cost = Roofline(LLAMA_8B, Hardware("h100", *H100))
    trace = simulate(requests, "prefill_first", cost=cost, scheduler=SchedulerConfig(2, 4096))
    bound = formulas.max_request_rate(LLAMA_8B, *lengths, 2, *H100, mixed=False)
    assert metrics.request_throughput(trace) == pytest.approx(bound, rel=0.05)


def test_the_largest_request_rate_of_one_token_outputs_is_that_of_their_prompts():
    rate = formulas.max_request_rate(LLAMA_8B, [1000], [1], 1, *H100, mixed=False)
    assert rate == pytest.approx(989e12 / (2 * 8.03e9 * 1000))
    assert rate == formulas.max_request_rate(LLAMA_8B, [1000], [1], 1, *H100, mixed=True)


def test_mixed_steps_are_never_slower():
    prompts, outputs = [100, 2000], [30, 400]
    for seats in (1, 10, 1000):
        apart, mixed = (
            formulas.max_request_rate(LLAMA_8B, prompts, outputs, seats, *H100, mixed=flag)
            for flag in (False, True)
        )
        assert mixed >= apart


def test_the_largest_request_rate_names_what_is_wrong():
    with pytest.raises(ValueError, match="prompts has 2 values, but outputs has 1"):
        formulas.max_request_rate(LLAMA_8B, [1, 2], [1], 1, *H100, mixed=True)
    with pytest.raises(ValueError, match="num_seqs is 0"):
        formulas.max_request_rate(LLAMA_8B, [1], [1], 0, *H100, mixed=True)
