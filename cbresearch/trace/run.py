"""A run: its limits, its records, and the columns that are worked out from them."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.trace.columns import Columns, cut_steps, request_columns, step_columns
from cbresearch.trace.files import write_whole
from cbresearch.trace.records import Origin, RequestRecord, StepRecord
from cbresearch.trace.steps import Part, Steps
from cbresearch.trace.storage import Header, read, written

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Trace", "load"]

T = TypeVar("T")


@dataclass(frozen=True)
class Trace:
    """One run, or a window of one (see `between`).

    Attributes:
        policy: Name of the policy, options included.
        scheduler: The limits of a step.
        cache: The KV pool.
        steps: Step records in order.
        requests: Request records in the order in which the requests were given.
        origin: What recorded it.
        whole: The run that this is a window of; None for a run itself.
        window: Where the window begins and ends, in seconds since the start of the run.
    """

    policy: str
    scheduler: SchedulerConfig
    cache: CacheConfig
    steps: Sequence[StepRecord] = ()
    requests: tuple[RequestRecord, ...] = ()
    origin: Origin = field(default_factory=Origin)
    whole: "Trace | None" = None
    window: tuple[float, float] | None = None

    def between(self, begin: float, end: float = math.inf) -> "Trace":
        """Return what happened in a window of time, [begin, end), as a trace that every reader takes.

        Its requests are those that ended in it (were finished, aborted, rejected or failed); one that never
        ended is in the window that reaches the run's end, as is all that happens at that very moment. Its
        steps are those that were running in it. Figures over time weigh a step by its part inside, tokens
        count where they come out, and so do the counts of a step, so that windows that follow one another
        add up to the run.

        Args:
            begin: Seconds since the start of the run.
            end: The same; by default, and at most, the end of the run.

        Raises:
            ValueError: `begin` is not a finite number of 0 or more, or `end` is before it.
        """
        if not (0 <= begin <= end and begin < math.inf):
            raise ValueError(f"the window is {begin!r} to {end!r}; give seconds, 0 or more, the end last")
        whole = self if self.whole is None else self.whole
        if self.window is not None:
            begin, end = max(begin, self.begin), min(end, self.end)
        part = replace(whole, whole=whole, window=(float(begin), float(max(begin, min(end, whole.end)))))
        limit = part.end if part.end < whole.end else math.inf
        num_begun = int(np.searchsorted(whole.step_columns["start_s"], limit)) if part.duration else 0
        steps = Steps(whole.parts, range(part.first_step, max(part.first_step, num_begun)))
        ends = zip(whole.requests, part.holds(_ends_of(whole)), strict=True)
        return replace(part, steps=steps, requests=tuple(record for record, is_inside in ends if is_inside))

    def holds(self, seconds: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Return which moments lie in the window; all do in a run itself."""
        times = np.asarray(seconds, dtype=np.float64)
        if self.whole is None:
            return np.ones(times.shape, dtype=bool)
        return (times >= self.begin) & ((times < self.end) | (self.begin < self.end >= self.whole.end))

    def of_window(self, columns: Columns) -> Columns:
        """Return the part of some columns of the whole run, one value a step, that is of the window's steps."""
        first = self.first_step
        return {name: values[first : first + len(self.steps)] for name, values in columns.items()}

    @cached_property
    def first_step(self) -> int:
        """Return how many steps of the run had ended before the window begins."""
        if self.whole is None:
            return 0
        steps = self.whole.step_columns
        return int(np.searchsorted(steps["start_s"] + steps["duration_s"], self.begin))

    @property
    def num_ended_steps(self) -> int:
        """Return how many steps ended in the window: all but the last one, if it was still running."""
        return len(self.steps) - bool(self.steps and not self.holds(self.steps[-1].end))

    def steps_so_far(self) -> Iterator[tuple[int, StepRecord]]:
        """Yield the steps from the start of the run on, numbered from 0 where the window begins."""
        before = () if self.whole is None else Steps(self.whole.parts, range(self.first_step))
        return enumerate(chain(before, self.steps), -self.first_step)

    @property
    def parts(self) -> Sequence[Part]:
        """Return the steps in order, each decode run as one part."""
        return self.steps.parts if isinstance(self.steps, Steps) else self.steps

    def once(self, compute: "Callable[[Trace], T]") -> "T":
        """Return what a function makes of this run; it is computed at the first call and kept."""
        if compute not in self._computed:
            self._computed[compute] = compute(self)
        return self._computed[compute]  # type: ignore[no-any-return]

    @cached_property
    def _computed(self) -> dict[Callable[..., Any], Any]:
        return {}

    @cached_property
    def step_columns(self) -> Columns:
        """Return the steps as columns by name, one value a step; NaN is what was not measured.

        In a window, times are of the part of each step that lies in it, and `share` is how much that is.
        """
        if self.whole is None:
            return step_columns(self.parts)
        return cut_steps(self.of_window(self.whole.step_columns), self.begin, self.end)

    @cached_property
    def request_columns(self) -> Columns:
        """Return the requests as columns by name; an undefined time is NaN, another undefined value None."""
        return request_columns(self.requests)

    @cached_property
    def token_times(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """Return when the output tokens of all requests came out, in one array.

        Returns:
            Seconds since the start of the run, request after request, of shape (output tokens,), and where
            each request's begin and the last one's end, of shape (requests + 1,).
        """
        numbers = [len(record.token_times) for record in self.requests]
        times = chain.from_iterable(record.token_times for record in self.requests)
        return np.fromiter(times, np.float64, sum(numbers)), np.cumsum([0, *numbers])

    @cached_property
    def served(self) -> tuple[RequestRecord, ...]:
        """Return the records of the requests that were not rejected."""
        return tuple(request for request in self.requests if not request.is_rejected)

    @property
    def outputs(self) -> dict[str, tuple[int, ...]]:
        """Return the output token ids by request id, of the requests that were not rejected."""
        return {request.id: request.tokens for request in self.served}

    @property
    def begin(self) -> float:
        """Return where the window begins, in seconds since the start of the run; 0 for a run itself."""
        return 0.0 if self.window is None else self.window[0]

    @property
    def end(self) -> float:
        """Return where the window ends; for a run itself, the end of its last step or, without one, token."""
        if self.window is not None:
            return self.window[1]
        return self.steps[-1].end if self.steps else float(self.token_times[0].max(initial=0.0))

    @property
    def duration(self) -> float:
        """Return the seconds from `begin` to `end`."""
        return self.end - self.begin

    def steps_frame(self) -> "pd.DataFrame":
        """Return `step_columns` as a pandas frame."""
        import pandas as pd

        return pd.DataFrame(dict(self.step_columns))

    def requests_frame(self) -> "pd.DataFrame":
        """Return `request_columns` as a pandas frame."""
        import pandas as pd

        return pd.DataFrame(dict(self.request_columns))

    def save(self, path: str | Path) -> Path:
        """Write the whole trace as JSON lines, which `trace.load` reads back bit for bit.

        Args:
            path: Where to write it, whole or not at all; with the ending ".gz" it is compressed.
        """
        path, run = Path(path), self.whole or self
        limits = (self.policy, self.scheduler, self.cache, self.origin)
        header = Header("cbresearch.trace", 1, *limits, self.window)
        write_whole(path, written(path, header, run.parts, run.requests))
        return path


def load(path: str | Path) -> Trace:
    """Read a trace that `Trace.save` or a `TraceWriter` wrote.

    A last line that is cut off, as a kill of the writer leaves it, is left out with a warning. A request that
    was queued and had not ended has what the steps before gave it.

    Args:
        path: The file; with the ending ".gz" it is decompressed.

    Raises:
        ValueError: It is no trace; the message names the file, the line and what is wrong there.
    """
    header, parts, requests = read(Path(path))
    run = Trace(header.policy, header.scheduler, header.cache, Steps(parts), requests, header.origin)
    return run if header.window is None else run.between(*header.window)


def _ends_of(run: Trace) -> list[float]:
    """Return when each request ended, in seconds; infinity for one that did not."""
    left: dict[str, float] = {}
    for step in run.parts:
        if isinstance(step, StepRecord):
            left |= dict.fromkeys(step.plan.aborted, step.start) | dict.fromkeys(step.finished, step.end)
    return [
        record.arrival
        if record.is_rejected
        else record.token_times[-1]
        if record.is_complete
        else left.get(record.id, math.inf)
        for record in run.requests
    ]
