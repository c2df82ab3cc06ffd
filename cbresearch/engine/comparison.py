"""Compare a short paged forward with the model's own, so that no model is served wrong."""

import re
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from cbresearch.attention import PagedCache, PagedStep, batch_order, shared_copy
from cbresearch.config import CacheConfig
from cbresearch.engine.forward import Forward
from cbresearch.models import LoadedModel

# By how much logits may differ, as a part of how they vary: sums are taken in another order. A model in
# float64 still takes its softmax or chooses its experts in float32.
_TOLERANCES = {torch.float16: 0.05, torch.bfloat16: 0.2}
_TOLERANCE = 1e-4
# Tokens of the longer sequence, and parameters times tokens up to which it may be longer.
_LEAST_LENGTH = 66
_MOST_APPLIED = 2 * 10**9
# Where two experts are as good, rounding may choose: other tokens are tried before a model is rejected.
_NUM_TRIES = 3


def reject_differing(loaded: LoadedModel, cache: PagedCache, forward: Forward) -> None:
    """Reject a model whose logits in a batch are not those of its own forward on each sequence alone.

    Two sequences of unlike content go through a small pool of their own in three steps: prompts in chunks,
    and a decode beside one. The logits behind every token are compared. What passes is a difference of at
    most 1e-4 of how they vary between tokens, 0.05 of it in float16 and 0.2 in bfloat16, and what rounding
    does to their own size; a mask or an offset on them excuses nothing else.

    Args:
        loaded: The model.
        cache: The pool that it is to be served with, which stays as it is.
        forward: Computes a step.

    Raises:
        ValueError: The logits differ, a layer does not attend through the cache, or a forward fails.
    """
    cause: Exception | None = None
    for seed in range(_NUM_TRIES):
        try:
            problem = _problem(loaded, cache, forward, np.random.default_rng(seed))
        except Exception as error:
            # Whatever a model's code meets there is about its insides.
            said = (str(error).splitlines() or [""])[0]
            problem = f"its forward fails on two short sequences: {type(error).__name__}: {said}"
            cause = error
        if problem is None:
            return
    family = loaded.model.config.model_type
    raise ValueError(f"model {loaded.name!r} of the family {family!r} cannot be served: {problem}") from cause


@torch.inference_mode()
def _problem(
    loaded: LoadedModel, cache: PagedCache, forward: Forward, rng: np.random.Generator
) -> str | None:
    """Return what is wrong with the logits of two sequences in three steps, or None."""
    # Other users of the model may train it, or run it, meanwhile.
    model, shape, block_size = shared_copy(loaded.model), loaded.shape, cache.config.block_size
    lengths = [min(length, shape.max_model_len or length) for length in (_length_over_windows(loaded), 7)]
    sequences = [rng.integers(shape.vocab_size or 2, size=length) for length in lengths]
    own = [_own_logits(model, torch.from_numpy(ids)[None].to(model.device)) for ids in sequences]
    widths = [-(-length // block_size) for length in lengths]
    where: Any = {"windows": cache.windows, "backend": cache.backend, "dtype": model.dtype}
    pool = PagedCache(
        shape, CacheConfig(sum(widths), block_size), **where, device=model.device, fill=torch.nan
    )
    blocks = np.split(rng.permutation(sum(widths)), widths[:1])
    tables = np.stack([np.resize(ids, max(widths)) for ids in blocks])
    # A chunk and a single token; chunks behind what is there; a decode beside a chunk.
    longer, shorter = lengths
    ends = np.array([(0, longer // 2, longer - 1, longer), (0, 1, max(1, shorter - 2), shorter)])
    whole = torch.cat(own).to(torch.promote_types(model.dtype, torch.float32))
    rounding = 8 * max(torch.finfo(dtype).eps for dtype in (model.dtype, own[0].dtype))
    # From token to token: what is added to the logits of all, as a mask or an offset, is none of their size.
    moved = whole.diff(dim=0).abs()
    moved = moved[(moved > rounding * whole[1:].abs()) & moved.isfinite()]
    # About as much as the largest of usual logits.
    moved = 4 * moved.median() if len(moved) and whole.shape[1] > 1 else whole.nan_to_num(0.0).abs().max()
    worst, most = 0.0, _TOLERANCES.get(model.dtype, _TOLERANCE) * float(moved)
    for starts, stops in zip(ends.T[:-1], ends.T[1:], strict=True):
        rows = [row for row in batch_order(starts, stops - starts) if stops[row] > starts[row]]
        if not rows:
            continue
        step = PagedStep(pool, tables[rows], starts[rows], (stops - starts)[rows])
        parts = [(row, slice(starts[row], stops[row])) for row in rows]
        ids = np.concatenate([sequences[row][part] for row, part in parts])
        # In another order, so that a model that gives the logits of all places instead is found out.
        logits = forward(ids, step, np.arange(len(ids))[::-1].copy()).flip(0)
        expected = torch.cat([own[row][part] for row, part in parts]).to(whole.dtype)
        difference = (logits - expected).abs() - rounding * expected.nan_to_num(0.0, 0.0, 0.0).abs()
        # A request that meets NaN fails by itself, where the model alone gives it too.
        same = (logits == expected) | (whole.isnan().any() & (logits.isnan() | expected.isnan()))
        worst = max(worst, float(difference.masked_fill(same, 0.0).nan_to_num(nan=torch.inf).max()))
    unused = [place for place, layer in enumerate(pool.kv) if bool(layer.isnan().all())]
    if unused and not whole.isnan().any():
        return f"its layers {unused} do not attend through the paged cache, by transformers' interface for it"
    if worst <= most:
        return None
    return (
        f"its logits in a batch differ from those of its own forward, by {worst:.2g} where {most:.2g} is "
        "rounding; a mask, a bias, positions or a state of its own take no part in the paged attention"
    )


def _own_logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return the logits `[num_tokens, vocab]` of all but one token at once, and of that one with a cache."""
    outputs = model(input_ids=ids[:, : max(1, ids.shape[1] - 1)], use_cache=True)
    for name in {"cache", "past_key_values"} & outputs.keys() if ids.shape[1] > 1 else ():
        last = model(input_ids=ids[:, -1:], use_cache=True, **{name: outputs[name]})
        return torch.cat((outputs.logits[0], last.logits[0]))
    logits: Tensor = model(input_ids=ids, use_cache=False).logits[0]
    return logits


def _length_over_windows(loaded: LoadedModel) -> int:
    """Return a length beyond small windows and chunks, and beyond the config's where that costs little."""
    config = loaded.model.config.get_text_config().to_dict()
    sizes = [int(size) for size in re.findall(r"'\w*(?:window|chunk|original_max)\w*': (\d+)", str(config))]
    most = _MOST_APPLIED // loaded.shape.num_parameters
    return max([_LEAST_LENGTH, *(size + 8 for size in sizes if size + 8 <= most)])
