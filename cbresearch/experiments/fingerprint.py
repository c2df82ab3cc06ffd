"""Hashes that tell whether two things would give the same results, in any process."""

import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import CellType, CodeType, FunctionType, GetSetDescriptorType, MemberDescriptorType, ModuleType
from typing import Any

_PACKAGE = Path(__file__).resolve().parents[1]


def fingerprint(value: Any) -> str:
    """Return joblib's hash of a value, in which functions and classes of the user's own count by their code.

    The code of a function is its bytecode with its defaults, what it closes over and the globals that it
    names; that of a class, its bases and members. A module counts by its file and not by what it imports,
    and what is installed counts by its name. It is the same in every process.

    Raises:
        Exception: The state of an object cannot be read, as that of an open file or a lock.
    """
    from joblib.hashing import NumpyHasher

    class Hasher(NumpyHasher):  # type: ignore[misc]
        def save(self, value: Any) -> None:
            is_code = isinstance(value, FunctionType | type)
            if is_code and id(value) in seen:
                # A function may refer to itself, and a method to its class.
                value = ("seen", seen[id(value)])
            elif is_code and not _is_installed(value.__module__):
                seen[id(value)] = len(seen)
                value = _code_of_function(value) if isinstance(value, FunctionType) else _code_of_class(value)
            else:
                value = _plain(value)
            super().save(value)

    seen: dict[int, int] = {}
    digest: str = Hasher("sha1").hash(value)
    return digest


def package_fingerprint() -> str:
    """Return the hash of this package's sources and of the Python that compiles code."""
    sources = [path.read_bytes() for path in sorted(_PACKAGE.rglob("*.py"))]
    return fingerprint((sys.implementation.cache_tag, sources))


def _plain(value: Any) -> Any:
    """Return what joblib can hash in the place of what it cannot, or hashes differently in each process."""
    if isinstance(value, set | frozenset):
        return type(value).__name__, sorted(map(fingerprint, value))
    if isinstance(value, CodeType):
        # Neither the file nor the line, so that a notebook's cell may be run again.
        counts = value.co_argcount, value.co_posonlyargcount, value.co_kwonlyargcount, value.co_flags
        names = value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars
        return "code", value.co_code, value.co_exceptiontable, counts, names, value.co_consts
    if isinstance(value, ModuleType):
        path = None if _is_installed(value.__name__) else value.__file__
        return "module", value.__name__, path and Path(path).read_bytes()
    if isinstance(value, property):
        return "property", value.fget, value.fset
    if isinstance(value, classmethod | staticmethod):
        return type(value).__name__, value.__func__
    if callable(value) and not isinstance(value, FunctionType | type) and hasattr(value, "__wrapped__"):
        # A cached function is pickled by its name alone.
        return type(value).__qualname__, value.__wrapped__
    return value


def _code_of_function(function: FunctionType) -> Any:
    names = sorted(set(_names(function.__code__)) & function.__globals__.keys())
    used = {name: function.__globals__[name] for name in names}
    # A cell without contents belongs to a name that is not defined yet.
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
    return "function", function.__code__, function.__defaults__, function.__kwdefaults__, cells, used


def _code_of_class(kind: type) -> Any:
    members = {
        name: member
        for name, member in vars(kind).items()
        # Python's own entries say where a class is, or what the other members say.
        if (callable(member) or not name.startswith("__"))
        and name != "_abc_impl"
        and not isinstance(member, GetSetDescriptorType | MemberDescriptorType)
    }
    return "class", kind.__qualname__, kind.__bases__, members


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names that some code loads, those of the functions within it included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_installed(module: str | None) -> bool:
    """Return whether a module belongs to Python, to this package or to another that was installed."""
    found = sys.modules.get(module or "")
    if found is None or module == "__main__":
        return False
    path: str | None = getattr(found, "__file__", None)
    paths = sysconfig.get_paths()
    folders = (str(_PACKAGE), *(paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")))
    return path is None or any(Path(path).is_relative_to(folder) for folder in folders)
