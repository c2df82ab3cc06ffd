"""The online engine: requests come at any time, their tokens go out as they are generated."""

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tqdm.auto import tqdm

from cbresearch import models, policies
from cbresearch.config import CacheConfig, QueueLimits, SchedulerConfig
from cbresearch.engine.executor import ModelExecutor, default_cache
from cbresearch.engine.queue import QueueFull, WaitingRoom
from cbresearch.engine.stream import Output, Stream
from cbresearch.models import LoadedModel
from cbresearch.policies import Policy
from cbresearch.request import Rejected, Request, RequestState, SamplingParams, parallel_samples
from cbresearch.scheduler import Scheduler
from cbresearch.serve import Loop, record_of
from cbresearch.trace import RequestRecord, StepRecord, Trace

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one prompt.

    Attributes:
        outputs: As many as were asked for.
    """

    outputs: tuple[Output, ...]

    @property
    def text(self) -> str:
        """Return the text of the first output."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Return the token ids of the first output."""
        return self.outputs[0].token_ids

    @property
    def error(self) -> str | None:
        """Return why the prompt was rejected or failed, or None."""
        return self.outputs[0].error


class _Ticket:
    """A request that is in the engine.

    Attributes:
        stream: Where its tokens go.
        state: How far it has come; None until the engine's thread has queued it.
        num_sent: Tokens that the stream has.
    """

    __slots__ = ("num_sent", "state", "stream")

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.state: RequestState | None = None
        self.num_sent = 0


class Engine:
    """Serve requests as they come, in a thread of its own, on the wall clock.

    The loop is that of `serve`: the same scheduler, block manager and policies. The thread begins with the
    first request; as a context manager the engine stops at the end of the block.

    Args:
        model: A model's name for `models.load`, or a model loaded already.
        policy: A policy or its name.
        scheduler: The limits of a step.
        cache: The KV pool; by default 1 GiB, or less where full seats can never fill that.
        queue: What may wait for a first seat.
        keep_trace: Whether to keep a record of every step and request for `trace()`. A server that runs for
            days should not.
        seed: For what is drawn for requests that have no seed of their own.
        clock: Seconds.
        **executor: Further arguments of `ModelExecutor`.

    Raises:
        ValueError: A name is unknown, or there is no room for the pool.
    """

    def __init__(
        self,
        model: str | LoadedModel,
        policy: str | Policy = "fcfs",
        *,
        scheduler: SchedulerConfig | None = None,
        cache: CacheConfig | None = None,
        queue: QueueLimits | None = None,
        keep_trace: bool = True,
        seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
        **executor: Any,
    ) -> None:
        self.loaded = models.load(model) if isinstance(model, str) else model
        limits = scheduler or SchedulerConfig()
        cache = cache or default_cache(self.loaded.shape, limits)
        policy = policies.get(policy)
        carried_out = ModelExecutor(self.loaded, limits, cache, seed=seed, clock=clock, **executor)
        carried_out.warm_up()
        self._loop = Loop(Scheduler(policy, limits, cache), carried_out)
        self._keep_trace = keep_trace
        self._clock = clock
        self._began = clock()
        self._numbers = itertools.count()
        # Guards everything below; the engine's thread holds it between steps only.
        self._condition = threading.Condition()
        self._thread: threading.Thread | None = None
        self._room = WaitingRoom(queue or QueueLimits())
        self._inbox: list[_Ticket] = []
        self._aborting: set[str] = set()
        self._tickets: dict[str, _Ticket] = {}
        self._steps: list[StepRecord] = []
        self._records: dict[str, RequestRecord] = {}
        self._unforgotten: list[str] = []
        self._stopping: str | None = None
        self._failure: BaseException | None = None

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def scheduler(self) -> Scheduler:
        """Return the scheduler, to look at between steps."""
        return self._loop.scheduler

    @property
    def num_unfinished(self) -> int:
        """Return how many accepted requests have not come to their end."""
        return len(self._tickets)

    def request(
        self,
        prompt: Prompt,
        max_tokens: int = 128,
        sampling: SamplingParams | None = None,
        id: str | None = None,
        **others: Any,
    ) -> Request:
        """Return a request for `add`, its text tokenized.

        Args:
            prompt: Text or token ids.
            max_tokens: Largest number of output tokens.
            sampling: How tokens are chosen; greedily by default.
            id: A name of its own; by default a number.
            **others: Further fields of `Request`, such as `priority`.

        Raises:
            ValueError: A field is out of range.
        """
        token_ids = tuple(self.loaded.encode(prompt)) if isinstance(prompt, str) else tuple(prompt)
        name = f"request-{next(self._numbers)}" if id is None else id
        return Request(name, token_ids, max_tokens, sampling=sampling or SamplingParams(), **others)

    def add(self, prompt: Prompt | Request, *arguments: Any, **fields: Any) -> Stream:
        """Take in a request and return the stream of its tokens.

        Args:
            prompt: Text, token ids, or a whole request; it arrives now, whatever its `arrival` says.
            *arguments: As for `request`.
            **fields: As for `request`.

        Raises:
            ValueError: It can never be served; the message says what it needs and what there is.
            QueueFull: Too much waits already.
            RuntimeError: The engine has stopped.
        """
        request = prompt if isinstance(prompt, Request) else self.request(prompt, *arguments, **fields)
        return self._add(request, waits=False)

    def generate(
        self,
        prompts: Sequence[Prompt],
        max_tokens: int | Sequence[int] = 128,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Answer]:
        """Return an answer to each prompt, in the order of the prompts.

        A prompt that cannot be served gets its error for an answer, and the others go on. Where the queue is
        full, the next prompt waits.

        Args:
            prompts: Texts or lists of token ids.
            max_tokens: Largest number of output tokens, for all or for each.
            sampling: How tokens are chosen, for all or for each; greedily by default.

        Raises:
            ValueError: There is not one `max_tokens` or one `sampling` for each prompt.
            RuntimeError: The engine has stopped.
        """
        lengths = _for_each("max_tokens", max_tokens, int, len(prompts))
        params = _for_each("sampling", sampling or SamplingParams(), SamplingParams, len(prompts))
        places: list[list[Stream | Output]] = []
        quiet = os.environ.get("TQDM_DISABLE", "0") not in ("", "0")
        try:
            for prompt, length, choice in zip(prompts, lengths, params, strict=True):
                places.append([])
                name = f"request-{next(self._numbers)}"
                try:
                    request = self.request(prompt, length, choice, name)
                    for sample in parallel_samples(request) if choice.n > 1 else (request,):
                        places[-1].append(self._add(sample, waits=True))
                except (ValueError, QueueFull) as error:
                    places[-1].append(_rejected(name, str(error)))
            bar = tqdm(places, desc="generate", unit="prompt", file=sys.stderr, disable=quiet)
            return [
                Answer(tuple(item.result() if isinstance(item, Stream) else item for item in place))
                for place in bar
            ]
        except BaseException:
            for item in itertools.chain.from_iterable(places):
                if isinstance(item, Stream):
                    item.abort()
            raise

    def abort(self, request_id: str) -> None:
        """End a request wherever it is; what it has generated stays. A finished one stays as it is."""
        with self._condition:
            if request_id in self._tickets:
                self._aborting.add(request_id)
                self._condition.notify_all()

    def stop(self, drain: bool = False) -> None:
        """Stop; what is finished stays, and every stream comes to its end.

        Args:
            drain: Whether to finish what was accepted first, or else to abort it.

        Raises:
            RuntimeError: The engine's thread had failed; its unfinished requests have the error too.
        """
        with self._condition:
            self._stopping = "drain" if drain and self._stopping is None else "abort"
            self._condition.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        if self._failure is not None:
            raise RuntimeError(f"the engine failed: {self._failure}") from self._failure

    def trace(self) -> Trace:
        """Return what has happened so far; times count from the engine's start.

        Raises:
            ValueError: The engine does not keep a trace.
        """
        if not self._keep_trace:
            raise ValueError("this engine keeps no trace; build it with keep_trace=True")
        scheduler = self._loop.scheduler
        with self._condition:
            running = {
                name: record_of(ticket.stream.request, ticket.state)
                for name, ticket in self._tickets.items()
                if ticket.state is not None
            }
            return Trace(
                policy=scheduler.policy.name,
                scheduler=scheduler.config,
                cache=scheduler.kv.config,
                steps=tuple(self._steps),
                requests=tuple(running.get(name, record) for name, record in self._records.items()),
            )

    def _now(self) -> float:
        return self._clock() - self._began

    def _add(self, request: Request, waits: bool) -> Stream:
        self._loop.validate(request)
        with self._condition:
            self._check_open()
            if request.id in self._tickets or request.id in self._records:
                raise ValueError(
                    f"request {request.id!r}: the id is taken; give each request an id of its own"
                )
            while True:
                try:
                    self._room.enter(request)
                    break
                except QueueFull:
                    if not waits or self._room.is_empty:
                        raise
                self._condition.wait()
                self._check_open()
            request = replace(request, arrival=self._now())
            ticket = _Ticket(Stream(request, self.loaded.decode, self.abort))
            self._tickets[request.id] = ticket
            self._inbox.append(ticket)
            if self._keep_trace:
                self._records[request.id] = record_of(request, RequestState(request, 0))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="cbresearch-engine", daemon=True)
                self._thread.start()
            self._condition.notify_all()
        return ticket.stream

    def _check_open(self) -> None:
        if self._failure is not None:
            raise RuntimeError(f"the engine failed: {self._failure}") from self._failure
        if self._stopping is not None:
            raise RuntimeError("the engine has stopped; build another one")

    def _run(self) -> None:
        try:
            while self._prepare():
                record, finished = self._loop.step(self._now)
                self._publish(record, finished)
        except BaseException as failure:
            self._failure = failure
        with self._condition:
            error = f"the engine failed: {self._failure}" if self._failure is not None else None
            self._stopping = self._stopping or "abort"
            for ticket in list(self._tickets.values()):
                self._close(ticket, "abort" if error is None else "error", error)
            self._condition.notify_all()

    def _prepare(self) -> bool:
        """Wait for work and take it in; return whether there is a step to serve."""
        scheduler = self._loop.scheduler
        with self._condition:
            while True:
                self._take_in()
                if self._stopping == "abort" or (self._stopping and not scheduler.has_work):
                    for request_id in list(self._tickets):
                        self._end(request_id)
                    return False
                if not scheduler.has_work:
                    self._condition.wait()
                    continue
                now = self._now()
                wake = scheduler.wakes(now)
                if wake is None:
                    return True
                self._condition.wait(wake - now)

    def _take_in(self) -> None:
        for ticket in self._inbox:
            ticket.state = self._loop.scheduler.submit(ticket.stream.request)
        self._inbox.clear()
        for request_id in self._aborting:
            self._end(request_id)
        self._aborting.clear()

    def _end(self, request_id: str) -> None:
        """Abort a request that is queued or runs, if it is still there."""
        ticket = self._tickets.get(request_id)
        if ticket is not None:
            self._loop.scheduler.abort(request_id)
            self._close(ticket)

    def _publish(self, record: StepRecord, finished: Sequence[RequestState]) -> None:
        with self._condition:
            if self._keep_trace:
                self._steps.append(record)
            for admission in record.plan.admitted:
                self._room.leave(admission.request.id)
            for entry in record.plan.scheduled:
                if entry.samples:
                    ticket = self._tickets[entry.request_id]
                    if ticket.state is not None and ticket.state.finish_reason is None:
                        ticket.stream.put(_unsent(ticket))
            for state in finished:
                self._close(self._tickets[state.id])
            self._condition.notify_all()

    def _close(self, ticket: _Ticket, reason: str | None = None, error: str | None = None) -> None:
        """Hand over a request's last tokens and its record, and let go of it."""
        request, state = ticket.stream.request, ticket.state
        record = record_of(request, state or RequestState(request, 0))
        if record.finish_reason is None:
            record = replace(record, finish_reason=reason, error=error)
        ticket.stream.put(_unsent(ticket), record)
        del self._tickets[request.id]
        self._room.leave(request.id)
        if self._keep_trace:
            self._records[request.id] = record
        elif state is not None:
            self._forget(request.id)

    def _forget(self, request_id: str) -> None:
        """Let the scheduler forget who is finished; rows that a static batch still computes come later."""
        self._unforgotten.append(request_id)
        remaining = []
        for name in self._unforgotten:
            try:
                self._loop.scheduler.forget(name)
            except ValueError:
                remaining.append(name)
        self._unforgotten = remaining


def _unsent(ticket: _Ticket) -> list[tuple[int, Any]]:
    """Return the tokens that a stream does not have yet, with their log-probabilities, and count them."""
    state, begin = ticket.state, ticket.num_sent
    if state is None:
        return []
    tokens = state.output_token_ids[begin:]
    ticket.num_sent += len(tokens)
    logprobs = state.logprobs[begin:] or [None] * len(tokens)
    return list(zip(tokens, logprobs, strict=True))


def _rejected(name: str, error: str) -> Output:
    record = record_of(Rejected(name, error), None)
    return Output(name, (), (), "", None, None, (), error, record)


def _for_each(name: str, given: Any, kind: type, number: int) -> list[Any]:
    values = [given] * number if isinstance(given, kind) else list(given)
    if len(values) != number:
        raise ValueError(f"there are {number} prompts but {len(values)} values of {name}; give one for each")
    return values
