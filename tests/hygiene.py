"""What the repository's files and its notebooks must both be free of."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

HOME_FOLDER = re.compile(r"(?<![\w.~-])/(?:(?:home|Users)/[\w.-]+|root/)|\b[A-Za-z]:\\{1,2}Users\\")


def machine_paths(text: str, root: Path = ROOT) -> list[str]:
    """Return the places in `text` that name somebody's home folder or this very checkout."""
    found = HOME_FOLDER.findall(text)
    # A checkout right below the file system's root has a name too common to search for.
    if len(root.parts) > 2 and re.search(rf"(?<![\w.~-]){re.escape(str(root))}(?![\w-])", text):
        found.append(str(root))
    return found
