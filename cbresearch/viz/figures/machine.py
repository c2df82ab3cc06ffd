"""What a machine's arithmetic and bandwidth allow a model."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cbresearch import formulas
from cbresearch.costs import Roofline
from cbresearch.step import Plan, Scheduled
from cbresearch.viz import axes, style, words
from cbresearch.viz.style import REQUEST_COLORS

_DECODE_COLOR, _PREFILL_COLOR = REQUEST_COLORS[4], REQUEST_COLORS[5]


class RooflinePoint(NamedTuple):
    """A step on the roofline.

    Attributes:
        kind: "decode" or "prefill".
        num_tokens: Tokens in the step: the batch size of a decode, the length of a prompt.
        intensity: FLOP per byte moved.
        flops: FLOP/s that the step reaches.
    """

    kind: str
    num_tokens: int
    intensity: float
    flops: float


def roofline_point(cost: Roofline, kind: str, num_tokens: int, context_length: int) -> RooflinePoint:
    """Return where a step lies: its FLOP over its bytes, and over its seconds.

    Bytes are the weights, read once, and the cached keys and values that attention reads.

    Args:
        cost: Model and machine.
        kind: "decode": so many requests with a token each; "prefill": one prompt of so many tokens.
        num_tokens: Tokens in the step.
        context_length: Tokens that each decode attends to, itself included; a prefill attends to its own.
    """
    shape, is_prefill = cost.shape, kind == "prefill"
    if is_prefill:
        rows = [Scheduled("prompt", 0, 0, num_tokens, True, True, ())]
    else:
        rows = [
            Scheduled(f"decode {row}", row, context_length - 1, 1, False, True, ())
            for row in range(num_tokens)
        ]
    plan = Plan(0, tuple(rows))
    # A prompt's tokens attend to half of it on average.
    context = (num_tokens + 1) / 2 if is_prefill else context_length
    flop = num_tokens * formulas.flops_per_token(shape, context)
    moved = formulas.weight_bytes(shape) + plan.num_context_tokens * formulas.kv_bytes_per_token(shape)
    return RooflinePoint(kind, num_tokens, flop / moved, flop / cost(plan))


def roofline(
    cost: Roofline,
    ax: Axes | None = None,
    *,
    batch_sizes: Sequence[int] = (1, 8, 64, 256),
    prompt_lengths: Sequence[int] = (128, 2048),
    context_length: int = 1024,
    title: str | None = None,
) -> Figure:
    """Draw a machine's roofline, and where decode and prefill steps of a model lie below it.

    A step's dot is below the roof since linear layers and attention, each on a roof of its own, follow one
    another, and where the cost has an overhead or efficiencies below 1.

    Args:
        cost: Model and machine.
        ax: Where to draw; a new figure by default.
        batch_sizes: Requests of the decode steps.
        prompt_lengths: Tokens of the prefill steps, a prompt each.
        context_length: Tokens that each decode attends to.
        title: What the figure shows; by default what share of the peak decode and prefill reach.
    """
    peak, bandwidth = cost.hardware.peak_flops, cost.hardware.bandwidth
    ridge = peak / bandwidth
    points = [
        roofline_point(cost, kind, num_tokens, context_length)
        for kind, sizes in (("decode", batch_sizes), ("prefill", prompt_lengths))
        for num_tokens in sizes
    ]
    fig, ax = axes.axes(ax, height=5)
    x = [ridge, *(point.intensity for point in points)]
    span = np.array([min(x) / 2, ridge, max(x) * 3])
    ax.plot(span, np.minimum(span * bandwidth, peak), color=style.INK, linewidth=2.4, gid="roof")
    ax.axvline(ridge, color="#9A9A9A", linestyle=":", linewidth=1.4, gid="ridge")
    ax.annotate(
        f"ridge: {ridge:,.0f} FLOP/byte",
        (ridge, 0.02),
        xycoords=("data", "axes fraction"),
        xytext=(-5, 0),
        textcoords="offset points",
        ha="right",
        color=style.INK,
    )
    looks = {"decode": (_DECODE_COLOR, "o", "requests"), "prefill": (_PREFILL_COLOR, "s", "tokens")}
    for kind, (color, marker, unit) in looks.items():
        here = [point for point in points if point.kind == kind]
        if not here:
            continue
        ax.plot(
            [point.intensity for point in here],
            [point.flops for point in here],
            color=color,
            marker=marker,
            markersize=9,
            linestyle="-" if kind == "decode" else "none",
            linewidth=1.2,
            markeredgecolor="white",
            label=f"{kind}, {context_length:,} tokens of context"
            if kind == "decode"
            else "prefill of a prompt",
            gid=kind,
        )
        for point in here:
            ax.annotate(
                f"{point.num_tokens:,} {unit if point.num_tokens > 1 else unit[:-1]}",
                (point.intensity, point.flops),
                xytext=(9, -4),
                textcoords="offset points",
                va="top",
                fontsize=10,
                color=style.INK,
            )
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlim(span[0], span[-1])
    ax.set_xlabel("arithmetic intensity (FLOP/byte)")
    ax.set_ylabel("arithmetic (FLOP/s)")
    ax.grid(axis="both")
    ax.legend(loc="upper left")
    shown = {kind: [point for point in points if point.kind == kind] for kind in looks}
    best = {kind: max(here, key=lambda point: point.num_tokens) for kind, here in shown.items() if here}
    axes.title(
        ax,
        title
        or words.roofline_finding(
            cost.hardware.name, {k: (p.num_tokens, p.flops / peak) for k, p in best.items()}
        ),
    )
    return fig
