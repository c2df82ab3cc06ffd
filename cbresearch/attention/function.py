"""The attention function that transformers' models call, and the choice of what computes it."""

import copy
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from cbresearch.attention.step import PagedStep
from cbresearch.attention.torch_backend import attend_with_torch
from cbresearch.config import ModelShape

ATTENTION_NAME = "cbresearch_paged"
BACKENDS = ("torch", "triton", "native")

# Arguments by which transformers' models change what is attended to.
_NOT_APPLIED = ("block_indices", "indices", "position_bias", "sinks")


class OwnStep(Protocol):
    """A step in a form of its own, which attends by itself; as `KernelInputs` does."""

    kv: tuple[Tensor, ...]
    windows: tuple[int | None, ...]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *,
        scale: float, window: int | None, softcap: float | None, sinks: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Write a layer's keys and values into the pool and attend."""


def choose_backend(asked: str | None, shape: ModelShape, device: torch.device) -> str:
    """Return "torch", "triton" or "native": what is asked for, or else what suits.

    Left to itself, a GPU takes the kernels and a CPU takes PyTorch, where Triton has only its interpreter
    (`TRITON_INTERPRET=1`, set before Triton is imported). The kernels take neither latents nor values of
    another size than keys. "native" is the business of the room `cpu`.

    Args:
        asked: What the user wants, or None.
        shape: The model's heads.
        device: Where it runs.

    Raises:
        ValueError: The backend is unknown, or was asked for and cannot serve the model.
    """
    if asked is not None and asked not in BACKENDS:
        raise ValueError(f"attention backend {asked!r} is unknown; choose one of {BACKENDS}")
    is_plain = shape.latent_dim is None and shape.value_head_dim in (None, shape.head_dim)
    if asked == "triton" and not is_plain:
        raise ValueError(
            "the Triton kernels take neither latents nor values of another size than keys; use the backend "
            "'torch' for this model"
        )
    return asked or ("triton" if device.type == "cuda" and is_plain else "torch")


def attention_function(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    paged: PagedStep | OwnStep | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Write the step's keys and values into the pool and attend to what each query may see.

    Args:
        module: The attention layer; its `layer_idx` says which pool.
        query: `[1, num_heads, num_tokens, head_dim]`, rotated.
        key: `[1, num_kv_heads, num_tokens, head_dim]`, rotated. With latent attention, those of all tokens
            that the step reads, as `LatentCache` returned them.
        value: As `key`; its heads may have another size.
        attention_mask: None: the step says which keys a query sees.
        scaling: Factor on the scores; 1 / sqrt(head_dim) by default.
        paged: The step, or the form of it that one backend takes.
        sliding_window: Keys that a query sees at most, its own included; None for what the pool says.
        softcap: Bound c of the scores, c · tanh(score/c).
        s_aux: `[num_heads]`: the score of each head's attention sink, which takes weight and gives no value.
        **others: What else the model asks for.

    Returns:
        `[1, num_tokens, num_heads, value size]` and no weights, as transformers expects.

    Raises:
        ValueError: The model asks for what is not applied here, or was called outside a ModelExecutor.
    """
    asked = {repr(name): others.get(name) for name in _NOT_APPLIED}
    for name, argument in {"a mask or bias of its own": attention_mask, **asked}.items():
        if argument is not None:
            raise ValueError(
                f"{type(module).__name__} asks for {name}, which the paged attention does not apply; "
                "take a model without it"
            )
    if paged is None:
        raise ValueError(
            f"the attention {ATTENTION_NAME!r} runs only inside a ModelExecutor, in layers that hand on the "
            f"keyword arguments of a forward; {type(module).__name__} was called without a step"
        )
    layer: int = module.layer_idx  # type: ignore[assignment]
    if not (isinstance(paged, PagedStep) and paged.cache.latent_dim is not None):
        # What computes the attention writes as many elements as it is given.
        given = (key.shape[2], key.shape[1], key.shape[3] + value.shape[3])
        if given != (expected := (query.shape[2], *paged.kv[layer].shape[1:])):
            raise ValueError(
                f"{type(module).__name__} hands over keys and values of {given} (tokens, KV heads, elements) "
                f"where the step and the model's config say {expected}"
            )
    window = sliding_window if sliding_window is not None else paged.windows[layer]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    tensors = (layer, query, key, value)
    how: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "sinks": s_aux}
    if not isinstance(paged, PagedStep):
        return paged.attend(*tensors, **how), None
    if paged.cache.backend == "triton":
        return paged.kernel_inputs.attend(*tensors, **how), None
    return attend_with_torch(paged, *tensors, **how), None


AttentionInterface.register(ATTENTION_NAME, attention_function)


def paged_logits(
    model: PreTrainedModel, token_ids: Tensor, positions: Tensor, step: Any, **others: Any
) -> Tensor:
    """Return the logits of a `paged_copy` of a model, all or those that it is told to keep.

    Args:
        model: The copy.
        token_ids: int64 `[1, num_tokens]`.
        positions: int64 `[1, num_tokens]`.
        step: The step, or the form of it that one backend takes.
        **others: What else the model is told.
    """
    logits: Tensor = model(
        input_ids=token_ids, position_ids=positions, use_cache=False, paged=step, **others
    ).logits[0]
    return logits


def paged_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return a `shared_copy` of a model that attends by `attention_function`."""
    copied = shared_copy(model)
    # The inner model's class is of transformers even where a user derived one of their own from the outer.
    inner = copied.base_model
    assert isinstance(inner, PreTrainedModel)
    inner.set_attn_implementation(ATTENTION_NAME)
    return copied


def shared_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a model's modules, in evaluation mode; the model stays as it is.

    The copy shares all tensors and hooks, so that it costs no memory and follows weights that change in
    place, and what cannot be copied, as a lock. Modules that are put into the model later are not in it.

    Raises:
        ValueError: A config in it cannot be copied.
    """
    shared: dict[int, Any] = {}
    for module in model.modules():
        kept = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        for name, value in vars(module).items():
            # A hook that is a method would otherwise tell a copy of its owner.
            is_hooks = name.endswith("_hooks") and isinstance(value, dict)
            kept += value.values() if is_hooks else [value] * isinstance(value, Tensor)
        shared.update((id(value), value) for value in kept)
    tried = shared | {id(module): module for module in model.modules()}
    for module in model.modules():
        for name in vars(module).keys() - vars(torch.nn.Module()).keys():
            value = vars(module)[name]
            try:
                copy.deepcopy(value, dict(tried))
            except Exception as error:
                # The copy attends in another way by a config of its own.
                if isinstance(value, PreTrainedConfig):
                    raise ValueError(f"the model's {name!r} holds what cannot be copied: {error}") from error
                shared[id(value)] = value
            tried[id(value)] = value
    return copy.deepcopy(model, memo=shared).eval()
