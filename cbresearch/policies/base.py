"""The policy hook: a policy only decides; the scheduler alone clips, allocates, preempts and counts."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Self

from cbresearch import names
from cbresearch.checks import text
from cbresearch.config import SchedulerConfig
from cbresearch.kv import KVManager
from cbresearch.request import RequestState


class View:
    """What a policy may read. Values are live: they change as the scheduler takes up proposals.

    Attributes:
        now: Seconds since the start of the run.
        running: Unfinished requests with a seat, in the order of admission.
        waiting: Requests without a seat when the step began: preempted ones first, then by arrival. The queue
            itself moves only after the step; `itertools.islice` takes its head.
        swapped: Requests without a seat whose KV lies in the host's pool, the earliest admitted first.
        token_budget: Tokens that this step can still take.
        max_num_batched_tokens: Tokens that a step can take at most.
        max_num_seqs: All seats.
        block_size: Tokens per block.
        num_blocks: All blocks of the KV pool.
        preemption: What becomes of a victim's KV, "recompute" or "swap", unless the policy decides otherwise.
        closed: Why admission stopped in this step, or None.
    """

    def __init__(
        self,
        limits: SchedulerConfig,
        kv: KVManager,
        free_seats: Sequence[int],
        waiting: Iterable[RequestState],
        swapped: Iterable[RequestState],
        step_time: Callable[[int, int], float] | None,
    ) -> None:
        self.now = 0.0
        self.running: Sequence[RequestState] = ()
        self.waiting, self.swapped = waiting, swapped
        self.token_budget = self.max_num_batched_tokens = limits.max_num_batched_tokens
        self.max_num_seqs, self.preemption = limits.max_num_seqs, limits.preemption
        self.block_size, self.num_blocks = kv.config.block_size, kv.num_blocks
        self.closed: str | None = None
        self._kv, self._free_seats, self._step_time = kv, free_seats, step_time

    @property
    def admitting(self) -> bool:
        """Whether a waiting request could still join: a seat is free, and memory has rejected none yet.

        A policy may stop walking the queue once this is False; what it yields all the same is skipped.
        """
        return bool(self._free_seats) and self.closed is None

    @property
    def num_free_seats(self) -> int:
        """Seats that no request holds."""
        return len(self._free_seats)

    @property
    def num_free_blocks(self) -> int:
        """Blocks of the KV pool that no request holds."""
        return self._kv.num_free_blocks

    def num_cached_tokens(self, request: RequestState) -> int:
        """Return the tokens of a waiting request whose KV is in the prefix cache now."""
        return self._kv.num_cached_tokens(request)

    def step_seconds(self, num_tokens: int, num_context_tokens: int) -> float:
        """Return the predicted seconds of a step of so many tokens and tokens of context; 0.0 if unknown."""
        return 0.0 if self._step_time is None else self._step_time(num_tokens, num_context_tokens)


Proposal = tuple[RequestState, int]


class Policy:
    """First come, first served, with chunked prefill and decodes mixed under one token budget.

    Orca's iteration-level scheduling (OSDI'22) with Sarathi's chunked prefills (OSDI'24), in the order of
    vLLM v1: running requests go on, then the queue's head joins while seats, budget and blocks last.
    A subclass overrides one method or two. The options of its constructor are checked against their
    annotations (see `names.check_option`), and those that are not the default are part of its name.
    """

    name = "fcfs"
    family = "batching"
    """One of "batching", "size", "memory", "fairness", "slo", "locality"."""
    source = "Orca (OSDI'22), Sarathi-Serve (OSDI'24)"
    """Where the rule was published."""
    pads_finished_rows = False
    """Whether a finished request's row stays in the batch until all rows are finished."""
    joins_running_batch = True
    """Whether a request may join a batch under way; a parallel sample then waits for its sibling's prompt."""
    preempts_one_by_one = False
    """Whether victims leave one after the other, those too that free nothing, as in vLLM."""
    fast_forward = True
    """Whether decode steps repeat themselves, so that a simulator may take many at once.

    A class that says True promises: a step that decodes every running request within the token budget, and
    admits and preempts none, is followed by its like until a request arrives or finishes, or a running one
    finds no block. So no decision turns on the time, on tokens served, or on fewer free blocks. `propose` is
    then asked once for many steps, or not at all, and `served` is told the tokens of many steps at once.
    `simulate(..., verify=True)` proves it on a workload.

    A class speaks for itself only: one that is derived from it says it anew, or its steps are taken one by
    one."""

    def __new__(cls, *values: Any, **options: Any) -> Self:
        """Check the options, and name the policy by its class and them."""
        policy = super().__new__(cls)
        policy.name = names.with_options("policy", _own_name(cls), cls.__init__, values, options)
        return policy

    def __init__(self) -> None:
        """Take no options."""

    def begin(self) -> None:
        """Drop what is kept of earlier runs; called when a scheduler takes the policy."""

    def propose(self, view: View) -> Iterator[Proposal]:
        """Yield (request, number of tokens) in the order of scheduling.

        The scheduler clips each proposal to what fits, and skips what does not. A generator sees the
        effect of a proposal when it resumes.
        """
        yield from whole(in_turn(view))
        yield from joining(view, queued(view))

    def victim(self, view: View, candidates: Sequence[RequestState]) -> RequestState:
        """Choose the request to preempt when blocks run out, among the running ones in admission order.

        By default the one admitted last: the oldest then always advances, so every run ends. A request with
        `max_preemptions` preemptions is no candidate; if that leaves none, the last is taken unasked.
        Asked again without the request that it chose, until there is room; only then are they preempted, but
        for those that hold nothing of their own where the others are enough. If the request that needs the
        blocks is chosen, it alone is preempted.
        """
        return candidates[-1]

    def displace(
        self, view: View, waiting: RequestState, candidates: Sequence[RequestState]
    ) -> RequestState | None:
        """Choose a running request to preempt for a waiting one that finds no seat or block; None: none.

        Asked again without the request that it chose, until there is room; only then are they preempted. The
        candidates leave out requests that joined in this step or were preempted too often already.
        """
        return None

    def preemption(self, view: View, victim: RequestState) -> str:
        """Choose what becomes of a victim's KV: "recompute" throws it away, "swap" moves it to the host.

        A host's pool that is absent or full makes it a recompute.
        """
        return view.preemption

    def wakes(self, view: View) -> float | None:
        """Return the seconds until which waiting requests are held back, or None; asked when none runs."""
        return None

    def served(self, request: RequestState, num_tokens: int) -> None:
        """Take note that a request was scheduled `num_tokens` tokens in the step just done.

        One whose `finish_reason` is set is not seen again. An aborted one is told with 0 tokens.
        """


def _own_name(kind: type[Policy]) -> str:
    # A class of your own without a name is not the class of this package that it is derived from.
    owner = next(one for one in kind.__mro__ if "name" in vars(one))
    is_own = owner.__module__.partition(".")[0] == kind.__module__.partition(".")[0]
    return kind.name if is_own else kind.__name__


def begin(policy: Policy) -> None:
    """Check what a policy says of itself, and let it begin a run.

    Raises:
        TypeError: One of its flags is neither True nor False.
        ValueError: Its name is no text.
        RuntimeError: Its `begin` fails.
    """
    text(f"the name of {policy!r}", policy.name)
    for flag in [name for name, value in vars(Policy).items() if isinstance(value, bool)]:
        if not isinstance(value := getattr(policy, flag), bool):
            raise TypeError(f"policy {policy.name!r}: {flag} is {value!r}; set it to True or False")
    ask(policy, "begin")


def ask(policy: Policy, hook: str, *values: Any) -> Any:
    """Return what a hook of a policy says.

    Raises:
        RuntimeError: The hook fails; the message names the policy, and the cause has the traceback.
    """
    try:
        return getattr(policy, hook)(*values)
    except (Exception, SystemExit) as error:
        raise failure(policy, hook, error) from error


def failure(policy: Policy, hook: str, error: BaseException, remedy: str = "") -> RuntimeError:
    """Return the error that says that a hook of a policy failed."""
    return RuntimeError(
        f"policy {policy.name!r}: its `{hook}` failed: {type(error).__name__}: {error}{remedy}"
    )


def may_fast_forward(policy: Policy) -> bool:
    """Return whether a policy's own class promises that its decode steps repeat themselves."""
    declares = "fast_forward" in vars(type(policy)) or "fast_forward" in vars(policy)
    return declares and policy.fast_forward


def whole(requests: Iterable[RequestState]) -> Iterator[Proposal]:
    """Propose each request with everything that it has pending."""
    for request in requests:
        yield request, request.num_tokens - request.num_computed_tokens


def in_turn(view: View) -> Sequence[RequestState]:
    """Return the running requests; the least recently scheduled first, if the budget cannot serve all."""
    if len(view.running) <= view.token_budget:
        return view.running
    return sorted(view.running, key=lambda request: request.scheduled_step)


def queued(view: View) -> Iterator[RequestState]:
    """Return all requests without a seat, swapped ones first."""
    return chain(view.swapped, view.waiting)


def joining(view: View, requests: Iterable[RequestState]) -> Iterator[Proposal]:
    """Propose requests without a seat as long as one can join, so that a long queue is not walked in vain."""
    for request in requests:
        if not view.admitting:
            return
        yield request, request.num_tokens - request.num_computed_tokens
