"""Logits in given shapes of batch, against transformers, and forwards that do not depend on the batch."""

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from cbresearch import models
from cbresearch.attention import ATTENTION_NAME, attention_function
from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.engine import ModelExecutor
from cbresearch.experiments.batch_variance import batch_invariant, forced_logits
from cbresearch.policies import get
from cbresearch.request import Request, SamplingParams
from cbresearch.scheduler import Scheduler
from cbresearch.serve import serve

SHAPES = [
    {"batch_size": 1},
    {"batch_size": 3},
    {"batch_size": 3, "block_size": 5},
    {"chunk": 7},
    {"batch_size": 4, "chunk": 100},
    {},
]


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(3, 4096, size=length).tolist() for length in (4, 9, 17, 33, 18, 4, 40)]


@pytest.mark.parametrize("shape", SHAPES)
def test_forced_logits_are_those_of_the_model(tiny, texts, shape):
    found = forced_logits(tiny, texts, 4, **shape)
    assert found.shape == (len(texts), 4, 4096)
    with torch.inference_mode():
        for logits, text in zip(found, texts, strict=True):
            expected = tiny.model(torch.tensor([text]), use_cache=False).logits[0, -4:]
            assert torch.allclose(logits, expected, atol=1e-3)


@pytest.mark.parametrize("num_outputs", [0, 5])
def test_a_text_that_is_too_short_is_rejected(tiny, texts, num_outputs):
    with pytest.raises(ValueError, match="sequence 0 has 4 tokens"):
        forced_logits(tiny, texts, num_outputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_bit_of_invariant_logits_depends_on_the_batch(texts, dtype):
    loaded = models.load("tiny", dtype=dtype)
    plain = forced_logits(loaded, texts, 3)
    with batch_invariant(loaded):
        first, *others = [forced_logits(loaded, texts, 3, **shape) for shape in SHAPES]
    assert all(torch.equal(first, other) for other in others)
    assert torch.allclose(first, plain, atol=1e-3 if dtype == torch.float32 else 0.5)


@pytest.mark.parametrize("num_rows", [1, 5])
def test_any_number_of_rows_will_do(tiny, texts, num_rows):
    with batch_invariant(tiny, num_rows):
        first, *others = [forced_logits(tiny, texts[:4], 2, **shape) for shape in SHAPES[:3]]
    assert all(torch.equal(first, other) for other in others)


def test_the_model_is_left_as_it_was_even_after_an_error(tiny, texts):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before = forced_logits(tiny, texts, 2)
    with pytest.raises(RuntimeError, match="on purpose"), batch_invariant(tiny):
        raise RuntimeError("on purpose")
    assert ALL_ATTENTION_FUNCTIONS[ATTENTION_NAME] is attention_function
    assert not any("forward" in vars(module) for module in tiny.model.modules())
    assert torch.equal(forced_logits(tiny, texts, 2), before)


def test_a_forward_of_a_module_s_own_comes_back(tiny):
    norm = tiny.model.model.norm
    own = norm.forward
    norm.forward = own
    try:
        with batch_invariant(tiny):
            assert norm.forward is not own
        assert norm.forward is own
    finally:
        del norm.forward


def test_what_cannot_be_fixed_is_rejected(tiny):
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    gpt2 = models.wrap("gpt2", GPT2LMHeadModel(config))
    with pytest.raises(ValueError, match="Conv1D of 'gpt2' multiplies"), batch_invariant(gpt2):
        pass
    with pytest.raises(ValueError, match="num_rows is 0"), batch_invariant(tiny, 0):
        pass


def test_answers_in_bfloat16_do_not_depend_on_the_schedule(texts):
    loaded = models.load("tiny", dtype=torch.bfloat16)
    requests = [
        Request(f"r{place}", tuple(text), 12, sampling=SamplingParams(ignore_eos=True))
        for place, text in enumerate(texts)
    ]
    found = []
    with batch_invariant(loaded):
        for limits, pool in (
            (SchedulerConfig(1), CacheConfig(20, 16)),
            (SchedulerConfig(7), CacheConfig(100, 4, prefix_caching=False)),
            (SchedulerConfig(5, 12), CacheConfig(26, 2)),
            (SchedulerConfig(5, preemption="swap"), CacheConfig(26, 2, num_host_blocks=26)),
        ):
            executor = ModelExecutor(loaded, limits, pool, fill=float("nan"))
            found.append(serve(requests, Scheduler(get("fcfs"), limits, pool), executor).outputs)
    assert all(outputs == found[0] for outputs in found[1:])
