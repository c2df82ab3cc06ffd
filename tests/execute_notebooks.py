"""Run notebooks top to bottom and save their outputs, free of when and where they ran."""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def execute(path: Path) -> None:
    """Run one notebook in its own folder and overwrite it; on an error the file stays as it was."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook,
        kernel_name=KERNEL["name"],
        timeout=120,
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(path.parent)}},
    ).execute()
    # The kernel reports its exact version, which would differ from one machine to the next.
    notebook.metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
    nbformat.write(notebook, path)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(argument, flush=True)
        execute(Path(argument))
