"""The paged cache and its attention function, against plain loops over blocks and over queries."""

import math
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.attention_cases import dense, random_chunks, serve_tokens, shape
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MptConfig,
    MptForCausalLM,
)

from cbresearch import models
from cbresearch.attention import LatentCache, PagedCache, PagedStep, attention_function, paged_copy
from cbresearch.config import CacheConfig

NUM_BATCHES = 40


@pytest.mark.parametrize("kind", ["plain", "softcap", "sinks", "both", "values of another size"])
def test_attention_function_equals_a_loop_over_queries_in_any_windows_and_steps(kind):
    for seed in range(NUM_BATCHES):
        rng = np.random.default_rng(seed)
        torch.manual_seed(seed)
        window = rng.choice([None, 1, 3, 4, 16, 200])
        lengths = rng.integers(1, 40, size=int(rng.integers(1, 5)))
        if seed % 20 == 0:
            lengths[0] = 300
        value_dim = int(rng.choice([3, 9])) if kind == "values of another size" else 6
        tokens = [
            [torch.randn(n, heads, size).double() for heads, size in ((4, 6), (2, 6), (2, value_dim))]
            for n in lengths
        ]
        softcap = 0.7 if kind in ("softcap", "both") else None
        sinks = torch.randn(4).double() if kind in ("sinks", "both") else None
        cache = PagedCache(
            shape(value_head_dim=value_dim),
            CacheConfig(1200, int(rng.choice([1, 3, 16]))),
            dtype=torch.float64,
            fill=math.nan,
        )
        chunks = random_chunks(rng, lengths, int(rng.choice([2, 12, 300])))
        ours = serve_tokens(cache, tokens, window, chunks, freed=window, softcap=softcap, s_aux=sinks)
        for (queries, keys, values), output in zip(tokens, ours, strict=True):
            want = [
                dense(queries[n], keys[: n + 1], values[: n + 1], window, softcap, sinks)
                for n in range(len(queries))
            ]
            torch.testing.assert_close(output, torch.stack(want), rtol=0, atol=1e-10)


@pytest.mark.parametrize("sizes", [(9,), (1,) * 9, (2, 3, 1, 3), (5, 1, 1, 1, 1), (1, 8)])
def test_sliding_window_shows_the_same_keys_as_in_transformers(sizes):
    length, window = 9, 4
    config = MistralConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        sliding_window=window,
    )
    model = MistralForCausalLM(config)
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        weights = model(torch.arange(length)[None], output_attentions=True).attentions[0][0, 0]
    cache = PagedCache(
        shape(num_heads=1, num_kv_heads=1, value_head_dim=length), CacheConfig(9, 2), fill=math.nan
    )
    # Equal scores, and values that name their position: an output shows which keys were seen.
    tokens = [torch.zeros(length, 1, 6), torch.zeros(length, 1, 6), torch.eye(length)[:, None]]
    (seen,) = serve_tokens(cache, [tokens], window, [sizes], freed=window)
    want = [list(range(max(0, query - window + 1), query + 1)) for query in range(length)]
    assert [row[0].nonzero()[:, 0].tolist() for row in seen] == want
    assert [row.nonzero()[:, 0].tolist() for row in weights] == want


def test_sliding_window_is_the_pools_where_a_layer_does_not_say():
    cache = PagedCache(
        shape(), CacheConfig(20, 2), windows=(None, 4, None), dtype=torch.float64, fill=math.nan
    )
    tokens = [[torch.randn(30, heads, 6).double() for heads in (4, 2, 2)]]
    sizes = [(20, 1, 1, 8)]
    from_pool = serve_tokens(cache, tokens, None, sizes)
    torch.testing.assert_close(from_pool, serve_tokens(cache, tokens, 4, sizes), rtol=0, atol=0)


def test_paged_step_cuts_a_prompt_longer_than_its_window_into_pieces():
    cache = PagedCache(shape(), CacheConfig(200, 16))
    step = PagedStep(cache, np.arange(200)[None], np.array([0]), np.array([3000]))
    reads = step.reads(256)
    assert max(read.mask.numel() for read in reads) <= 256 * 511
    assert [(read.begin, read.end) for read in reads] == [
        (n, min(n + 256, 3000)) for n in range(0, 3000, 256)
    ]


def test_soft_cap_keeps_scores_of_ten_thousand_finite():
    tokens = [[torch.full((5, heads, 6), 64.0) for heads in (4, 2)] + [torch.randn(5, 2, 6)]]
    tokens[0][1][2] *= -1
    outputs = [
        serve_tokens(
            PagedCache(shape(), CacheConfig(4, 2), fill=math.nan), tokens, None, [(3, 1, 1)], softcap=cap
        )[0]
        for cap in (None, 50.0, 1.0)
    ]
    assert all(output.isfinite().all() for output in outputs)
    assert (outputs[0] - outputs[2]).abs().max() > 0.01


def test_attention_function_rejects_arguments_that_it_does_not_apply():
    with pytest.raises(ValueError, match="asks for 'position_bias'"):
        attention_function(
            SimpleNamespace(), *(torch.zeros(1, 1, 1, 1),) * 3, None, position_bias=torch.zeros(1)
        )
    with pytest.raises(ValueError, match="runs only inside a ModelExecutor"):
        attention_function(SimpleNamespace(), *(torch.zeros(1, 1, 1, 1),) * 3, None, position_bias=None)


def latent_step():
    cache = PagedCache(shape(latent_dim=5), CacheConfig(4, 2))
    return PagedStep(cache, np.array([[1, 0]]), np.array([0]), np.array([3]))


def test_latent_cache_rejects_expanded_keys():
    with pytest.raises(ValueError, match=r"\[1, 4, 3, 6\] and \[1, 4, 3, 6\] where latents of 5 elements"):
        LatentCache(latent_step()).update(torch.zeros(1, 4, 3, 6), torch.zeros(1, 4, 3, 6), 0)


def test_attention_function_rejects_latents_that_were_not_read_from_the_cache():
    step = latent_step()
    key = torch.zeros(1, 4, 2, 6)
    with pytest.raises(ValueError, match="does not read its latents"):
        attention_function(SimpleNamespace(layer_idx=0), torch.zeros(1, 4, 3, 6), key, key, None, paged=step)


def test_attention_function_rejects_a_window_over_latents():
    step = latent_step()
    key = torch.zeros(1, 4, 3, 6)
    with pytest.raises(ValueError, match="a sliding window of 2 over latents"):
        attention_function(SimpleNamespace(layer_idx=0), key, key, key, None, paged=step, sliding_window=2)


def test_paged_copy_serves_a_class_derived_by_a_user(tiny):
    # Its module is not there to be read, as with a class of a notebook.
    derived = type("Derived", (LlamaForCausalLM,), {"__module__": "not there"})(tiny.model.config)
    before = derived.config._attn_implementation
    with pytest.raises(ValueError, match="runs only inside a ModelExecutor"):
        paged_copy(derived)(torch.tensor([[3, 4]]))
    assert derived.config._attn_implementation == before
    derived(torch.tensor([[3, 4]]))


def test_paged_copy_shares_tensors_and_hooks_and_nothing_else():
    class Notes:
        def __init__(self):
            # What cannot be copied.
            self.lock, self.seen = threading.Lock(), []

        def note(self, module, *_):
            self.seen.append(module)

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=16, **sizes)
    model, notes = LlamaForCausalLM(config), Notes()
    model.model.norm.register_forward_hook(notes.note)
    model.train()
    model.model.mask = torch.ones(3)
    copied = paged_copy(model)
    ours, theirs = ([*of.parameters(), *of.buffers(), of.model.mask] for of in (copied, model))
    assert all(one is other for one, other in zip(ours, theirs, strict=True))
    assert {id(module) for module in copied.modules()}.isdisjoint(id(module) for module in model.modules())
    assert model.training
    assert not any(module.training for module in copied.modules())
    copied.set_attn_implementation("eager")
    copied(torch.tensor([[3, 4]]))
    assert notes.seen == [copied.model.norm]


@pytest.mark.parametrize(
    ("model_class", "config"),
    [
        (BloomForCausalLM, BloomConfig(hidden_size=32, n_layer=2, n_head=4)),
        (MptForCausalLM, MptConfig(d_model=32, n_layers=2, n_heads=4)),
        (FalconForCausalLM, FalconConfig(num_hidden_layers=1, hidden_size=32, num_attention_heads=4)),
    ],
)
def test_models_rejects_families_with_alibi_at_load(model_class, config):
    config.vocab_size = 64
    with pytest.raises(ValueError, match=f"of the family '{config.model_type}', .* ALiBi included"):
        models.wrap("m", model_class(config))
