"""How far a model's logits vary with the shape of the batch, and how to compute them so that they do not."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import Embedding, Linear
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from cbresearch import attention
from cbresearch.config import CacheConfig
from cbresearch.models import LoadedModel, layer_windows


@torch.inference_mode()
def forced_logits(
    loaded: LoadedModel,
    sequences: Sequence[Sequence[int]],
    num_outputs: int,
    *,
    batch_size: int | None = None,
    chunk: int | None = None,
    block_size: int = 16,
) -> Tensor:
    """Return the logits behind the last tokens of given sequences, computed through the paged cache.

    The tokens are given, not chosen, so that the logits of two shapes of batch can be compared place by
    place. By default the last tokens are decodes: all before them are computed in one step, and then one
    token of each sequence in a step.

    Args:
        loaded: The model; its keys and values must not be latents.
        sequences: Token ids, at least `num_outputs` each.
        num_outputs: Of how many of the last tokens the logits are wanted.
        batch_size: Sequences that are computed together; all of them by default.
        chunk: Tokens of each sequence in a step; None for decodes.
        block_size: Tokens per KV block.

    Returns:
        `[num_sequences, num_outputs, vocab_size]`, in the model's dtype but at least float32, on the CPU.

    Raises:
        ValueError: A sequence is too short.
    """
    for place, sequence in enumerate(sequences):
        if not 1 <= num_outputs <= len(sequence):
            raise ValueError(
                f"sequence {place} has {len(sequence)} tokens; num_outputs is {num_outputs}, "
                "and must be 1 or more but at most that"
            )
    if batch_size is not None and batch_size < len(sequences):
        groups = [sequences[at : at + batch_size] for at in range(0, len(sequences), batch_size)]
        how: dict[str, Any] = {"chunk": chunk, "block_size": block_size}
        return torch.cat([forced_logits(loaded, group, num_outputs, **how) for group in groups])
    model = attention.paged_copy(loaded.model)
    lengths = np.array([len(sequence) for sequence in sequences])
    token_ids = np.zeros((len(sequences), lengths.max()), dtype=np.int64)
    for row, sequence in zip(token_ids, sequences, strict=True):
        row[: len(sequence)] = sequence
    width = -(-token_ids.shape[1] // block_size)
    tables = np.arange(len(sequences) * width).reshape(-1, width)
    cache = attention.PagedCache(
        loaded.shape,
        CacheConfig(tables.size, block_size),
        windows=layer_windows(model.config, loaded.shape.num_layers),
        backend=attention.choose_backend(None, loaded.shape, model.device),
        dtype=model.dtype,
        device=model.device,
    )
    firsts = lengths - num_outputs
    found: list[list[Tensor]] = [[] for _ in sequences]
    done = np.zeros_like(lengths)
    while (done < lengths).any():
        counts = np.full_like(lengths, chunk) if chunk else np.where(done, 1, firsts + 1)
        counts = np.minimum(counts, lengths - done)
        order = attention.batch_order(done, counts)
        order = order[counts[order] > 0]
        step = attention.PagedStep(cache, tables[order], done[order], counts[order])
        rows = np.repeat(order, counts[order])
        wanted = np.flatnonzero(step.positions >= firsts[rows])
        logits = _logits(model, step, token_ids[rows, step.positions], wanted)
        for row, its_logits in zip(rows[wanted].tolist(), logits, strict=True):
            found[row].append(its_logits)
        done += counts
    return torch.stack([torch.stack(of_one) for of_one in found])


def _logits(
    model: PreTrainedModel,
    step: attention.PagedStep,
    token_ids: npt.NDArray[np.int64],
    places: npt.NDArray[np.int64],
) -> Tensor:
    """Return the logits at some places of a step, `[num_places, vocab_size]`."""
    # Models take no places for "all", so a step of which no logits are wanted computes one.
    keep = places if len(places) else np.zeros(1, dtype=np.int64)
    arrays = {"input_ids": token_ids[None], "position_ids": step.positions[None], "logits_to_keep": keep}
    inputs = {name: torch.from_numpy(array).to(model.device) for name, array in arrays.items()}
    logits: Tensor = model(**inputs, use_cache=False, paged=step).logits[0, : len(places)]
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).cpu()


@contextmanager
def batch_invariant(loaded: LoadedModel, num_rows: int = 16) -> Iterator[None]:
    """Let a model compute each token in the same way whatever else is in the step, inside the context.

    A product of matrices chooses its order of summation by its shape, so linear layers get one shape:
    `num_rows` tokens at a time, the last of them filled up with zeros. Norms and activations take one token
    at a time, for a vectorised loop computes the elements behind its last full vector in another way.
    Attention takes one query at a time, with its own context and no padding.
    It reaches the model as transformers wrote it, not one that an executor compiled or captured as graphs.
    Source: Thinking Machines Lab, "Defeating Nondeterminism in LLM Inference", 2025: fixed tiles and splits.

    Args:
        loaded: The model; its keys and values must not be latents.
        num_rows: Rows of every product. Results are the same bits for the same number only. 1 relies on
            nothing; more on a library whose rows do not depend on their place among the rows of a product.

    Raises:
        ValueError: The number is below 1, or the model multiplies matrices in a way of its own.
    """
    if num_rows < 1:
        raise ValueError(f"num_rows is {num_rows}; it must be at least 1")
    if loaded.shape.latent_dim is not None:
        raise ValueError(f"model {loaded.name!r} caches latents, which are expanded for all queries at once")
    modules = list(loaded.model.modules())
    for module in modules:
        has_matrix = any(parameter.ndim > 1 for parameter in module.parameters(recurse=False))
        if has_matrix and not isinstance(module, Embedding | Linear):
            raise ValueError(
                f"{type(module).__name__} of {loaded.name!r} multiplies matrices without a linear layer; "
                "the order of its sums cannot be fixed here"
            )
    # What has no parts maps rows to rows. Embeddings only look up, and are called with token ids.
    leaves = [leaf for leaf in modules if not any(leaf.children()) and not isinstance(leaf, Embedding)]
    attend = ALL_ATTENTION_FUNCTIONS[attention.ATTENTION_NAME]
    own = [vars(leaf).get("forward") for leaf in leaves]
    try:
        ALL_ATTENTION_FUNCTIONS[attention.ATTENTION_NAME] = _by_query(attend, set(loaded.model.parameters()))
        for leaf in leaves:
            leaf.forward = _in_tiles(leaf.forward, num_rows if isinstance(leaf, Linear) else 1)
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS[attention.ATTENTION_NAME] = attend
        for leaf, forward in zip(leaves, own, strict=True):
            if forward is None:
                vars(leaf).pop("forward", None)
            else:
                leaf.forward = forward


def _in_tiles(forward: Callable[..., Any], num_rows: int) -> Callable[..., Any]:
    """Return what computes the rows of its only argument, `[..., features]`, `num_rows` at a time."""

    def in_tiles(rows: Tensor, *others: Any, **named: Any) -> Any:
        # Rotary embeddings take positions, too; they multiply nothing along which a sum could run.
        if others or named:
            return forward(rows, *others, **named)
        flat = rows.reshape(-1, rows.shape[-1])
        filled = pad(flat, (0, 0, 0, -len(flat) % num_rows))
        done = torch.cat([forward(tile) for tile in torch.split(filled, num_rows)])
        return done[: len(flat)].view(*rows.shape[:-1], -1)

    return in_tiles


def _by_query(attend: Callable[..., Any], weights: set[torch.nn.Parameter]) -> Callable[..., Any]:
    """Return an attention function that calls `attend` for each query alone, in layers with some weights."""
    last: attention.PagedStep | None = None
    steps: list[attention.PagedStep] = []

    def attend_alone(
        module: torch.nn.Module, *tensors: Any, paged: attention.PagedStep | None = None, **named: Any
    ) -> tuple[Tensor, None]:
        nonlocal last, steps
        if paged is None or weights.isdisjoint(module.parameters()):
            return attend(module, *tensors, paged=paged, **named)  # type: ignore[no-any-return]
        if paged is not last:
            last, steps = paged, _single_steps(paged)
        # A chunk's tokens are in the order of their positions, so each finds the keys before its own written.
        outputs = []
        for at, step in enumerate(steps):
            one = (tensor[:, :, at : at + 1] for tensor in tensors[:3])
            outputs.append(attend(module, *one, *tensors[3:], paged=step, **named)[0])
        return torch.cat(outputs, dim=1), None

    return attend_alone


def _single_steps(paged: attention.PagedStep) -> list[attention.PagedStep]:
    """Return a step for each token of a step."""
    tables = np.repeat(paged.block_tables, paged.num_tokens, axis=0)
    is_stored = np.ones(len(tables), dtype=bool)
    if paged.stored is not None:
        is_stored[:] = False
        is_stored[paged.stored.cpu().numpy()] = True
    one = np.ones(1, dtype=np.int64)
    return [
        attention.PagedStep(
            paged.cache, tables[at : at + 1], paged.positions[at : at + 1], one, is_stored[at : at + 1]
        )
        for at in range(len(tables))
    ]
