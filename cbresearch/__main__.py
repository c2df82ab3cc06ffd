"""The command line: `python -m cbresearch compare` and `python -m cbresearch simulate`."""

import argparse
import math
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from cbresearch import policies, workloads
from cbresearch.config import SchedulerConfig
from cbresearch.costs import Linear
from cbresearch.experiments import Comparison, compare, compare_simulated
from cbresearch.metrics import Reporting, Slo

NUM_ANSWERS_SHOWN = 3
NUM_ERRORS_SHOWN = 10


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 0, or 1 if nothing could be served, or 2 for bad input."""
    options = _parser().parse_args(arguments)
    folder = Path(options.output)
    try:
        _check_options(options)
        slo = _slo(options)
        # Before the work, so that an output folder that cannot be is not found out after it.
        _make_folder(folder)
        limits = SchedulerConfig(
            options.max_num_seqs, options.max_num_batched_tokens, preemption=options.preemption
        )
        if options.command == "compare":
            comparison = compare(
                options.model,
                options.workload,
                options.policy,
                scheduler=limits,
                block_size=options.block_size,
                num_blocks=options.num_blocks,
                prefix_caching=not options.no_prefix_caching,
                num_host_blocks=options.host_blocks,
                seed=options.seed,
                trust_remote_code=options.trust_remote_code,
                slo=slo,
                price_per_hour=options.price_per_hour,
                currency=options.currency,
            )
        else:
            comparison = compare_simulated(
                options.workload,
                options.policy,
                cost=Linear.parse(options.cost),
                scheduler=limits,
                block_size=options.block_size,
                num_blocks=options.num_blocks,
                prefix_caching=not options.no_prefix_caching,
                num_host_blocks=options.host_blocks,
                seed=options.seed,
                slo=slo,
                price_per_hour=options.price_per_hour,
                currency=options.currency,
            )
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    _write(comparison, folder, options)
    _show(comparison, folder, timed=options.command == "compare")
    records = (record for trace in comparison.traces.values() for record in trace.requests)
    return 0 if any(record.is_complete for record in records) else 1


def _check_options(options: argparse.Namespace) -> None:
    if options.seed < 0:
        raise ValueError(f"--seed is {options.seed}; it must be 0 or more")
    if options.host_blocks is not None and options.host_blocks < 0:
        raise ValueError(f"--host-blocks is {options.host_blocks}; it must be 0 or more")
    price = options.price_per_hour
    if price is not None and not 0 <= price < math.inf:
        raise ValueError(f"--price-per-hour is {price}; it must be a finite number of 0 or more")


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ValueError(f"--output {str(folder)!r} is, or lies in, a file; name a folder") from None


def _slo(options: argparse.Namespace) -> Slo | None:
    """Return what was promised, or None if nothing was."""
    if options.slo_ttft is None and options.slo_tpot is None:
        return None
    return Slo(ttft=options.slo_ttft, tpot=options.slo_tpot)


def _parser() -> argparse.ArgumentParser:
    limits = argparse.ArgumentParser(add_help=False)
    limits.add_argument(
        "--workload",
        required=True,
        metavar="W",
        help=f"a preset ({', '.join(sorted(workloads.PRESETS))}), a public trace "
        f"({', '.join(sorted(workloads.TRACES))}), or a trace or workload file; options follow a colon: "
        "chat:rate=4,n=200",
    )
    limits.add_argument(
        "--policy",
        required=True,
        action="append",
        metavar="P",
        help=f"one of {', '.join(policies.available())}; options follow a colon, as in static:release or "
        "past_future:reserved=0.05; repeat --policy to compare",
    )
    limits.add_argument("--output", required=True, metavar="DIR", help="folder for the results")
    limits.add_argument("--max-num-seqs", type=int, default=8, metavar="N", help="seats (default 8)")
    limits.add_argument(
        "--max-num-batched-tokens",
        type=int,
        default=2048,
        metavar="N",
        help="token budget of a step (default 2048)",
    )
    limits.add_argument(
        "--block-size", type=int, default=16, metavar="N", help="tokens in a KV block (default 16)"
    )
    limits.add_argument(
        "--num-blocks", type=int, metavar="N", help="KV blocks (default: as many as full seats can ever need)"
    )
    limits.add_argument(
        "--preemption",
        choices=["recompute", "swap"],
        default="recompute",
        help="what becomes of the KV of a request that has to make room (default recompute)",
    )
    limits.add_argument(
        "--host-blocks",
        type=int,
        metavar="N",
        help="KV blocks in the host's memory, to swap to (default: as many as KV blocks with --preemption "
        "swap, else 0)",
    )
    limits.add_argument(
        "--no-prefix-caching",
        action="store_true",
        help="compute every prompt in full, even where prompts begin alike",
    )
    limits.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of everything random (default 0)"
    )
    limits.add_argument(
        "--slo-ttft",
        type=float,
        metavar="SECONDS",
        help="time to first token that was promised: adds goodput, the requests that kept all promises",
    )
    limits.add_argument(
        "--slo-tpot",
        type=float,
        metavar="SECONDS",
        help="mean time per output token after the first that was promised",
    )
    limits.add_argument(
        "--price-per-hour",
        type=float,
        metavar="PRICE",
        help="what an hour of the machine costs: adds the cost of a million tokens",
    )
    limits.add_argument(
        "--currency", default="USD", metavar="NAME", help="currency of the price (default USD)"
    )

    parser = argparse.ArgumentParser(prog="python -m cbresearch", description="Compare batching policies.")
    commands = parser.add_subparsers(dest="command", required=True)
    real = commands.add_parser("compare", parents=[limits], help="serve a workload on a real model")
    real.add_argument(
        "--model", required=True, metavar="M", help="tiny, smollm2-135m, a Hub id, or a local folder"
    )
    real.add_argument(
        "--trust-remote-code", action="store_true", help="allow code that ships with the weights to run"
    )
    simulated = commands.add_parser("simulate", parents=[limits], help="serve a workload in the simulator")
    simulated.add_argument(
        "--cost",
        required=True,
        metavar="linear:T0,T_TOKEN,T_CONTEXT",
        help="seconds of a step, a token, a context token, and (a fourth number) a block copied or swapped, "
        "such as linear:0.01,1e-4,1e-7; those left out are 0",
    )
    return parser


def _write(comparison: Comparison, folder: Path, options: argparse.Namespace) -> None:
    from cbresearch import viz

    comparison.write(folder)
    subject = options.model if options.command == "compare" else "the simulator"
    viz.write_report(
        folder / "report.html",
        title=f"{options.workload} on {subject}: {', '.join(comparison.traces)}",
        traces=comparison.traces,
        kpi=comparison.kpi,
        predictions=[(*row, row.relative_error) for row in comparison.predictions],
        answers=comparison.answers[:NUM_ANSWERS_SHOWN],
        environment=comparison.environment,
        bytes_per_token=comparison.bytes_per_token,
        reporting=Reporting(comparison.slo, comparison.price_per_hour, comparison.currency),
    )


def _show(comparison: Comparison, folder: Path, *, timed: bool) -> None:
    print(comparison.kpi_frame().to_string())
    if comparison.predictions:
        print("\nPredicted by the formulas, and measured:")
        print(comparison.prediction_frame().to_string(float_format=_number))
        if timed:
            print(
                "Steps and bytes are counted; a speed-up compares wall-clock times, which other work moves."
            )
    shown = [answer for answer in comparison.answers if len(answer[1]) > 1][:NUM_ANSWERS_SHOWN]
    for prompt, texts in shown:
        first = next(iter(texts.values()))
        verdict = (
            "the same under every policy" if set(texts.values()) == {first} else "NOT the same everywhere"
        )
        print(f"\n> {_shortened(prompt)}\n{_shortened(first)}\n[{verdict}]")
    runs = comparison.traces.values()
    errors = {
        record.id: f"{'refused' if record.is_refused else 'failed'}: {record.error}"
        for trace in runs
        for record in trace.requests
        if record.error
    }
    for error in islice(errors.values(), NUM_ERRORS_SHOWN):
        print(error, file=sys.stderr)
    if len(errors) > NUM_ERRORS_SHOWN:
        print(f"… and {len(errors) - NUM_ERRORS_SHOWN} more; requests.csv has them all", file=sys.stderr)
    if not any(trace.requests for trace in runs):
        print("the workload has no requests, so nothing was served", file=sys.stderr)
    print(
        f"\nThe report is {folder / 'report.html'}; results.json, requests.csv and steps.csv lie beside it."
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value and value.is_integer() else f"{value:,.3f}"


def _shortened(text: str, limit: int = 300) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= limit else f"{flat[: limit - 1]}…"


if __name__ == "__main__":
    sys.exit(main())
