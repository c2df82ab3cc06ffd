"""Bytes of the KV cache against published numbers, hand arithmetic and brute force."""

import math
from dataclasses import replace

import numpy as np
import pytest

from cbresearch import formulas
from cbresearch.config import ModelShape

OPT_13B = ModelShape(40, 40, 40, 128, 13_000_000_000, dtype_bytes=2)
LLAMA_2_70B = ModelShape(80, 64, 8, 128, 69_000_000_000, dtype_bytes=2)
DEEPSEEK_V3 = ModelShape(
    61, 128, 128, 192, 671_000_000_000, dtype_bytes=2, value_head_dim=128, latent_dim=576
)
GEMMA_2_9B = ModelShape(
    42, 16, 8, 256, 9_000_000_000, dtype_bytes=2, sliding_window=4096, num_sliding_layers=21
)
WINDOWED = ModelShape(3, 4, 2, 8, 1000, dtype_bytes=2, sliding_window=5, num_sliding_layers=2)


def held_by_counting(shape: ModelShape, num_tokens: int, block_size: int) -> int:
    """Return the bytes of the blocks that each layer needs while the last token attends, one by one."""
    slots = 0
    for layer in range(shape.num_layers):
        seen = range(num_tokens)
        if layer < shape.num_sliding_layers:
            seen = [place for place in seen if num_tokens - 1 - place < shape.sliding_window]
        slots += block_size * len({place // block_size for place in seen})
    return slots * formulas.kv_bytes_per_token(shape) // shape.num_layers


def sample(seed: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    return generator.integers(1, 40, 60), generator.geometric(0.05, 60)


@pytest.mark.parametrize(
    ("shape", "kib"),
    [
        (OPT_13B, 800),  # vLLM paper, section 3: 800 KB a token
        (ModelShape(32, 32, 32, 128, 1, dtype_bytes=2), 512),  # LLaMA-2-7B: 0.5 MiB
        (LLAMA_2_70B, 320),
        (ModelShape(32, 32, 8, 128, 1, dtype_bytes=2), 128),  # Llama-3-8B, Mistral-7B
        (ModelShape(32, 71, 1, 64, 1, dtype_bytes=2), 8),  # Falcon-7B
        (GEMMA_2_9B, 336),
    ],
)
def test_published_shapes_take_the_known_kib_per_token(shape, kib):
    assert formulas.kv_bytes_per_token(shape) == kib * 1024


def test_opt_13b_takes_819_200_bytes_per_token():
    assert formulas.kv_bytes_per_token(OPT_13B) == 819_200


def test_a_latent_is_held_once_for_keys_and_values_of_all_heads():
    # DeepSeek-V3 technical report: 512 compressed and 64 rotary elements, 61 layers: 70,272 bytes in bf16.
    assert formulas.kv_bytes_per_token(DEEPSEEK_V3) == 70_272
    expanded = replace(DEEPSEEK_V3, latent_dim=None)
    assert formulas.kv_bytes_per_token(expanded) == 61 * 128 * (192 + 128) * 2


def test_the_latent_of_deepseek_v2_equals_two_and_a_quarter_groups():
    # DeepSeek-V2, table 1: latent 4 d and rotary d / 2 take (9/2) d l elements, as GQA with 2.25 groups.
    latent = ModelShape(6, 16, 16, 128, 1, latent_dim=4 * 128 + 64)
    assert formulas.kv_bytes_per_token(latent) == 2.25 * formulas.kv_bytes_per_token(
        ModelShape(6, 16, 1, 128, 1)
    )


def test_values_of_another_size_than_keys_count_with_their_own():
    shape = ModelShape(3, 4, 2, 24, 1, dtype_bytes=2, value_head_dim=16)
    assert formulas.kv_bytes_per_token(shape) == 3 * 2 * (24 + 16) * 2


def test_eight_bits_halve_the_cache_and_scales_take_some_back():
    assert formulas.kv_bytes_per_token(LLAMA_2_70B, cache_dtype_bytes=1) == 160 * 1024
    with_scales = formulas.kv_bytes_per_token(LLAMA_2_70B, cache_dtype_bytes=1, scale_bytes=4)
    # A float32 per key and per value of 128 elements: 8 bytes to 256.
    assert with_scales == 160 * 1024 * (1 + 8 / 256)
    latent = formulas.kv_bytes_per_token(DEEPSEEK_V3, cache_dtype_bytes=1, scale_bytes=4)
    assert latent == 61 * (576 + 4)


@pytest.mark.parametrize(("devices", "share"), [(1, 1), (2, 2), (4, 4), (8, 8), (16, 8), (32, 8)])
def test_tensor_parallel_divides_by_at_most_the_kv_heads(devices, share):
    whole = formulas.kv_bytes_per_token(LLAMA_2_70B)
    assert formulas.kv_bytes_per_token(LLAMA_2_70B, tensor_parallel=devices) * share == whole


def test_tensor_parallel_repeats_a_latent():
    assert formulas.kv_bytes_per_token(DEEPSEEK_V3, tensor_parallel=8) == 70_272


def test_the_same_options_hold_for_a_request():
    options = {"cache_dtype_bytes": 1, "scale_bytes": 4, "tensor_parallel": 2}
    assert formulas.kv_bytes_per_request(LLAMA_2_70B, 100, **options) == 100 * formulas.kv_bytes_per_token(
        LLAMA_2_70B, **options
    )


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 16])
@pytest.mark.parametrize("window", [1, 2, 5, 8, 40])
def test_a_windowed_request_holds_the_blocks_of_the_tokens_that_its_last_one_sees(window, block_size):
    shape = replace(WINDOWED, sliding_window=window)
    for num_tokens in range(1, 50):
        held = formulas.kv_bytes_per_request(shape, num_tokens, block_size)
        assert held == held_by_counting(shape, num_tokens, block_size)
    assert formulas.kv_bytes_per_request(shape, 7) == formulas.kv_bytes_per_request(shape, 7, 1)


def test_only_windowed_layers_stop_to_grow():
    per_layer = formulas.kv_bytes_per_token(GEMMA_2_9B) // 42
    assert formulas.kv_bytes_per_request(GEMMA_2_9B, 4096) == 4096 * 42 * per_layer
    assert formulas.kv_bytes_per_request(GEMMA_2_9B, 8192) == (8192 * 21 + 4096 * 21) * per_layer


def test_a_pool_takes_what_weights_and_activations_leave():
    # 80 GB at 90 %, 26 GB of weights, 2 GB of activations: 44 GB in blocks of 16 · 819,200 bytes.
    blocks = formulas.num_kv_blocks(80e9, 819_200, 16, weights=26e9, activations=2e9)
    assert blocks == math.floor(44e9 / 13_107_200) == 3356
    assert formulas.num_kv_blocks(80e9, 819_200, 16, weights=90e9) == 0


def test_the_reservation_is_what_is_left_averaged_over_every_step():
    prompts, outputs = sample(0)
    # After x of X steps X − x are left; midpoints make the sum over steps the integral over time.
    left = [output - step - 0.5 for output in outputs for step in range(output)]
    assert formulas.mean_reserved_tokens(outputs) == pytest.approx(np.mean(left))
    biased_prompt = float(prompts @ outputs / outputs.sum())
    held = formulas.time_mean_held_tokens(prompts, outputs)
    assert held - formulas.mean_reserved_tokens(outputs) == pytest.approx(biased_prompt)


@pytest.mark.parametrize("seed", range(5))
def test_shares_of_a_contiguous_memory_equal_those_counted_step_by_step(seed):
    prompts, outputs = sample(seed)
    reserved = prompts + 2 ** np.ceil(np.log2(outputs))
    counted = np.zeros(3)
    for prompt, output, room in zip(prompts, outputs, reserved, strict=True):
        for step in range(output):
            counted += prompt + step + 0.5, output - step - 0.5, room - prompt - output
    per_request = counted / outputs.sum()
    shares = formulas.contiguous_memory_shares(prompts, outputs, reserved, 7.5, 1000)
    assert shares[:3] == pytest.approx(7.5 * per_request / 1000)
    assert sum(shares) == pytest.approx(1)


def test_the_exact_reservation_wastes_nothing_inside():
    prompts, outputs = sample(1)
    shares = formulas.contiguous_memory_shares(prompts, outputs, prompts + outputs, 10, 1000)
    assert shares.internal == 0


def test_seven_requests_of_2048_tokens_leave_8_7_percent_of_15_700():
    # vLLM paper, figure 2: 8.9 % external and others, at 7.00 requests in 15.7K slots.
    shares = formulas.contiguous_memory_shares([161], [338], [2048], 7, 15_700)
    assert shares.external == pytest.approx(0.087, abs=5e-4)


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda: formulas.kv_bytes_per_token(OPT_13B, cache_dtype_bytes=0), "cache_dtype_bytes is 0"),
        (lambda: formulas.kv_bytes_per_token(OPT_13B, scale_bytes=-1), "scale_bytes is -1"),
        (lambda: formulas.kv_bytes_per_token(OPT_13B, tensor_parallel=0), "tensor_parallel is 0"),
        (lambda: formulas.kv_bytes_per_token(LLAMA_2_70B, tensor_parallel=3), "tensor_parallel is 3; 8 KV"),
        (lambda: formulas.num_kv_blocks(0, 1, 1), "memory is 0"),
        (lambda: formulas.num_kv_blocks(1, 1, 1, utilization=1.5), "utilization is 1.5"),
        (lambda: formulas.num_kv_blocks(1, 1, 1, weights=-1), "weights is -1"),
        (lambda: formulas.mean_reserved_tokens([]), r"outputs has shape \(0,\)"),
        (lambda: formulas.contiguous_memory_shares([1], [2], [2], 1, 9), "reserved holds 2.0, less than"),
        (lambda: formulas.contiguous_memory_shares([1], [2], [3, 3], 1, 9), "reserved has 2 values"),
        (lambda: formulas.contiguous_memory_shares([1], [2], [3], 4, 9), "num_running is 4; at 3 tokens"),
    ],
)
def test_bad_input_is_rejected_with_its_name_and_value(call, complaint):
    with pytest.raises(ValueError, match=complaint):
        call()
