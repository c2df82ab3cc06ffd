"""A dispatcher's three questions: how much was carried, who waited longest, and what did it cost."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from cbresearch import metrics
from cbresearch.metrics import Slo
from cbresearch.trace import RequestRecord, Trace
from cbresearch.viz import words

_MAX_REASONS = 3


class Row(NamedTuple):
    """A quantity of every run, ready to print.

    Attributes:
        name: Of the quantity.
        unit: Of its values; empty for a pure number.
        cells: A value and the sample size behind it (or "") per run.
    """

    name: str
    unit: str
    cells: tuple[tuple[str, str], ...]


class LongestWait(NamedTuple):
    """Who waited longest for a first token in one run.

    Attributes:
        label: The run.
        request_id: Who; None if nobody waited.
        seconds: From arrival to the first token or, if there was none, to the end of the request or the run.
        got_token: Whether it got one.
        reason: What befell it until then.
        life: The whole of what befell it.
    """

    label: str
    request_id: str | None
    seconds: float
    got_token: bool
    reason: str
    life: str


class Question(NamedTuple):
    """A question and its answer.

    Attributes:
        heading: The question.
        finding: The answer in a sentence or two.
        rows: The numbers behind it.
        waits: Per run who waited longest; only for the question that asks for it.
        note: What the answer depends on.
    """

    heading: str
    finding: str
    rows: tuple[Row, ...]
    waits: tuple[LongestWait, ...] = ()
    note: str = ""


def questions(
    traces: Mapping[str, Trace],
    *,
    bytes_per_token: int | None = None,
    slo: Slo | None = None,
    price_per_hour: float | None = None,
    currency: str = "USD",
) -> tuple[Question, ...]:
    """Return the three questions with their answers.

    Args:
        traces: The runs by label.
        bytes_per_token: KV bytes of one token; without it the peak is given in tokens.
        slo: What was promised; without it there is no goodput.
        price_per_hour: Price of the machine's hour; without it the cost of tokens is given in hours.
        currency: Of the price.

    Raises:
        ValueError: The price is not a finite number of 0 or more.
    """
    return (_carried(traces), _waited(traces), _cost(traces, bytes_per_token, slo, price_per_hour, currency))


def longest_wait(trace: Trace) -> tuple[RequestRecord, float] | None:
    """Return who waited longest for a first token, and for how many seconds; None if nobody came.

    Whoever got none waited until it failed or the run ended. Refused and aborted requests do not count.

    Args:
        trace: The run.
    """
    silent = {record.id for record in trace.served if record.ttft is None and record.finish_reason == "error"}
    failures = (
        {name: step.end for step in trace.steps for name in step.finished if name in silent} if silent else {}
    )
    waits = [
        (
            record,
            failures.get(record.id, trace.duration) - record.arrival if record.ttft is None else record.ttft,
        )
        for record in trace.served
        if record.finish_reason != "abort" or record.ttft is not None
    ]
    return max(waits, key=lambda wait: wait[1], default=None)


def _carried(traces: Mapping[str, Trace]) -> Question:
    tokens = {label: metrics.output_throughput(trace) for label, trace in traces.items()}
    order = _from_best(tokens, largest=True)
    finding = _nothing(traces, "No run gave a token.")
    if order:
        best, worst = order[0], order[-1]
        is_draw = _rate(tokens[best]) == _rate(tokens[worst])
        load = "their load" if 1 < len(order) < len(traces) else "its load"
        finding = (
            f"{_all_of(order, traces, 'Every run') if is_draw else best} carried "
            f"{load if is_draw else 'most'}: {_rate(tokens[best])} tokens/s and "
            f"{_rate(metrics.request_throughput(traces[best]))} finished requests/s, with "
            f"{_share(metrics.utilization(traces[best]))} of its seats busy."
        )
        if not is_draw and (low := tokens[worst]):
            finding += (
                f" {worst} carried least, {_rate(low)} tokens/s; {best} is {_times(tokens[best], low)}."
            )
    return Question(
        "How much was carried?",
        finding,
        (
            _numbers("output throughput", "tokens/s", traces, metrics.output_throughput),
            _numbers("throughput with prompts", "tokens/s", traces, metrics.total_throughput),
            _numbers("finished requests", "requests/s", traces, metrics.request_throughput),
            _numbers("busy seats, mean of all steps", "%", traces, metrics.utilization, scale=100),
        ),
    )


def _waited(traces: Mapping[str, Trace]) -> Question:
    waits = tuple(_explained(label, trace) for label, trace in traces.items())
    known = {wait.label: wait.seconds for wait in waits if wait.request_id is not None}
    order = _from_best(known, largest=False)
    finding = "Nobody came."
    if order:
        worst = next(wait for wait in waits if wait.label == order[-1])
        finding = (
            f"Request {worst.request_id} in {worst.label}: it waited {words.duration(worst.seconds)} "
            f"{'for its first token' if worst.got_token else 'and got no token'}."
        )
        if known[order[0]] < known[order[-1]]:
            best = next(wait for wait in waits if wait.label == order[0])
            finding += (
                f" In {best.label} nobody waited longer than {words.duration(best.seconds)} "
                f"(request {best.request_id})."
            )
    return Question(
        "Who waited longest?",
        finding,
        (
            _times_row("time to first token, p50", traces, metrics.ttft, "p50"),
            _times_row("time to first token, p99", traces, metrics.ttft, "p99"),
            _times_row("gap between two tokens, p99", traces, metrics.itl, "p99"),
            _times_row("mean gap of a request, p99", traces, metrics.tpot, "p99"),
        ),
        waits,
    )


def _cost(
    traces: Mapping[str, Trace],
    bytes_per_token: int | None,
    slo: Slo | None,
    price_per_hour: float | None,
    currency: str,
) -> Question:
    hours = {label: metrics.cost_per_million_tokens(trace, 1.0) for label, trace in traces.items()}
    rows, notes = [], []
    if bytes_per_token is None:
        rows.append(_numbers("peak KV memory", "tokens", traces, metrics.peak_kv_tokens))
    else:

        def peak(trace: Trace) -> float | None:
            return metrics.peak_kv_bytes(trace, bytes_per_token)

        rows.append(_numbers("peak KV memory", "MiB", traces, peak, scale=2**-20))
    rows += [
        _numbers("held KV without a token in use", "%", traces, metrics.fragmentation, scale=100),
        _numbers(
            "machine time of a million output tokens",
            "hours",
            traces,
            lambda trace: metrics.cost_per_million_tokens(trace, 1.0),
        ),
    ]
    costs: Mapping[str, float | None] = hours
    if price_per_hour is not None:
        price = price_per_hour
        costs = {label: metrics.cost_per_million_tokens(trace, price) for label, trace in traces.items()}
        rows += [
            _numbers(
                "million output tokens",
                currency,
                traces,
                lambda trace: metrics.cost_per_million_tokens(trace, price),
            ),
            _numbers(
                "million tokens, prompts included",
                currency,
                traces,
                lambda trace: metrics.cost_per_million_total_tokens(trace, price),
            ),
        ]
        notes.append(
            f"An hour of the machine costs {words.number(price)} {currency}, from the first arrival to the "
            "last token, idle times included."
        )
    else:
        notes.append("No price of an hour was given, so the cost of tokens is in hours of the machine.")
    if slo is not None:
        rows += [
            _numbers(
                "requests that kept the SLO", "%", traces, lambda t: metrics.slo_attainment(t, slo), scale=100
            ),
            _numbers("goodput", "requests/s", traces, lambda trace: metrics.goodput(trace, slo)),
        ]
        notes.append(f"The SLO: {_promise(slo)}. Goodput counts the finished requests that kept all of it.")
    else:
        notes.append("No SLO was given, so there is no goodput.")
    unit = "hours of the machine" if price_per_hour is None else currency
    return Question(
        "What did it cost?", _cost_finding(traces, costs, unit, slo), tuple(rows), (), " ".join(notes)
    )


def _cost_finding(
    traces: Mapping[str, Trace], costs: Mapping[str, float | None], unit: str, slo: Slo | None
) -> str:
    order = _from_best(costs, largest=False)
    if not order:
        return _nothing(traces, "Nothing was generated, so a token has no cost.")
    best, worst = order[0], order[-1]
    is_draw = _rate(costs[best]) == _rate(costs[worst])
    finding = f"A million output tokens cost {_rate(costs[best])} {unit} with "
    finding += f"{_all_of(order, traces)}." if is_draw else f"{best}, and {_rate(costs[worst])} with {worst}."
    if slo is not None:
        kept = {label: metrics.goodput(trace, slo) for label, trace in traces.items()}
        ranked = _from_best(kept, largest=True)
        most = ranked[0]
        share = _share(metrics.slo_attainment(traces[most], slo))
        if len(ranked) > 1 and _rate(kept[most]) == _rate(kept[ranked[-1]]):
            finding += f" The goodput of {_all_of(ranked, traces)} is {_rate(kept[most])} requests/s."
        else:
            finding += (
                f" {most} has the most goodput: {_rate(kept[most])} requests/s, {share} of its requests."
            )
    return finding


def _nothing(traces: Mapping[str, Trace], finding: str) -> str:
    """Return the finding where there is no rate: nothing was generated, or all of it in no time."""
    has_tokens = any(record.tokens for trace in traces.values() for record in trace.served)
    return "The runs took no time." if has_tokens else finding


def _all_of(labels: Sequence[str], traces: Mapping[str, Trace], every: str = "every run") -> str:
    """Name runs that are alike; all there are by one word, unless there is just one."""
    return every if 1 < len(labels) == len(traces) else " and ".join(labels)


def _explained(label: str, trace: Trace) -> LongestWait:
    found = longest_wait(trace)
    if found is None:
        return LongestWait(label, None, 0.0, False, "", "")
    record, seconds = found
    life = [line.strip() for line in trace.explain(record.id).splitlines()]
    reasons: list[str] = []
    # The first line names the request, the second its arrival.
    for line in life[2:]:
        if not re.match(r"took|came back", line):
            reasons.append(re.sub(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?(?= s\b)", _shorter, line))
        if re.search(r"for [1-9]\d* new token", line):
            break
    if len(reasons) > _MAX_REASONS:
        reasons = [*reasons[: _MAX_REASONS - 1], "…", reasons[-1]]
    return LongestWait(
        label, record.id, seconds, record.ttft is not None, "; ".join(reasons), "\n".join(life[1:])
    )


def _promise(slo: Slo) -> str:
    names = {"ttft": "time to first token", "tpot": "mean time per output token", "latency": "latency"}
    given = {name: getattr(slo, name) for name in names}
    return ", ".join(
        f"{names[name]} at most {words.duration(seconds)}"
        for name, seconds in given.items()
        if seconds is not None
    )


def _from_best(values: Mapping[str, float | None], largest: bool) -> list[str]:
    known = {label: value for label, value in values.items() if value is not None}
    return sorted(known, key=lambda label: -known[label] if largest else known[label])


def _numbers(
    name: str,
    unit: str,
    traces: Mapping[str, Trace],
    measure: Callable[[Trace], float | None],
    scale: float = 1,
) -> Row:
    values = (measure(trace) for trace in traces.values())
    return Row(name, unit, tuple((_rate(None if value is None else value * scale), "") for value in values))


def _times_row(
    name: str, traces: Mapping[str, Trace], measure: Callable[[Trace], metrics.Summary], statistic: str
) -> Row:
    found = [measure(trace) for trace in traces.values()]
    values: Sequence[float | None] = [getattr(summary, statistic) for summary in found]
    factor, unit = words.time_scale(max((value for value in values if value is not None), default=0.0))
    cells = (
        (_rate(None if value is None else value * factor), f"{summary.n:,}")
        for value, summary in zip(values, found, strict=True)
    )
    return Row(name, unit, tuple(cells))


def _rate(value: float | None) -> str:
    """Return a number with three digits, which is as much as one reads in a sentence."""
    return words.number(
        value if value is None or value >= 1000 or isinstance(value, int) else float(f"{value:.3g}")
    )


def _shorter(found: re.Match[str]) -> str:
    """Return a number of seconds with three digits."""
    return words.number(float(f"{float(found[0]):.3g}"))


def _share(value: float | None) -> str:
    return words.NOTHING if value is None else f"{100 * value:.0f} %"


def _times(value: float | None, other: float) -> str:
    return words.NOTHING if value is None else f"{value / other:.2f} times as fast"
