"""What the repository's files and its notebooks must both be free of."""

import os
import re
import subprocess
import sys
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


def printed_by_two_processes(code: str) -> tuple[bytes, bytes]:
    """Return what Python code prints in two processes with different hash seeds."""
    first, second = (
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    )
    return first, second
