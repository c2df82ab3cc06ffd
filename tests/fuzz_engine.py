"""Serve random schedules on a small random model, and hold every answer against that of its prompt alone.

    python tests/fuzz_engine.py [SCHEDULES] [--processes N] [--resume FILE] [--dtype float64]
    python tests/fuzz_engine.py --seed N

A schedule is requests that arrive at random, limits, pools and a policy; while it runs, requests are aborted
and preempted at random between its steps. Half of the schedules run two at a time, in two threads, on one
model. The first form prints what all of them came to, and exits with 1 if an answer differs or a rule is
broken; the second repeats one schedule by its seed. With `--resume` the progress is kept in a file, and a run
that was killed goes on from there.
"""

import argparse
import gc
import json
import math
import multiprocessing
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch
from engine_cases import Answer, Schedule, draw, expected_rejections
from tqdm import tqdm

from cbresearch import policies
from cbresearch.engine import ModelExecutor
from cbresearch.request import Request, RequestState, RequestStatus
from cbresearch.scheduler import Scheduler
from cbresearch.serve import serve
from cbresearch.trace import RequestRecord, StepRecord, Trace

BATCH = 20

# The rarer, the later.
STAGES = ("decoding", "waiting", "prefilling", "preempted", "swapped")
TRANSFERS = {"copy": "copied on write", "swap_out": "swapped out", "swap_in": "swapped in"}
EVENTS = (
    *(f"aborted while {stage}" for stage in STAGES),
    "forced preemptions by recompute",
    "forced preemptions by swap",
    "preemptions by recompute",
    "preemptions by swap",
    "hits in the prefix cache",
    "forks",
    "blocks copied on write",
    "blocks swapped out",
    "blocks swapped in",
    "padding rows",
    "forks that go apart",
    "answers drawn at random",
    "answers ended by a token or a text",
    "answers that fail alone",
    "rejections",
    "false calls rejected",
    "schedules beside another on one model",
)


def stage(state: RequestState) -> str:
    """Return where a request is on its way."""
    if state.status is RequestStatus.SWAPPED:
        return "swapped"
    if state.status is RequestStatus.WAITING:
        return "preempted" if state.num_preemptions else "waiting"
    return "prefilling" if state.is_prefill else "decoding"


class Meddler:
    """Abort and preempt at random between the steps, and prove the invariants each time.

    Args:
        schedule: What is served.
        scheduler: Who serves it.
        rng: Draws whom and when.
        counts: Where the disturbances are counted.
    """

    def __init__(
        self, schedule: Schedule, scheduler: Scheduler, rng: np.random.Generator, counts: Counter[str]
    ) -> None:
        self.schedule, self.scheduler, self.rng, self.counts = schedule, scheduler, rng, counts
        self.aborted: set[str] = set()
        self._num_left = schedule.most_forced
        tokens = [
            request.num_prompt_tokens + request.max_tokens
            for request in schedule.requests
            if isinstance(request, Request) and not isinstance(request.prompt, str)
        ]
        # Each may be computed again as often as it is preempted, and everyone may have to wait for it.
        self._patience = 20 * sum(tokens) * (schedule.limits.max_preemptions + 1) + 20 * schedule.most_forced

    def __call__(self, record: StepRecord) -> None:
        """Disturb what a step has left."""
        assert record.plan.step < self._patience, "the run does not come to an end"
        assert record.plan.num_tokens <= self.schedule.limits.max_num_batched_tokens
        assert record.num_running <= self.schedule.limits.max_num_seqs
        self.scheduler.check()
        while self._num_left and self.rng.random() < self.schedule.chance:
            self._num_left -= 1
            if self.rng.random() < 0.05:
                self._call_falsely()
            elif self.rng.random() < self.schedule.share_aborted:
                self._abort()
            else:
                self._preempt()
            self.scheduler.check()

    def _live(self) -> list[RequestState]:
        scheduler = self.scheduler
        return [*scheduler.running, *scheduler.waiting, *scheduler.swapped]

    def _one_of(self, choices: list) -> object:
        return choices[int(self.rng.integers(len(choices)))]

    def _abort(self) -> None:
        live = self._live()
        if not live:
            return
        # By stage, the rare ones first: few are ever swapped out.
        stages = sorted({stage(state) for state in live}, key=STAGES.index)
        wanted = stages[-1] if self.rng.integers(2) else self._one_of(stages)
        chosen = [self._one_of([state for state in live if stage(state) == wanted])]
        if self.rng.random() < 0.03:
            chosen = live
        for state in chosen:
            self.counts[f"aborted while {stage(state)}"] += 1
            self.aborted.add(state.id)
            assert self.scheduler.abort(state.id).finish_reason == "abort"

    def _preempt(self) -> None:
        running = list(self.scheduler.running)
        if not running:
            return
        mode = self._one_of(["recompute", "swap", "swap", None])
        for state in running if self.rng.random() < 0.1 else [self._one_of(running)]:
            self.scheduler.preempt(state.id, mode)
            how = "swap" if state.status is RequestStatus.SWAPPED else "recompute"
            self.counts[f"forced preemptions by {how}"] += 1

    def _call_falsely(self) -> None:
        """Ask for what cannot be done, which has to be rejected and to change nothing."""
        live = {state.id for state in self._live()}
        running = [state.id for state in self.scheduler.running]
        dead = [request.id for request in self.schedule.requests if request.id not in live]
        outside = sorted(live - set(running)) + dead
        calls: list[Callable[[], object]] = [partial(self.scheduler.abort, name) for name in dead]
        calls += [partial(self.scheduler.preempt, name, "recompute") for name in outside]
        calls += [partial(self.scheduler.preempt, name, "neither") for name in running]
        if not calls:
            return
        try:
            self._one_of(calls)()
        except ValueError:
            self.counts["false calls rejected"] += 1
        else:
            raise AssertionError("a call that cannot be carried out was accepted")


def ticking(rng: np.random.Generator) -> Callable[[], float]:
    """Return a clock on which every step takes a random while, the same in every run."""
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += float(rng.random())
        return now

    return clock


def groups(seeds: range, dtype: torch.dtype = torch.float32) -> list[list[int]]:
    """Return the first half of some schedules one by one, the others two by two where they have one model."""
    half = len(seeds) // 2
    by_model: defaultdict[int, list[int]] = defaultdict(list)
    for seed in seeds[half:]:
        by_model[id(draw(seed, dtype).shelf)].append(seed)
    pairs = [same[at : at + 2] for same in by_model.values() for at in range(0, len(same), 2)]
    return [*([seed] for seed in seeds[:half]), *pairs]


def run_together(seeds: list[int], dtype: torch.dtype = torch.float32) -> Counter[str]:
    """Serve schedules at once, each in a thread of its own; return what happened, or raise as `run` does."""
    with ThreadPoolExecutor(len(seeds)) as threads:
        counts = sum(threads.map(partial(run, dtype=dtype), seeds), Counter[str]())
    counts["schedules beside another on one model"] += len(seeds) if len(seeds) > 1 else 0
    return counts


def run(seed: int, dtype: torch.dtype = torch.float32) -> Counter[str]:
    """Serve one schedule, and return what happened in it.

    Raises:
        AssertionError: An answer differs from that of its prompt alone, a request was lost or rejected for no
            reason, a block or an invariant was, or the run does not come to an end.
    """
    schedule = draw(seed, dtype)
    rng = np.random.default_rng([seed, 2])
    counts: Counter[str] = Counter(schedules=1)
    scheduler = Scheduler(policies.get(schedule.policy), schedule.limits, schedule.cache)
    executor = ModelExecutor(
        schedule.shelf.loaded, schedule.limits, schedule.cache, clock=ticking(rng), fill=math.nan
    )
    meddler = Meddler(schedule, scheduler, rng, counts)
    trace = serve(schedule.requests, scheduler, executor, on_step=meddler)
    problems = [*wrong_answers(schedule, trace, meddler.aborted), *wrong_end(scheduler)]
    if problems:
        raise AssertionError(
            "\n".join([f"{schedule.policy}, {schedule.limits}, {schedule.cache}", *problems])
        )
    count(schedule, trace, counts)
    return counts


def wrong_answers(schedule: Schedule, trace: Trace, aborted: set[str]) -> Iterator[str]:
    """Yield what is wrong with each request's end."""
    reasons = expected_rejections(schedule)
    for request, reason, record in zip(schedule.requests, reasons, trace.requests, strict=True):
        if reason is not None:
            if record.error is None or reason not in record.error or record.tokens:
                yield f"{request.id} should be rejected with {reason!r}: {record}"
        elif record.is_rejected:
            yield f"{request.id} was rejected: {record.error}"
        else:
            yield from wrong_answer(request, record, schedule.shelf.answer(request), aborted)


def wrong_answer(request: Request, record: RequestRecord, answer: Answer, aborted: set[str]) -> Iterator[str]:
    """Yield what is wrong with the end of a request that was served."""
    want, reason = answer.within(request.max_tokens)
    if request.id in aborted:
        if len(record.tokens) == len(want) and reason != "error":
            yield f"{request.id} was still there to be aborted after its last token"
        want, reason = want[: len(record.tokens)], "abort"
    if record.finish_reason != reason:
        yield f"{request.id} ended by {record.finish_reason!r} instead of {reason!r}: {record.error}"
    if len(record.token_times) != len(record.tokens):
        yield f"{request.id} has {len(record.token_times)} times for {len(record.tokens)} tokens"
    if record.tokens != want:
        pairs = zip(record.tokens, want, strict=False)
        place = next((n for n, (got, wanted) in enumerate(pairs) if got != wanted), None)
        if place is None:
            yield f"{request.id} has {len(record.tokens)} tokens instead of {len(want)}"
            return
        gap = "its token is chosen in float64"
        if answer.gaps:
            gap = f"the two best logits there are {answer.gaps[place]:.3g} apart"
        yield (
            f"{request.id} differs at token {place}, behind {request.num_prompt_tokens} of prompt: "
            f"{record.tokens[place]} instead of {want[place]}; {gap}; {request.sampling}"
        )
        return
    expected = answer.logprobs[: len(want)]
    if len(record.logprobs) != len(expected):
        yield f"{request.id} has log-probabilities of {len(record.logprobs)} tokens, not of {len(expected)}"
    for place, (got, wanted) in enumerate(zip(record.logprobs, expected, strict=False)):
        close = np.allclose([got[0], *got[2]], [wanted[0], *wanted[2]], rtol=0, atol=1e-9)
        if got.top_ids != wanted.top_ids or not close:
            yield f"{request.id} has other log-probabilities at token {place}: {got} instead of {wanted}"


def wrong_end(scheduler: Scheduler) -> Iterator[str]:
    """Yield what is not as it was before anyone came."""
    scheduler.check()
    blocks = scheduler.kv
    if scheduler.has_work:
        yield "somebody was left behind"
    if blocks.num_free_blocks != blocks.num_blocks or blocks.num_held_blocks or blocks.num_shared_blocks:
        yield f"{blocks.num_free_blocks} of {blocks.num_blocks} blocks came back, cached ones included"
    if blocks.num_held_host_blocks:
        yield f"{blocks.num_held_host_blocks} blocks of the host did not come back"


def count(schedule: Schedule, trace: Trace, counts: Counter[str]) -> None:
    """Add up what happened in a run."""
    counts["steps"] += len(trace.steps)
    for step in trace.steps:
        plan = step.plan
        counts["preemptions by swap"] += len(plan.swapped)
        counts["preemptions by recompute"] += len(plan.preempted) - len(plan.swapped)
        counts["padding rows"] += len(plan.padding)
        for kind, what in TRANSFERS.items():
            counts[f"blocks {what}"] += plan.num_transfers(kind)
    for request, record in zip(schedule.requests, trace.requests, strict=True):
        if record.is_rejected:
            counts["rejections"] += 1
            continue
        assert isinstance(request, Request)
        counts["requests served"] += 1
        counts["tokens"] += len(record.tokens)
        counts["answers ended by a token or a text"] += record.finish_reason == "stop"
        counts["answers that fail alone"] += record.finish_reason == "error"
        counts["answers drawn at random"] += request.sampling.temperature > 0
        counts[f"answers under {schedule.policy}"] += record.finish_reason != "abort"
        # The cache finds whole blocks only, and nothing if it is off.
        whole = schedule.cache.prefix_caching and not record.num_cached_tokens % schedule.cache.block_size
        if record.num_cached_tokens:
            counts["hits in the prefix cache" if whole else "forks"] += 1
            counts["forks that go apart"] += not whole and request.sampling.temperature > 0
    counts["schedules with a sliding window"] += schedule.cache.sliding_window is not None
    counts["schedules with contiguous reservations"] += schedule.cache.reservation is not None
    counts["schedules without chunked prefill"] += not schedule.limits.chunked_prefill
    counts["schedules that were disturbed"] += any(
        number for name, number in counts.items() if name.startswith(("forced", "aborted"))
    )


def run_batch(dtype: str, seeds: range) -> tuple[range, Counter[str], list[str]]:
    """Serve the schedules of some seeds; return them, what happened and what went wrong."""
    torch.set_num_threads(1)
    # What the imports left behind is large and never garbage.
    gc.freeze()
    counts: Counter[str] = Counter()
    problems = []
    for group in groups(seeds, getattr(torch, dtype)):
        try:
            counts += run_together(group, getattr(torch, dtype))
        except Exception as error:
            counts["differences"] += 1
            names = " beside ".join(f"--seed {seed}" for seed in group)
            problems.append(f"{names}: {type(error).__name__}: {error}")
    return seeds, counts, problems


class Progress:
    """What is done, kept in a file if there is one, which is replaced whole after every batch.

    Args:
        path: The file, or None.
        settings: What the run was asked for; a file of another run is rejected.
    """

    def __init__(self, path: Path | None, settings: dict[str, object]) -> None:
        self._path, self._settings = path, settings
        self.done: set[int] = set()
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.seconds = 0.0
        if path is None or not path.exists():
            return
        kept = json.loads(path.read_text())
        if kept["settings"] != settings:
            raise SystemExit(f"{path} belongs to a run with {kept['settings']}, this one has {settings}")
        self.done, self.counts = set(kept["done"]), Counter(kept["counts"])
        self.problems, self.seconds = kept["problems"], kept["seconds"]

    def add(self, seeds: range, counts: Counter[str], problems: list[str], seconds: float) -> None:
        """Take in a batch."""
        self.done.add(seeds.start)
        self.counts += counts
        self.problems += problems
        self.seconds += seconds
        if self._path is None:
            return
        whole = {
            "settings": self._settings,
            "done": sorted(self.done),
            "counts": self.counts,
            "problems": self.problems,
            "seconds": self.seconds,
        }
        unfinished = self._path.with_name(self._path.name + ".unfinished")
        unfinished.write_text(json.dumps(whole))
        os.replace(unfinished, self._path)


def summary(counts: Counter[str], seconds: float) -> str:
    """Return what a run came to, a line for each count."""
    under = {name: number for name, number in counts.items() if name.startswith("answers under ")}
    policies_served = {name.removeprefix("answers under ").partition(":")[0] for name in under}
    first = ("schedules", "requests served", "tokens", "steps")
    rest = sorted(set(counts) - set(first) - set(EVENTS) - set(under) - {"differences"})
    lines = [f"{counts[name]:>12,} {name}" for name in (*first, *EVENTS, *rest)]
    lines += [
        f"{len(policies_served):>12,} policies of {len(policies.available())} served, "
        f"in {len(under)} forms; the fewest answers: {min(under.values(), default=0):,}",
        f"{counts['differences']:>12,} differences",
        f"{seconds:>12,.0f} seconds",
    ]
    return "\n".join(lines)


def batches(results: Iterable[tuple[range, Counter[str], list[str]]], progress: Progress, total: int) -> None:
    """Take in batches as they come, with a bar."""
    with tqdm(total=total, initial=progress.counts["schedules"], unit=" schedules", smoothing=0.05) as bar:
        before = time.perf_counter()
        for seeds, counts, problems in results:
            now = time.perf_counter()
            progress.add(seeds, counts, problems, now - before)
            before = now
            for problem in problems:
                bar.write(problem, file=sys.stderr)
            bar.update(len(seeds))


def main(arguments: list[str]) -> int:
    """Run the command; return 1 if something differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("schedules", nargs="?", type=int, default=10_000)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--resume", type=Path, metavar="FILE")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--seed", type=int, help="repeat this schedule alone")
    given = parser.parse_args(arguments)
    if given.seed is not None:
        print(draw(given.seed, getattr(torch, given.dtype)))
        _, counts, problems = run_batch(given.dtype, range(given.seed, given.seed + 1))
        print(*problems, summary(counts, 0.0), sep="\n")
        return int(bool(problems))
    progress = Progress(given.resume, {"schedules": given.schedules, "dtype": given.dtype})
    todo = [
        range(start, min(start + BATCH, given.schedules))
        for start in range(0, given.schedules, BATCH)
        if start not in progress.done
    ]
    work = partial(run_batch, given.dtype)
    if given.processes > 1:
        with multiprocessing.get_context("spawn").Pool(given.processes) as pool:
            batches(pool.imap_unordered(work, todo), progress, given.schedules)
    else:
        batches(map(work, todo), progress, given.schedules)
    print(*progress.problems, summary(progress.counts, progress.seconds), sep="\n")
    return int(bool(progress.problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
