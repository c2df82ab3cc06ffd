"""A run: its limits, its records, and the columns that are worked out from them."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from numbers import Real
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
        begin: Seconds since the start of the run at which the window begins; 0 for a run itself.
        until: The same for its end; None for a run itself.
        first_step: Steps of the run that had ended before the window begins.
    """

    policy: str
    scheduler: SchedulerConfig
    cache: CacheConfig
    steps: Sequence[StepRecord] = ()
    requests: tuple[RequestRecord, ...] = ()
    origin: Origin = field(default_factory=Origin)
    whole: "Trace | None" = None
    begin: float = 0.0
    until: float | None = None
    first_step: int = 0

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
        if not (isinstance(begin, Real) and isinstance(end, Real) and 0 <= begin <= end and begin < math.inf):
            raise ValueError(f"the window is {begin!r} to {end!r}; give seconds, 0 or more, the end last")
        whole, begin, end = self.whole or self, max(begin, self.begin), min(end, self.end)
        part = replace(whole, whole=whole, begin=float(begin), until=float(max(begin, end)))
        starts = whole.step_columns["start_s"]
        first = int((starts + whole.step_columns["duration_s"] < begin).sum())
        number = int(part.holds(np.maximum(starts, begin))[first:].sum())
        steps, is_inside = Steps(whole.parts, range(first, first + number)), part.holds(_ends_of(whole))
        requests = tuple(record for record, inside in zip(whole.requests, is_inside, strict=True) if inside)
        return replace(part, steps=steps, requests=requests, first_step=first)

    def holds(self, times: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
        """Return which moments lie in the window; in a run itself all do but NaN, which is none."""
        reaches_end = self.whole is None or self.begin < self.end >= self.whole.end
        return (times >= self.begin) & ((times < self.end) | reaches_end)

    def of_window(self, columns: Columns) -> Columns:
        """Return the part of columns of the whole run, one value a step, that is of the window's steps."""
        places = slice(self.first_step, self.first_step + len(self.steps))
        return {name: values[places] for name, values in columns.items()}

    @property
    def num_ended_steps(self) -> int:
        """Return how many steps ended in the window: all but the last one, if it was still running."""
        return len(self.steps) - bool(self.steps and not self.holds(np.array(self.steps[-1].end)))

    def steps_so_far(self) -> Iterator[tuple[int, StepRecord]]:
        """Yield the steps from the start of the run on, numbered from 0 where the window begins."""
        before = () if self.whole is None else Steps(self.whole.parts, range(self.first_step))
        return enumerate(chain(before, self.steps), -self.first_step)

    @property
    def parts(self) -> Sequence[Part]:
        """Return the steps in order, each decode run as one part; a window may begin and end within one."""
        return self.steps.parts if isinstance(self.steps, Steps) and self.whole is None else self.steps

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
    def end(self) -> float:
        """Return where the window ends; for a run itself, the end of its last step or, without one, token."""
        last = self.steps[-1].end if self.steps else float(self.token_times[0].max(initial=0.0))
        return last if self.until is None else self.until

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
        window = None if self.until is None else (self.begin, self.until)
        header = Header("cbresearch.trace", 1, self.policy, self.scheduler, self.cache, self.origin, window)
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
    header, parts, requests = read(Path(path).expanduser())
    run = Trace(header.policy, header.scheduler, header.cache, Steps(parts), requests, header.origin)
    return run if header.window is None else run.between(*header.window)


def _ends_of(run: Trace) -> npt.NDArray[np.float64]:
    """Return when each request ended, in seconds; infinity for one that did not."""
    left: dict[str, float] = {}
    for step in run.parts:
        if isinstance(step, StepRecord):
            left |= dict.fromkeys(step.plan.aborted, step.start) | dict.fromkeys(step.finished, step.end)
    times = (record.arrival if record.is_rejected else record.finish for record in run.requests)
    pairs = zip(run.requests, times, strict=True)
    return np.array([left.get(record.id, math.inf) if when is None else when for record, when in pairs])
