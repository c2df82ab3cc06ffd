"""The command line: `python -m cbresearch compare` and `python -m cbresearch simulate`."""

import argparse
import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import shorten
from typing import Any

from cbresearch import policies, workloads
from cbresearch.config import SchedulerConfig
from cbresearch.costs import Linear
from cbresearch.experiments import Comparison, compare, default_cache
from cbresearch.experiments.environment import progress_bar
from cbresearch.metrics import Reporting, Slo

NUM_ANSWERS_SHOWN = 3
NUM_ERRORS_SHOWN = 10


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        0, or 1 if no request was served to its end, 2 for bad input, or 130 after Ctrl-C.
    """
    options = _parser().parse_args(arguments)
    folder = Path(options.output)
    try:
        reporting = _reporting(options)
        # Before the work, so that an output folder that cannot be is not found out after it.
        with _unfinished_folder(folder) as unfinished:
            comparison = _compare(options)
            _write(comparison, reporting, unfinished, options)
    except KeyboardInterrupt:
        print(f"interrupted; nothing was written to {folder}", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    _show(comparison, reporting, folder, timed=options.command == "compare")
    return 0 if any(one.is_complete for trace in comparison.traces.values() for one in trace.requests) else 1


def _parser() -> argparse.ArgumentParser:
    shared = argparse.ArgumentParser(add_help=False)

    def add(name: str, text: str, **options: Any) -> None:
        default = options.get("default")
        shared.add_argument(name, help=text if default is None else f"{text} (default {default})", **options)

    presets, traces = ", ".join(sorted(workloads.PRESETS)), ", ".join(sorted(workloads.TRACES))
    workload = f"a preset ({presets}), a public trace ({traces}), or a trace or workload file"
    options = "options follow a colon, as in"
    add("--workload", f"{workload}; {options} chat:rate=4,n=200", required=True, metavar="W")
    policy = f"one of {', '.join(policies.available())}; {options} static:release or past_future:reserved=.1"
    add("--policy", f"{policy}; repeat --policy to compare", required=True, action="append", metavar="P")
    add("--output", "folder for the results", required=True, metavar="DIR")
    number: dict[str, Any] = {"type": int, "metavar": "N"}
    add("--max-num-seqs", "seats", default=8, **number)
    add("--max-num-batched-tokens", "token budget of a step", default=2048, **number)
    add("--block-size", "tokens in a KV block", default=16, **number)
    add("--num-blocks", "KV blocks (default: as many as full seats can ever need)", **number)
    add("--preemption", "fate of preempted KV", choices=["recompute", "swap"], default="recompute")
    host = "KV blocks in the host's memory (default: as many as KV blocks with --preemption swap, else 0)"
    add("--host-blocks", host, dest="num_host_blocks", **number)
    add("--no-prefix-caching", "compute every prompt in full", dest="prefix_caching", action="store_false")
    add("--seed", "seed of everything random", default=0, **number)
    add("--slo-ttft", "promised time to first token: adds goodput", type=float, metavar="SECONDS")
    add("--slo-tpot", "promised mean time per token after the first", type=float, metavar="SECONDS")
    add("--price-per-hour", "of the machine: adds the cost of tokens", type=float, metavar="PRICE")
    add("--currency", "of the price", default="USD", metavar="NAME")
    parser = argparse.ArgumentParser(prog="python -m cbresearch", description="Compare batching policies.")
    commands = parser.add_subparsers(dest="command", required=True)
    real = commands.add_parser("compare", parents=[shared], help="serve a workload on a real model")
    real.add_argument("--model", required=True, metavar="M", help="tiny, smollm2-135m, a Hub id, or a folder")
    real.add_argument("--compile", action="store_true", help="compile the model first, for long runs")
    real.add_argument(
        "--trust-remote-code", action="store_true", help="run code that lies beside the weights"
    )
    simulated = commands.add_parser("simulate", parents=[shared], help="serve a workload in the simulator")
    cost = "seconds of a step, a token, a context token and a copied or swapped block; those left out are 0"
    simulated.add_argument("--cost", required=True, metavar="linear:T0,T_TOKEN,T_CONTEXT,T_BLOCK", help=cost)
    return parser


def _reporting(options: argparse.Namespace) -> Reporting:
    for name, value in (("--seed", options.seed), ("--host-blocks", options.num_host_blocks)):
        if value is not None and value < 0:
            raise ValueError(f"{name} is {value}; it must be 0 or more")
    ttft, tpot = options.slo_ttft, options.slo_tpot
    slo = None if ttft is None and tpot is None else Slo(ttft=ttft, tpot=tpot)
    return Reporting(slo, options.price_per_hour, options.currency)


def _compare(options: argparse.Namespace) -> Comparison:
    def chosen(*names: str) -> dict[str, Any]:
        return {name: getattr(options, name) for name in names}

    limits = SchedulerConfig(**chosen("max_num_seqs", "max_num_batched_tokens", "preemption"))
    pool = chosen("num_blocks", "block_size", "prefix_caching", "num_host_blocks")
    given = {"scheduler": limits, "cache": partial(default_cache, **pool), "seed": options.seed}
    if options.command == "simulate":
        given["cost"] = Linear.parse(options.cost)
    else:
        given |= chosen("model", "compile", "trust_remote_code")
    return compare(options.workload, options.policy, **given)


@contextmanager
def _unfinished_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder whose files move into the output folder at the end; if there is none, none is left."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ValueError(f"--output {str(folder)!r} is, or lies in, a file; name a folder") from None
    try:
        with TemporaryDirectory(prefix=".unfinished-", dir=folder) as unfinished:
            yield Path(unfinished)
            for path in Path(unfinished).iterdir():
                path.replace(folder / path.name)
    except BaseException:
        for path in missing:
            with suppress(OSError):
                path.rmdir()
        raise


def _write(comparison: Comparison, reporting: Reporting, folder: Path, options: Any) -> None:
    from cbresearch import viz

    title = f"{options.workload} on {getattr(options, 'model', 'the simulator')}"
    with progress_bar(4, "results", "file") as bar:
        comparison.write(folder, reporting)
        bar.update(3)
        viz.write_report(
            folder / "report.html",
            title=f"{title}: {', '.join(comparison.traces)}",
            traces=comparison.traces,
            kpi=comparison.kpi(reporting),
            predictions=[(*row, row.relative_error) for row in comparison.predictions],
            answers=comparison.answers[:NUM_ANSWERS_SHOWN],
            environment=comparison.environment,
            bytes_per_token=comparison.bytes_per_token,
            reporting=reporting,
        )
        bar.update()


def _show(comparison: Comparison, reporting: Reporting, folder: Path, *, timed: bool) -> None:
    print(comparison.kpi_frame(reporting).to_string())
    if comparison.predictions:
        print("\nPredicted by the formulas, and measured:")
        print(comparison.prediction_frame().to_string(float_format=_number))
        if timed:
            print("Steps and bytes are counted; speed-ups compare wall-clock times, which other work moves.")
    for prompt, texts in [answer for answer in comparison.answers if len(answer[1]) > 1][:NUM_ANSWERS_SHOWN]:
        is_same = len(set(texts.values())) == 1
        verdict = "the same under every policy" if is_same else "NOT the same everywhere"
        first = next(iter(texts.values()))
        print(f"\n> {shorten(prompt, 300)}\n{shorten(first, 300)}\n[{verdict}]")
    records = [record for trace in comparison.traces.values() for record in trace.requests]
    if not records:
        print("the workload has no requests, so nothing was served", file=sys.stderr)
    errors = {
        one.id: f"{'rejected' if one.is_rejected else 'failed'}: {one.error}" for one in records if one.error
    }
    for error in list(errors.values())[:NUM_ERRORS_SHOWN]:
        print(error, file=sys.stderr)
    if len(errors) > NUM_ERRORS_SHOWN:
        print(f"… and {len(errors) - NUM_ERRORS_SHOWN} more; requests.csv has them all", file=sys.stderr)
    print(f"\nThe report is {folder / 'report.html'}, beside results.json, requests.csv and steps.csv.")


def _number(value: float) -> str:
    return f"{value:,.0f}" if value and value.is_integer() else f"{value:,.3f}"


if __name__ == "__main__":
    # What a run makes stays until the end of the program, which has the process to itself: to look for
    # garbage in it, again and again and once more at the end, would take a third of the time.
    gc.set_threshold(1_000_000)
    status = main()
    # Triton reports objects that are never collected as leaks.
    if "torch" not in sys.modules:
        gc.freeze()
    sys.exit(status)
