"""The attention function that transformers' models call, and the choice of what computes it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from cbresearch.attention.native_backend import NativeStep, attend_natively
from cbresearch.attention.step import PagedStep
from cbresearch.attention.torch_backend import attend_with_torch
from cbresearch.attention.triton_backend import KernelInputs, attend_with_triton
from cbresearch.config import ModelShape
from cbresearch.kernels import native

ATTENTION_NAME = "cbresearch_paged"
BACKENDS = ("torch", "triton", "native")

# Arguments by which transformers' models change what is attended to.
_NOT_APPLIED = ("block_indices", "indices", "position_bias", "sinks")


def choose_backend(
    asked: str | None, shape: ModelShape, device: torch.device, dtype: torch.dtype = torch.float32
) -> str:
    """Return "torch", "triton" or "native": the one place that decides.

    Left to itself, a GPU takes the kernels and a CPU takes PyTorch, where Triton has only its interpreter
    (`TRITON_INTERPRET=1`, set before Triton is imported). The kernels take neither latents nor values of
    another size than keys. "native" is C++ for float32 on a CPU, taken only where it is asked for, since it
    needs a compiler.

    Args:
        asked: What the user wants, or None.
        shape: The model's heads.
        device: Where it runs.
        dtype: Element type of the cache.

    Raises:
        ValueError: The backend is unknown, or was asked for and cannot serve the model, or there is no C++
            compiler.
    """
    if asked is not None and asked not in BACKENDS:
        raise ValueError(f"attention backend {asked!r} is unknown; choose one of {BACKENDS}")
    is_plain = shape.latent_dim is None and shape.value_head_dim in (None, shape.head_dim)
    if asked == "triton" and not is_plain:
        raise ValueError(
            "the Triton kernels take neither latents nor values of another size than keys; use the backend "
            "'torch' for this model"
        )
    if asked == "native":
        if device.type != "cpu" or dtype != torch.float32 or shape.latent_dim is not None:
            raise ValueError(
                "the backend 'native' and compiled models are for float32 on a CPU, not for latents; this "
                f"model is {dtype} on {device.type}{'' if shape.latent_dim is None else ', with latents'}"
            )
        native.library()
    return asked or ("triton" if device.type == "cuda" and is_plain else "torch")


def attention_function(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    paged: PagedStep | KernelInputs | NativeStep | None = None,
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
        attention_mask: Unused: the step says which keys a query sees.
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
    for name in _NOT_APPLIED:
        if others.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} asks for {name!r}, which the paged attention does not apply; "
                "take a model without it"
            )
    if paged is None:
        raise ValueError(
            f"the attention {ATTENTION_NAME!r} runs only inside a ModelExecutor; restore the model's own"
        )
    step = _of_backend(paged) if isinstance(paged, PagedStep) else paged
    layer: int = module.layer_idx  # type: ignore[assignment]
    window = sliding_window if sliding_window is not None else step.windows[layer]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    attend: Callable[..., Tensor] = attend_with_torch
    if not isinstance(step, PagedStep):
        attend = attend_natively if isinstance(step, NativeStep) else attend_with_triton
    how = {"scale": scale, "window": window, "softcap": softcap, "sinks": s_aux}
    return attend(step, layer, query, key, value, **how), None


def _of_backend(step: PagedStep) -> PagedStep | KernelInputs | NativeStep:
    """Return a step as the backend of its pool takes it."""
    if step.cache.backend == "triton":
        return step.kernel_inputs
    return step.native if step.cache.backend == "native" else step


AttentionInterface.register(ATTENTION_NAME, attention_function)


@contextmanager
def paged_model(model: PreTrainedModel) -> Iterator[None]:
    """Let a model use `attention_function` inside the context, and leave it as it was found."""
    # The inner model's class is of transformers even where a user derived one of their own from the outer.
    inner = model.base_model
    assert isinstance(inner, PreTrainedModel)
    before = inner.config._attn_implementation  # noqa: SLF001, RUF100 - no public way to ask.
    inner.set_attn_implementation(ATTENTION_NAME)
    try:
        yield
    finally:
        inner.set_attn_implementation(before)
