"""The C++ code: built when it is first needed, kept in the cache folder, and wrapped as PyTorch operators."""

import ctypes
import hashlib
import mmap
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from cbresearch.models import cache_folder

_SOURCE = Path(__file__).with_name("native.cpp")
_FLAGS = [
    *("-std=c++17", "-O3", "-march=native", "-fPIC", "-shared", "-pthread"),
    # Sums may be reordered, so that they become vector instructions; NaN and infinity stay what they are.
    *("-fno-math-errno", "-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math"),
]

_POINTERS = ("q", "k", "v", "sinks", "out", "kv", "step")
_INTEGERS = (
    *("q_token", "q_head", "k_token", "k_head", "v_token", "v_head"),
    *("num_tokens", "num_heads", "num_kv_heads", "key_dim", "value_dim", "block_size", "window"),
)


class _Call(ctypes.Structure):
    """The arguments of the attention, as the C++ code declares them."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _INTEGERS),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
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
    """Load the C++ code, built before if this machine and compiler never did: about three seconds.

    Raises:
        ValueError: There is no C++ compiler, it fails, or the cache folder cannot be written to.
    """
    compiler = find_compiler()
    # What the compiler defines beforehand tells its version and what this processor can do.
    target_macros = _compile(compiler, "-dM", "-E", "-x", "c++", os.devnull)
    digest = hashlib.blake2b(_SOURCE.read_bytes() + target_macros.encode(), digest_size=8).hexdigest()
    target = cache_folder() / f"native-{digest}.so"
    try:
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=".native-") as folder:
                built = Path(folder) / target.name
                _compile(compiler, str(_SOURCE), "-o", str(built))
                # At once and whole, for other processes may look for it, or build it too.
                built.replace(target)
        loaded = ctypes.CDLL(str(target))
    except OSError as error:
        raise ValueError(
            f"the C++ code cannot be kept in {str(target.parent)!r}: {error}; name another folder by "
            "CBRESEARCH_CACHE, or use the backend 'torch'"
        ) from error
    loaded.cbresearch_panel.restype = ctypes.c_int
    loaded.cbresearch_linear.argtypes = (*[ctypes.c_void_p] * 4, *[ctypes.c_int64] * 3)
    loaded.cbresearch_linear.restype = None
    loaded.cbresearch_paged_attention.argtypes = (ctypes.POINTER(_Call),)
    loaded.cbresearch_paged_attention.restype = None
    return loaded


def _compile(compiler: str, *arguments: str) -> str:
    done = subprocess.run([compiler, *_FLAGS, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"the C++ compiler {compiler!r} fails on the C++ code:\n{done.stderr[:2000]}")
    return done.stdout


def panels_shape(weight: Tensor) -> tuple[int, int, int]:
    """Return the shape of packed weights: panels, inputs, outputs of a panel; zeros fill the last."""
    num_outputs, num_inputs = weight.shape
    size = library().cbresearch_panel()
    return -(-num_outputs // size), num_inputs, size


def pack(weight: Tensor) -> Tensor:
    """Return a linear layer's weights `[num_outputs, num_inputs]` as `native_linear` reads them."""
    num_panels, num_inputs, size = panels_shape(weight)
    filled = pad(weight, (0, 0, 0, num_panels * size - len(weight)))
    return filled.view(num_panels, size, num_inputs).mT.contiguous()


def large_pages(num_floats: int) -> Tensor:
    """Return memory for floats, in large pages where there are any: weights are read faster from these."""
    if not num_floats or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(num_floats)
    memory = mmap.mmap(-1, 4 * num_floats, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32)


def _pointers(*tensors: Tensor | None) -> list[int | None]:
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


def native_linear(x: Tensor, panels: Tensor, bias: Tensor | None, num_outputs: int) -> Tensor:
    """Return `x @ weight.T + bias`, each row of which is bit for bit the same in any company.

    Args:
        x: float32 `[..., num_inputs]`.
        panels: The weights as `pack` returns them.
        bias: float32 `[num_outputs]`.
        num_outputs: Columns of the result.
    """
    x = x.contiguous()
    num_inputs = panels.shape[1]
    out = x.new_empty(*x.shape[:-1], num_outputs)
    num_rows = x.numel() // num_inputs
    library().cbresearch_linear(*_pointers(x, panels, bias, out), num_rows, num_inputs, num_outputs)
    return out


def native_attention(
    query: Tensor, key: Tensor, value: Tensor, kv: Tensor, step: Tensor, sinks: Tensor | None,
    block_size: int, window: int, scale: float, softcap: float,
) -> Tensor:  # fmt: skip
    """Write a step's keys and values into a layer's pool, and attend.

    Args:
        query: float32 `[1, num_heads, num_tokens, head_dim]`, the last stride 1; as are `key` and `value`.
        key: `[1, num_kv_heads, num_tokens, head_dim]`.
        value: As `key`; its heads may have another size.
        kv: The layer's pool, as `PagedCache` has it.
        step: int64: the rows with their tokens and places, as `CpuStep` packs it.
        sinks: float32 `[num_heads]`: scores of the attention sinks.
        block_size: Tokens of a block.
        window: Keys that a query sees at most, its own included; 0 for all.
        scale: Factor on the scores.
        softcap: Bound of the scores; 0 for none.

    Returns:
        `[1, num_tokens, num_heads, value size]`; 0 for tokens that belong to no sequence.
    """
    _, num_heads, num_tokens, key_dim = query.shape
    num_kv_heads, value_dim = key.shape[1], value.shape[3]
    assert query.stride(3) == key.stride(3) == value.stride(3) == 1
    out = query.new_empty(1, num_tokens, num_heads, value_dim)
    call = _Call(
        *_pointers(query, key, value, sinks, out, kv, step),
        *(stride for tensor in (query, key, value) for stride in (tensor.stride(2), tensor.stride(1))),
        *(num_tokens, num_heads, num_kv_heads, key_dim, value_dim, block_size, window, scale, softcap),
    )
    library().cbresearch_paged_attention(call)
    return out


# For a compiler, which takes operators and their shapes but no pointers.
for _function, _written, _shape in (
    (native_linear, (), lambda x, panels, bias, num_outputs: x.new_empty(*x.shape[:-1], num_outputs)),
    (native_attention, ("kv",), lambda q, k, v, *_: q.new_empty(1, q.shape[2], q.shape[1], v.shape[3])),
):
    _name = f"cbresearch::{_function.__name__}"
    torch.library.define(_name, torch.library.infer_schema(_function, mutates_args=_written))
    torch.library.impl(_name, "CPU", _function)
    torch.library.register_fake(_name, _shape)
