"""The command line: `cbresearch compare`, `cbresearch simulate` and `cbresearch policies`."""

import argparse
import gc
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import fill, shorten
from typing import Any, NoReturn

from cbresearch import costs, policies, workloads
from cbresearch.config import PREEMPTIONS, SchedulerConfig
from cbresearch.experiments import Comparison, compare, default_cache
from cbresearch.experiments.environment import progress_bar, usable_folder
from cbresearch.metrics import Reporting, Slo
from cbresearch.names import described, suggestion
from cbresearch.version import __version__

NUM_ANSWERS_SHOWN = 3
NUM_ERRORS_SHOWN = 10

_FILES = ("results.json", "requests.csv", "steps.csv", "report.html")
_DTYPES = ("float32", "bfloat16", "float16", "float64")
_OF_A_MODEL = ("--model", "--device", "--dtype", "--compile", "--trust-remote-code")
_EXAMPLES = {
    "command": "compare, simulate or policies",
    "--workload": "chat24",
    "--policy": "fcfs",
    "--output": "out",
    "--model": "tiny",
    "--cost": "linear:0.01,0.0001",
}
_ELSEWHERE = {"--cost": "simulate", **dict.fromkeys(_OF_A_MODEL, "compare")}


def script() -> None:
    """Run the command line in a process of its own."""
    # Pictures go into a file, and a screen to draw on is not there everywhere.
    os.environ["MPLBACKEND"] = "agg"
    # What a run makes stays until the end of the program, which has the process to itself: to look for
    # garbage in it, again and again and once more at the end, would take a third of the time.
    gc.set_threshold(1_000_000)
    status = 1
    try:
        status = main()
    finally:
        # Triton reports objects that are never collected as leaks.
        if "torch" not in sys.modules:
            gc.freeze()
        try:
            if sys.stdout is not None:
                sys.stdout.flush()
        except OSError:
            # Who reads the output has gone, as in `| head`: Python would try, and complain, again at its end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(status)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        0, or 1 if no request was served to its end, a policy failed or a result could not be written, 2 for
        bad input, or 130 after Ctrl-C.

    Raises:
        SystemExit: Help or the version was asked for.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        options = _parser().parse_args(arguments)
        return _list_policies() if options.command == "policies" else _run(options)
    except BrokenPipeError:
        return 0
    except Exception as error:
        # A comparison of which every policy failed names each in a note.
        notes = getattr(error, "__notes__", None)
        said = " ".join(str(error).split()) if isinstance(error, ValueError | OSError) else described(error)
        print("error:", *(notes or [said]), file=sys.stderr)
        return 1 if notes else 2


def _run(options: argparse.Namespace) -> int:
    folder = Path(os.path.expanduser(options.output))
    try:
        ttft, tpot = options.slo_ttft, options.slo_tpot
        slo = None if ttft is None and tpot is None else Slo(ttft=ttft, tpot=tpot)
        reporting = Reporting(slo, options.price_per_hour, options.currency)
        # Before the work, so that an output folder that cannot be is not found out after it.
        with _unfinished_folder(folder, options.output) as unfinished:
            comparison = _compare(options)
            with progress_bar(4, "results", "file") as bar:
                is_whole = _done("results", lambda: comparison.write(unfinished, reporting))
                bar.update(3)
                is_whole &= _done("report", lambda: _write_report(comparison, reporting, unfinished, options))
                bar.update()
    except KeyboardInterrupt:
        print(f"interrupted; nothing was written to {folder}", file=sys.stderr)
        return 130
    is_whole &= _done("table", lambda: _show(comparison, reporting, folder, options.command == "compare"))
    is_served = any(one.is_complete for trace in comparison.traces.values() for one in trace.requests)
    return 0 if is_served and is_whole and not comparison.failed else 1


def _done(what: str, action: Callable[[], object]) -> bool:
    """Do what comes behind the work, and say in a line what fails: nothing else is lost to it."""
    try:
        action()
    except Exception as error:
        if not isinstance(error, BrokenPipeError):
            print(f"error: the {what} cannot be given out: {described(error)}", file=sys.stderr)
            return False
    return True


class _Parser(argparse.ArgumentParser):
    """A parser that refuses in one line, and says what to write instead."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and refuse what is no option before what is missing."""
        known = self._option_string_actions
        for name in (str(one).partition("=")[0] for one in (args or ()) if self._subparsers is None):
            if name.startswith("--") and not any(one.startswith(name) for one in known):
                remedy = f"it is for {_ELSEWHERE[name]}" if name in _ELSEWHERE else suggestion(name, known)
                self.error(f"{name!r} is no option of this command; {remedy}")
        options, unknown = super().parse_known_args(args, namespace)
        for value in unknown:
            self.error(f"{value!r} follows no option; repeat one for each value, as --policy P --policy Q")
        return options, unknown

    def error(self, message: str) -> NoReturn:
        """Raise ValueError with the message and the remedy."""
        if "are required" in message or "expected one" in message:
            named = [f"{name} {_EXAMPLES[name]}" for name in _EXAMPLES if name in message]
            message += f"; write {' '.join(named) or 'its value behind it'}"
        raise ValueError(f"{message}; see {self.prog} --help")


def _parser() -> _Parser:
    shared = _Parser(add_help=False)

    def add(name: str, text: str, to: argparse.ArgumentParser = shared, **options: Any) -> None:
        default = options.get("default")
        to.add_argument(name, help=text if default is None else f"{text} (default {default})", **options)

    presets, traces = ", ".join(sorted(workloads.PRESETS)), ", ".join(sorted(workloads.TRACES))
    workload = f"a preset ({presets}), a public trace ({traces}), or a trace or workload file"
    add("--workload", f"{workload}; options as in chat:rate=4,n=200", required=True, metavar="W")
    policy = 'a policy (see "cbresearch policies"), or mine.py:MyPolicy; options as in static:release'
    add("--policy", f"{policy}; repeat --policy to compare", required=True, action="append", metavar="P")
    add("--output", "folder for the results", required=True, metavar="DIR")
    real_number = _read(float, "number; give one, such as 0.5")
    number: dict[str, Any] = {"type": _read(int, "whole number; give one, such as 8"), "metavar": "N"}
    add("--max-num-seqs", "seats", default=8, **number)
    add("--max-num-batched-tokens", "token budget of a step", default=2048, **number)
    add("--block-size", "tokens in a KV block", default=16, **number)
    add("--num-blocks", "KV blocks (default: as many as full seats can ever need)", **number)
    add("--preemption", "fate of preempted KV", choices=PREEMPTIONS, default="recompute")
    host = "KV blocks in the host's memory (default: as many as KV blocks with --preemption swap, else 0)"
    add("--host-blocks", host, dest="num_host_blocks", **number)
    add("--no-prefix-caching", "compute every prompt in full", dest="prefix_caching", action="store_false")
    add("--seed", "seed of everything random", default=0, **number)
    add("--slo-ttft", "promised time to first token: adds goodput", type=real_number, metavar="SECONDS")
    add("--slo-tpot", "promised mean time per token after the first", type=real_number, metavar="SECONDS")
    add("--price-per-hour", "of the machine: adds the cost of tokens", type=real_number, metavar="PRICE")
    add("--currency", "of the price", default="USD", metavar="NAME")
    parser = _Parser(prog="cbresearch", description="Compare batching policies.")
    parser.add_argument("--version", action="version", version=f"cbresearch {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    real = commands.add_parser("compare", parents=[shared], help="serve a workload on a real model")
    add("--model", "tiny, smollm2-135m, a Hub id, or a folder", real, required=True, metavar="M")
    devices = "device; give cpu, cuda, cuda:1, mps or xpu"
    add("--device", "where it runs, as cuda:1 (default cpu)", real, type=_read(_device, devices), metavar="D")
    add("--dtype", "of weights and activations (default float32)", real, choices=_DTYPES)
    add("--compile", "compile the model first, for long runs", real, action="store_true")
    add("--trust-remote-code", "run code that lies beside the weights", real, action="store_true")
    simulated = commands.add_parser("simulate", parents=[shared], help="serve a workload in the simulator")
    cards = f"a card ({', '.join(costs.CARDS)}) as in h100:model=llama-3-70b,overhead=0.002"
    terms = "linear:T0,T_TOKEN,T_CONTEXT,T_BLOCK: seconds of a step, a token, a context token and a copied or"
    add("--cost", f"{terms} swapped block, those left out being 0; or {cards}", simulated, required=True)
    commands.add_parser("policies", help="list the policies and their options")
    return parser


def _device(text: str) -> str:
    if not re.fullmatch(r"cpu|(cuda|mps|xpu)(:\d+)?", text):
        raise ValueError
    return text


def _read(kind: Callable[[str], Any], what: str) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        with suppress(ValueError):
            return kind(text)
        raise argparse.ArgumentTypeError(f"{text!r} is no {what}")

    return read


def _list_policies() -> int:
    for name, entry in policies.table().items():
        # The class itself shows the signature of its `__new__`, where the constructor is inherited.
        _, *parameters = inspect.signature(type(policies.get(name)).__init__).parameters.values()
        options = ", ".join(f"{one.name}={one.default}" for one in parameters)
        about = f"{entry.rule} [{entry.family}]" + (f" Options: {options}." if options else "")
        print(fill(f"{name:<21}{about}", 80, subsequent_indent=" " * 21))
    return 0


def _compare(options: argparse.Namespace) -> Comparison:
    def chosen(*names: str) -> dict[str, Any]:
        return {name: getattr(options, name) for name in names}

    limits = SchedulerConfig(**chosen("max_num_seqs", "max_num_batched_tokens", "preemption"))
    pool = chosen("num_blocks", "block_size", "prefix_caching", "num_host_blocks")
    # Numbers that no pool can have are refused before a model is loaded.
    default_cache((), limits, **pool)
    given = {"scheduler": limits, "cache": partial(default_cache, **pool), "seed": options.seed}
    if options.command == "simulate":
        given["cost"] = costs.parse(options.cost)
    else:
        given |= chosen("compile", "trust_remote_code", "device", "dtype")
        given["model"] = os.path.expanduser(options.model)
    return compare(options.workload, options.policy, **given)


@contextmanager
def _unfinished_folder(folder: Path, name: str) -> Iterator[Path]:
    """Yield a folder whose files move into the output folder at the end; if there is none, none is left."""
    if not name.strip():
        raise ValueError(f"--output is {name!r}; name a folder")
    missing = [path for path in (folder, *folder.parents) if not os.path.exists(path)]
    try:
        usable_folder("--output", folder)
        for taken in (path for path in map(folder.joinpath, _FILES) if path.is_dir()):
            raise ValueError(f"--output {name!r} has a folder {taken.name}; name another, or move it away")
        with TemporaryDirectory(prefix=".unfinished-", dir=folder) as unfinished:
            yield Path(unfinished)
            for file in _FILES:
                # One of an earlier run would pass for one of this run.
                (folder / file).unlink(missing_ok=True)
                with suppress(FileNotFoundError):
                    Path(unfinished, file).replace(folder / file)
    except BaseException:
        for path in missing:
            with suppress(OSError):
                path.rmdir()
        raise


def _write_report(comparison: Comparison, reporting: Reporting, folder: Path, options: Any) -> None:
    from cbresearch import viz

    title = f"{options.workload} on {getattr(options, 'model', 'the simulator')}"
    viz.write_report(
        folder / "report.html",
        title=f"{title}: {', '.join(comparison.traces)}",
        traces=comparison.traces,
        kpi=comparison.kpi(reporting),
        predictions=[(*row, row.relative_error) for row in comparison.predictions],
        answers=comparison.answers[:NUM_ANSWERS_SHOWN],
        environment=comparison.environment,
        note=comparison.caution,
        bytes_per_token=comparison.bytes_per_token,
        reporting=reporting,
    )


def _show(comparison: Comparison, reporting: Reporting, folder: Path, timed: bool) -> None:
    if comparison.caution:
        print(f"{comparison.caution}\n")
    print(comparison.kpi_frame(reporting).to_string())
    if comparison.predictions:
        print("\nPredicted by the formulas, and measured:")
        print(comparison.prediction_frame().to_string(float_format=_number))
        if timed:
            print("Steps and bytes are counted; speed-ups in seconds move with other work on the computer.")
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
    made = [name for name in reversed(_FILES) if (folder / name).exists()]
    if "report.html" in made:
        print(f"\nThe report is {folder / 'report.html'}, beside {', '.join(made[1:])}.")
    # What cannot be printed, as to a full disk, is found out here and not behind the end of the program.
    print(end="", flush=True)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value and value.is_integer() else f"{value:,.3f}"


if __name__ == "__main__":
    script()
