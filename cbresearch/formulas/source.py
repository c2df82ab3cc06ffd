"""The formulas' own source, so that a notebook shows what it computes with instead of restating it."""

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

__all__ = ["code"]


def code(*functions: Callable[..., Any]) -> str:
    """Return the source of some functions without their docstrings.

    Args:
        *functions: Functions of this package, or any others whose source can be read.

    Raises:
        TypeError: Something is no function with a source, such as a built-in one or a class.
    """
    return "\n\n".join(_without_docstring(function) for function in functions)


def _without_docstring(function: Callable[..., Any]) -> str:
    lines = textwrap.dedent(inspect.getsource(function)).splitlines()
    definition = ast.parse("\n".join(lines)).body[0]
    if not isinstance(definition, ast.FunctionDef):
        raise TypeError(f"{function!r} is not defined by a def statement; give a function that is")
    first = definition.body[0]
    if ast.get_docstring(definition) is None or first.end_lineno is None:
        return "\n".join(lines)
    return "\n".join([*lines[: first.lineno - 1], *lines[first.end_lineno :]])
