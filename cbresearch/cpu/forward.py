"""The model on a CPU in float32: its linear layers and its attention in C++, as they are or compiled into one graph."""

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cbresearch.attention import ATTENTION_NAME, PagedStep
from cbresearch.config import ModelShape
from cbresearch.cpu.library import library, native_attention, native_linear

_log = logging.getLogger(__name__)


class CpuStep(NamedTuple):
    """What the C++ attention needs to know of a step; nothing but tensors and constants, so that it compiles.

    Attributes:
        kv: The pool of each layer.
        packed: int64, in one row: the number of sequences; the columns of the block tables; each sequence's
            first token, tokens, start, and whether they are written; the block tables, row by row.
        block_size: Tokens of a block.
        windows: Tokens that each layer attends to at most, None for the whole context.
    """

    kv: tuple[Tensor, ...]
    packed: Tensor
    block_size: int
    windows: tuple[int | None, ...]

    @classmethod
    def of(cls, step: PagedStep) -> "CpuStep":
        """Return a step as the C++ attention takes it."""
        firsts = np.cumsum(step.num_tokens) - step.num_tokens
        sequences = np.stack((firsts, step.num_tokens, step.starts, step.is_stored), axis=1)
        packed = np.concatenate((step.block_tables.shape, sequences.ravel(), step.block_tables.ravel()))
        cache = step.cache
        return cls(tuple(cache.kv), torch.from_numpy(packed), cache.config.block_size, step.windows)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *,
        scale: float, window: int | None, softcap: float | None, sinks: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Write a layer's keys and values into the pool and attend; see `attention_function`."""
        attend = torch.ops.cbresearch.native_attention if torch.compiler.is_compiling() else native_attention
        attended: Tensor = attend(
            *(query, key, value, self.kv[layer], self.packed, sinks),
            *(self.block_size, window or 0, scale, softcap or 0.0),
        )
        return attended


class NativeLinear(nn.Linear):
    """A linear layer whose product is C++."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the outputs `[..., out_features]`."""
        if torch.compiler.is_compiling():
            output: Tensor = torch.ops.cbresearch.native_linear(input, self.weight, self.bias)
            return output
        return native_linear(input, self.weight, self.bias)


@contextmanager
def _threads_of_ours() -> Iterator[None]:
    """Hand PyTorch's threads over to the C++ code, which never waits for one that has no core.

    PyTorch's own operators take part with one thread: they are short, and at the end of each the others would
    be waited for.
    """
    number = torch.get_num_threads()
    library().cbresearch_use_threads(number)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(number)


class NativeForward:
    """Call a model with its linear layers and its attention in C++.

    The model stays as it is: what runs is a copy of its modules, which shares all weights.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        self._model = copy.deepcopy(model, memo=shared)
        self._model.base_model.set_attn_implementation(ATTENTION_NAME)
        for module in self._model.modules():
            # A subclass may compute something else.
            if type(module) is nn.Linear and module.weight.is_contiguous():
                module.__class__ = NativeLinear

    @torch.inference_mode()
    def __call__(self, token_ids: np.ndarray, step: PagedStep, places: np.ndarray) -> Tensor:
        """Return the logits `[num places, vocab]` behind some places of a step."""
        arrays = (token_ids[None], step.positions[None], places)
        with _threads_of_ours():
            return self._logits(*map(torch.from_numpy, arrays), CpuStep.of(step))

    def _logits(self, token_ids: Tensor, positions: Tensor, places: Tensor, step: CpuStep) -> Tensor:
        outputs = self._model(
            input_ids=token_ids, position_ids=positions, use_cache=False, logits_to_keep=places, paged=step
        )
        logits: Tensor = outputs.logits[0]
        return logits


class CompiledForward(NativeForward):
    """Compile the model into one graph, with its linear layers and its attention in C++.

    One compilation serves every number of tokens: half a minute or so for a small model, and again in each
    process, though a later one finds parts of it in PyTorch's cache.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self._compiled = torch.compile(
            self._logits,
            fullgraph=True,
            dynamic=False,
            isolate_recompiles=True,
            options={"guard_filter_fn": _keep_guards, "size_asserts": False},
        )

    @torch.inference_mode()
    def __call__(self, token_ids: np.ndarray, step: PagedStep, places: np.ndarray) -> Tensor:
        """Return the logits `[num places, vocab]` behind some places of a step."""
        positions, num = step.positions, len(places)
        # A compiler takes a size of 1 for a constant, so such a step gets a token that belongs to no sequence.
        if len(token_ids) == 1:
            token_ids, positions = token_ids.repeat(2), positions.repeat(2)
        if num == 1:
            places = places.repeat(2)
        ids, at, keep = map(torch.from_numpy, (token_ids[None], positions[None], places))
        cpu_step = CpuStep.of(step)
        for tensor, axis in ((ids, 1), (at, 1), (keep, 0), (cpu_step.packed, 0)):
            torch._dynamo.mark_dynamic(tensor, axis)
        return self._compiled(ids, at, keep, cpu_step)[:num]


def _keep_guards(guards):
    return [False] * len(guards)
