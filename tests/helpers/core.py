"""What tests of the core share: a referee that carries out plans, tight workloads, readers of a trace."""

import math
import random
import zlib
from collections import Counter
from dataclasses import dataclass, field, fields

import numpy as np

from cbresearch import policies
from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.kv import NULL_BLOCK
from cbresearch.request import Request, parallel_samples
from cbresearch.scheduler import Scheduler
from cbresearch.serve import serve
from cbresearch.step import StepResult

POLICIES = ("fcfs", "prefill_first", "sjf", "static", "static:release")
"""The policies that need no option to show what the mechanism does."""


# --- what a request has to come out with


def prompt_ids(request):
    """Return a prompt's token ids, made up if only its length is given; parallel samples get the same."""
    if not isinstance(request.prompt, int):
        return request.prompt
    name = request.group or request.id
    return tuple(zlib.crc32(f"{name} {place}".encode()) for place in range(request.prompt))


def extended(states, token_ids):
    """Return what stands for the KV at each further position: it depends on all tokens up to there."""
    states = list(states)
    for token in token_ids:
        states.append(hash((states[-1] if states else 0, token)))
    return states


def next_token(states):
    return states[-1] % 5


def answer_of(request):
    """Return the output of a request, which depends on nothing but its prompt."""
    length = min(request.max_tokens, request.output_length or request.max_tokens)
    states, answer = extended((), prompt_ids(request)), []
    for _ in range(length):
        answer.append(next_token(states))
        states = extended(states, answer[-1:])
    return tuple(answer)


def can_be_served(request, limits, cache):
    """Say whether a request can finish alone in a pool of pages; its last token is never fed back."""
    num_tokens = request.num_prompt_tokens + request.max_tokens
    fits = num_tokens - 1 <= cache.num_tokens
    return fits and (limits.max_model_len is None or num_tokens <= limits.max_model_len)


# --- blocks, by plans and block events alone


class BlockLedger:
    """Block tables of both pools, and the blocks that are held and findable, folded from step records.

    Attributes:
        tables: Device blocks of each seated request, those that the last step finished included.
        host_tables: Host blocks of each swapped request.
        held: Device blocks with a reference.
        findable: Device blocks that the prefix cache knows.
    """

    def __init__(self, cache):
        self.size = cache.block_size
        self.tables: dict[str, list[int]] = {}
        self.host_tables: dict[str, list[int]] = {}
        self.held: set[int] = set()
        self.findable: set[int] = set()
        self.computed: dict[str, int] = {}
        self.finished: tuple[str, ...] = ()

    @property
    def cached(self):
        return self.findable - self.held

    def take(self, record):
        """Take in a step's record; the requests that it finished still have their tables then."""
        plan, events = record.plan, record.events
        for name in self.finished:
            self.tables.pop(name, None)
        self.finished = record.finished
        self._move_to_host(plan.swapped, events)
        for name in (*plan.preempted, *plan.aborted):
            self.tables.pop(name, None)
        for name in plan.aborted:
            self.host_tables.pop(name, None)
        admitted = {admission.request.id for admission in plan.admitted}
        for name in admitted:
            self.host_tables.pop(name, None)
            self.tables[name] = []
        for entry in plan.scheduled:
            self.tables[entry.request_id] += entry.new_block_ids
            self.computed[entry.request_id] = entry.context_length
        for name, block in events.released:
            table = self.tables[name]
            table[table.index(block)] = NULL_BLOCK
        seated = {block for table in self.tables.values() for block in table} - {NULL_BLOCK}
        # Rows that are computed for nothing hold what was not freed.
        self.held = seated | (self.held - set(events.freed))
        known = Counter(self.findable)
        known.update(events.cached)
        known.subtract(events.evicted)
        assert set(known.values()) <= {0, 1}, "a block is cached twice, or evicted without being cached"
        self.findable = {block for block, count in known.items() if count}

    def _move_to_host(self, swapped, events):
        # Of a window that shows nothing but the next token no block is moved.
        given: dict[str, list[int]] = {name: [] for name in swapped}
        for name, block in events.host_held:
            given.setdefault(name, []).append(block)
        freed = set(events.host_freed)
        for name in [name for name, table in self.host_tables.items() if freed & set(table)]:
            # It came back; if it was then moved out again, it is given a table below.
            shape = self.host_tables.pop(name)
            if name in given:
                self.host_tables[name] = self._shaped(shape, given.pop(name))
        for name, blocks in given.items():
            shape = self.host_tables.get(name)
            if shape is None:
                shape = self.tables[name][: -(-self.computed[name] // self.size)]
            self.host_tables[name] = self._shaped(shape, blocks)

    @staticmethod
    def _shaped(shape, blocks):
        """Return a table with the gaps of another one; of several moves within a step the last one counts."""
        number = sum(block != NULL_BLOCK for block in shape)
        moved = iter(blocks[len(blocks) - number :])
        return [block if block == NULL_BLOCK else next(moved) for block in shape]


# --- the referee


@dataclass
class Row:
    """A seat as an executor sees it."""

    request: Request
    seat: int
    states: list[int]
    computed: int = -1
    table: list[int] = field(default_factory=list)
    is_done: bool = False


class Referee:
    """Carry out plans, transfers included, on pools whose slots remember the prefix that they were given.

    What a plan says about seats, positions and blocks is compared with books kept from the plans and block
    events before it. Each position that a step attends to has to be found in the pool as the request's own
    prefix gives it; a slot that was never written, or whose block was given back, is empty, as NaN would be.
    Nothing is written to a block to which a second request refers, and no slot twice in a step; only where a
    block counts as cached once it is scheduled may requests that are admitted in that very step refer to it.

    Args:
        scheduler: The scheduler whose plans are carried out.
        max_steps: Steps after which the run is taken to have no end.
    """

    def __init__(self, scheduler, max_steps=math.inf):
        cache = scheduler.kv.config
        self.scheduler, self.max_steps = scheduler, max_steps
        self.size, self.window = cache.block_size, cache.sliding_window
        self.is_paged, self.cache_on_schedule = cache.reservation is None, cache.cache_on_schedule
        self.pools = {
            "device": [[None] * self.size for _ in range(cache.num_blocks)],
            "host": [[None] * self.size for _ in range(cache.num_host_blocks)],
        }
        self.ledger = BlockLedger(cache)
        self.rows: dict[str, Row] = {}
        self.outputs: dict[str, list[int]] = {}
        self.seen: set[str] = set()
        self.ended: set[str] = set()
        self.num_steps = 0
        self.num_transfers: Counter[str] = Counter()
        self.most_held: Counter[str] = Counter()

    def check(self, request):
        """Accept every request; whether it can be served is the scheduler's affair."""

    def execute(self, plan):
        self.scheduler.check()
        assert plan.step == self.num_steps
        self.num_steps += 1
        assert self.num_steps < self.max_steps, "the run does not come to an end"
        assert plan.scheduled or plan.preempted, "a step without progress"
        self.move_rows(plan)
        self.transfer(plan.transfers)
        for entry in plan.scheduled:
            self.grow(entry)
        self.judge_limits(plan)
        self.compute(plan)
        return self.sample(plan)

    def move_rows(self, plan):
        for name in plan.preempted:
            del self.rows[name]
        for name in plan.aborted:
            self.ended.add(name)
            if name in self.rows:
                self.rows[name].is_done = True
        # A row that is done stays for as long as it keeps its blocks.
        for name in [name for name, row in self.rows.items() if row.is_done]:
            if not self.scheduler.kv.table(name):
                del self.rows[name]
        for request, seat, output in plan.admitted:
            assert request.id not in self.rows and request.id not in self.ended
            assert list(output) == self.outputs.setdefault(request.id, [])
            self.rows[request.id] = Row(request, seat, extended((), (*prompt_ids(request), *output)))

    def transfer(self, transfers):
        for kind, source, target in transfers:
            self.num_transfers[kind] += 1
            read = self.pools["host" if kind == "swap_in" else "device"]
            written = self.pools["host" if kind == "swap_out" else "device"]
            assert kind in ("copy", "swap_out", "swap_in")
            assert 0 <= source < len(read) and 0 <= target < len(written)
            written[target] = list(read[source])

    def grow(self, entry):
        row = self.rows[entry.request_id]
        assert not row.is_done
        assert entry.seat == row.seat
        assert row.computed < 0 or entry.start == row.computed, (
            "a part does not begin where the last one ended"
        )
        known = len(row.states)
        assert 1 <= entry.num_tokens <= known - entry.start
        assert entry.context_length == entry.start + entry.num_tokens
        assert entry.samples == (entry.context_length == known)
        is_decode = bool(self.outputs[entry.request_id]) and entry.start == known - 1
        assert entry.is_prefill == (not is_decode)
        row.table += entry.new_block_ids
        row.computed = entry.context_length
        if self.is_paged:
            assert len(row.table) == -(-row.computed // self.size), "not the blocks that it needs"
        self.most_held[entry.request_id] = max(
            self.most_held[entry.request_id], sum(block != NULL_BLOCK for block in row.table)
        )

    def judge_limits(self, plan):
        config = self.scheduler.config
        names = [part.request_id for part in (*plan.scheduled, *plan.padding)]
        assert len(names) == len(set(names)) <= config.max_num_seqs
        num_tokens = sum(entry.num_tokens for entry in plan.scheduled) + len(plan.padding)
        assert num_tokens == plan.num_tokens <= config.max_num_batched_tokens
        seats = [row.seat for row in self.rows.values()]
        assert len(seats) == len(set(seats)), "two requests in one seat"
        assert set(seats) <= set(range(config.max_num_seqs))
        done = {name for name, row in self.rows.items() if row.is_done}
        assert not done or self.scheduler.policy.pads_finished_rows
        padding = {row.request_id for row in plan.padding}
        assert padding <= done
        assert padding == done or num_tokens == config.max_num_batched_tokens

    def compute(self, plan):
        device = self.pools["device"]
        readers = {admission.request.id for admission in plan.admitted} if self.cache_on_schedule else ()
        references = Counter(
            block for name, row in self.rows.items() if name not in readers for block in row.table
        )
        written = set()
        for entry in plan.scheduled:
            row = self.rows[entry.request_id]
            for position in range(entry.start, entry.context_length):
                block = row.table[position // self.size]
                assert block != NULL_BLOCK, f"{entry} writes to a block that it gave back"
                others = references[block] - (entry.request_id not in readers)
                assert not others, f"{entry} writes block {block}, to which others refer"
                device[block][position % self.size] = row.states[position]
                written.add((block, position % self.size))
        assert len(written) == sum(entry.num_tokens for entry in plan.scheduled), "two tokens in one slot"
        spans = [(entry.request_id, entry.start, entry.context_length) for entry in plan.scheduled]
        # A row that is computed over again reads what it has, and writes nothing.
        for name, seat, length in plan.padding:
            assert (seat, length) == (self.rows[name].seat, self.rows[name].computed)
            spans.append((name, length - 1, length))
        for name, start, end in spans:
            row = self.rows[name]
            for position in range(0 if self.window is None else max(0, start - self.window + 1), end):
                block = row.table[position // self.size]
                assert block != NULL_BLOCK, f"{name} reads position {position} of a block that it gave back"
                found = device[block][position % self.size]
                assert found == row.states[position], f"{name} reads foreign KV, or none, at {position}"

    def sample(self, plan):
        tokens, stopped = {}, []
        for entry in plan.scheduled:
            if not entry.samples:
                continue
            name, row = entry.request_id, self.rows[entry.request_id]
            tokens[name] = next_token(row.states)
            row.states = extended(row.states, [tokens[name]])
            output = self.outputs[name]
            output.append(tokens[name])
            if len(output) == row.request.output_length:
                stopped.append(name)
            row.is_done = name in stopped or len(output) == row.request.max_tokens
            self.ended |= {name} if row.is_done else set()
        return StepResult(1.0, tokens, frozenset(stopped))

    def after(self, record):
        """Compare what the scheduler says of the step just committed, and forget what was given back."""
        scheduler, ledger, pool = self.scheduler, self.ledger, record.pool
        scheduler.check()
        ledger.take(record)
        for name, row in self.rows.items():
            row.table = list(ledger.tables.get(name, row.table))
        running = {name for name, row in self.rows.items() if not row.is_done}
        assert {state.id for state in scheduler.running} == running
        assert set(record.finished) == {name for name in ledger.tables if self.rows[name].is_done}
        for name in running:
            assert scheduler.kv.table(name) == tuple(ledger.tables[name])
        waiting = [state.id for state in (*scheduler.waiting, *scheduler.swapped)]
        assert {state.id for state in scheduler.swapped} == ledger.host_tables.keys()
        for name, table in ledger.host_tables.items():
            assert scheduler.kv.host_table(name) == tuple(table)
        queued = [*waiting, *running]
        assert len(queued) == len(set(queued)), "a request is in two queues"
        self.seen |= set(queued)
        assert self.seen - self.ended <= set(queued), "a request was lost"
        assert (pool.num_running, pool.num_waiting) == (len(ledger.tables), len(waiting))
        self.judge_pool(record)
        kept = ledger.held | ledger.findable
        for block in range(len(self.pools["device"])):
            if block not in kept:
                self.pools["device"][block] = [None] * self.size

    def judge_pool(self, record):
        ledger, pool = self.ledger, record.pool
        assert pool.num_held_blocks == len(ledger.held)
        assert pool.num_cached_blocks == len(ledger.cached)
        tables = [[block for block in row.table if block != NULL_BLOCK] for row in self.rows.values()]
        assert pool.num_shared_blocks == sum(map(len, tables)) - len(ledger.held)
        in_use = {
            (row.table[position // self.size], position % self.size)
            for name, row in self.rows.items()
            if name in ledger.tables
            for position in range(row.computed)
            if row.table[position // self.size] != NULL_BLOCK
        }
        assert pool.num_held_tokens == len(in_use)
        on_host = {block for table in ledger.host_tables.values() for block in table} - {NULL_BLOCK}
        assert (pool.num_swapped, pool.num_held_host_blocks) == (len(ledger.host_tables), len(on_host))


# --- runs


def given_limits(seats=8, budget=2048, num_blocks=1000, block_size=1, **options):
    """Return the limits and the pool that loose numbers and fields of either configuration stand for."""
    names = {entry.name for entry in fields(SchedulerConfig)}
    limits = {name: value for name, value in options.items() if name in names}
    memory = {name: value for name, value in options.items() if name not in names}
    return SchedulerConfig(seats, budget, **limits), CacheConfig(num_blocks, block_size, **memory)


def serve_refereed(requests, policy="fcfs", limits=None, cache=None, between=None, **options):
    """Serve requests under a referee, and hold the outcome against what was asked for.

    Args:
        requests: The workload.
        policy: A policy or its name.
        limits: The limits of a step; by default those of `options`.
        cache: The pools; by default those of `options`.
        between: Called with the scheduler and each step's record, to preempt or abort.
        options: As for `given_limits`.

    Returns:
        The trace and the referee.
    """
    loose_limits, loose_cache = given_limits(**options)
    scheduler = Scheduler(policies.get(policy), limits or loose_limits, cache or loose_cache)
    limits, cache = scheduler.config, scheduler.kv.config
    total = sum(request.num_prompt_tokens + request.max_tokens for request in requests)
    referee = Referee(scheduler, 50 * total + 1000)

    def on_step(record):
        referee.after(record)
        if between is not None:
            between(scheduler, record)
            scheduler.check()

    trace = serve(requests, scheduler, referee, on_step=on_step)
    assert_whole(scheduler)
    assert [record.id for record in trace.requests] == [request.id for request in requests]
    starts = {}
    for step in trace.steps:
        for admission in step.plan.admitted:
            starts.setdefault(admission.request.id, step.start)
    taken: set[str] = set()
    for place in sorted(range(len(requests)), key=lambda place: requests[place].arrival):
        request, record = requests[place], trace.requests[place]
        if cache.sliding_window is cache.reservation is None and limits.chunked_prefill:
            fits = can_be_served(request, limits, cache)
            assert (record.error is None) == (fits and request.id not in taken), record.error
        if record.error is not None:
            assert record.tokens == ()
            continue
        taken.add(request.id)
        assert record.first_scheduled == starts.get(request.id)
        judge_record(request, record)
        assert tuple(referee.outputs.get(request.id, ())) == record.tokens
    return trace, referee


def judge_record(request, record):
    """Hold what came of a request against what it asked for."""
    answer = answer_of(request)
    times = record.token_times
    assert len(times) == len(record.tokens)
    assert list(times) == sorted(set(times))
    assert 0 <= record.num_cached_tokens < request.num_prompt_tokens
    assert record.num_recomputed_tokens >= 0
    if record.finish_reason == "abort":
        assert record.tokens == answer[: len(record.tokens)]
        return
    assert record.tokens == answer
    assert record.finish_reason == ("stop" if request.output_length == len(answer) else "length")


def assert_whole(scheduler):
    """Assert that nothing is held, as before the first request came."""
    pool = scheduler.kv
    scheduler.check()
    assert not scheduler.has_work
    assert pool.num_free_blocks == pool.num_blocks
    assert pool.num_held_blocks == pool.num_held_host_blocks == pool.num_shared_blocks == 0


# --- what a trace says


def served(trace):
    """Return the tokens of each request in each step, in the plan's order, such as "a3 b1"."""
    return [
        " ".join(f"{entry.request_id}{entry.num_tokens}" for entry in step.plan.scheduled)
        for step in trace.steps
    ]


def admitted(trace):
    """Return the ids of the requests that each step admits, in one text."""
    return ["".join(admission.request.id for admission in step.plan.admitted) for step in trace.steps]


def admission_order(trace):
    """Return the ids of requests in the order in which they were admitted, again after a preemption."""
    return [admission.request.id for step in trace.steps for admission in step.plan.admitted]


def preempted(trace):
    """Return the ids of the requests that each step preempts, in one text."""
    return ["".join(step.plan.preempted) for step in trace.steps]


def entries_of(trace, request_id):
    """Return (step, entry) for each part of a request."""
    return [
        (step.plan.step, entry)
        for step in trace.steps
        for entry in step.plan.scheduled
        if entry.request_id == request_id
    ]


def kinds(plan):
    """Return the kinds of a plan's transfers, in order."""
    return [transfer.kind for transfer in plan.transfers]


# --- workloads and limits


def distinct(first, length):
    """Return token ids that no other part of a test has."""
    return tuple(range(first, first + length))


def is_out_of_window(place, next_position, window, block_size):
    """Say whether the next token, and so any later one, sees nothing of a block."""
    seen = range(max(0, next_position - window + 1), next_position + 1)
    return not set(seen) & set(range(place * block_size, (place + 1) * block_size)) and (
        (place + 1) * block_size <= next_position
    )


def least_pool(requests, limits, block_size, window=None):
    """Return the fewest blocks with which every request can finish alone; its last token needs none."""
    longest = max(request.num_prompt_tokens + request.max_tokens - 1 for request in requests)
    blocks = -(-longest // block_size)
    if window is not None:
        blocks = min(blocks, -(-(window - 1 + limits.max_num_batched_tokens) // block_size) + 1)
    return blocks


def random_case(seed, windows=(None,)):
    """Draw requests (some alike, some parallel samples), limits and pools down to the least."""
    rng = np.random.default_rng(seed)
    heads = [tuple(rng.integers(0, 5, size=rng.integers(1, 20)).tolist()) for _ in range(2)]
    requests = []
    for place in range(int(rng.integers(2, 8))):
        head = heads[int(rng.integers(2))]
        tail = tuple(rng.integers(0, 5, size=rng.integers(0, 8)).tolist())
        prompt = head[: int(rng.integers(1, len(head) + 1))] + tail
        max_tokens = int(rng.integers(1, 16))
        length = int(rng.integers(1, max_tokens + 1)) if rng.integers(2) else None
        request = Request(f"r{place}", prompt, max_tokens, float(rng.integers(10)), output_length=length)
        requests += parallel_samples(request, int(rng.integers(2, 4))) if rng.random() < 0.4 else [request]
    block_size = int(rng.choice([1, 2, 3, 4, 16]))
    limits = SchedulerConfig(int(rng.integers(1, 8)), int(rng.choice([1, 3, 7, 64])), preemption="swap")
    window = windows[int(rng.integers(len(windows)))]
    least = least_pool(requests, limits, block_size, window)
    cache = CacheConfig(
        least + int(rng.choice([0, 0, 1, 4])),
        block_size,
        prefix_caching=bool(rng.integers(2)),
        num_host_blocks=int(rng.choice([0, 1, 5, 100])),
        sliding_window=window,
    )
    return requests, limits, cache


class Meddler:
    """Preempt and abort at random between steps, for some time."""

    def __init__(self, seed, rate=0.3, aborts=0.0, patience=60):
        self.rng = np.random.default_rng(seed)
        self.rate, self.aborts, self.patience = rate, aborts, patience
        self.num_aborted: Counter[str] = Counter()

    def __call__(self, scheduler, record):
        if record.plan.step >= self.patience:
            return
        if self.rng.random() < self.rate and scheduler.running:
            victim = scheduler.running[int(self.rng.integers(len(scheduler.running)))]
            scheduler.preempt(victim.id, str(self.rng.choice(["swap", "recompute"])))
        if self.rng.random() < self.aborts:
            states = [*scheduler.running, *scheduler.waiting, *scheduler.swapped]
            if states:
                state = states[int(self.rng.integers(len(states)))]
                self.num_aborted[state.status.value] += 1
                scheduler.abort(state.id)


def preempting(request_id, steps, mode):
    """Return what preempts a request after each of some steps, if it runs then."""

    def between(scheduler, record):
        if record.plan.step in steps and any(state.id == request_id for state in scheduler.running):
            scheduler.preempt(request_id, mode)

    return between


class NewcomersFirst(policies.Policy):
    """Admit before serving the running requests, so that an admission can be undone within its step."""

    name = "newcomers_first"

    def propose(self, view):
        yield from policies.joining(view, policies.queued(view))
        yield from policies.whole(view.running)


# --- policies that stress the mechanism


class Chunked(policies.Policy):
    """Want a block's worth for each request, so that many prompts are begun at once."""

    name = "chunked"

    def propose(self, view):
        for state, wanted in super().propose(view):
            yield state, min(wanted, view.block_size)


class OldestLeaves(Chunked):
    """Preempt the request that was admitted first."""

    name = "oldest_leaves"

    def victim(self, view, candidates):
        return candidates[0]


class Selfless(policies.Policy):
    """Preempt the request that asks."""

    name = "selfless"

    def propose(self, view):
        for state, wanted in super().propose(view):
            self.asking = state
            yield state, wanted

    def victim(self, view, candidates):
        return self.asking


class Erratic(policies.Policy):
    """Decide by lot: the order, the wants and the victims."""

    name = "erratic"

    def __init__(self, seed, pads_finished_rows):
        self.random = random.Random(seed)
        self.pads_finished_rows = pads_finished_rows

    def propose(self, view):
        states = [*view.running, *view.waiting]
        self.random.shuffle(states)
        for state in states:
            yield state, self.random.randint(-1, 6)
        for state in states:
            yield state, state.num_pending_tokens

    def victim(self, view, candidates):
        return self.random.choice(candidates)


class Scripted(policies.Policy):
    """Propose what the script says for a step, and go on as the base class does after its end."""

    name = "scripted"

    def __init__(self, *script):
        self.script = list(script)

    def propose(self, view):
        if not self.script:
            yield from super().propose(view)
            return
        states = {state.id: state for state in [*view.running, *view.waiting]}
        for part in self.script.pop(0).split():
            yield states[part[0]], int(part[1:] or 1)


STRESS = {
    **{name: lambda seed, name=name: policies.get(name) for name in POLICIES},
    "chunked": lambda seed: Chunked(),
    "oldest leaves": lambda seed: OldestLeaves(),
    "selfless": lambda seed: Selfless(),
    "erratic": lambda seed: Erratic(seed, pads_finished_rows=False),
    "erratic, seats kept": lambda seed: Erratic(seed, pads_finished_rows=True),
}
"""Policies by a name that says what they do, each built from a seed."""


# --- a real model


class OnlyOwnBlocks:
    """Stand before an executor, and let no plan pass that writes a block to which two requests refer."""

    def __init__(self, executor, scheduler):
        self.executor, self.scheduler = executor, scheduler
        self.num_transfers: Counter[str] = Counter()

    def check(self, request):
        self.executor.check(request)

    def execute(self, plan):
        pool = self.scheduler.kv
        size = pool.config.block_size
        seated = {state.id for state in self.scheduler.running} | {row.request_id for row in plan.padding}
        references = Counter(block for name in seated for block in pool.table(name))
        for entry in plan.scheduled:
            table = pool.table(entry.request_id)
            for place in range(entry.start // size, -(-entry.context_length // size)):
                assert references[table[place]] == 1, f"{entry} writes a block to which others refer"
        self.num_transfers.update(kinds(plan))
        return self.executor.execute(plan)


def serve_on_model(loaded, requests, policy, limits, cache, between=None):
    """Serve on a model whose pools are full of NaN, with every invariant checked after every step."""
    from cbresearch.engine import ModelExecutor

    scheduler = Scheduler(policies.get(policy), limits, cache)
    executor = OnlyOwnBlocks(ModelExecutor(loaded, limits, cache, fill=math.nan), scheduler)

    def on_step(record):
        scheduler.check()
        if between is not None:
            between(scheduler, record)
            scheduler.check()

    trace = serve(requests, scheduler, executor, on_step=on_step)
    assert_whole(scheduler)
    return trace, executor
