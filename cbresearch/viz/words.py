"""Numbers and findings as a reader wants them: with units, rounded, and a dash where there is none."""

import math
import unicodedata
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from cbresearch.metrics import fragmentation, memory_shares, occupancy, output_throughput, peak_kv_tokens
from cbresearch.trace import RequestRecord, Trace
from cbresearch.viz.blockmap import PoolState

NOTHING = "–"

TimeAxis = Literal["step", "seconds"]


def number(value: Any) -> str:
    """Return a number with about four digits, a text as it is, and a dash for None and NaN."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return NOTHING
    if isinstance(value, str | bool):
        return str(value)
    if isinstance(value, int | np.integer):
        return f"{value:,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def percent(value: float | None) -> str:
    """Return a signed relative error in percent, such as "+1.3 %".

    Args:
        value: A fraction, or None.
    """
    if value is None or math.isnan(value):
        return NOTHING
    return f"{100 * value:+.3g} %".replace("-", "−")


def visible(text: str, *, lines: bool = True) -> str:
    """Return a text with what would not be seen, or would reorder the rest, by its code point: "⟨U+001B⟩".

    Those are control characters, line and paragraph separators, marks of writing direction, what has no
    width, lone surrogates and what is no character.

    Args:
        text: Any text.
        lines: Whether newlines and tabs stay as they are, as in a prompt; an id or a label has no lines.
    """
    kept = _JOINERS + ("\n\t" if lines else "")
    return "".join(
        f"⟨U+{ord(letter):04X}⟩" if _is_unseen(letter) and letter not in kept else letter for letter in text
    )


def duration(seconds: float | None) -> str:
    """Return a time with the unit that suits its size.

    Args:
        seconds: The time, or None.
    """
    if seconds is None:
        return NOTHING
    factor, unit = time_scale(seconds)
    return f"{number(float(f'{seconds * factor:.3g}'))} {unit}"


def time_scale(seconds: float) -> tuple[float, str]:
    """Return the factor and the unit for an axis that reaches up to `seconds`."""
    if seconds >= 1 or seconds <= 0:
        return 1.0, "s"
    return (1e3, "ms") if seconds >= 1e-3 else (1e6, "µs")


def length(trace: Trace, time: TimeAxis) -> str:
    """Return how long a run took, in steps or in seconds."""
    return _steps(len(trace.steps)) if time == "step" else duration(trace.duration)


def latencies(requests: Sequence[RequestRecord], name: Literal["ttft", "tpot"]) -> list[float]:
    """Return a latency of the requests that have it, in seconds."""
    found = (getattr(request, name) for request in requests)
    return [value for value in found if value is not None]


def seats_finding(trace: Trace, label: str | None = None) -> str:
    """Say how well a run used its seats.

    Args:
        trace: The run.
        label: Its name; the policy's by default.
    """
    label = label or trace.policy
    mean = occupancy(trace)
    if mean is None:
        return f"{label} ran no step"
    seats = trace.scheduler.max_num_seqs
    return f"{label} keeps {mean:.1f} of {seats} seats busy on average over {_steps(len(trace.steps))}"


def length_finding(traces: Mapping[str, Trace], time: TimeAxis = "seconds") -> str:
    """Say which run ends first and how far the last is behind.

    Args:
        traces: The runs by label.
        time: Whether to count steps or seconds.
    """
    sizes = {label: len(trace.steps) if time == "step" else trace.duration for label, trace in traces.items()}
    first = min(sizes, key=lambda label: sizes[label])
    last = max(sizes, key=lambda label: sizes[label])
    if sizes[first] == sizes[last]:
        who = "Each run takes" if len(sizes) > 1 else f"{first} takes"
        return f"{who} {length(traces[first], time)}"
    soon, late = length(traces[first], time), length(traces[last], time)
    ratio = f", {sizes[last] / sizes[first]:.2f} times as long" if sizes[first] else ""
    return f"{first} is done after {soon}, {last} after {late}{ratio}"


def kv_finding(trace: Trace, label: str | None = None) -> str:
    """Say how full the held KV blocks are and how many the run needs at most.

    Args:
        trace: The run.
        label: Its name; the policy's by default.
    """
    label = label or trace.policy
    empty, peak = fragmentation(trace), peak_kv_tokens(trace)
    if empty is None or peak is None:
        return f"{label} holds no KV"
    blocks = f"{peak // trace.cache.block_size:,} of {trace.cache.num_blocks:,}"
    return f"{label}: {100 * (1 - empty):.0f} % of held KV is in use, at most {blocks} blocks held"


def kv_findings(traces: Mapping[str, Trace]) -> str:
    """Say how full the held KV blocks are, run by run.

    Args:
        traces: The runs by label.
    """
    empty = {label: fragmentation(trace) for label, trace in traces.items()}
    parts = [f"{label} {100 * (1 - value):.0f} %" for label, value in empty.items() if value is not None]
    return f"Held KV that is in use: {', '.join(parts)}" if parts else "No KV is held"


def categories_finding(trace: Trace, label: str | None = None) -> str:
    """Say what the KV pool is used for on average over time, the largest category first.

    Args:
        trace: The run.
        label: Its name; the policy's by default.
    """
    shares = {_IN_WORDS[name]: share for name, share in _pool_shares(trace).items()}
    largest = sorted(shares, key=lambda name: -shares[name])
    parts = [f"{name} {100 * shares[name]:.0f} %" for name in largest if shares[name] >= 0.005]
    return f"{label or trace.policy}: {', '.join(parts) or 'no step was run'}"


def categories_findings(traces: Mapping[str, Trace]) -> str:
    """Say how much of the KV pool holds tokens in use, run by run, and what most of the rest is.

    Args:
        traces: The runs by label.
    """
    parts = []
    for label, trace in traces.items():
        shares = _pool_shares(trace)
        if not shares:
            continue
        used = shares.pop("token_states")
        rest = max(shares, key=lambda name: shares[name])
        parts.append(f"{label} {100 * used:.0f} % ({100 * shares[rest]:.0f} % {_IN_WORDS[rest]})")
    return f"KV pool that holds tokens in use: {', '.join(parts)}" if parts else "No KV is held"


def blocks_finding(trace: Trace) -> str:
    """Say how many blocks of the pool are held at most, and how many references sharing saves.

    Args:
        trace: The run.
    """
    if not trace.steps:
        return f"{trace.policy} holds no KV block"
    held = max(record.num_held_blocks for record in trace.steps)
    shared = max(record.num_shared_blocks for record in trace.steps)
    sharing = f", and sharing saves up to {shared:,}" if shared else ", none of them shared"
    return f"{trace.policy} holds up to {held:,} of {trace.cache.num_blocks:,} KV blocks{sharing}"


def block_finding(trace: Trace, state: PoolState, step: int) -> str:
    """Say how many blocks are held, shared, cached and free in one step.

    Args:
        trace: The run.
        state: The pool in that step.
        step: Index of the step.
    """
    held, cached = len(state.holders), len(state.cached)
    shared = sum(len(names) > 1 for names in state.holders.values())
    names = {name for group in state.holders.values() for name in group}
    free = trace.cache.num_blocks - held - cached
    return (
        f"Step {step:,}: {len(names):,} requests hold {held:,} of {trace.cache.num_blocks:,} KV blocks, "
        f"{shared:,} of them shared; {cached:,} are cached, {free:,} free"
    )


def occupancy_finding(traces: Mapping[str, Trace]) -> str:
    """Say how many rows do useful work on average, run by run.

    Args:
        traces: The runs by label.
    """
    means = {label: occupancy(trace) for label, trace in traces.items()}
    parts = [f"{label} {mean:.1f}" for label, mean in means.items() if mean is not None]
    return f"Useful rows on average: {', '.join(parts)}" if parts else "No step was run"


def latency_finding(traces: Mapping[str, Trace]) -> str:
    """Say which run has the lowest median time to first token, and which the highest.

    Args:
        traces: The runs by label.
    """
    times = {label: latencies(trace.served, "ttft") for label, trace in traces.items()}
    medians = {label: float(np.percentile(found, 50)) for label, found in times.items() if found}
    if not medians:
        return "No request got a token"
    low = min(medians, key=lambda label: medians[label])
    high = max(medians, key=lambda label: medians[label])
    finding = f"Median time to first token: {low} {duration(medians[low])}"
    return finding if low == high else f"{finding}, {high} {duration(medians[high])}"


def roofline_finding(machine: str, reached: Mapping[str, tuple[int, float]]) -> str:
    """Say what share of a machine's peak the largest decode and prefill steps reach.

    Args:
        machine: Its name.
        reached: Tokens of the step and its share of the peak, by "decode" and "prefill".
    """
    what = {"decode": "a decode of {:,} requests", "prefill": "a prompt of {:,} tokens"}
    parts = [
        f"{what[kind].format(size)} reaches {100 * share:.{0 if share > 0.1 else 1}f} %"
        for kind, (size, share) in reached.items()
    ]
    return f"{machine}: {', '.join(parts)} of the peak" if parts else f"The roofline of {machine}"


def tradeoff_finding(runs: Mapping[str, Mapping[float, Trace]], rank: int, load: str) -> str:
    """Say who waits least for a first token, and who most, at the highest load that all runs share.

    Args:
        runs: The runs by label and load.
        rank: Percentile of the times, in percent.
        load: What the loads count.
    """
    shared = set.intersection(*(set(by_load) for by_load in runs.values()))
    if not shared:
        return "No load is shared by all runs"
    most = max(shared)
    times = {label: latencies(by_load[most].served, "ttft") for label, by_load in runs.items()}
    waits = {label: float(np.percentile(found, rank)) for label, found in times.items() if found}
    if not waits:
        return "No request got a token"
    low, high = min(waits, key=lambda name: waits[name]), max(waits, key=lambda name: waits[name])
    rates = {label: output_throughput(runs[label][most]) or 0.0 for label in (low, high)}
    parts = [
        f"{label} gives {rates[label]:,.0f} tokens/s and makes a first token wait {duration(waits[label])}"
        for label in dict.fromkeys((low, high))
    ]
    return f"At {most:g} {load}, {'; '.join(parts)} (p{rank})"


def pareto_finding(front: Sequence[str], num_runs: int) -> str:
    """Say which runs no other beats.

    Args:
        front: Their labels.
        num_runs: How many runs define both.
    """
    if not front:
        return "No run defines both"
    if len(front) == 1:
        return f"{front[0]} is best in both" if num_runs > 1 else f"{front[0]} is the only run"
    if len(front) == num_runs:
        return f"None of the {num_runs} runs beats another in both: each is a choice"
    return f"No policy wins both: {', '.join(front)} are the choice, {num_runs - len(front)} are beaten"


def metric(name: str) -> str:
    """Return a name of `metrics.summary` as a reader wants it, its unit in parentheses.

    Args:
        name: Such as "ttft_p99_s".
    """
    ending = next((ending for ending in _UNITS if name.endswith(ending)), "")
    parts = name.removesuffix(ending).split("_")
    shown = " ".join(part.upper() if part in ("ttft", "tpot", "itl", "kv", "slo") else part for part in parts)
    return f"{shown} ({_UNITS[ending]})" if ending else shown


_UNITS = MappingProxyType(
    {
        "_tokens_per_s": "tokens/s",
        "_requests_per_s": "requests/s",
        "_s": "s",
        "_rows": "rows",
        "_bytes": "bytes",
    }
)


def _steps(count: int) -> str:
    return f"{count:,} step{'' if count == 1 else 's'}"


_IN_WORDS = MappingProxyType(
    {
        "token_states": "in use",
        "reserved": "reserved",
        "internal": "never filled",
        "external": "out of reach",
        "cached": "cached",
        "free": "free",
    }
)


def _pool_shares(trace: Trace) -> dict[str, float]:
    """Return the time-weighted share of the pool in each category; empty if no step was run."""
    shares = memory_shares(trace)
    return {name: share for name in _IN_WORDS if (share := shares[name]) is not None}


# They hold emoji and some scripts together, and do no harm.
_JOINERS = "\u200c\u200d"


def _is_unseen(letter: str) -> bool:
    if letter.isprintable():
        return False
    is_no_character = ord(letter) & 0xFFFE == 0xFFFE or 0xFDD0 <= ord(letter) <= 0xFDEF
    return is_no_character or unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Zl", "Zp")
