"""Attention and matrix products on a CPU, in C++ that is built when it is first needed."""

import ctypes
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

_SOURCE = Path(__file__).with_name("native.cpp")
# Sums may be reordered, so that they become vector instructions; NaN and infinity stay what they are.
_FLAGS = [
    *("-std=c++17", "-O3", "-march=native", "-fPIC", "-shared"),
    *("-fno-math-errno", "-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math"),
]

_POINTERS = ("q", "k", "v", "sinks", "out", "kv", "step")
_INTEGERS = (
    *("q_token", "q_head", "k_token", "k_head", "v_token", "v_head"),
    *("num_tokens", "num_heads", "num_kv_heads", "key_dim", "value_dim", "block_size", "window"),
)


class _Call(ctypes.Structure):
    """The arguments, as the C++ code declares them."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _INTEGERS),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


class _Product(ctypes.Structure):
    """The arguments of a matrix product, as the C++ code declares them."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "panels", "bias", "out")),
        *((name, ctypes.c_int64) for name in ("x_row", "num_rows", "num_inputs", "num_outputs")),
    )


def find_compiler() -> str:
    """Return the C++ compiler: what `CXX` names, or the first of c++, g++ and clang++ on the path.

    Raises:
        ValueError: There is none.
    """
    asked = os.environ.get("CXX")
    for name in (asked,) if asked else ("c++", "g++", "clang++"):
        if shutil.which(name):
            return name
    raise ValueError(
        f"no C++ compiler is found ({f'CXX is {asked!r}' if asked else 'c++, g++, clang++'}), which the "
        "attention backend 'native' and compiled models need; install one, or use the backend 'torch'"
    )


@cache
def library() -> ctypes.CDLL:
    """Build and load the C++ code, once in a process; about a second.

    Raises:
        ValueError: There is no C++ compiler, or it fails.
    """
    compiler = find_compiler()
    with tempfile.TemporaryDirectory(prefix="cbresearch-") as folder:
        target = Path(folder) / "native.so"
        # A compiler without OpenMP still makes a library that runs on one thread.
        for flags in ([*_FLAGS, "-fopenmp"], _FLAGS):
            command = [compiler, *flags, str(_SOURCE), "-o", str(target)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if not done.returncode:
                break
        else:
            raise ValueError(f"the C++ compiler {compiler!r} fails on the native attention:\n{done.stderr}")
        loaded = ctypes.CDLL(str(target))
    loaded.cbresearch_paged_attention.argtypes = (ctypes.POINTER(_Call), ctypes.c_int)
    loaded.cbresearch_paged_attention.restype = None
    loaded.cbresearch_linear.argtypes = (ctypes.POINTER(_Product), ctypes.c_int)
    loaded.cbresearch_linear.restype = None
    return loaded


def pack(weight: Tensor) -> Tensor:
    """Return a linear layer's `[num_outputs, num_inputs]` weight as `[num_panels, num_inputs, width]`.

    A panel holds some outputs side by side, for each input after the other, so that a product reads the
    weights in one stream. Zeros fill up the last one.
    """
    width = library().cbresearch_panel_width()
    num_outputs, num_inputs = weight.shape
    padded = pad(weight.detach(), (0, 0, 0, -num_outputs % width))
    return padded.view(-1, width, num_inputs).transpose(1, 2).contiguous()


torch.library.define(
    "cbresearch::native_linear", "(Tensor x, Tensor panels, Tensor? bias, int num_outputs) -> Tensor"
)


@torch.library.impl("cbresearch::native_linear", "CPU")
def native_linear(x: Tensor, panels: Tensor, bias: Tensor | None, num_outputs: int) -> Tensor:
    """Return `x @ weight.T + bias`, each row of which is bit for bit the same in any company.

    Args:
        x: float32 `[..., num_inputs]`.
        panels: The weight, as `pack` returns it.
        bias: float32 `[num_outputs]`.
        num_outputs: Rows of the weight.
    """
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    out = x.new_empty(*x.shape[:-1], num_outputs)
    product = _Product(
        rows.data_ptr(),
        panels.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        rows.stride(0),
        rows.shape[0],
        rows.shape[1],
        num_outputs,
    )
    library().cbresearch_linear(product, torch.get_num_threads())
    return out


@torch.library.register_fake("cbresearch::native_linear")
def _native_linear_shape(x: Tensor, panels: Tensor, bias: Tensor | None, num_outputs: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], num_outputs)


torch.library.define(
    "cbresearch::native_attention",
    "(Tensor query, Tensor key, Tensor value, Tensor(a!) kv, Tensor step, Tensor? sinks, int block_size, "
    "int window, float scale, float softcap) -> Tensor",
)


@torch.library.impl("cbresearch::native_attention", "CPU")
def native_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv: Tensor,
    step: Tensor,
    sinks: Tensor | None,
    block_size: int,
    window: int,
    scale: float,
    softcap: float,
) -> Tensor:
    """Write a step's keys and values into a layer's pool, and attend.

    Args:
        query: float32 `[1, num_heads, num_tokens, head_dim]`, the last stride 1; as are `key` and `value`.
        key: `[1, num_kv_heads, num_tokens, head_dim]`.
        value: As `key`; its heads may have another size.
        kv: The layer's pool, as `PagedCache` has it.
        step: int64: who has which tokens, and where, as `PagedStep.native` packs it.
        sinks: float32 `[num_heads]`: scores of the attention sinks.
        block_size: Tokens of a block.
        window: Keys that a query sees at most, its own included; 0 for all.
        scale: Factor on the scores.
        softcap: Bound of the scores; 0 for none.

    Returns:
        `[1, num_tokens, num_heads, value size]`; 0 for tokens that belong to no sequence.
    """
    _, num_heads, num_tokens, key_dim = query.shape
    value_dim = value.shape[3]
    out = query.new_empty(1, num_tokens, num_heads, value_dim)
    _, q_head, q_token, q_last = query.stride()
    _, k_head, k_token, k_last = key.stride()
    _, v_head, v_token, v_last = value.stride()
    assert q_last == k_last == v_last == 1
    call = _Call(
        query.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        None if sinks is None else sinks.data_ptr(),
        out.data_ptr(),
        kv.data_ptr(),
        step.data_ptr(),
        q_token,
        q_head,
        k_token,
        k_head,
        v_token,
        v_head,
        num_tokens,
        num_heads,
        key.shape[1],
        key_dim,
        value_dim,
        block_size,
        window,
        scale,
        softcap,
    )
    library().cbresearch_paged_attention(call, torch.get_num_threads())
    return out


@torch.library.register_fake("cbresearch::native_attention")
def _native_attention_shape(query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
