"""Sequences that are attended to step by step on a pool full of NaN, and a plain loop over their queries."""

import math
from types import SimpleNamespace

import numpy as np
import torch

from cbresearch.attention import PagedStep, attention_function, batch_order
from cbresearch.config import ModelShape


def shape(**changes):
    numbers = {"num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "num_parameters": 1}
    return ModelShape(**{**numbers, **changes})


def dense(query, keys, values, window, softcap, sinks):
    """Return one query's attention over all keys up to its own, `[num_heads, value size]`."""
    if window is not None:
        keys, values = keys[-window:], values[-window:]
    outputs = []
    for head in range(query.shape[0]):
        group = head // (query.shape[0] // keys.shape[1])
        scores = keys[:, group] @ query[head] / math.sqrt(query.shape[1])
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if sinks is not None:
            scores = torch.cat((scores, sinks[head, None]))
        outputs.append(scores.softmax(0)[: len(keys)] @ values[:, group])
    return torch.stack(outputs)


def serve_tokens(cache, tokens, window, chunks, *, freed=None, form=lambda step: step, **arguments):
    """Attend to sequences that are computed step by step on a pool full of NaN.

    Args:
        cache: The pool.
        tokens: For each sequence its queries, keys and values, each `[num_tokens, heads, size]`.
        window: The layer's window.
        chunks: For each sequence how many tokens each step computes, 0 for none.
        freed: If given, blocks behind a window of so many tokens are lost before each step.
        form: Makes of a step what the attention function gets.
        **arguments: For the attention function.

    Returns:
        For each sequence `[num_tokens, num_heads, value size]`.
    """
    block_size = cache.config.block_size
    num_blocks = max(-(-len(queries) // block_size) for queries, _, _ in tokens)
    ids = np.random.default_rng(0).permutation(cache.config.num_blocks)
    tables = ids[: len(tokens) * num_blocks].reshape(len(tokens), num_blocks).copy()
    done = np.zeros(len(tokens), dtype=np.int64)
    outputs = [[] for _ in tokens]
    for sizes in filter(any, zip(*chunks, strict=True)):
        now = np.flatnonzero(sizes)
        if freed is not None:
            for sequence in now:
                for block in range(max(0, done[sequence] - freed + 1) // block_size):
                    if tables[sequence, block] >= 0:
                        for layer in range(len(cache.kv)):
                            for view in cache.block_views(layer):
                                view[tables[sequence, block]] = math.nan
                        tables[sequence, block] = -1
        num_tokens = np.array(sizes, dtype=np.int64)[now]
        order = batch_order(done[now], num_tokens)
        now, num_tokens = now[order], num_tokens[order]
        step = PagedStep(cache, tables[now], done[now], num_tokens)
        new = [
            torch.cat(
                [tokens[n][kind][done[n] : done[n] + size] for n, size in zip(now, num_tokens, strict=True)]
            )
            for kind in range(3)
        ]
        output, _ = attention_function(
            SimpleNamespace(layer_idx=1),
            *(every.transpose(0, 1)[None] for every in new),
            None,
            paged=form(step),
            sliding_window=window,
            **arguments,
        )
        for n, part in zip(now, output[0].split(num_tokens.tolist()), strict=True):
            outputs[n].append(part)
        done[now] += num_tokens
    return [torch.cat(parts) for parts in outputs]


def random_chunks(rng, lengths, largest):
    """Return, for each sequence, tokens to compute in each of equally many steps."""
    chunks = []
    for length in lengths:
        sizes = []
        while sum(sizes) < length:
            sizes.append(int(min(rng.choice([0, 1, 1, rng.integers(1, largest + 1)]), length - sum(sizes))))
        chunks.append(sizes)
    most = max(map(len, chunks))
    return [sizes + [0] * (most - len(sizes)) for sizes in chunks]
