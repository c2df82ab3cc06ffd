"""The package's HTML templates and the texts that go into them."""

import json
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from cbresearch.viz import text

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
    return environment.get_template(name).render(**values)


def _shown(value: Any) -> Any:
    """Return what a template writes for a value: texts of users made visible, our own HTML as it is."""
    return text.visible(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def asset(name: str) -> str:
    """Return the text of a file that lies beside the templates."""
    return (_FOLDER / name).read_text(encoding="utf-8")


def script_json(value: Any) -> str:
    """Return JSON that is safe inside a script element, whatever its texts contain."""
    found = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return found.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
