"""The same requests under several policies, with an environment stamp and tidy results."""

import json
import logging
import os
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from cbresearch import formulas, metrics
from cbresearch.checks import count
from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.costs import CostModel, Linear
from cbresearch.experiments.clock import caution, slowdowns
from cbresearch.experiments.environment import environment, progress_bar
from cbresearch.experiments.points import as_list, distinct
from cbresearch.experiments.simulation_error import predict_run
from cbresearch.metrics import Reporting
from cbresearch.model_shape import ModelShape
from cbresearch.names import described, suggestion
from cbresearch.policies import Policy, get
from cbresearch.request import Rejected, Request, expand, listed
from cbresearch.scheduler import Scheduler
from cbresearch.serve import Run
from cbresearch.simulator import check_limits, simulate, unlimited_cache
from cbresearch.trace import Origin, StepRecord, Trace, write_columns, write_whole
from cbresearch.workloads import load, resolve_prompts

if TYPE_CHECKING:
    import pandas as pd
    from tqdm.auto import tqdm

    from cbresearch.models import LoadedModel

Requests = Sequence[Request | Rejected]
Workload = str | os.PathLike[str] | Requests
Policies = str | Policy | Sequence[str | Policy]
CacheSizer = Callable[[Requests, SchedulerConfig, ModelShape | None], CacheConfig]

T = TypeVar("T")

_PLAIN = Reporting()
_LOG = logging.getLogger(__name__)
# Policies take turns while their KV pools together are no larger; each of a larger one serves alone.
_MOST_POOL_BYTES = 2**31
_MOST_REASONS = 3
_MODELS = ("tiny", "smollm2-135m")


class Prediction(NamedTuple):
    """A quantity, what a formula says of it, and what was measured."""

    quantity: str
    predicted: float | None
    measured: float | None

    @property
    def relative_error(self) -> float | None:
        """Return (measured - predicted) / predicted, or None where that is undefined."""
        if self.measured is None or not self.predicted:
            return None
        return (self.measured - self.predicted) / self.predicted


@dataclass(frozen=True, slots=True)
class Comparison:
    """The same requests served once under each policy.

    Attributes:
        traces: The runs by policy name.
        environment: What they ran on.
        requests: The requests as they were served.
        bytes_per_token: KV bytes of one token, or None without a model.
        answers: (prompt text, output text by policy) of each request, where there was a model.
        predictions: What the formulas say beside what was measured.
        failed: What a policy failed of, by name, if others did not: its run is left out.
    """

    traces: Mapping[str, Trace]
    environment: Mapping[str, str]
    requests: tuple[Request | Rejected, ...]
    bytes_per_token: int | None = None
    answers: tuple[tuple[str, Mapping[str, str]], ...] = ()
    predictions: tuple[Prediction, ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)

    @property
    def slowdown(self) -> dict[str, float | None]:
        """Return the `slowdowns` of the runs on a model, of which the simulator has none."""
        timed = {name: trace for name, trace in self.traces.items() if trace.origin.model is not None}
        return slowdowns(timed)

    @property
    def caution(self) -> str:
        """Return what to say of seconds that other work on the computer disturbed, or an empty text."""
        return caution(self.slowdown)

    def kpi(self, reporting: Reporting = _PLAIN) -> list[metrics.KpiRow]:
        """Return the key figures, one column a policy.

        Args:
            reporting: The SLO and the price, for goodput and the cost of tokens.

        Raises:
            TypeError: It is something else.
        """
        if not isinstance(reporting, Reporting):
            raise TypeError(f"reporting is {reporting!r}; give a Reporting(slo=Slo(…), price_per_hour=…)")
        rows = metrics.kpi_table(self.traces, self.bytes_per_token, reporting)
        if slowdown := self.slowdown:
            texts = tuple("–" if value is None else f"{value:.2f}" for value in slowdown.values())
            rows.append(metrics.KpiRow("step time over that of like steps", "×", texts))
        return rows

    def kpi_frame(self, reporting: Reporting = _PLAIN) -> "pd.DataFrame":
        """Return the key figures as a pandas frame of texts, one column a policy.

        Args:
            reporting: The SLO and the price, for goodput and the cost of tokens.
        """
        import pandas as pd

        rows = self.kpi(reporting)
        names = [f"{row.name} ({row.unit})" if row.unit else row.name for row in rows]
        pairs = (zip_longest(row.values, row.sizes) for row in rows)
        texts = [[f"{value} (n={n})" if n else value for value, n in row] for row in pairs]
        return pd.DataFrame(texts, index=names, columns=list(self.traces))

    def prediction_frame(self) -> "pd.DataFrame":
        """Return predicted and measured values with their relative error, as a pandas frame."""
        import pandas as pd

        rows = [(*row, row.relative_error) for row in self.predictions]
        frame = pd.DataFrame(rows, columns=["quantity", "predicted", "measured", "relative error"])
        return frame.set_index("quantity").rename_axis(None)

    def write(self, folder: str | Path, reporting: Reporting = _PLAIN) -> None:
        """Write `results.json`, `requests.csv` and `steps.csv` into a folder, each whole or not at all.

        Args:
            folder: It is made if it is not there.
            reporting: The SLO and the price, for goodput and the cost of tokens.

        Raises:
            OSError: A file cannot be written; those that can be are there.
        """
        slowdown = self.slowdown
        keys = ("id", "tokens", "arrival", "first_token", "finish", "error")
        runs: list[dict[str, Any]] = [
            {
                "policy": trace.policy,
                "limits": {**asdict(trace.scheduler), **asdict(trace.cache)},
                "requests": [
                    {**{key: getattr(record, key) for key in keys}, "preemptions": record.num_preemptions}
                    for record in trace.requests
                ],
                "metrics": {
                    **metrics.summary(trace, self.bytes_per_token, reporting),
                    **({"slowdown_over_like_steps": slowdown[name]} if name in slowdown else {}),
                },
            }
            for name, trace in self.traces.items()
        ]
        rows = [{**row._asdict(), "relative_error": row.relative_error} for row in self.predictions]
        results = {"environment": dict(self.environment), "runs": runs, "predictions": rows}
        results |= {"caution": self.caution, "failed": dict(self.failed)}
        requests = {policy: trace.request_columns for policy, trace in self.traces.items()}
        steps = {policy: trace.step_columns for policy, trace in self.traces.items()}
        # The last comes first, and none is kept from being written by one that cannot be.
        with ExitStack() as files:
            files.callback(write_columns, Path(folder, "steps.csv"), steps, "policy")
            files.callback(write_columns, Path(folder, "requests.csv"), requests, "policy")
            # On one line, for the tokens are millions: json writes that five times as fast as indented lines.
            text = json.dumps(results, allow_nan=False)
            files.callback(write_whole, Path(folder, "results.json"), [text, "\n"])


def compare(
    workload: Workload,
    policies: Policies = ("static", "fcfs"),
    *misplaced: object,
    model: "str | LoadedModel | None" = None,
    cost: CostModel | None = None,
    scheduler: SchedulerConfig | None = None,
    cache: CacheConfig | CacheSizer | None = None,
    seed: int = 0,
    compile: bool = False,
    trust_remote_code: bool = False,
    device: str | None = None,
    dtype: str | None = None,
) -> Comparison:
    """Serve a workload once under each policy, on a real model or by a cost model in the simulator.

    On a model the policies take turns, step by step, each behind the others in rows served, so that whatever
    else the computer does slows all of them alike. A policy that raises ends its own run; the others go on.

    Args:
        workload: A preset, a workload file, or requests. In the simulator, text counts as an estimate of its
            length.
        policies: Policy names, options included, or policies.
        *misplaced: None; all that follows is given by name.
        model: A model's name for `models.load`, or a model loaded already.
        cost: The step time of the simulator; either this or a model is needed.
        scheduler: The limits of a step.
        cache: The KV pool, or a function that sizes it once the requests are known; `default_cache` by
            default, with prefix caching and a pool that never runs out.
        seed: Seed of the workload, and of what the model samples.
        compile: Compile the model first: for long runs; see `engine.ModelExecutor`.
        trust_remote_code: Allow code that ships with the weights to run.
        device: Where a model that is loaded by name runs, such as "cuda"; "cpu" by default.
        dtype: The element type of a model that is loaded by name, such as "bfloat16"; "float32" by default.

    Raises:
        TypeError: There is neither a model nor a cost, or both, or an argument without its name; or the
            model, the cost, a request or a limit is of another class.
        ValueError: A name is unknown, a number out of range, or no line of a workload file can be read.
    """
    if misplaced or (model is None) == (cost is None):
        raise TypeError(_advice(workload, policies, *misplaced, both=cost is not None and model is not None))
    sized = None if callable(cache) else cache
    check_limits(scheduler=(scheduler, SchedulerConfig), cache=(sized, CacheConfig))
    seed = count("seed", seed, 0)
    # What is neither a policy nor several is left to `get`, which says so.
    built = [get(policy) for policy in as_list(policies, str)]
    distinct([policy.name for policy in built], "policy")
    if isinstance(model, str) and not (
        model in _MODELS
        or re.fullmatch(r"[\w.-]*[\w-]/[\w.-]+", model)
        or (model and os.path.exists(os.path.expanduser(model)))
    ):
        # Here as well as where models are loaded, which takes seconds to import.
        known = f"{suggestion(model, _MODELS)} (a local folder or a Hub id, org/model, works too)"
        raise ValueError(f"unknown model {model!r}; {known}")
    given, label = _given(workload, seed)
    loaded = None if model is None else _loaded(model, trust_remote_code, device, dtype)
    shape = None if loaded is None else loaded.shape
    encode, vocab_size = (None, None) if loaded is None else (loaded.encode, loaded.shape.vocab_size)
    requests = expand(resolve_prompts(given, encode, vocab_size, np.random.default_rng(seed)))
    limits = scheduler or SchedulerConfig()
    pool = cache if isinstance(cache, CacheConfig) else (cache or default_cache)(requests, limits, shape)
    facts: dict[str, object] = {"workload": label, "seed": seed}
    ended: dict[str, Trace | BaseException] = {}
    if cost is not None:
        for policy in built:
            # Many steps are taken at once, so that the run is over before a bar is of use.
            with progress_bar(len(requests), policy.name, "request") as bar:
                try:
                    ended[policy.name] = simulate(requests, policy, cost=cost, scheduler=limits, cache=pool)
                except (Exception, SystemExit) as error:
                    ended[policy.name] = error
                bar.update(len(requests))
        traces, failed = _sorted_out(ended)
        foreseen = _made("predictions", lambda: predictions(traces))
        stamp = environment(**facts, cost=repr(cost))
        return Comparison(traces, stamp, tuple(requests), predictions=foreseen, failed=failed)
    assert loaded is not None
    from cbresearch.engine import ModelExecutor

    bytes_per_token = formulas.kv_bytes_per_token(loaded.shape)
    at_once = max(1, _MOST_POOL_BYTES // (bytes_per_token * pool.num_tokens))
    for first in range(0, len(built), at_once):
        runs = {}
        with ExitStack() as bars:
            for policy in built[first : first + at_once]:
                executor = ModelExecutor(loaded, limits, pool, seed=seed, compile=compile)
                executor.warm_up()
                bar = bars.enter_context(progress_bar(len(requests), policy.name, "request"))
                mechanism, origin = Scheduler(policy, limits, pool), Origin(model=loaded.name)
                runs[policy.name] = Run(requests, mechanism, executor, partial(_show, bar), origin=origin)
            ended |= _take_turns(runs)
    traces, failed = _sorted_out(ended)
    size = Prediction("KV pool (bytes)", bytes_per_token * pool.num_tokens, executor.cache.num_bytes)
    facts |= {"device": loaded.model.device, "dtype": loaded.model.dtype, "compiled": compile}
    threads = os.environ.get("OMP_NUM_THREADS", "default")
    fitted = _made("simulated speed-up", lambda: _fitted(traces, requests, built))
    return Comparison(
        traces,
        environment(model=loaded.name, **facts, omp_num_threads=threads),
        tuple(requests),
        bytes_per_token,
        _made("answers", lambda: _answers(expand(given), traces, loaded.decode)),
        (*_made("predictions", lambda: predictions(traces)), *fitted, size),
        failed,
    )


def default_cache(
    requests: Sequence[Request | Rejected],
    scheduler: SchedulerConfig,
    shape: ModelShape | None = None,
    *,
    num_blocks: int | None = None,
    block_size: int = 16,
    prefix_caching: bool = True,
    num_host_blocks: int | None = None,
) -> CacheConfig:
    """Size the KV pool of a comparison; here, and nowhere else, prefix caching is on by default.

    Blocks that fell out of a sliding window are freed if all layers of the model have that window.

    Args:
        requests: The requests to serve.
        scheduler: The limits of a step.
        shape: The model's, or None in the simulator.
        num_blocks: Blocks in the KV pool; by default as many as full seats can ever need.
        block_size: Tokens per block.
        prefix_caching: Share the KV of prompts that begin alike.
        num_host_blocks: Blocks in the host's pool; by default as many as in the KV pool where
            `scheduler.preemption` is "swap", else none.
    """
    if num_blocks is None:
        longest = None if shape is None else shape.max_model_len
        num_blocks = unlimited_cache(requests, scheduler.max_num_seqs, block_size, longest).num_blocks
    if num_host_blocks is None:
        num_host_blocks = num_blocks if scheduler.preemption == "swap" else 0
    is_windowed = shape is not None and shape.num_sliding_layers == shape.num_layers
    window = shape.sliding_window if shape is not None and is_windowed else None
    return CacheConfig(num_blocks, block_size, prefix_caching, num_host_blocks, window)


def predictions(traces: Mapping[str, Trace]) -> list[Prediction]:
    """Predict what the first static and the first other run should have shown, from the output lengths alone.

    The closed forms assume that all requests are there from the start and that memory and the token budget
    never bind; where that is not so, the error says how much it matters. Counts of steps come first, which do
    not depend on the clock; the speed-ups below them do.
    """
    pair = _static_and_other(traces)
    if pair is None:
        return []
    static, other = pair
    lengths = [len(record.tokens) for record in static.served if record.tokens]
    seats = static.scheduler.max_num_seqs
    mean, longest = float(np.mean(lengths)), formulas.expected_max(lengths, seats)
    static_steps = formulas.static_steps(lengths, seats)
    other_steps = formulas.continuous_steps(lengths, seats)
    utilization, speed_up = metrics.utilization(static), metrics.speed_up(static, other)
    endless = "endless queue of these lengths"
    finite = formulas.finite_speed_up(lengths, seats)
    static_use, speed = formulas.static_utilization(mean, longest), formulas.speed_up(mean, longest)
    rows = [
        (f"static: utilization, {endless}, E[X]/E[M_B]", static_use, utilization),
        ("static: utilization, this queue", sum(lengths) / (seats * static_steps), utilization),
        ("static: steps, sum of batch maxima", static_steps, len(static.steps)),
        (f"{other.policy}: steps, list scheduling", other_steps, len(other.steps)),
        ("speed-up in steps, this queue", finite, len(static.steps) / len(other.steps)),
        (f"speed-up, {endless}, E[M_B]/E[X]", speed, speed_up),
        ("speed-up, this queue, equal steps", finite, speed_up),
    ]
    return [Prediction(*row) for row in rows]


def _advice(*arguments: object, both: bool) -> str:
    """Return what to write in the place of a call that compare cannot make sense of."""
    given = ", ".join(reprlib.repr(one)[:60] for one in arguments)
    problem = "both model and" if both else "no model or"
    call = 'compare("chat24", ["static", "fcfs"],'
    order = "the workload comes first, the policies second, and all else by name"
    return f'compare({given}) has {problem} cost; {order}: {call} model="tiny") or {call} cost=Linear(0.01))'


def _show(bar: "tqdm[Any]", record: StepRecord) -> None:
    """Show on a progress bar of requests what a step did."""
    bar.update(len(record.finished))
    bar.set_postfix(running=record.num_running, waiting=record.num_waiting, refresh=False)


def _take_turns(runs: Mapping[str, Run]) -> dict[str, Trace | BaseException]:
    """Serve several runs, a step of one at a time; return the trace or the error of each in their order."""
    ended: dict[str, Trace | BaseException] = {}
    steps = {name: run.steps() for name, run in runs.items()}
    num_rows: Counter[str] = Counter()
    while steps:
        # What is computed is nearly the same in all, so that all are as far and end together.
        name = min(steps, key=num_rows.__getitem__)
        try:
            num_rows[name] += next(steps[name])
        except (Exception, SystemExit) as error:
            ended[name] = runs[name].trace() if isinstance(error, StopIteration) else error
            del steps[name]
    return {name: ended[name] for name in runs}


def _sorted_out(ended: Mapping[str, Trace | BaseException]) -> tuple[dict[str, Trace], dict[str, str]]:
    """Return the traces of the policies, and what the others failed of; raise if all did."""
    traces = {name: one for name, one in ended.items() if isinstance(one, Trace)}
    errors = {name: one for name, one in ended.items() if isinstance(one, BaseException)}
    failed = {name: described(error) for name, error in errors.items()}
    for error in () if traces else errors.values():
        error.add_note("; ".join(f"policy {name!r} failed: {reason}" for name, reason in failed.items()))
        raise error
    for name, reason in failed.items():
        _LOG.warning("policy %r failed, and its run is left out: %s", name, reason)
    return traces, failed


def _made(what: str, make: Callable[[], Iterable[T]]) -> tuple[T, ...]:
    """Return what is made of finished runs; where that fails they are not lost to it, and it is left out."""
    try:
        return tuple(make())
    except Exception as error:
        _LOG.warning("the %s cannot be made, and are left out: %s", what, described(error))
        return ()


def _given(workload: Workload, seed: int) -> tuple[list[Request | Rejected], str]:
    """Return a workload's requests and its label; a file of which no line can be read is refused."""
    if not isinstance(workload, str | os.PathLike):
        requests = listed(workload)
        return requests, f"{len(requests)} requests"
    given, label = load(workload, np.random.default_rng(seed)), Path(workload).name
    errors = [one.error for one in given if isinstance(one, Rejected)]
    if errors and len(errors) == len(given):
        reasons = "; ".join(errors[:_MOST_REASONS])
        raise ValueError(f"workload {label!r}: no line of {len(errors)} can be read: {reasons}")
    return given, label


def _loaded(
    model: "str | LoadedModel", trust_remote_code: bool, device: str | None, dtype: str | None
) -> "LoadedModel":
    from cbresearch import models

    if not isinstance(model, str | models.LoadedModel):
        raise TypeError(f"model is {model!r}; give a name such as 'tiny', or what models.load returned")
    if isinstance(model, str):
        return models.load(model, trust_remote_code=trust_remote_code, **models.placement(device, dtype))
    if device is not None or dtype is not None:
        raise TypeError(f"model {model.name!r} is loaded already; give device and dtype to models.load")
    return model


def _answers(
    given: Requests, traces: Mapping[str, Trace], decode: Callable[[Sequence[int]], str]
) -> Iterator[tuple[str, Mapping[str, str]]]:
    for place, request in enumerate(given):
        records = {name: trace.requests[place] for name, trace in traces.items()}
        if isinstance(request, Request) and all(record.error is None for record in records.values()):
            prompt = request.prompt if isinstance(request.prompt, str) else f"request {request.id}"
            yield prompt, {name: decode(record.tokens) for name, record in records.items()}


def _static_and_other(traces: Mapping[str, Trace]) -> tuple[Trace, Trace] | None:
    """Return the first static run and the first other one that gave out a token, if there are both."""
    first: dict[bool, Trace] = {}
    for trace in traces.values():
        if any(record.tokens for record in trace.served):
            first.setdefault(trace.policy.partition(":")[0] == "static", trace)
    return (first[True], first[False]) if len(first) == 2 else None


def _fitted(
    traces: Mapping[str, Trace], requests: Requests, policies: Sequence[Policy]
) -> Iterator[Prediction]:
    """Fit one step time to the real runs, and let the simulator say how they should compare."""
    pair = _static_and_other(traces)
    if pair is not None and sum(step.duration > 0 for trace in pair for step in trace.steps) >= 3:
        cost = Linear.fit(*pair, context=True)
        by_name = {policy.name: policy for policy in policies}
        again = [predict_run(trace, requests, cost, by_name[trace.policy]) for trace in pair]
        name = "speed-up, simulated with a fitted step time"
        yield Prediction(name, metrics.speed_up(*again), metrics.speed_up(*pair))
