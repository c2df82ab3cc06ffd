"""One look for every figure: fonts, and a colour, a marker and a line style that stay with a policy."""

import zlib
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

REQUEST_COLORS = ("#56B4E9", "#E69F00", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7")
"""Fills for requests: Okabe and Ito's colours, neighbours in the list as unlike as they get."""

PADDING_COLOR = "#E4E4E4"
PADDING_HATCH = "////"
HATCH_COLOR = "#7A7A7A"
FRAME_COLOR = "#CFCFCF"
INK = "#222222"


class PolicyLook(NamedTuple):
    """How a policy looks in every figure.

    Attributes:
        color: Hex colour, of a palette made for colour blindness.
        marker: Matplotlib marker.
        linestyle: Matplotlib line style.
    """

    color: str
    marker: str
    linestyle: str | tuple[int, tuple[int, ...]]


_KNOWN = MappingProxyType(
    {
        "static": PolicyLook("#D55E00", "s", "-"),
        "static:release": PolicyLook("#E69F00", "D", "--"),
        "fcfs": PolicyLook("#0072B2", "o", "-"),
        "prefill_first": PolicyLook("#009E73", "^", "-."),
        "sjf": PolicyLook("#CC79A7", "v", (0, (1, 1))),
    }
)
# Paul Tol's muted scheme, less what resembles a colour above; and markers that no known policy has.
_OTHER_COLORS = ("#332288", "#882255", "#44AA99", "#999933", "#AA4499", "#661100", "#6699CC")
_OTHER_MARKERS = ("P", "X", "*", "<", ">", "h", "p", "d")
_OTHER_LINES = ("-", "--", "-.", (0, (5, 1, 1, 1, 1, 1)))


def use_style() -> None:
    """Give all later figures of this process the package's look: seaborn's theme, then our style file."""
    import matplotlib.pyplot as plt
    import seaborn as sns

    sns.set_theme(context="notebook", style="ticks")
    plt.style.use(Path(__file__).with_name("cbresearch.mplstyle"))


def policy_look(name: str) -> PolicyLook:
    """Return a policy's colour, marker and line style: the same in every figure, run and process.

    Args:
        name: Policy name, options included. An unknown one gets a look computed from its letters.
    """
    if name in _KNOWN:
        return _KNOWN[name]
    # Not `hash`, which differs from process to process.
    digest = zlib.crc32(name.encode("utf-8", "backslashreplace"))
    digest, color = divmod(digest, len(_OTHER_COLORS))
    digest, marker = divmod(digest, len(_OTHER_MARKERS))
    return PolicyLook(_OTHER_COLORS[color], _OTHER_MARKERS[marker], _OTHER_LINES[digest % len(_OTHER_LINES)])


def ink_on(color: str) -> str:
    """Return black or white, whichever reads better on a fill (WCAG contrast).

    Args:
        color: The fill as "#rrggbb".
    """
    channels = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if (luminance + 0.05) ** 2 > 0.05 * 1.05 else "#ffffff"
