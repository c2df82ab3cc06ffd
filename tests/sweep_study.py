"""A sweep of 64 runs to kill and to resume.

    python tests/sweep_study.py OUTPUT [--folder FOLDER] [--jobs N | --dask]

Each run that is computed adds a line to the file that SWEEP_LOG names, if any. Once that has SWEEP_STOP_AFTER
lines, the next run hangs, so that it can be killed in the middle.
"""

import argparse
import contextlib
import os
import tempfile
import time
from functools import partial
from pathlib import Path

from cbresearch import Request, SchedulerConfig, policies
from cbresearch.experiments import sweep
from cbresearch.metrics import Slo

NUM_RUNS = 64


@policies.register
class LongestPromptFirst(policies.Policy):
    """Admit the longest prompt first."""

    name = "longest_prompt"

    def propose(self, view):
        yield from policies.whole(view.running)
        by_length = sorted(policies.queued(view), key=lambda request: -request.num_prompt_tokens)
        yield from policies.joining(view, by_length)


def stream(rate, rng):
    note()
    arrivals = rng.exponential(1 / rate, size=12).cumsum()
    return [
        Request(str(n), int(rng.integers(1, 40)), int(rng.integers(1, 9)), t) for n, t in enumerate(arrivals)
    ]


def note():
    if "SWEEP_LOG" not in os.environ:
        return
    path = Path(os.environ["SWEEP_LOG"])
    if path.exists() and path.read_text().count("\n") >= int(os.environ.get("SWEEP_STOP_AFTER", NUM_RUNS)):
        time.sleep(600)
    with path.open("a") as file:
        file.write("run\n")


def on_dask():
    import joblib
    from distributed import Client, LocalCluster

    around = contextlib.ExitStack()
    # What the workers put on disk goes away with them.
    scratch = around.enter_context(tempfile.TemporaryDirectory())
    cluster = LocalCluster(2, threads_per_worker=1, dashboard_address=None, local_directory=scratch)
    around.enter_context(cluster)
    around.enter_context(Client(cluster))
    around.enter_context(joblib.parallel_config("dask"))
    return around


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("output")
    parser.add_argument("--folder")
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--dask", action="store_true")
    arguments = parser.parse_args()
    with on_dask() if arguments.dask else contextlib.nullcontext():
        result = sweep(
            {"light": partial(stream, 0.2), "heavy": partial(stream, 2.0)},
            ["fcfs", "static", "sjf", "longest_prompt"],
            scheduler=[SchedulerConfig(max_num_seqs=2), SchedulerConfig(max_num_seqs=4)],
            seeds=range(4),
            slo=Slo(ttft=5.0),
            folder=arguments.folder,
            n_jobs=arguments.jobs,
        )
    result.write(arguments.output)
    print(result.num_computed, len(result.failed))


if __name__ == "__main__":
    main()
