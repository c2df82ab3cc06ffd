"""One look for every figure: fonts, and a colour, a marker and a line style that stay with a policy."""

import zlib
from collections.abc import Mapping
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


# Paul Tol's muted scheme, less what resembles a colour below; and markers that no policy below has.
_OTHER_COLORS = ("#332288", "#882255", "#44AA99", "#999933", "#AA4499", "#661100", "#6699CC")
_OTHER_MARKERS = ("P", "X", "*", "<", ">", "h", "p", "d")
_OTHER_LINES = ("-", "--", "-.", (0, (5, 1, 1, 1, 1, 1)))

# Those of a family follow one another, so that they differ in colour: they are compared most.
_OTHER_POLICIES = (
    "orca",
    "vllm_v0",
    "vllm_v1",
    "sarathi",
    "splitfuse",
    "srpt",
    "mlfq",
    "rank",
    "trail",
    "hrrn",
    "mc_sf",
    "no_evict",
    "max_utilization",
    "past_future",
    "new_token_ratio",
    "vtc",
    "dlpm",
    "lpm",
    "priority",
    "edf",
    "least_slack",
    "andes",
)

_KNOWN: Mapping[str, PolicyLook] = MappingProxyType(
    {
        "static": PolicyLook("#D55E00", "s", "-"),
        "static:release": PolicyLook("#E69F00", "D", "--"),
        "fcfs": PolicyLook("#0072B2", "o", "-"),
        "prefill_first": PolicyLook("#009E73", "^", "-."),
        "sjf": PolicyLook("#CC79A7", "v", (0, (1, 1))),
        # No pair of colour and marker comes twice before the least common multiple of 7 and 8.
        **{
            name: PolicyLook(
                _OTHER_COLORS[place % len(_OTHER_COLORS)],
                _OTHER_MARKERS[place % len(_OTHER_MARKERS)],
                _OTHER_LINES[place // len(_OTHER_COLORS)],
            )
            for place, name in enumerate(_OTHER_POLICIES)
        },
    }
)


def use_style() -> None:
    """Give all later figures of this process the package's look: seaborn's theme, then our style file."""
    import matplotlib.pyplot as plt
    import seaborn as sns

    sns.set_theme(context="notebook", style="ticks")
    plt.style.use(Path(__file__).with_name("cbresearch.mplstyle"))


def policy_look(name: str) -> PolicyLook:
    """Return a policy's colour, marker and line style: the same in every figure, run and process.

    Those of the package's policies all differ. Any other name gets a look computed from its letters, and none
    of theirs.

    Args:
        name: Policy name, options included.
    """
    if name in _KNOWN:
        return _KNOWN[name]
    # Not `hash`, which differs from process to process.
    digest = zlib.crc32(name.encode("utf-8", "backslashreplace"))
    taken = set(_KNOWN.values())
    looks = [
        PolicyLook(color, marker, line)
        for line in _OTHER_LINES
        for marker in _OTHER_MARKERS
        for color in _OTHER_COLORS
        if PolicyLook(color, marker, line) not in taken
    ]
    return looks[digest % len(looks)]


def is_known(name: str) -> bool:
    """Return whether a policy has a look of its own, which no other name has."""
    return name in _KNOWN


def ink_on(color: str) -> str:
    """Return black or white, whichever reads better on a fill (WCAG contrast).

    Args:
        color: The fill as "#rrggbb".
    """
    channels = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if (luminance + 0.05) ** 2 > 0.05 * 1.05 else "#ffffff"
