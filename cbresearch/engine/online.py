"""The online engine: requests come at any time, their tokens go out as they are generated."""

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import count, zip_longest
from numbers import Integral
from typing import Any, TypeVar

from tqdm.auto import tqdm

from cbresearch import models, policies
from cbresearch.config import CacheConfig, QueueLimits, SchedulerConfig
from cbresearch.engine.executor import ModelExecutor, default_cache
from cbresearch.engine.queue import AdmissionQueue, QueueFull
from cbresearch.engine.token_stream import Output, TokenStream, check_process
from cbresearch.models import LoadedModel
from cbresearch.policies import Policy
from cbresearch.request import Rejected, Request, RequestState, SamplingParams, parallel_samples
from cbresearch.scheduler import Scheduler
from cbresearch.serve import Loop, record_of
from cbresearch.trace import Origin, RequestRecord, StepRecord, Trace

Prompt = str | Sequence[int]
_Value = TypeVar("_Value")
_Bytes = bytes | bytearray | memoryview


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


@dataclass(slots=True)
class _Ticket:
    """A request that is in the engine.

    Attributes:
        stream: Where its tokens go.
        state: How far it has come; None until the engine's thread has queued it.
        num_sent: Tokens that the stream has.
    """

    stream: TokenStream
    state: RequestState | None = None
    num_sent: int = 0

    def record(self) -> RequestRecord:
        """Return what there is to know of the request so far."""
        return record_of(self.stream.request, self.state)

    def cut(self, record: RequestRecord) -> RequestRecord:
        """Return a record that has the tokens that the stream has, for a step may be under way."""
        state, end = self.state, self.num_sent
        if state is None:
            return record
        tokens, times = tuple(state.output_token_ids[:end]), tuple(state.token_times[:end])
        return replace(record, tokens=tokens, token_times=times, logprobs=tuple(state.logprobs[:end]))

    def send(self, record: RequestRecord | None = None) -> None:
        """Hand the stream the tokens that it does not have yet and, in the end, the record."""
        unsent: Iterable[Any] = ()
        if self.state is not None:
            begin, self.num_sent = self.num_sent, len(self.state.output_token_ids)
            unsent = zip_longest(self.state.output_token_ids[begin:], self.state.logprobs[begin:])
        self.stream.put(unsent, record)


class Engine:
    """Serve requests as they come, in a thread of its own, on the wall clock.

    The loop is that of `serve`: the same scheduler, block manager and policies. There is a thread as long as
    there is work; what is unfinished when the program ends is aborted. As a context manager the engine stops
    at the end of the block. Several engines may serve one model. A forked child needs an engine of its own.

    Args:
        model: A model's name for `models.load`, or a model loaded already.
        policy: A policy or its name.
        scheduler: The limits of a step.
        cache: The KV pool; by default 1 GiB, or less where full seats can never fill that.
        queue: What may wait for a first seat.
        keep_trace: Whether to keep a record of every step and request for `trace()`. A server that runs for
            days should not.
        backend: As for `ModelExecutor`; so are `compile`, `graphs`, `seed` and `fill`.
        compile: Compile the model, for long runs on a CPU.
        graphs: Capture decode steps as CUDA graphs.
        seed: For what is drawn for requests that have no seed of their own.
        clock: Returns the seconds of a wall clock.
        fill: Value to fill the KV pools with, for tests.

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
        backend: str | None = None,
        compile: bool = False,
        graphs: bool = False,
        seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
        fill: float | None = None,
    ) -> None:
        self.loaded = models.load(model) if isinstance(model, str) else model
        limits = scheduler or SchedulerConfig()
        cache = cache or default_cache(self.loaded.shape, limits)
        policy = policies.get(policy)
        executor = ModelExecutor(
            *(self.loaded, limits, cache), backend=backend, compile=compile, graphs=graphs,
            seed=seed, clock=clock, fill=fill,
        )  # fmt: skip
        executor.warm_up()
        self._loop = Loop(Scheduler(policy, limits, cache), executor)
        self._keep_trace = keep_trace
        self._clock = clock
        self._began = clock()
        self._numbers = count()
        # Guards everything below; the engine's thread holds it between steps only.
        self._condition = threading.Condition()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._queue = AdmissionQueue(queue or QueueLimits())
        self._inbox: list[_Ticket] = []
        self._aborting: set[str] = set()
        self._tickets: dict[str, _Ticket] = {}
        self._steps: list[StepRecord] = []
        # Of every request whose id is taken, as of the end of the last step.
        self._records: dict[str, RequestRecord] = {}
        self._stopping: str | None = None
        self._failure: BaseException | None = None

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # What went wrong inside the block is told, not that the engine had failed, too.
        with nullcontext() if kind is None else suppress(RuntimeError):
            self.stop()

    @property
    def scheduler(self) -> Scheduler:
        """Return the scheduler, to look at between steps."""
        return self._loop.scheduler

    @property
    def num_unfinished(self) -> int:
        """Return how many accepted requests have not come to their end."""
        return len(self._tickets)

    def add(
        self,
        prompt: Prompt | Request,
        max_tokens: int = 128,
        sampling: SamplingParams | None = None,
        *,
        id: str | None = None,
        priority: int = 0,
        client: str = "",
        deadline: float | None = None,
    ) -> TokenStream:
        """Take in a request and return the stream of its tokens.

        Args:
            prompt: Text, token ids, or a whole request, whose own fields count then, but for `arrival`: it
                arrives now.
            max_tokens: Largest number of output tokens.
            sampling: How tokens are chosen; greedily by default.
            id: A name of its own; by default a number.
            priority: Smaller is more urgent.
            client: Name of the client, for fair-share policies.
            deadline: Seconds since the engine's start by which the answer is wanted.

        Raises:
            ValueError: It can never be served; the message says what it needs and what there is.
            QueueFull: Too much waits already.
            RuntimeError: The engine has stopped.
        """
        if not isinstance(prompt, Request):
            name = self._next_id() if id is None else id
            sampling = SamplingParams() if sampling is None else sampling
            request = self._request(name, prompt, max_tokens, sampling)
            prompt = replace(request, priority=priority, client=client, deadline=deadline)
        return self._add(prompt, waits=False)

    def generate(
        self,
        prompts: str | Iterable[Any],
        max_tokens: int | Sequence[int] = 128,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Answer]:
        """Return an answer to each prompt, in the order of the prompts.

        A prompt that cannot be served gets its error for an answer, and the others go on. Where the queue is
        full, the next prompt waits.

        Args:
            prompts: Texts or token ids (lists, arrays, tensors). A single text is one prompt, and so is a
                list of token ids.
            max_tokens: Largest number of output tokens, for all or for each.
            sampling: How tokens are chosen, for all or for each; greedily by default.

        Raises:
            ValueError: These are no prompts in an order, or there is not one `max_tokens` or one `sampling`
                for each.
            RuntimeError: The engine has stopped.
        """
        found: Any = [prompts] if isinstance(prompts, str | Mapping | _Bytes) else prompts
        if isinstance(found, Set) or not isinstance(found, Iterable) or getattr(found, "ndim", 1) == 0:
            raise ValueError(f"the prompts are {prompts!r}; give a text, token ids, or a list of such")
        # The entries of a tensor are tensors.
        given: list[Any] = [one.tolist() if getattr(one, "ndim", 1) == 0 else one for one in found]
        if given and all(isinstance(item, Integral) for item in given):
            given = [given]
        lengths = _for_each("max_tokens", max_tokens, len(given))
        params = _for_each("sampling", SamplingParams() if sampling is None else sampling, len(given))
        # An error in the middle ends what was added before.
        with ExitStack() as added:
            streams = [self._streams(added, *asked) for asked in zip(given, lengths, params, strict=True)]
            quiet = os.environ.get("TQDM_DISABLE", "0") not in ("", "0")
            bar = tqdm(streams, desc="generate", unit="prompt", file=sys.stderr, disable=quiet)
            return [
                Answer(tuple(item.result() if isinstance(item, TokenStream) else item for item in items))
                for items in bar
            ]

    def abort(self, request_id: str) -> None:
        """End a request wherever it is; what it has generated stays. A finished one stays as it is."""
        if os.getpid() != self._process:
            return
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
        if os.getpid() != self._process:
            return
        with self._condition:
            self._stopping = "drain" if drain and self._stopping is None else "abort"
            self._condition.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self._raise_failure()

    def trace(self) -> Trace:
        """Return what has happened up to the end of the last step; times count from the engine's start.

        Raises:
            ValueError: The engine does not keep a trace.
        """
        if not self._keep_trace:
            raise ValueError("this engine keeps no trace; build it with keep_trace=True")
        check_process(self._process)
        with self._condition:
            running = {name: ticket.cut(self._records[name]) for name, ticket in self._tickets.items()}
            return Trace(
                policy=self.scheduler.policy.name,
                scheduler=self.scheduler.config,
                cache=self.scheduler.kv.config,
                steps=tuple(self._steps),
                requests=tuple(running.get(name, record) for name, record in self._records.items()),
                origin=Origin(model=self.loaded.name),
            )

    def _now(self) -> float:
        return self._clock() - self._began

    def _next_id(self) -> str:
        return f"request-{next(self._numbers)}"

    def _request(self, name: str, prompt: Prompt, max_tokens: int, sampling: SamplingParams) -> Request:
        if isinstance(prompt, _Bytes):
            raise ValueError(f"request {name!r}: the prompt is bytes; decode it to text")
        given: Any = tuple(self.loaded.encode(prompt)) if isinstance(prompt, str) else prompt
        return Request(name, given, max_tokens, sampling=sampling)

    def _streams(
        self, added: ExitStack, prompt: Prompt, max_tokens: int, sampling: SamplingParams
    ) -> list[TokenStream | Output]:
        """Add as many requests as answers are wanted; return their streams, or the error for an answer."""
        name = self._next_id()
        try:
            request = self._request(name, prompt, max_tokens, sampling)
            samples = parallel_samples(request) if sampling.n > 1 else (request,)
            return [added.enter_context(self._add(sample, waits=True)) for sample in samples]
        except (ValueError, QueueFull) as error:
            record = record_of(Rejected(name, str(error)), None)
            return [Output(name, (), (), "", None, None, (), str(error), record)]

    def _add(self, request: Request, waits: bool) -> TokenStream:
        check_process(self._process)
        self._loop.validate(request)
        with self._condition:
            self._check_open()
            if request.id in self._records:
                raise ValueError(
                    f"request {request.id!r}: the id is taken; give each request an id of its own"
                )
            while True:
                try:
                    self._queue.enter(request)
                    break
                except QueueFull:
                    if not waits or self._queue.is_empty:
                        raise
                self._condition.wait()
                self._check_open()
            request = request.moved(self._now())
            ticket = _Ticket(TokenStream(request, self.loaded.decode_for(request.sampling.stop), self.abort))
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="cbresearch-engine", daemon=True)
                thread.start()
                self._thread = thread
                # A thread that still computes when Python ends would abort the process.
                atexit.register(self.stop)
            self._tickets[request.id] = ticket
            self._inbox.append(ticket)
            self._keep(ticket)
            self._condition.notify_all()
        return ticket.stream

    def _check_open(self) -> None:
        self._raise_failure()
        if self._stopping is not None:
            raise RuntimeError("the engine has stopped; build another one")

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise RuntimeError(f"the engine failed: {self._failure}") from self._failure

    def _run(self) -> None:
        try:
            while self._prepare():
                self._publish(*self._loop.step(self._now))
        except BaseException as failure:
            with self._condition:
                self._failure, self._stopping = failure, "abort"
                for ticket in list(self._tickets.values()):
                    self._close(ticket, "error", f"the engine failed: {failure}")
                self._end()

    def _end(self) -> None:
        """Let the thread go; the next request starts another."""
        self._thread = None
        atexit.unregister(self.stop)
        self._condition.notify_all()

    def _prepare(self) -> bool:
        """Wait for work and take it in; return whether there is a step to serve."""
        scheduler = self.scheduler
        with self._condition:
            while True:
                for ticket in self._inbox:
                    ticket.state = scheduler.submit(ticket.stream.request, now=self._now())
                    self._keep(ticket)
                self._inbox.clear()
                if self._stopping == "abort":
                    self._aborting.update(self._tickets)
                for request_id in self._aborting & self._tickets.keys():
                    scheduler.abort(request_id)
                    self._close(self._tickets[request_id])
                self._aborting.clear()
                if scheduler.has_work:
                    now = self._now()
                    wake = scheduler.wakes(now)
                    if wake is None:
                        return True
                    self._condition.wait(wake - now)
                else:
                    self._end()
                    return False

    def _publish(self, record: StepRecord, finished: Sequence[RequestState]) -> None:
        with self._condition:
            if self._keep_trace:
                self._steps.append(record)
            for admission in record.plan.admitted:
                self._queue.leave(admission.request.id)
            for name in self._tickets.keys() & record.plan.preempted:
                self._keep(self._tickets[name])
            for entry in record.plan.scheduled:
                ticket = self._tickets[entry.request_id]
                if entry.is_prefill:
                    self._keep(ticket)
                if entry.samples and ticket.state is not None and ticket.state.finish_reason is None:
                    ticket.send()
            for state in finished:
                self._close(self._tickets[state.id])
            self._condition.notify_all()

    def _keep(self, ticket: _Ticket) -> None:
        self._records[ticket.stream.id] = ticket.record()

    def _close(self, ticket: _Ticket, reason: str | None = None, error: str | None = None) -> None:
        """Hand over a request's last tokens and its record, and let go of it."""
        record = ticket.record()
        if record.finish_reason is None:
            record = replace(record, finish_reason=reason, error=error)
        ticket.send(record)
        del self._tickets[record.id]
        self._queue.leave(record.id)
        self._records[record.id] = record
        if not self._keep_trace:
            # Rows that a static batch still computes can be forgotten only later.
            for name in self._records.keys() - self._tickets.keys():
                with suppress(ValueError):
                    self.scheduler.forget(name)
                    del self._records[name]


def _for_each(name: str, given: _Value | Sequence[_Value], number: int) -> Sequence[_Value]:
    values = given if isinstance(given, Sequence) else [given] * number
    if len(values) != number:
        raise ValueError(f"there are {number} prompts but {len(values)} values of {name}; give one for each")
    return values
