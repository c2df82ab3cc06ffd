"""Compile the attention kernels ahead of time, without a GPU, and tabulate their machine code.

    python tests/kernel_report.py                 the whole grid, into tests/kernel_code.csv
    python tests/kernel_report.py --only REGEX    rows whose name matches, to the standard output

A row is named like `sm_90/bf16/d128/g4/narrow`, or with an option `sm_90/bf16/d128/g4/wide/softcap`.
Kernels are compiled with the very arguments that `paged_attention` launches them with.
"""

import argparse
import ast
import csv
import hashlib
import inspect
import re
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TextIO
from unittest.mock import MagicMock, patch

import torch
import triton
from tqdm.auto import tqdm
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from cbresearch.kernels import Device, attend, plan_work

TABLE = Path(__file__).with_name("kernel_code.csv")
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), Device("cuda", 80, 108)),
    "sm_90": (GPUTarget("cuda", 90, 32), Device("cuda", 90, 132)),
    "gfx942": (GPUTarget("hip", "gfx942", 64), Device("hip", 0, 304)),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HEAD_DIMS = (64, 80, 96, 128, 256)
GROUPS = (1, 4, 7, 8)
KERNELS = {"narrow": 1, "wide": 512}
OPTIONS = ("window", "softcap", "sinks")
# Shapes beyond the grid: the widest groups, and float32, which has no tensor cores.
EXTRA = ("bf16/d128/g17", "bf16/d128/g48", "fp32/d64/g4", "fp32/d128/g4")
NUM_KV_HEADS = 8
BLOCK_SIZE = 16

_TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
}


@dataclass(frozen=True)
class Code:
    """What one compiled kernel holds.

    Attributes:
        name: Row of the grid.
        tile: Rows x keys of its tiles, warps, stages.
        registers: A thread's, accumulation registers of AMD included.
        spills: Instructions that store to or load from a thread's stack; on AMD vector registers kept there.
        stack: Bytes of a thread's stack.
        shared: Bytes of shared memory.
        instructions: All but padding.
        wide_loads: Loads of 16 bytes from global memory.
        odd_loads: Loads from global memory that are neither 16 bytes nor a single number of 4.
        tensor: Tensor-core instructions.
    """

    name: str
    tile: str
    registers: int
    spills: int
    stack: int
    shared: int
    instructions: int
    wide_loads: int
    odd_loads: int
    tensor: int


def grid() -> Iterator[str]:
    """Yield the names of all rows."""
    shapes = [
        f"{dtype}/d{size}/g{group}" for dtype in list(DTYPES)[1:] for size in HEAD_DIMS for group in GROUPS
    ]
    for target in TARGETS:
        for kernel in KERNELS:
            yield from (f"{target}/{shape}/{kernel}" for shape in (*shapes, *EXTRA))
            yield from (f"{target}/bf16/d128/g4/{kernel}/{option}" for option in OPTIONS)


def arguments_of(name: str) -> dict[str, Any]:
    """Return what `paged_attention` would launch for a row, on tensors without memory."""
    target, dtype, head_dim, group, kernel, *chosen = name.split("/")
    head_dim, group, dtype = int(head_dim[1:]), int(group[1:]), DTYPES[dtype]
    num_heads, num_queries = group * NUM_KV_HEADS, KERNELS[kernel]

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    # One long sequence: the decode is split, and the chunk has whole tiles as well as masked ones.
    plan = plan_work(
        [16384],
        [0, num_queries],
        num_heads=num_heads,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=head_dim,
        dtype=dtype,
        window=1024 if "window" in chosen else None,
        target=TARGETS[target][1],
        split_keys=256,
    )
    cache = empty(2048, BLOCK_SIZE, NUM_KV_HEADS, head_dim)
    possible = {"window": 1024, "softcap": 50.0, "sinks": empty(num_heads, dtype=torch.float32)}
    options = {option: value if option in chosen else None for option, value in possible.items()}
    recorder = MagicMock()
    tensors = (empty(num_queries, num_heads, head_dim), cache, cache, empty(1, 1024, dtype=torch.int32))
    lengths = (empty(1, dtype=torch.int32), empty(2, dtype=torch.int32))
    with patch.multiple(attend, attend_kernel=recorder, merge_kernel=MagicMock()):
        attend.paged_attention(*tensors, *lengths, plan=plan, **options)
    # One launch, `attend_kernel[grid](...)`.
    (launch,) = recorder.__getitem__.return_value.call_args_list
    names = (parameter.name for parameter in attend.attend_kernel.params)
    return {**dict(zip(names, launch.args, strict=False)), **launch.kwargs}


def compile_kernel(kernel: Any, arguments: dict[str, Any], target: GPUTarget) -> Any:
    """Compile a kernel for what Triton would specialise these arguments to."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for place, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        kind = "constexpr"
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1):
            constants[parameter.name] = value
        elif isinstance(value, torch.Tensor):
            kind = "*" + _TYPES[value.dtype]
        elif isinstance(value, float):
            kind = "fp32"
        else:
            kind = "i32" if value < 2**31 else "i64"
        if kind[0] == "*" or (kind[0] == "i" and value % 16 == 0):
            attributes[place,] = [["tt.divisibility", 16]]
        signature[parameter.name] = kind
    options = {key: value for key, value in arguments.items() if key not in signature}
    return triton.compile(ASTSource(kernel, signature, constants, attributes), target=target, options=options)


def read_nvidia(compiled: Any) -> dict[str, int]:
    """Count what a cubin holds."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        run = lambda *command: subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: E731
        usage = run(TOOLS / "cuobjdump", "--dump-resource-usage", cubin)
        listing = run(TOOLS / "nvdisasm", "-c", cubin)
    resources = {key: int(value) for key, value in re.findall(r"(REG|STACK):(\d+)", usage)}
    operations = re.findall(
        r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", listing, re.MULTILINE
    )
    loads = [name for name in operations if re.match(r"(LDG|LDGSTS)\.", name)]
    return {
        "registers": resources["REG"],
        "spills": sum(name.split(".")[0] in ("STL", "LDL") for name in operations),
        "stack": resources["STACK"],
        "shared": compiled.metadata.shared,
        "instructions": sum(name != "NOP" for name in operations),
        "wide_loads": sum(name.endswith(".128") for name in loads),
        "odd_loads": sum(bool(re.search(r"\.(64|U8|S8|U16|S16)\b", name)) for name in loads),
        "tensor": sum(name.split(".")[0] in ("HMMA", "HGMMA", "QGMMA") for name in operations),
    }


def read_amd(compiled: Any) -> dict[str, int]:
    """Count what AMD's assembly holds."""
    text = compiled.asm["amdgcn"]

    def field(name: str) -> int:
        return int(re.search(rf"\.{name}:\s+(\d+)", text)[1])

    operations = Counter(re.findall(r"^\t([a-z]+_[a-z0-9_]+)", text, re.MULTILINE))
    loads = {name: n for name, n in operations.items() if re.match(r"(global|buffer|flat)_load_", name)}
    wide = sum(n for name, n in loads.items() if name.endswith("dwordx4"))
    single = sum(n for name, n in loads.items() if name.endswith("_dword"))
    return {
        "registers": field("vgpr_count"),
        # Scalar registers that do not fit are parked in lanes of vector registers, which is no memory.
        "spills": field("vgpr_spill_count"),
        "stack": field("private_segment_fixed_size"),
        "shared": compiled.metadata.shared,
        "instructions": sum(operations.values()),
        "wide_loads": wide,
        "odd_loads": sum(loads.values()) - wide - single,
        "tensor": sum(n for name, n in operations.items() if name.startswith("v_mfma")),
    }


def tile_of(name: str) -> str:
    """Return what `choose_launch` says for a row: rows x keys, warps, stages."""
    return "{TILE_ROWS}x{TILE_KEYS}/{num_warps}/{num_stages}".format(**arguments_of(name))


def measure(name: str) -> Code:
    """Compile one row of the grid and count."""
    target = TARGETS[name.split("/", 1)[0]][0]
    arguments = arguments_of(name)
    compiled = compile_kernel(attend.attend_kernel, arguments, target)
    numbers = read_nvidia(compiled) if target.backend == "cuda" else read_amd(compiled)
    return Code(name, tile_of(name), **numbers)


def source_hash() -> str:
    """Return a hash of what the machine code of a tile depends on here, whatever its formatting."""
    parts = (attend.tanh, attend.attend_tile, attend.attend_kernel, attend.paged_attention)
    sources = [textwrap.dedent(inspect.getsource(getattr(part, "fn", part))) for part in parts]
    text = "\n".join(ast.dump(ast.parse(source)) for source in sources)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write_table(file: TextIO, rows: list[Code]) -> None:
    """Write rows below a line that says of what and by which Triton."""
    file.write(f"# triton {triton.__version__}, source {source_hash()}\n")
    writer = csv.DictWriter(file, [field.name for field in fields(Code)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)


def read_table(path: Path = TABLE) -> tuple[dict[str, str], dict[str, Code]]:
    """Return the Triton version and source hash of a table, and its rows by name."""
    with path.open() as file:
        version, source = re.match(r"# triton (\S+), source (\S+)", file.readline()).groups()
        rows = [
            Code(*(kind(row[name]) for name, kind in ((field.name, field.type) for field in fields(Code))))
            for row in csv.DictReader(file)
        ]
    return {"triton": version, "source": source}, {row.name: row for row in rows}


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="a regular expression: print the rows whose names match")
    options = parser.parse_args()
    if options.only:
        write_table(
            sys.stdout, [measure(name) for name in tqdm(list(grid())) if re.search(options.only, name)]
        )
        return
    # An interrupted run goes on where it was, and a new choice of tiles costs those rows alone.
    stamp, known = read_table() if TABLE.exists() else ({}, {})
    if stamp != {"triton": triton.__version__, "source": source_hash()}:
        known = {}
    known = {name: known[name] for name in grid() if name in known and known[name].tile == tile_of(name)}
    for name in tqdm([name for name in grid() if name not in known]):
        known[name] = measure(name)
        with TABLE.open("w") as file:
            write_table(file, [known[name] for name in grid() if name in known])


if __name__ == "__main__":
    main()
