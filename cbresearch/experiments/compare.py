"""The same requests under several policies, with an environment stamp and tidy results."""

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cbresearch import formulas, metrics
from cbresearch.config import CacheConfig, ModelShape, SchedulerConfig
from cbresearch.costs import CostModel, Linear
from cbresearch.experiments.environment import environment, progress_bar
from cbresearch.policies import Policy, get
from cbresearch.request import Refusal, Request, expand
from cbresearch.scheduler import Scheduler
from cbresearch.serve import Executor, serve
from cbresearch.simulator import CostExecutor, unlimited_cache, simulate
from cbresearch.trace import StepRecord, Trace, write_columns, write_json
from cbresearch.workloads import load, resolve_prompts

if TYPE_CHECKING:
    import pandas as pd
    from tqdm.auto import tqdm

    from cbresearch.models import LoadedModel

Workload = str | os.PathLike[str] | Sequence[Request | Refusal]
Policies = str | Policy | Sequence[str | Policy]


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
        slo: What was promised to the clients, or None.
        price_per_hour: What an hour of the machine costs, or None.
        currency: Of the price.
    """

    traces: Mapping[str, Trace]
    environment: Mapping[str, str]
    requests: tuple[Request | Refusal, ...]
    bytes_per_token: int | None = None
    answers: tuple[tuple[str, Mapping[str, str]], ...] = ()
    predictions: tuple[Prediction, ...] = ()
    slo: metrics.Slo | None = None
    price_per_hour: float | None = None
    currency: str = "USD"

    @property
    def kpi(self) -> list[metrics.KpiRow]:
        """Return the key figures, one column a policy."""
        return metrics.kpi_table(
            self.traces,
            self.bytes_per_token,
            metrics.Reporting(self.slo, self.price_per_hour, self.currency),
        )

    def frame(self) -> "pd.DataFrame":
        """Return the metrics as a tidy pandas frame: one row a policy and quantity."""
        import pandas as pd

        rows = [
            {"policy": policy, "metric": name, "value": value}
            for policy, trace in self.traces.items()
            for name, value in self._summary(trace).items()
        ]
        return pd.DataFrame(rows)

    def kpi_frame(self) -> "pd.DataFrame":
        """Return the key figures as a pandas frame of texts, one column a policy."""
        import pandas as pd

        rows = {
            f"{row.name} ({row.unit})" if row.unit else row.name: [
                f"{value} (n={row.sizes[place]})" if row.sizes else value
                for place, value in enumerate(row.values)
            ]
            for row in self.kpi
        }
        return pd.DataFrame.from_dict(rows, orient="index", columns=list(self.traces))

    def prediction_frame(self) -> "pd.DataFrame":
        """Return predicted and measured values with their relative error, as a pandas frame."""
        import pandas as pd

        return pd.DataFrame(
            [(row.predicted, row.measured, row.relative_error) for row in self.predictions],
            index=[row.quantity for row in self.predictions],
            columns=["predicted", "measured", "relative error"],
        )

    def write(self, folder: str | Path) -> None:
        """Write `results.json`, `requests.csv` and `steps.csv` into a folder, each whole or not at all."""
        folder = Path(folder)
        runs = [{**trace.to_json(), "metrics": self._summary(trace)} for trace in self.traces.values()]
        predictions = [{**row._asdict(), "relative_error": row.relative_error} for row in self.predictions]
        write_json(
            folder / "results.json",
            {"environment": dict(self.environment), "runs": runs, "predictions": predictions},
        )
        requests = {policy: trace.request_columns for policy, trace in self.traces.items()}
        write_columns(folder / "requests.csv", requests, "policy")
        steps = {policy: trace.step_columns for policy, trace in self.traces.items()}
        write_columns(folder / "steps.csv", steps, "policy")

    def _summary(self, trace: Trace) -> dict[str, float | int | None]:
        return metrics.summary(
            trace, self.bytes_per_token, metrics.Reporting(self.slo, self.price_per_hour, self.currency)
        )


def compare(
    model: "str | LoadedModel",
    workload: Workload,
    policies: Policies = ("static", "fcfs"),
    *,
    scheduler: SchedulerConfig | None = None,
    block_size: int = 16,
    num_blocks: int | None = None,
    prefix_caching: bool = True,
    num_host_blocks: int | None = None,
    seed: int = 0,
    trust_remote_code: bool = False,
    slo: metrics.Slo | None = None,
    price_per_hour: float | None = None,
    currency: str = "USD",
) -> Comparison:
    """Serve a workload on a real model, once under each policy.

    Args:
        model: A model's name for `models.load`, or a model loaded already.
        workload: A preset, a workload file, or requests.
        policies: Policy names, options included, or policies that have served nobody yet.
        scheduler: The limits of a step.
        block_size: Tokens per KV block.
        num_blocks: Blocks in the KV pool; by default as many as full seats can ever need.
        prefix_caching: Share the KV of prompts that begin alike.
        num_host_blocks: Blocks in the host's pool; by default as many as in the KV pool where
            `scheduler.preemption` is "swap", else none.
        seed: Seed of the workload.
        trust_remote_code: Allow code that ships with the weights to run.
        slo: What was promised to the clients, for goodput.
        price_per_hour: What an hour of the machine costs, for the cost of tokens.
        currency: Of the price.

    Raises:
        ValueError: A name is unknown or a limit out of range.
    """
    built = _built(policies)
    _check_price(price_per_hour)
    given = _given(workload, seed)
    from cbresearch import models
    from cbresearch.engine import ModelExecutor

    loaded = models.load(model, trust_remote_code=trust_remote_code) if isinstance(model, str) else model
    rng = np.random.default_rng(seed)
    requests = expand(resolve_prompts(given, loaded.encode, loaded.shape.vocab_size, rng))
    scheduler = scheduler or SchedulerConfig()
    cache = _cache(scheduler, block_size, num_blocks, prefix_caching, num_host_blocks, requests, loaded.shape)
    pool_bytes = 0

    def executor() -> Executor:
        nonlocal pool_bytes
        built = ModelExecutor(loaded, scheduler, cache, seed=seed)
        built.warm_up()
        pool_bytes = built.cache.num_bytes
        return built

    traces = _run(requests, built, scheduler, cache, executor)
    bytes_per_token = formulas.kv_bytes_per_token(loaded.shape)
    return Comparison(
        traces=traces,
        environment=environment(
            model=loaded.name,
            workload=_label(workload),
            seed=seed,
            device=str(loaded.model.device),
            dtype=str(loaded.model.dtype),
            omp_num_threads=os.environ.get("OMP_NUM_THREADS", "default"),
        ),
        requests=tuple(requests),
        bytes_per_token=bytes_per_token,
        answers=_answers(expand(given), traces, loaded.decode),
        predictions=(
            *predictions(traces),
            *_fitted(traces, requests),
            Prediction("KV pool (bytes)", bytes_per_token * cache.num_tokens, pool_bytes),
        ),
        slo=slo,
        price_per_hour=price_per_hour,
        currency=currency,
    )


def compare_simulated(
    workload: Workload,
    policies: Policies = ("static", "fcfs"),
    *,
    cost: CostModel,
    scheduler: SchedulerConfig | None = None,
    block_size: int = 16,
    num_blocks: int | None = None,
    prefix_caching: bool = True,
    num_host_blocks: int | None = None,
    seed: int = 0,
    slo: metrics.Slo | None = None,
    price_per_hour: float | None = None,
    currency: str = "USD",
) -> Comparison:
    """Serve a workload in the simulator, once under each policy.

    Args:
        workload: A preset, a workload file, or requests; text counts as an estimate of its length.
        policies: Policy names, options included, or policies that have served nobody yet.
        cost: The step time.
        scheduler: The limits of a step.
        block_size: Tokens per KV block.
        num_blocks: Blocks in the KV pool; by default as many as full seats can ever need.
        prefix_caching: Share the KV of prompts that begin alike.
        num_host_blocks: Blocks in the host's pool; by default as many as in the KV pool where
            `scheduler.preemption` is "swap", else none.
        seed: Seed of the workload.
        slo: What was promised to the clients, for goodput.
        price_per_hour: What an hour of the machine costs, for the cost of tokens.
        currency: Of the price.

    Raises:
        ValueError: A name is unknown or a limit out of range.
    """
    built = _built(policies)
    _check_price(price_per_hour)
    requests = expand(resolve_prompts(_given(workload, seed), None, None, np.random.default_rng(seed)))
    scheduler = scheduler or SchedulerConfig()
    cache = _cache(scheduler, block_size, num_blocks, prefix_caching, num_host_blocks, requests, None)
    traces = _run(requests, built, scheduler, cache, lambda: CostExecutor(cost))
    return Comparison(
        traces=traces,
        environment=environment(workload=_label(workload), seed=seed, cost=repr(cost)),
        requests=tuple(requests),
        predictions=tuple(predictions(traces)),
        slo=slo,
        price_per_hour=price_per_hour,
        currency=currency,
    )


def predictions(traces: Mapping[str, Trace]) -> list[Prediction]:
    """Predict what the first static and the first other run should have shown, from the output lengths alone.

    The closed forms assume that all requests are there from the start and that memory and the token budget
    never bind; where that is not so, the error says how much it matters.
    """
    pair = _static_and_other(traces)
    if pair is None:
        return []
    static, other = pair
    lengths = [len(record.tokens) for record in static.served]
    seats = static.scheduler.max_num_seqs
    mean, longest = float(np.mean(lengths)), formulas.expected_max(lengths, seats)
    measured = metrics.speed_up(static, other)
    return [
        Prediction(
            "static: utilization, endless queue of these lengths, E[X]/E[M_B]",
            formulas.static_utilization(mean, longest),
            metrics.utilization(static),
        ),
        Prediction(
            "static: utilization, this queue",
            sum(lengths) / (seats * formulas.static_steps(lengths, seats)),
            metrics.utilization(static),
        ),
        Prediction(
            "static: steps, sum of batch maxima", formulas.static_steps(lengths, seats), len(static.steps)
        ),
        Prediction(
            f"{other.policy}: steps, list scheduling",
            formulas.continuous_steps(lengths, seats),
            len(other.steps),
        ),
        Prediction(
            "speed-up, endless queue of these lengths, E[M_B]/E[X]",
            formulas.speed_up(mean, longest),
            measured,
        ),
        Prediction("speed-up, this queue, equal steps", formulas.finite_speed_up(lengths, seats), measured),
    ]


def _run(
    requests: Sequence[Request | Refusal],
    policies: Sequence[Policy],
    scheduler: SchedulerConfig,
    cache: CacheConfig,
    executor: Callable[[], Executor],
) -> dict[str, Trace]:
    num_requests = sum(isinstance(request, Request) for request in requests)
    traces = {}
    for policy in policies:
        with progress_bar(num_requests, policy.name, "request") as bar:

            def advance(record: StepRecord, bar: "tqdm[Any]" = bar) -> None:
                bar.update(len(record.finished))
                bar.set_postfix(running=record.num_running, waiting=record.num_waiting, refresh=False)

            mechanism = Scheduler(policy, scheduler, cache)
            built = executor()
            # A simulation takes many steps at once, and is over before a bar is of use.
            is_simulated = isinstance(built, CostExecutor)
            traces[policy.name] = serve(requests, mechanism, built, on_step=None if is_simulated else advance)
            bar.update(num_requests - bar.n if is_simulated else 0)
    return traces


def _built(policies: Policies) -> list[Policy]:
    """Build the policies, and see that each has a name of its own."""
    given = [policies] if isinstance(policies, str | Policy) else list(policies)
    if not given:
        raise ValueError("no policy is given; name at least one, such as 'fcfs'")
    built = [get(policy) for policy in given]
    names = [policy.name for policy in built]
    for place, name in enumerate(names):
        if name in names[:place]:
            raise ValueError(f"policy {name!r} is given twice; a run is known by its policy's name")
    return built


def _check_price(price_per_hour: float | None) -> None:
    """Refuse before the work what would be refused after it."""
    if price_per_hour is not None and not 0 <= price_per_hour < math.inf:
        raise ValueError(f"price_per_hour is {price_per_hour!r}; give a finite price of 0 or more")


def _given(workload: Workload, seed: int) -> list[Request | Refusal]:
    if isinstance(workload, str | os.PathLike):
        return load(workload, np.random.default_rng(seed))
    return list(workload)


def _label(workload: Workload) -> str:
    return Path(workload).name if isinstance(workload, str | os.PathLike) else f"{len(workload)} requests"


def _cache(
    scheduler: SchedulerConfig,
    block_size: int,
    num_blocks: int | None,
    prefix_caching: bool,
    num_host_blocks: int | None,
    requests: Sequence[Request | Refusal],
    shape: ModelShape | None,
) -> CacheConfig:
    """Size the pools; whatever falls out of a window that all layers have is freed."""
    pool = (
        unlimited_cache(requests, scheduler.max_num_seqs, block_size, shape.max_model_len if shape else None)
        if num_blocks is None
        else CacheConfig(num_blocks, block_size)
    )
    if num_host_blocks is None:
        num_host_blocks = pool.num_blocks if scheduler.preemption == "swap" else 0
    is_windowed = shape is not None and shape.num_sliding_layers == shape.num_layers
    return replace(
        pool,
        prefix_caching=prefix_caching,
        num_host_blocks=num_host_blocks,
        sliding_window=shape.sliding_window if shape is not None and is_windowed else None,
    )


def _answers(
    given: Sequence[Request | Refusal], traces: Mapping[str, Trace], decode: Callable[[Sequence[int]], str]
) -> tuple[tuple[str, Mapping[str, str]], ...]:
    answers = []
    for place, request in enumerate(given):
        records = {name: trace.requests[place] for name, trace in traces.items()}
        if isinstance(request, Request) and all(record.error is None for record in records.values()):
            prompt = request.prompt if isinstance(request.prompt, str) else f"request {request.id}"
            answers.append((prompt, {name: decode(record.tokens) for name, record in records.items()}))
    return tuple(answers)


def _static_and_other(traces: Mapping[str, Trace]) -> tuple[Trace, Trace] | None:
    """Return the first static run and the first other one that served somebody, if there are both."""
    ran = [trace for trace in traces.values() if trace.steps]
    static = next((trace for trace in ran if trace.policy.partition(":")[0] == "static"), None)
    other = next((trace for trace in ran if trace.policy.partition(":")[0] != "static"), None)
    return None if static is None or other is None else (static, other)


def _fitted(traces: Mapping[str, Trace], requests: Iterable[Request | Refusal]) -> list[Prediction]:
    """Fit one step time to the real runs, and let the simulator say how they should compare."""
    pair = _static_and_other(traces)
    if pair is None or sum(step.duration > 0 for trace in pair for step in trace.steps) < 3:
        return []
    cost = Linear.fit(*pair, context=True)
    lengths = {record.id: len(record.tokens) for record in pair[0].served}
    known = [
        replace(request, output_length=lengths[request.id])
        for request in requests
        if isinstance(request, Request) and request.id in lengths
    ]
    again = [
        simulate(known, trace.policy, cost=cost, scheduler=trace.scheduler, cache=trace.cache)
        for trace in pair
    ]
    return [
        Prediction(
            "speed-up, simulated with a fitted step time", metrics.speed_up(*again), metrics.speed_up(*pair)
        )
    ]
