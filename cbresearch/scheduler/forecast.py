"""How long consecutive steps take, and who is done with which, as far as nobody runs out of blocks."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf
from typing import NamedTuple

_MOST_STEPS = 4096


class Segment(NamedTuple):
    """Steps with the same rows.

    Attributes:
        end: Steps from the first of all to the last of these.
        leaving: Places of the rows that are done with the last of these, ascending.
    """

    end: int
    leaving: Sequence[int]


class Forecast(NamedTuple):
    """Consecutive steps.

    Attributes:
        durations: Seconds of each.
        ends: Seconds since the start of the run at which each ends.
        segments: They, in parts.
    """

    durations: list[float]
    ends: list[float]
    segments: list[Segment]


def forecast(
    price: Callable[[int, range], Sequence[float]],
    starts: Sequence[int],
    lasts: Sequence[int],
    padding: Sequence[int],
    now: float,
    until: float,
    passes_finishes: bool,
    most: int,
) -> Forecast:
    """Return the steps until somebody arrives, or nobody is left, or there are enough.

    Args:
        price: Returns the seconds of steps of so many tokens, by their context tokens.
        starts: Tokens of each row that are computed.
        lasts: Steps until each row is done.
        padding: Context tokens of the rows that are computed for nothing.
        now: Seconds since the start of the run.
        until: Seconds at which somebody arrives: the first step that ends no earlier is the last one.
        passes_finishes: Whether to go on when somebody is done.
        most: Steps that are enough.
    """
    order = sorted(range(len(lasts)), key=lasts.__getitem__)
    num_rows, num_padding = len(order), len(padding)
    most = min(most, _MOST_STEPS)
    computed = sum(starts) + sum(padding)
    durations: list[float] = []
    ends: list[float] = []
    segments: list[Segment] = []
    offset, number, clock = 0, 0, now
    while num_rows and offset < most and clock < until:
        last = min(lasts[order[number]], most)
        num_steps = last - offset
        context = computed + num_rows * (offset + 1)
        if num_steps > 8 and until < inf:
            guess = (
                durations[-1] if durations else price(num_rows + num_padding, range(context, context + 1))[0]
            )
            # So that not too many are priced; if it falls short there is another round.
            if guess > 0 and (until - clock) / guess < num_steps:
                num_steps = min(num_steps, int((until - clock) / guess) + 2)
        seconds = price(num_rows + num_padding, range(context, context + num_steps * num_rows, num_rows))
        more = list(accumulate(seconds, initial=clock))
        clock = more[-1]
        if not min(seconds) >= 0 or not clock < inf:
            # A step that takes no sensible time is refused when it is taken by itself.
            break
        if clock >= until:
            # One less than the place among those with the beginning in front, which is before `until`.
            num_steps = bisect_left(more, until)
            seconds = seconds[:num_steps]
        durations += seconds
        ends += more[1 : num_steps + 1]
        offset += num_steps
        leaving: list[int] = []
        while number < len(order) and lasts[order[number]] == offset:
            leaving.append(order[number])
            computed -= starts[order[number]]
            number += 1
        segments.append(Segment(offset, leaving))
        num_rows -= len(leaving)
        if leaving and not passes_finishes:
            break
    return Forecast(durations, ends, segments)
