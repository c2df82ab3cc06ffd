"""A run: its limits, its records, and the columns that are worked out from them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.trace.columns import Columns, request_columns, step_columns
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
    """One run.

    Attributes:
        policy: Name of the policy, options included.
        scheduler: The limits of a step.
        cache: The KV pool.
        steps: Step records in order.
        requests: Request records in the order in which the requests were given.
        origin: What recorded it.
    """

    policy: str
    scheduler: SchedulerConfig
    cache: CacheConfig
    steps: Sequence[StepRecord] = ()
    requests: tuple[RequestRecord, ...] = ()
    origin: Origin = field(default_factory=Origin)

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
        """Return the steps as columns by name, one value a step; NaN is what was not measured."""
        return step_columns(self.parts)

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
    def duration(self) -> float:
        """Return the seconds from the start of the run to the end of its last step."""
        return self.steps[-1].end if self.steps else 0.0

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
        path, header = (
            Path(path),
            Header("cbresearch.trace", 1, self.policy, self.scheduler, self.cache, self.origin),
        )
        write_whole(path, written(path, header, self.parts, self.requests))
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
    return Trace(header.policy, header.scheduler, header.cache, Steps(parts), requests, header.origin)
