"""Numbers and names as a reader wants them: rounded, with a unit, and a dash where nothing is defined."""

import math
import unicodedata
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

NOTHING = "–"

_UNITS: Mapping[str, str] = MappingProxyType(
    {
        "_tokens_per_s": "tokens/s",
        "_requests_per_s": "requests/s",
        "_s": "s",
        "_rows": "rows",
        "_bytes": "bytes",
    }
)
_ABBREVIATIONS = frozenset({"ttft", "tpot", "itl", "kv", "slo"})
# Joiners hold emoji and some scripts together, and do no harm.
_JOINERS = "\u200c\u200d"


def number(value: Any, digits: int = 4) -> str:
    """Return a number rounded to some digits, a text as it is, and a dash for None and NaN."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return NOTHING
    if isinstance(value, str | bool):
        return str(value)
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def percent(value: float | None) -> str:
    """Return a fraction as a signed percentage, such as "+1.3 %"."""
    if value is None or math.isnan(value):
        return NOTHING
    return f"{100 * value:+.3g} %".replace("-", "−")


def time_scale(seconds: float) -> tuple[float, str]:
    """Return the factor and the unit for an axis that reaches up to `seconds`."""
    if seconds >= 1 or seconds <= 0:
        return 1.0, "s"
    return (1e3, "ms") if seconds >= 1e-3 else (1e6, "µs")


def duration(seconds: float | None) -> str:
    """Return seconds with three digits, in the unit that suits their size."""
    if seconds is None:
        return NOTHING
    factor, unit = time_scale(seconds)
    return f"{number(float(f'{seconds * factor:.3g}'))} {unit}"


def steps(count: int) -> str:
    """Return a number of steps, such as "1 step" or "1,200 steps"."""
    return f"{count:,} step{'' if count == 1 else 's'}"


def metric(name: str) -> str:
    """Return a name of `metrics.summary`, such as "ttft_p99_s", as "TTFT p99 (s)"."""
    ending = next((ending for ending in _UNITS if name.endswith(ending)), "")
    parts = name.removesuffix(ending).split("_")
    shown = " ".join(part.upper() if part in _ABBREVIATIONS else part for part in parts)
    return f"{shown} ({_UNITS[ending]})" if ending else shown


def visible(text: str, *, lines: bool = True) -> str:
    """Return a text with what would not be seen, or would reorder the rest, by its code point: "⟨U+001B⟩".

    Those are control characters, line and paragraph separators, marks of writing direction, what has no
    width, lone surrogates and what is no character.

    Args:
        text: Any text.
        lines: Whether newlines and tabs stay as they are, as in a prompt; an id or a label has no lines.
    """
    if text.isprintable():
        return text
    kept = _JOINERS + ("\n\t" if lines else "")
    return "".join(
        f"⟨U+{ord(letter):04X}⟩" if _is_unseen(letter) and letter not in kept else letter for letter in text
    )


def _is_unseen(letter: str) -> bool:
    if letter.isprintable():
        return False
    is_no_character = ord(letter) & 0xFFFE == 0xFFFE or 0xFDD0 <= ord(letter) <= 0xFDEF
    return is_no_character or unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Zl", "Zp")
