"""The model on a CPU in float32, its linear layers and its attention in C++, compiled or not."""

import inspect
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cbresearch.attention import PagedStep, paged_copy, paged_logits
from cbresearch.config import ModelShape
from cbresearch.cpu.library import large_pages, library, native_attention, native_linear, pack, panels_shape


def is_native(backend: str | None, shape: ModelShape, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a model runs in C++: where that is asked for, and by default wherever it can.

    Args:
        backend: What is asked for, or None.
        shape: The model's.
        device: Where it runs.
        dtype: Its element type.

    Raises:
        ValueError: "native" is asked for, and the model is of another kind or the C++ code cannot be built.
    """
    if backend not in (None, "native"):
        return False
    is_served = device.type == "cpu" and dtype == torch.float32 and shape.latent_dim is None
    if backend is None:
        return is_served and can_build()
    if not is_served:
        raise ValueError(
            "the backend 'native' and compiled models are for float32 on a CPU, not for latents; this "
            f"model is {dtype} on {device.type}{'' if shape.latent_dim is None else ', with latents'}"
        )
    library()
    return True


@cache
def can_build() -> bool:
    """Return whether the C++ code is there; where it is not, say so once."""
    try:
        library()
    except ValueError as problem:
        logging.getLogger(__name__).warning("models run more slowly, all in PyTorch: %s", problem)
        return False
    return True


@contextmanager
def native_threads() -> Iterator[None]:
    """Hand the threads that PyTorch may use over to the C++ code, which waits for none that has no core.

    PyTorch's own operators take one thread meanwhile: they are short, and at the end of each the others would
    be waited for.
    """
    # PyTorch counts for each thread, and tells a new one what another was told last.
    users = _users()
    number = next(iter(users), None) or torch.get_num_threads()
    users.append(number)
    library().cbresearch_use_threads(number)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(number)
        users.pop()


@cache
def _users() -> list[int]:
    """Return how many threads PyTorch may use by itself, once for each forward under way."""
    return []


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
    """A linear layer whose product is C++, which reads a copy of its weights in another order."""

    panels: Tensor
    packed_state = (0, 0)

    def pack(self) -> None:
        """Copy the weights into `panels`, if that has not happened since they last changed in place."""
        # Tensors made for inference only do not count their changes.
        changes = 0 if self.weight.is_inference() else self.weight._version  # noqa: SLF001 - PyTorch's name.
        state = (self.weight.data_ptr(), changes)
        if state != self.packed_state and self.weight.dtype == torch.float32:
            self.packed_state = state
            self.panels.copy_(pack(self.weight))

    def forward(self, input: Tensor) -> Tensor:
        """Return the outputs `[..., out_features]`."""
        if input.dtype != torch.float32:
            # The model was moved to another type meanwhile; PyTorch says what is wrong with that.
            return super().forward(input)
        multiply = torch.ops.cbresearch.native_linear if torch.compiler.is_compiling() else native_linear
        output: Tensor = multiply(input, self.panels, self.bias, self.out_features)
        return output


class NativeForward:
    """Call a model with its linear layers and its attention in C++.

    Layers of other kinds, and what a model multiplies without a layer, are PyTorch's. The weights of linear
    layers are there packed once more, and packed again when they change in place between steps; a change
    behind PyTorch's back, as through `weight.data`, is not seen.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = paged_copy(model)
        # A subclass may compute something else, and what runs before a layer make its weights anew.
        self._layers: list[Any] = [
            module for module in self._model.modules()
            if type(module) is nn.Linear and "weight" in dict(module.named_parameters(recurse=False))
            and not vars(module)["_forward_pre_hooks"]
        ]  # fmt: skip
        sizes = [math.prod(panels_shape(layer.weight)) for layer in self._layers]
        for layer, part in zip(self._layers, large_pages(sum(sizes)).split_with_sizes(sizes), strict=True):
            layer.__class__ = NativeLinear
            layer.register_buffer("panels", part.view(panels_shape(layer.weight)), persistent=False)
        self._pack()

    @torch.no_grad()
    def _pack(self) -> None:
        for layer in self._layers:
            layer.pack()

    @torch.inference_mode()
    def __call__(self, token_ids: np.ndarray, step: PagedStep, places: np.ndarray) -> Tensor:
        """Return the logits `[num places, vocab]` behind some places of a step."""
        self._pack()
        ids, positions = torch.from_numpy(token_ids)[None], torch.from_numpy(step.positions)[None]
        return self._logits(ids, positions, torch.from_numpy(places), CpuStep.of(step))

    def _logits(self, token_ids: Tensor, positions: Tensor, places: Tensor, step: CpuStep) -> Tensor:
        return paged_logits(self._model, token_ids, positions, step, logits_to_keep=places)


class CompiledForward(NativeForward):
    """Compile the model into one graph, with its linear layers and its attention in C++.

    One compilation serves every number of tokens: half a minute or so for a small model, and again in each
    process, though a later one finds parts of it in PyTorch's cache.

    Raises:
        ValueError: This PyTorch cannot keep what it compiles for several models apart.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        if "isolate_recompiles" not in inspect.signature(torch.compile).parameters:
            raise ValueError(
                f"torch {torch.__version__} cannot compile several models apart; install torch 2.13 or "
                "newer, or leave compile=False"
            )
        super().__init__(model)
        self._compiled: Callable[..., Tensor] = torch.compile(  # type: ignore[call-overload]
            self._logits,
            fullgraph=True,
            dynamic=False,
            # Without guards on whose it is, another model would otherwise get what was compiled for this one.
            isolate_recompiles=True,
            options={"guard_filter_fn": _keep_guards, "size_asserts": False},
        )

    @torch.inference_mode()
    def __call__(self, token_ids: np.ndarray, step: PagedStep, places: np.ndarray) -> Tensor:
        """Return the logits `[num places, vocab]` behind some places of a step."""
        self._pack()
        positions, num = step.positions, len(places)
        # A compiler takes a size of 1 for a constant: such a step gets a token that belongs to no sequence.
        if len(token_ids) == 1:
            token_ids, positions = token_ids.repeat(2), positions.repeat(2)
        if num == 1:
            places = places.repeat(2)
        ids, at = torch.from_numpy(token_ids)[None], torch.from_numpy(positions)[None]
        keep, cpu_step = torch.from_numpy(places), CpuStep.of(step)
        for tensor, axis in ((ids, 1), (at, 1), (keep, 0), (cpu_step.packed, 0)):
            torch._dynamo.mark_dynamic(tensor, axis)  # noqa: SLF001 - there is no public name for it.
        return self._compiled(ids, at, keep, cpu_step)[:num]


def _keep_guards(guards: Sequence[Any]) -> list[bool]:
    """Keep those on what differs from step to step: the modules are this forward's own, and stay."""
    changing = ("L['token_ids']", "L['positions']", "L['places']", "L['step'].packed", "L['step'][1]")
    return [guard.name.startswith(changing) for guard in guards]
