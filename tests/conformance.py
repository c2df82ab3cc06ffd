"""Hold the `vllm_v1` policy against recorded decisions of that scheduler, step by step.

    python tests/conformance.py FILE…

prints how many cases, steps and differences there are, and exits with 1 if any step differs. A line of a
file, which may be compressed (.gz, .xz), is one case: its limits, its requests by the step of their arrival,
and what was decided at each step. `tests/oracle/README.md` says what each field means.
"""

import gzip
import json
import lzma
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from cbresearch import policies
from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.request import Request
from cbresearch.scheduler import Scheduler
from cbresearch.step import Plan, StepResult

SAMPLED_TOKEN, EOS_TOKEN = 7, 2
# Sets in vLLM. Their order shows in the steps behind them: in that of the queue and of the free blocks.
UNORDERED = ("preempted", "finished")


class Difference(NamedTuple):
    """One step at which the decision is another one."""

    case: int
    step: int
    field: str
    recorded: object
    decided: object


def conformance(path: str | Path, policy: str = "vllm_v1") -> list[Difference]:
    """Return all differences between a file of recorded decisions and what a policy decides.

    After a case's first differing step its later steps say little; they are compared all the same.
    """
    return [
        difference for number, case in enumerate(read(path)) for difference in compare(number, case, policy)
    ]


def read(path: str | Path) -> list[dict[str, Any]]:
    """Return the cases of a file."""
    data = Path(path).read_bytes()
    data = {".gz": gzip.decompress, ".xz": lzma.decompress}.get(Path(path).suffix, bytes)(data)
    return [json.loads(line) for line in data.splitlines() if line.strip()]


def compare(number: int, case: dict[str, Any], policy: str = "vllm_v1") -> Iterator[Difference]:
    """Yield the differences of one case."""
    for step, (recorded, decided) in enumerate(zip(case["steps"], decisions(case, policy), strict=True)):
        for field, value in decided.items():
            if field not in recorded:
                continue
            of_one_order = sorted if field in UNORDERED else lambda values: values
            if of_one_order(value) != of_one_order(recorded[field]):
                yield Difference(number, step, field, recorded[field], value)


def decisions(case: dict[str, Any], policy: str) -> Iterator[dict[str, Any]]:
    """Yield what the scheduler decides at each step of a case, in the file's format."""
    scheduler = scheduler_of(case["config"], policy)
    # The sort is stable: those of one step come in the order of the list, if that is the order of arrival.
    given = {request["id"]: request for request in case["requests"]}
    coming = sorted(case["requests"], key=lambda request: (request["arrival_step"], *_order(request)))
    for step in range(len(case["steps"])):
        while coming and coming[0]["arrival_step"] <= step:
            scheduler.submit(request_of(coming.pop(0)))
        _abort(scheduler, given, step, "before")
        plan, finished = Plan(step, ()), ()
        if scheduler.has_work:
            plan = scheduler.schedule(float(step))
            _abort(scheduler, given, step, "during")
            _, _, finished = scheduler.commit(plan, result_of(plan, scheduler, given), step + 1.0)
        scheduler.check()
        yield {
            "scheduled": [[entry.request_id, entry.start, entry.num_tokens] for entry in plan.scheduled],
            "preempted": list(plan.preempted),
            "finished": [state.id for state in finished],
            "running": len(scheduler.running),
            "waiting": len(list(scheduler.waiting)),
            "free_blocks_after": scheduler.kv.num_free_blocks,
        }


def scheduler_of(config: dict[str, Any], policy: str) -> Scheduler:
    """Return a scheduler with a case's limits; switches that it does not have are left out."""
    limits = SchedulerConfig(
        config.get("max_num_active_seqs", config["max_num_seqs"]),
        config.get("max_num_scheduled_tokens", config["max_num_batched_tokens"]),
        config["max_model_len"],
        # The recorded scheduler preempts the same request as often as it likes.
        max_preemptions=sys.maxsize,
        chunked_prefill=config.get("enable_chunked_prefill", True),
    )
    cache = CacheConfig(
        config["num_blocks"],
        config["block_size"],
        prefix_caching=config["prefix_caching"],
        sliding_window=config.get("sliding_window"),
        cache_on_schedule=config["prefix_caching"],
    )
    name = policy if config["policy"] == "fcfs" else f"{policy}:{config['policy']}"
    return Scheduler(policies.get(name), limits, cache)


def request_of(given: dict[str, Any]) -> Request:
    """Return a request of a case."""
    return Request(
        given["id"],
        tuple(given["prompt"]),
        given["max_tokens"],
        arrival=float(given["arrival_step"]),
        priority=given["priority"],
        cache_salt=given.get("cache_salt"),
    )


def result_of(plan: Plan, scheduler: Scheduler, given: dict[str, dict[str, Any]]) -> StepResult:
    """Return the tokens that a step generates, of the requests that it left running."""
    num_output_tokens = {state.id: state.num_output_tokens for state in scheduler.running}
    tokens, stopped = {}, set()
    for entry in plan.scheduled:
        if not entry.samples or entry.request_id not in num_output_tokens:
            continue
        request = given[entry.request_id]
        tokens[entry.request_id] = request.get("token", SAMPLED_TOKEN)
        if num_output_tokens[entry.request_id] + 1 == request.get("eos_at"):
            tokens[entry.request_id] = EOS_TOKEN
            stopped.add(entry.request_id)
    return StepResult(1.0, tokens, frozenset(stopped))


def _abort(scheduler: Scheduler, given: dict[str, dict[str, Any]], step: int, when: str) -> None:
    states = [*scheduler.running, *scheduler.waiting, *scheduler.swapped]
    for request_id in [state.id for state in states]:
        if given[request_id].get("abort") == [step, when]:
            scheduler.abort(request_id)


def _order(request: dict[str, Any]) -> tuple[int, ...]:
    """Return what decides between requests of one step; samples of a prompt are in the order of the list."""
    return (int(request.get("parent", request["id"])),)


def main(*paths: str | Path, policy: str = "vllm_v1") -> int:
    """Print the verdict on some files; return 1 if anything differs."""
    cases = [case for path in paths for case in read(path)]
    differences = [entry for number, case in enumerate(cases) for entry in compare(number, case, policy)]
    for entry in differences[:20]:
        print(entry)
    num_steps = sum(len(case["steps"]) for case in cases)
    print(f"{len(cases)} cases, {num_steps} steps, {len(differences)} differences")
    return int(bool(differences))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("give files of recorded decisions: python tests/conformance.py FILE…")
    sys.exit(main(*sys.argv[1:]))
