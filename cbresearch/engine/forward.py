"""Run a step's tokens through the model: as it is, or compiled."""

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cbresearch.attention import ATTENTION_NAME, LatentCache, NativeStep, PagedCache, PagedStep, paged_model
from cbresearch.kernels import native

# Token ids, the step, and the places whose logits are wanted, to logits `[num places, vocab]`.
Forward = Callable[[np.ndarray, PagedStep, np.ndarray], Tensor]


class EagerForward:
    """Call the model as transformers wrote it."""

    def __init__(self, model: PreTrainedModel, cache: PagedCache) -> None:
        self._model = model
        self._has_latents = cache.latent_dim is not None
        # transformers 5.24 renamed the argument.
        takes_cache = "cache" in inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if takes_cache else "past_key_values"

    @torch.inference_mode()
    def __call__(self, token_ids: np.ndarray, step: PagedStep, places: np.ndarray) -> Tensor:
        """Return the logits `[num places, vocab]` behind some places of a step."""
        device = self._model.device
        # Such models hand over what there is to cache before they attend.
        latents = {self._cache_argument: LatentCache(step)} if self._has_latents else {}
        with paged_model(self._model):
            return self._model(
                input_ids=torch.from_numpy(token_ids)[None].to(device),
                position_ids=torch.from_numpy(step.positions)[None].to(device),
                use_cache=False,
                logits_to_keep=torch.from_numpy(places).to(device),
                paged=step,
                **latents,
            ).logits[0]


class PackedLinear(nn.Module):
    """A linear layer whose weights lie in the order in which the C++ product reads them."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.out_features = linear.out_features
        self.panels = native.pack(linear.weight)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs `[..., out_features]`."""
        return torch.ops.cbresearch.native_linear(x, self.panels, self.bias, self.out_features)


class CompiledForward:
    """Compile the model into one graph, for float32 on a CPU.

    One compilation serves every number of tokens: half a minute or so for a small model, and again in each
    process, though a later one finds parts of it in PyTorch's cache. The graph is made of a copy of the
    model's modules, with linear layers and attention in C++. The copy shares all weights but those of linear
    layers, which it holds rearranged: that much more memory, and a later change to them is not seen.
    """

    def __init__(self, model: PreTrainedModel, _: PagedCache) -> None:
        shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        self._model = copy.deepcopy(model, memo=shared)
        self._model.config._attn_implementation = ATTENTION_NAME
        for module in list(self._model.modules()):
            for name, child in module.named_children():
                if type(child) is nn.Linear:
                    setattr(module, name, PackedLinear(child))
        self._compiled = torch.compile(
            self._run,
            fullgraph=True,
            dynamic=False,
            options={"guard_filter_fn": _keep_guards, "size_asserts": False},
        )

    def _run(self, token_ids: Tensor, positions: Tensor, places: Tensor, step: NativeStep) -> Tensor:
        outputs = self._model(
            input_ids=token_ids, position_ids=positions, use_cache=False, logits_to_keep=places, paged=step
        )
        logits: Tensor = outputs.logits[0]
        return logits

    @torch.inference_mode()
    def __call__(self, token_ids: np.ndarray, step: PagedStep, places: np.ndarray) -> Tensor:
        """Return the logits `[num places, vocab]` behind some places of a step."""
        positions, num = step.positions, len(places)
        # A compiler takes a size of 1 for a constant, so such a step gets a token that belongs to nobody.
        if len(token_ids) == 1:
            token_ids, positions = token_ids.repeat(2), positions.repeat(2)
        if num == 1:
            places = places.repeat(2)
        ids, at = torch.from_numpy(token_ids)[None], torch.from_numpy(positions)[None]
        keep, packed_step = torch.from_numpy(places), step.native
        for tensor, axis in ((ids, 1), (at, 1), (keep, 0), (packed_step.packed, 0)):
            torch._dynamo.mark_dynamic(tensor, axis)
        return self._compiled(ids, at, keep, packed_step)[:num]


def _keep_guards(guards: Sequence[Any]) -> list[bool]:
    """Keep those on what differs from step to step: nobody else has the modules, so they stay as they are."""
    changing = ("L['token_ids']", "L['positions']", "L['places']", "L['step'].packed", "L['step'][1]")
    return [guard.name.startswith(changing) for guard in guards]
