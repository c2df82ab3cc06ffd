"""The stamp of what an experiment ran on, and its progress bar."""

import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from tqdm.auto import tqdm


def environment(**facts: object) -> dict[str, str]:
    """Return what a result depends on beside its inputs: versions, platform, cores, and the given facts."""
    packages = {
        name: next((found.version for found in metadata.distributions(name=name)), "not installed")
        for name in ("cbresearch", "torch", "triton", "transformers", "numpy")
    }
    return {
        **{name: str(value) for name, value in facts.items()},
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cores": str(os.cpu_count()),
        **packages,
    }


def progress_bar(total: int | None, label: str, unit: str, initial: int = 0) -> "tqdm[Any]":
    """Return a progress bar on the error stream; TQDM_DISABLE turns it off.

    Args:
        total: Number of units, or None if it is not known.
        label: What is done.
        unit: What is counted.
        initial: Number of units that are done already.
    """
    # Asked for by hand, since tqdm's notebook bar does not read its own variable.
    quiet = os.environ.get("TQDM_DISABLE", "0") not in ("", "0")
    return tqdm(total=total, initial=initial, desc=label, unit=unit, file=sys.stderr, disable=quiet)


def usable_folder(what: str, folder: str | os.PathLike[str]) -> Path:
    """Make a folder if it is not there, and see that it takes files, before the work whose results go there.

    Args:
        what: What the error message calls it.
        folder: Its path, which may begin with `~`.

    Raises:
        ValueError: It is, or lies in, a file; it cannot be written; or the disk is full.
    """
    path = Path(os.path.expanduser(folder))
    try:
        path.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=path) as file:
            file.write(bytes(2**16))
    except OSError as error:
        reason = f"cannot be written ({error.strerror or error}); name another folder"
        raise ValueError(f"{what} {str(folder)!r} {reason}") from error
    return path
