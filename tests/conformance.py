"""Hold the `vllm_v1` policy against recorded decisions of that scheduler, step by step.

    python tests/conformance.py FILE

prints how many cases, steps and differences there are, and exits with 1 if any step differs. A line of the
file is one case: its limits, its requests by the step of their arrival, and what was decided at each step.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from cbresearch.plan import StepResult

from cbresearch import policies
from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.request import Request
from cbresearch.scheduler import Scheduler

SAMPLED_TOKEN = 7


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
    return [json.loads(line) for line in Path(path).read_text().splitlines() if line.strip()]


def compare(number: int, case: dict[str, Any], policy: str = "vllm_v1") -> Iterator[Difference]:
    """Yield the differences of one case."""
    for step, (recorded, decided) in enumerate(zip(case["steps"], decisions(case, policy), strict=True)):
        for field, value in recorded.items():
            if value != decided[field]:
                yield Difference(number, step, field, value, decided[field])


def decisions(case: dict[str, Any], policy: str) -> Iterator[dict[str, Any]]:
    """Yield what the scheduler decides at each step of a case, in the file's format."""
    limits = case["config"]
    scheduler = Scheduler(
        policies.get(policy if limits["policy"] == "fcfs" else f"{policy}:{limits['policy']}"),
        # The recorded scheduler preempts the same request as often as it likes.
        SchedulerConfig(
            limits["max_num_seqs"],
            limits["max_num_batched_tokens"],
            limits["max_model_len"],
            max_preemptions=sys.maxsize,
        ),
        CacheConfig(limits["num_blocks"], limits["block_size"], limits["prefix_caching"]),
    )
    arrivals = sorted(case["requests"], key=lambda request: (request["arrival_step"], int(request["id"])))
    for step in range(len(case["steps"])):
        now = float(step)
        while arrivals and arrivals[0]["arrival_step"] <= step:
            given = arrivals.pop(0)
            scheduler.submit(
                Request(
                    given["id"],
                    tuple(given["prompt"]),
                    given["max_tokens"],
                    arrival=float(given["arrival_step"]),
                    priority=given["priority"],
                )
            )
        if not scheduler.has_work:
            yield _row((), (), (), scheduler)
            continue
        plan = scheduler.schedule(now)
        tokens = {entry.request_id: SAMPLED_TOKEN for entry in plan.scheduled if entry.samples}
        committed = scheduler.commit(plan, StepResult(1.0, tokens), now + 1)
        scheduler.check()
        yield _row(
            [[entry.request_id, entry.start, entry.num_tokens] for entry in plan.scheduled],
            plan.preempted,
            [state.id for state in committed.finished],
            scheduler,
        )


def _row(scheduled, preempted, finished, scheduler: Scheduler) -> dict[str, Any]:
    return {
        "scheduled": list(scheduled),
        "preempted": list(preempted),
        "finished": list(finished),
        "running": len(scheduler.running),
        "waiting": len(list(scheduler.waiting)),
        "free_blocks_after": scheduler.blocks.num_free_blocks,
    }


def main(path: str, policy: str = "vllm_v1") -> int:
    """Print the verdict on a file; return 1 if anything differs."""
    cases = read(path)
    differences = [entry for number, case in enumerate(cases) for entry in compare(number, case, policy)]
    for entry in differences[:20]:
        print(entry)
    num_steps = sum(len(case["steps"]) for case in cases)
    print(f"{len(cases)} cases, {num_steps} steps, {len(differences)} differences")
    return int(bool(differences))


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit("give a file of recorded decisions: python tests/conformance.py FILE [POLICY]")
    sys.exit(main(*sys.argv[1:]))
