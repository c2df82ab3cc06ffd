"""Run a step's tokens through the model: as it is, or compiled."""

import copy
import inspect
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cbresearch.attention import ATTENTION_NAME, LatentCache, PagedCache, PagedStep, paged_model
from cbresearch.kernels import native
from cbresearch.models import LoadedModel

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
        return torch.ops.cbresearch.native_linear(x, self.panels, self.bias, self.out_features)


class CompiledForward:
    """Compile the model into one graph, for float32 on a CPU."""

    def __init__(self, model: PreTrainedModel, cache: PagedCache) -> None:
        parameters = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        self._model = copy.deepcopy(model, memo=parameters)
        self._model.config._attn_implementation = ATTENTION_NAME
        for module in list(self._model.modules()):
            for name, child in module.named_children():
                if type(child) is nn.Linear:
                    setattr(module, name, PackedLinear(child))
        self._compiled = torch.compile(self._run, dynamic=False, fullgraph=True)

    def _run(self, token_ids, positions, places, step):
        return self._model(
            input_ids=token_ids,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=places,
            paged=step,
        ).logits[0]

    @torch.inference_mode()
    def __call__(self, token_ids: np.ndarray, step: PagedStep, places: np.ndarray) -> Tensor:
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


def choose_forward(loaded: LoadedModel, cache: PagedCache, compile: bool) -> Forward:
    """Return what runs the model.

    Raises:
        ValueError: It is to be compiled, and cannot be.
    """
    return CompiledForward(loaded.model, cache) if compile else EagerForward(loaded.model, cache)
