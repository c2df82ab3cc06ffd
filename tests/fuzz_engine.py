"""Serve random schedules on a small random model, and hold every answer against that of its prompt alone.

    python tests/fuzz_engine.py [SCHEDULES] [--processes N] [--resume FILE] [--dtype float64]
    python tests/fuzz_engine.py --seed N

A schedule is requests that arrive at random, limits, pools and a policy; while it runs, requests are aborted
and preempted at random between its steps. The first form prints what all of them came to, and exits with 1
if an answer differs or a rule is broken; the second repeats one schedule by its seed. With `--resume` the
progress is kept in a file, and a run that was killed goes on from there.
"""

import argparse
import json
import math
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from fuzz_policies import POLICIES
from tqdm import tqdm
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from cbresearch import models
from cbresearch import policies as policy_library
from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.engine import ModelExecutor
from cbresearch.models import LoadedModel
from cbresearch.request import (
    Refusal,
    Request,
    RequestState,
    RequestStatus,
    SamplingParams,
    parallel_samples,
)
from cbresearch.scheduler import Scheduler
from cbresearch.serve import serve
from cbresearch.trace import RequestRecord, StepRecord, Trace

VOCABULARY = 97
LONGEST_PROMPT = 44
LONGEST_ANSWER = 20
CONTEXT = 72
WINDOW = 9
# Tokens that the models emit often, so that many answers end early.
EOS = frozenset({7, 42, 89})
# Seeds that share their prompts, so that each is answered alone once and served many times.
SEEDS_PER_LIBRARY = 1000
BATCH = 20

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
    "answers ended by a token",
    "refusals",
    "false calls refused",
)


@cache
def small_model(windowed: bool, dtype: torch.dtype) -> LoadedModel:
    """Return a seeded random model of two layers whose answers depend on all that they may attend to."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = (
            MistralForCausalLM(MistralConfig(**sizes, sliding_window=WINDOW))
            if windowed
            else LlamaForCausalLM(LlamaConfig(**sizes))
        )
    # For `generate` alone: it goes on to the longest answer, which serves for all shorter ones.
    model.generation_config.eos_token_id = None
    return replace(models.wrap("small", model.to(dtype)), eos_token_ids=EOS)


@dataclass(frozen=True)
class Answer:
    """What a prompt is answered alone.

    Attributes:
        token_ids: The longest answer, past any end-of-sequence token.
        gaps: By how much the best logit leads the second at each of them.
    """

    token_ids: tuple[int, ...]
    gaps: tuple[float, ...]

    def until(self, request: Request) -> tuple[tuple[int, ...], str]:
        """Return the part of it that a request gets, and why it ends."""
        token_ids = self.token_ids[: request.max_tokens]
        if not request.sampling.ignore_eos:
            for place, token in enumerate(token_ids):
                if token in EOS:
                    return token_ids[: place + 1], "stop"
        return token_ids, "length"


class Library:
    """Prompts of which many begin alike, and their answers, each computed when it is first asked for.

    Args:
        number: Seeds the prompts.
        windowed: Whether every layer of the model has a sliding window.
        dtype: Of the model.
    """

    def __init__(self, number: int, windowed: bool, dtype: torch.dtype) -> None:
        self.loaded = small_model(windowed, dtype)
        self._answers: dict[tuple[int, ...], Answer] = {}
        rng = np.random.default_rng([number, 1])
        stems = [rng.integers(0, VOCABULARY, LONGEST_PROMPT).tolist() for _ in range(3)]
        self.prompts: list[tuple[int, ...]] = []
        for place in range(40):
            stem = stems[place % 4][: int(rng.integers(0, 33))] if place % 4 < 3 else []
            tail = rng.integers(0, VOCABULARY, int(rng.integers(1, 12))).tolist()
            self.prompts.append((*stem, *tail))
        # Later turns of a conversation: they begin with an earlier prompt and its answer.
        for prompt in self.prompts[:8]:
            answer = self.answer(prompt).token_ids[: int(rng.integers(1, LONGEST_ANSWER))]
            self.prompts.append((*prompt, *answer, *rng.integers(0, VOCABULARY, 3).tolist())[:LONGEST_PROMPT])

    def answer(self, prompt: tuple[int, ...]) -> Answer:
        """Return the answer of transformers to a prompt alone and unpadded."""
        if prompt not in self._answers:
            self._answers[prompt] = self._generate(prompt)
        return self._answers[prompt]

    def _generate(self, prompt: tuple[int, ...]) -> Answer:
        input_ids = torch.tensor([prompt])
        config = GenerationConfig(
            max_new_tokens=LONGEST_ANSWER,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        output = self.loaded.model.generate(
            input_ids, attention_mask=torch.ones_like(input_ids), generation_config=config
        )
        best, second = torch.cat(output.logits).topk(2).values.T
        return Answer(tuple(output.sequences[0, len(prompt) :].tolist()), tuple((best - second).tolist()))


@cache
def library(number: int, windowed: bool, dtype: torch.dtype) -> Library:
    """Return a library, the same one for the same arguments."""
    return Library(number, windowed, dtype)


@dataclass(frozen=True)
class Schedule:
    """What is served, under which limits, and how much it is disturbed.

    Attributes:
        requests: Who comes.
        policy: The policy's name.
        limits: Seats, budget, preemption.
        cache: The pools.
        shelf: Where the prompts and their answers come from.
        chance: Of one more disturbance after a step.
        most_forced: Disturbances at most.
        share_aborted: Share of them that are aborts.
    """

    requests: list[Request | Refusal]
    policy: str
    limits: SchedulerConfig
    cache: CacheConfig
    shelf: Library
    chance: float
    most_forced: int
    share_aborted: float


def draw(seed: int, dtype: torch.dtype) -> Schedule:
    """Draw a schedule; the policies take turns."""
    rng = np.random.default_rng([seed, 0])
    windowed = rng.random() < 0.15
    shelf = library(seed // SEEDS_PER_LIBRARY, windowed, dtype)
    budget = int(rng.choice([1, 2, 3, 7, 16, 64, 2048, rng.integers(1, 80)]))
    requests = draw_requests(rng, shelf, budget)
    policy = POLICIES[seed % len(POLICIES)]
    limits = SchedulerConfig(
        int(rng.integers(1, 9)),
        budget,
        max_model_len=int(rng.choice([CONTEXT, rng.integers(40, CONTEXT)])) if rng.integers(5) == 0 else None,
        preemption=str(rng.choice(["recompute", "swap"])),
        max_preemptions=int(rng.choice([1, 3, 8])),
    )
    block_size = int(rng.choice([1, 2, 3, 4, 8, 16, 32, rng.integers(1, 33)]))
    cache = CacheConfig(
        1,
        block_size,
        prefix_caching=bool(rng.integers(2)),
        sliding_window=WINDOW if windowed and rng.integers(3) else None,
    )
    if not windowed and rng.random() < 0.08:
        cache = CacheConfig(1, block_size, reservation=str(rng.choice(["max", "pow2", "oracle"])))
        limits = replace(limits, max_model_len=limits.max_model_len or CONTEXT)
    if rng.integers(4) == 0:
        # Whole prompts: the budget has to hold the longest context, or else its request is refused.
        lengths = [request.num_prompt_tokens + request.max_tokens - 1 for request in requests]
        budget = max(1, max(lengths) - int(rng.choice([0, 0, 0, 3])) + int(rng.choice([0, 1, 30])))
        limits = replace(limits, max_num_batched_tokens=budget, chunked_prefill=False)
    needed = [num_blocks_needed(request, limits, cache) for request in requests]
    spare = int(rng.choice([0, 0, 1, 2, 3, 6, sum(needed), -1]))
    num_blocks = max(1, max(needed) + spare)
    host = int(rng.choice([0, 1, 3, num_blocks, 3 * num_blocks, 3 * num_blocks]))
    return Schedule(
        add_impossible(rng, requests),
        policy,
        limits,
        replace(cache, num_blocks=num_blocks, num_host_blocks=0 if cache.reservation else host),
        shelf,
        chance=float(rng.choice([0.0, 0.1, 0.3])),
        most_forced=int(rng.integers(2, 25)),
        share_aborted=float(rng.choice([0.0, 0.2, 0.5])),
    )


def draw_requests(rng: np.random.Generator, shelf: Library, budget: int) -> list[Request]:
    """Draw requests that can be answered, as many as a token budget serves in some dozens of steps."""
    # Few of the prompts, so that the same ones and those that begin alike meet.
    chosen = rng.choice(len(shelf.prompts), int(rng.integers(1, 7)), replace=False).tolist()
    span = float(rng.choice([0.0, 10.0, 40.0]))
    requests: list[Request] = []
    for place in range(int(rng.integers(1, 9))):
        prompt = shelf.prompts[chosen[int(rng.integers(len(chosen)))]]
        request = Request(
            f"r{place}",
            prompt,
            int(rng.integers(1, LONGEST_ANSWER + 1)),
            arrival=float(rng.random() * span),
            sampling=SamplingParams(ignore_eos=bool(rng.integers(2))),
            priority=int(rng.integers(-1, 2)),
            client=f"c{int(rng.integers(3))}",
            deadline=float(rng.random() * 60) if rng.integers(2) else None,
            cache_salt=str(rng.choice(["a", "b"])) if rng.integers(6) == 0 else None,
            predicted_output=int(rng.integers(1, LONGEST_ANSWER + 1)) if rng.integers(2) else None,
        )
        if rng.integers(2):
            length = len(shelf.answer(prompt).until(request)[0])
            request = replace(request, output_length=length)
        requests += parallel_samples(request, int(rng.integers(2, 5))) if rng.integers(5) == 0 else [request]
    work = np.cumsum([request.num_prompt_tokens + request.max_tokens for request in requests])
    return requests[: max(1, int((work <= 60 * budget).sum()))]


def add_impossible(rng: np.random.Generator, requests: list[Request]) -> list[Request | Refusal]:
    """Put some among the requests that cannot be served."""
    mixed: list[Request | Refusal] = list(requests)
    for place in range(int(rng.choice([0, 0, 0, 1, 2]))):
        arrival = float(rng.random() * 20)
        impossible = [
            Request(f"x{place}", (3, VOCABULARY), 4, arrival),
            Request(f"x{place}", (-1, 3), 4, arrival),
            Request(f"x{place}", "text", 4, arrival),
            Request(f"x{place}", 9, 4, arrival),
            Request(f"x{place}", (5,) * CONTEXT, 1, arrival),
            replace(requests[int(rng.integers(len(requests)))], arrival=arrival),
            Refusal(f"x{place}", "turned away before", arrival),
        ]
        mixed.insert(int(rng.integers(len(mixed) + 1)), impossible[int(rng.integers(len(impossible)))])
    return mixed


def num_blocks_needed(request: Request, limits: SchedulerConfig, cache: CacheConfig) -> int:
    """Return the fewest blocks with which a request can finish alone."""
    output = request.max_tokens
    if cache.reservation is not None:
        longest = limits.max_model_len or CONTEXT
        output = min(output, request.output_length or output)
        if cache.reservation == "max":
            num_tokens = max(longest, request.num_prompt_tokens + output)
        elif cache.reservation == "pow2":
            doubled = 1 << (output - 1).bit_length()
            num_tokens = max(
                request.num_prompt_tokens + output, min(request.num_prompt_tokens + doubled, longest)
            )
        else:
            num_tokens = request.num_prompt_tokens + output - 1
        return 1 << (-(-num_tokens // cache.block_size) - 1).bit_length()
    needed = -(-(request.num_prompt_tokens + output - 1) // cache.block_size)
    if cache.sliding_window is None:
        return needed
    in_flight = cache.sliding_window - 1 + limits.max_num_batched_tokens
    return min(needed, -(-in_flight // cache.block_size) + 1)


def why_impossible(request: Request, schedule: Schedule, taken: set[str]) -> str | None:
    """Return what a request's refusal has to say, or None if it has to be served."""
    limits, cache = schedule.limits, schedule.cache
    if not isinstance(request.prompt, tuple):
        return "a model needs token ids"
    if not all(0 <= token < VOCABULARY for token in request.prompt):
        return "outside the vocabulary"
    num_tokens = request.num_prompt_tokens + request.max_tokens
    if num_tokens > CONTEXT:
        return f"over the {CONTEXT} that"
    if request.id in taken:
        return "the id is taken"
    if limits.max_model_len is not None and num_tokens > limits.max_model_len:
        return f"over the model's length of {limits.max_model_len}"
    if not limits.chunked_prefill and num_tokens - 1 > limits.max_num_batched_tokens:
        return f"over the token budget of {limits.max_num_batched_tokens}"
    if num_blocks_needed(request, limits, cache) > cache.num_blocks:
        return f"the pool has {cache.num_blocks}"
    return None


def expected_refusals(schedule: Schedule) -> list[str | None]:
    """Return for each request what its refusal has to say, or None."""
    reasons: list[str | None] = [None] * len(schedule.requests)
    taken: set[str] = set()
    for place, request in sorted(enumerate(schedule.requests), key=lambda pair: pair[1].arrival):
        if isinstance(request, Refusal):
            reasons[place] = request.error
            continue
        reasons[place] = why_impossible(request, schedule, taken)
        if reasons[place] is None:
            taken.add(request.id)
    return reasons


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
        """Ask for what cannot be done, which has to be refused and to change nothing."""
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
            self.counts["false calls refused"] += 1
        else:
            raise AssertionError("a call that cannot be carried out was accepted")


def ticking(rng: np.random.Generator) -> Callable[[], float]:
    """Return a clock on which every step takes a random while, the same in every run."""
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += float(rng.random()) * 2
        return now

    return clock


def run(seed: int, dtype: torch.dtype = torch.float32) -> Counter[str]:
    """Serve one schedule, and return what happened in it.

    Raises:
        AssertionError: An answer differs from that of its prompt alone, a request was lost or refused without
            reason, a block or an invariant was, or the run does not come to an end.
    """
    schedule = draw(seed, dtype)
    rng = np.random.default_rng([seed, 2])
    counts: Counter[str] = Counter(schedules=1)
    scheduler = Scheduler(policy_library.get(schedule.policy), schedule.limits, schedule.cache)
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
    reasons = expected_refusals(schedule)
    for request, reason, record in zip(schedule.requests, reasons, trace.requests, strict=True):
        if reason is not None:
            if record.error is None or reason not in record.error or record.tokens:
                yield f"{request.id} should be refused with {reason!r}: {record}"
        elif record.error is not None:
            yield f"{request.id} was refused: {record.error}"
        else:
            yield from wrong_answer(request, record, schedule.shelf.answer(request.prompt), aborted)


def wrong_answer(request: Request, record: RequestRecord, answer: Answer, aborted: set[str]) -> Iterator[str]:
    """Yield what is wrong with the end of a request that was served."""
    want, reason = answer.until(request)
    if request.id in aborted:
        want, reason = want[: len(record.tokens)], "abort"
    if record.finish_reason != reason:
        yield f"{request.id} ended by {record.finish_reason!r} instead of {reason!r}"
    if len(record.token_times) != len(record.tokens):
        yield f"{request.id} has {len(record.token_times)} times for {len(record.tokens)} tokens"
    if record.tokens != want:
        pairs = zip(record.tokens, want, strict=False)
        place = next((n for n, (got, wanted) in enumerate(pairs) if got != wanted), None)
        if place is None:
            yield f"{request.id} has {len(record.tokens)} tokens instead of {len(want)}"
            return
        yield (
            f"{request.id} differs at token {place}, behind {request.num_prompt_tokens} of prompt: "
            f"{record.tokens[place]} instead of {want[place]}; the two best logits there are "
            f"{answer.gaps[place]:.3g} apart"
        )


def wrong_end(scheduler: Scheduler) -> Iterator[str]:
    """Yield what is not as it was before anyone came."""
    scheduler.check()
    blocks = scheduler.blocks
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
        for kind, what in (
            ("copy", "copied on write"),
            ("swap_out", "swapped out"),
            ("swap_in", "swapped in"),
        ):
            counts[f"blocks {what}"] += plan.num_transfers(kind)
    for request, record in zip(schedule.requests, trace.requests, strict=True):
        if record.error is not None:
            counts["refusals"] += 1
            continue
        assert isinstance(request, Request)
        counts["requests served"] += 1
        counts["tokens"] += len(record.tokens)
        counts["answers ended by a token"] += record.finish_reason == "stop"
        counts[f"answers under {schedule.policy}"] += record.finish_reason != "abort"
        # The cache finds whole blocks only, and nothing if it is off.
        whole = schedule.cache.prefix_caching and not record.num_cached_tokens % schedule.cache.block_size
        if record.num_cached_tokens:
            counts["hits in the prefix cache" if whole else "forks"] += 1
    counts["schedules with a sliding window"] += schedule.cache.sliding_window is not None
    counts["schedules with contiguous reservations"] += schedule.cache.reservation is not None
    counts["schedules without chunked prefill"] += not schedule.limits.chunked_prefill
    counts["schedules that were disturbed"] += any(
        number for name, number in counts.items() if name.startswith(("forced", "aborted"))
    )


def run_batch(dtype: str, seeds: range) -> tuple[range, Counter[str], list[str]]:
    """Serve the schedules of some seeds; return them, what happened and what went wrong."""
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    problems = []
    for seed in seeds:
        try:
            counts += run(seed, getattr(torch, dtype))
        except Exception as error:
            counts["differences"] += 1
            problems.append(f"--seed {seed}: {type(error).__name__}: {error}")
    return seeds, counts, problems


class Progress:
    """What is done, kept in a file if there is one, which is replaced whole after every batch.

    Args:
        path: The file, or None.
        settings: What the run was asked for; a file of another run is refused.
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
        f"{len(policies_served):>12,} policies of {len(policy_library.available())} served, "
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
