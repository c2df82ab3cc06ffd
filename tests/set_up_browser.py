"""Find a Chromium to test in and print its path, or say how to get one.

    python tests/set_up_browser.py

`CBRESEARCH_BROWSER` names one that lies elsewhere. No browser is downloaded: the system's own is driven.
"""

import os
import shutil
import sys

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
REMEDY = (
    f"no browser is found under the names {', '.join(NAMES)}; install Chromium (Debian: apt install "
    "chromium), or set CBRESEARCH_BROWSER to the path of a Chromium or Chrome"
)


def find_browser() -> str | None:
    """Return the path of a Chromium, or None.

    Raises:
        ValueError: `CBRESEARCH_BROWSER` names a file that cannot be run.
    """
    named = os.environ.get("CBRESEARCH_BROWSER")
    if not named:
        return next(filter(None, map(shutil.which, NAMES)), None)
    if shutil.which(named) is None:
        raise ValueError(f"CBRESEARCH_BROWSER is {named!r}, which cannot be run; name a Chromium or Chrome")
    return named


if __name__ == "__main__":
    try:
        browser = find_browser()
    except ValueError as error:
        sys.exit(str(error))
    print(browser or sys.exit(REMEDY))
