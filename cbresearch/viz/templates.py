"""The package's HTML templates and the texts that go into them."""

import json
import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from cbresearch.viz import words

_FOLDER = Path(__file__).parent


def render(name: str, **values: object) -> str:
    """Return a template filled in; every text is escaped unless the template calls it safe.

    Args:
        name: File name of the template.
        **values: What it names.
    """
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    environment.filters |= {"number": words.number, "percent": words.percent, "duration": words.duration}
    return environment.get_template(name).render(**values)


def visible(text: str) -> str:
    r"""Return a text with characters that would not be seen, or would reorder others, written out.

    Control characters appear as their pictures, such as "␀"; line and paragraph separators, marks of writing
    direction and lone surrogates as escapes, such as "\u202e". Newlines and tabs stay.

    Args:
        text: Any text.
    """
    return "".join(_visible(letter) for letter in text) if _UNSEEN.search(text) else text


def _visible(letter: str) -> str:
    if not _UNSEEN.match(letter):
        return letter
    code = ord(letter)
    if code < 0x20 or code == 0x7F:
        return chr(0x2400 + (code if code < 0x20 else 0x21))
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


# C0 and C1 without tab and newline; then separators, directions, what has no width, and lone surrogates.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"
    "\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ufffe\uffff\ud800-\udfff]"
)


def _shown(value: Any) -> Any:
    """Return what a template writes for a value: texts of users made visible, our own HTML as it is."""
    return visible(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def asset(name: str) -> str:
    """Return the text of a file that lies beside the templates."""
    return (_FOLDER / name).read_text(encoding="utf-8")


def script_json(value: Any) -> str:
    """Return JSON that is safe inside a script element, whatever its texts contain."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
