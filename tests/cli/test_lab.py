"""`make lab`: it starts as root and as another, without a browser, and prints where the first notebook is."""

import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
from hygiene import ROOT


def told(user, folder):
    """Return what `make -n lab` would run for a user of a number."""
    (folder / "id").write_text(f"#!/bin/sh\necho {user}\n")
    (folder / "id").chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    command = ["make", "-n", "lab", f"PY={sys.executable}"]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize(("user", "asks"), [(0, True), (1000, False)])
def test_lab_says_that_it_is_root_only_where_it_is(tmp_path, user, asks):
    assert ("--allow-root" in told(user, tmp_path)) == asks


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_lab_prints_the_address_of_the_first_notebook_and_no_traceback_without_a_display(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name not in ("DISPLAY", "BROWSER")}
    environment |= {"HOME": str(tmp_path), "JUPYTER_PREFER_ENV_PATH": "0"}
    process = subprocess.Popen(
        ["make", "lab", f"PY={sys.executable}"],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    said = ""
    try:
        for line in process.stdout:
            said += line
            if re.search(r"http://127\.0\.0\.1:\d+/lab/tree/00_start_here\.ipynb\?token=\w+", line):
                break
        else:
            pytest.fail(f"no address was printed: {said}")
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
    assert "Traceback" not in said
