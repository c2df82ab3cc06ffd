"""Tell whether two things would give the same results, in any process: digests of values and of code."""

import copyreg
import dis
import functools
import hashlib
import json
import sys
import sysconfig
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

_ROOT = Path(__file__).resolve().parents[1]

# What no simulation loads; all else in the package may change what a run gives.
_WITHOUT_EFFECT = ("kernels", "attention", "engine", "viz", "experiments", "models.py", "__main__.py")
_WITH_EFFECT = ("experiments/points.py",)

# What Python itself adds to a class: names of places, caches, and what the other members say already.
_NO_MEMBERS = frozenset(
    {
        "__abstractmethods__",
        "__annotate__",
        "__annotate_func__",
        "__annotations__",
        "__annotations_cache__",
        "__conditional_annotations__",
        "__dataclass_fields__",
        "__dataclass_params__",
        "__dict__",
        "__doc__",
        "__firstlineno__",
        "__match_args__",
        "__module__",
        "__orig_bases__",
        "__parameters__",
        "__slotnames__",
        "__slots__",
        "__static_attributes__",
        "__weakref__",
        "_abc_impl",
    }
)


def digest(value: Any, what: str) -> str:
    """Return the SHA-256 of a value, equal in every process, under every PYTHONHASHSEED.

    A function or a class of the user's own counts by its compiled code, with its defaults, what it closes
    over and the globals that it loads, and so do the functions and classes among these. What is installed
    counts by its name, an object by its class and its state, and a module of the user's by its file.

    Args:
        value: Anything that can be pickled, and functions and classes wherever they are defined.
        what: What the value is for the caller, for the error.

    Raises:
        ValueError: Its state cannot be read, as that of an open file, a lock or a generator.
    """
    text = json.dumps(_Description(what).of(value))
    return hashlib.sha256(text.encode()).hexdigest()


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def package_digest(root: Path = _ROOT) -> str:
    """Return the SHA-256 of those files of this package that a simulated run depends on.

    Args:
        root: The package's folder.
    """
    whole = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if name.split("/")[0] in _WITHOUT_EFFECT and name not in _WITH_EFFECT:
            continue
        if path.is_file() and path.suffix != ".pyc":
            whole.update(f"{name}\0{file_digest(path)}\n".encode())
    return whole.hexdigest()


class _Description:
    """Turn a value into nested lists that JSON can hold."""

    def __init__(self, what: str) -> None:
        self._what = what
        # Functions, classes and objects met already, by their address: they may refer to one another. They
        # are kept, so that no other takes a place that became free.
        self._met: dict[int, tuple[int, Any]] = {}

    def of(self, value: Any) -> Any:
        if value is None or type(value) in (bool, int, float, str):
            return value
        if type(value) in (bytes, bytearray, complex, range):
            return [type(value).__name__, repr(value)]
        if type(value) in (list, tuple):
            return [type(value).__name__, *map(self.of, value)]
        if type(value) in (dict, types.MappingProxyType):
            return ["dict", *([self.of(key), self.of(entry)] for key, entry in value.items())]
        if type(value) in (set, frozenset):
            # Each by itself, since what was met before depends on an order that a set does not have.
            entries = (_Description(self._what).of(entry) for entry in value)
            return ["set", *sorted(entries, key=json.dumps)]
        if isinstance(value, np.ndarray) and value.dtype != object:
            content = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
            return ["array", value.dtype.str, list(value.shape), content]
        if isinstance(value, types.CodeType):
            return self._code(value)
        if isinstance(value, types.ModuleType):
            return self._module(value)
        if id(value) in self._met:
            return ["met", self._met[id(value)][0]]
        self._met[id(value)] = (len(self._met), value)
        if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
            return self._defined(value)
        if isinstance(value, types.MethodType | functools.partial):
            parts = ("__func__", "__self__", "func", "args", "keywords")
            return ["call", *(self.of(getattr(value, part)) for part in parts if hasattr(value, part))]
        if isinstance(value, classmethod | staticmethod):
            return [type(value).__name__, self.of(value.__func__)]
        if isinstance(value, property):
            return ["property", self.of(value.fget), self.of(value.fset)]
        return self._object(value)

    def _object(self, value: Any) -> Any:
        reduce = copyreg.dispatch_table.get(type(value))
        try:
            reduced = reduce(value) if reduce else value.__reduce_ex__(2)
        except Exception as error:
            raise ValueError(
                f"{self._what} holds {value!r}, whose state cannot be read ({error}), so that a finished run "
                "would not be known again; build it where it is used, or sweep without a folder"
            ) from error
        if isinstance(reduced, str):
            # A cached function has a name only, yet wraps one that has code.
            return ["global", type(value).__qualname__, reduced, self.of(getattr(value, "__wrapped__", None))]
        build, arguments, state, *items = (*reduced, None, None, None)[:5]
        return ["object", self.of(build), *map(self.of, arguments), self.of(state), *self._items(items)]

    def _items(self, iterators: list[Any]) -> Iterator[Any]:
        for iterator in iterators:
            yield self.of(None if iterator is None else list(iterator))

    def _defined(self, value: Any) -> Any:
        name = [getattr(value, "__module__", None) or "", value.__qualname__]
        if isinstance(value, types.BuiltinFunctionType):
            bound = value.__self__
            return ["builtin", *name, None if isinstance(bound, types.ModuleType) else self.of(bound)]
        if _is_installed(name[0]):
            return ["installed", *name]
        if isinstance(value, types.FunctionType):
            return ["function", *self._function(value)]
        members = [
            [key, self.of(member)]
            for key, member in vars(value).items()
            if key not in _NO_MEMBERS
            and not isinstance(member, types.MemberDescriptorType | types.GetSetDescriptorType)
        ]
        return ["class", value.__qualname__, [self.of(base) for base in value.__bases__], members]

    def _function(self, function: types.FunctionType) -> Iterator[Any]:
        yield self.of(function.__code__)
        yield self.of(function.__defaults__)
        yield self.of(function.__kwdefaults__)
        yield self.of(vars(function))
        yield [self.of(_content(cell)) for cell in function.__closure__ or ()]
        for name in dict.fromkeys(_globals(function.__code__)):
            if name in function.__globals__:
                yield [name, self.of(function.__globals__[name])]

    def _code(self, code: types.CodeType) -> Any:
        # Bytecode means something only to the Python that made it.
        numbers = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        compiled = [code.co_code.hex(), code.co_exceptiontable.hex()]
        return ["code", sys.implementation.cache_tag, *compiled, *numbers, *names, self.of(code.co_consts)]

    def _module(self, module: types.ModuleType) -> Any:
        path = getattr(module, "__file__", None)
        if path is None or _is_installed(module.__name__):
            return ["module", module.__name__]
        return ["module", module.__name__, file_digest(Path(path))]


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        # It is empty until what it names is defined.
        return None


def _globals(code: types.CodeType) -> Iterator[str]:
    """Yield the names of globals that some code loads, that of the functions within it included."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _globals(constant)


def _is_installed(name: str) -> bool:
    """Return whether a module belongs to Python, to this package or to another that was installed."""
    top = name.partition(".")[0]
    if top == "__main__":
        return False
    if top == _ROOT.name or top in sys.stdlib_module_names:
        return True
    path = getattr(sys.modules.get(name), "__file__", None)
    folders = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    return path is not None and any(Path(path).is_relative_to(folder) for folder in folders)
