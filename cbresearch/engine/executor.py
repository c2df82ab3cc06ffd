"""Carry out plans on a transformers model, and measure how long they take."""

import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from cbresearch.attention import PagedCache, PagedStep, choose_backend
from cbresearch.config import CacheConfig, ModelShape, SchedulerConfig
from cbresearch.cpu.forward import CompiledForward, NativeForward, is_native, native_threads
from cbresearch.engine.comparison import reject_differing
from cbresearch.engine.detokenizer import Detokenizer
from cbresearch.engine.forward import EagerForward, Forward, GraphForward
from cbresearch.engine.sampler import Sampler, SamplerOutput
from cbresearch.models import LoadedModel, layer_windows
from cbresearch.request import Request
from cbresearch.step import Plan, Scheduled, StepResult

_DEFAULT_POOL_BYTES = 2**30

# A fork has none of the threads that OpenMP has started, and would wait for them for ever.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=functools.partial(torch.set_num_threads, 1))


class ModelExecutor:
    """Run each plan as one flat forward of a real model, and choose each request's tokens as it asks.

    The scheduler owns all bookkeeping; the executor only mirrors each seat's tokens and block table in
    arrays that are written as the plan says. What goes wrong for one request ends that one alone. The model
    is left as it is, and may serve others meanwhile.

    Args:
        loaded: The model.
        scheduler: The limits that the plans obey.
        cache: The KV pool to allocate.
        backend: What computes the attention: "torch", "triton", "native", or None for what suits. "native" is
            C++, with the linear layers in C++ too, for float32 on a CPU; there it suits wherever a C++
            compiler is found. It uses as many threads as PyTorch would (`OMP_NUM_THREADS`,
            `torch.set_num_threads`), and waits for none whose core another process keeps busy.
        compile: Compile the model too, for long runs with the backend "native"; see `CompiledForward`. The
            first forward then takes long, so that `warm_up` is best called first.
        graphs: Capture decode steps as CUDA graphs; see `GraphForward`.
        seed: For what is drawn for requests that have no seed of their own; their ids make them differ.
        clock: Seconds, for the durations.
        fill: Value to fill the KV pools with, for tests; by default they are left uninitialised.

    Raises:
        ValueError: There is no room for the pools, the cache frees blocks that some layer reads, or the
            backend is unknown or cannot serve the model.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        scheduler: SchedulerConfig,
        cache: CacheConfig,
        *,
        backend: str | None = None,
        compile: bool = False,
        graphs: bool = False,
        seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
        fill: float | None = None,
    ) -> None:
        self.loaded = loaded
        model, shape = loaded.model, loaded.shape
        _check_window(loaded.name, shape, cache)
        wanted = "native" if compile else backend
        native = not graphs and is_native(wanted, shape, model.device, model.dtype)
        self.cache = PagedCache(
            shape,
            cache,
            windows=layer_windows(model.config, shape.num_layers),
            backend="native" if native else choose_backend(wanted, shape, model.device),
            dtype=model.dtype,
            device=model.device,
            fill=fill,
        )
        self._run_model: Forward
        if graphs:
            longest = min(cache.num_tokens, shape.max_model_len or cache.num_tokens)
            self._run_model = GraphForward(model, self.cache, scheduler.max_num_seqs, longest)
        elif native:
            self._run_model = CompiledForward(model) if compile else NativeForward(model)
        else:
            self._run_model = EagerForward(model, self.cache)
        is_interpreted = self.cache.backend == "triton" and model.device.type == "cpu"
        self._threads = native_threads if native else _interpreter if is_interpreted else nullcontext
        self._kind = model.device, model.dtype
        self._parts = _parts(model)
        self._clock = clock
        self._num_seats = scheduler.max_num_seqs
        self._token_ids = np.zeros((self._num_seats, 0), dtype=np.int64)
        self._block_tables = np.zeros((self._num_seats, 0), dtype=np.int64)
        self._num_blocks = [0] * self._num_seats
        self._sampler = Sampler(loaded.eos_token_ids, seed)
        self._detokenizers: dict[int, Detokenizer] = {}
        self._step = threading.Lock()
        # A thread that still computes when Python ends would abort the process.
        weakref.finalize(self, _let_no_step_begin, self._step, os.getpid())

    def check(self, request: Request) -> None:
        """Reject a request that the model cannot serve.

        Raises:
            ValueError: The prompt is not token ids, an id (of the prompt, or of those that end the output) is
                outside the vocabulary, or the request is longer than the model's context.
        """
        if not isinstance(request.prompt, tuple):
            raise ValueError(
                f"request {request.id!r}: the prompt is {request.prompt!r}; a model needs token ids "
                "(workloads.resolve_prompts makes them from text or a length)"
            )
        shape = self.loaded.shape
        token = max(*request.prompt, *request.sampling.stop_token_ids, 0)
        if shape.vocab_size is not None and token >= shape.vocab_size:
            raise ValueError(
                f"request {request.id!r}: token id {token} is outside the vocabulary of "
                f"{self.loaded.name!r}, 0 to {shape.vocab_size - 1}; use the model's own tokenizer"
            )
        num_tokens = len(request.prompt) + request.max_tokens
        if shape.max_model_len is not None and num_tokens > shape.max_model_len:
            raise ValueError(
                f"request {request.id!r}: prompt {len(request.prompt)} + max_tokens {request.max_tokens} "
                f"= {num_tokens} tokens, over the {shape.max_model_len} that {self.loaded.name!r} takes; "
                "shorten the prompt or lower max_tokens"
            )

    def warm_up(self, num_seqs: int = 8, num_steps: int = 3) -> None:
        """Compare with the model's own forward, and run decodes, so that no first-time cost is measured.

        Raises:
            ValueError: The model cannot be served right; see `reject_differing`.
        """
        blocks = np.arange(min(num_seqs, self._num_seats, self.cache.config.num_blocks))
        ones = np.ones_like(blocks)
        # Without threads that PyTorch would wait for: the model's own forward is many short operators too.
        with self._threads():
            reject_differing(self.loaded, self.cache, self._run_model)
            for _ in range(num_steps):
                step = PagedStep(self.cache, blocks[:, None], np.zeros_like(ones), ones)
                self._run_model(np.zeros_like(ones), step, blocks)

    @torch.inference_mode()
    def execute(self, plan: Plan) -> StepResult:
        """Carry out one step and time it until its tokens are there, preparation included.

        Raises:
            ValueError: The model was moved to another device or type meanwhile, or was given other weights,
                modules or hooks, which is seen when no earlier request is in the batch.
        """
        # Nothing waits for a daemon thread when Python ends, so that it can be kept from going on there.
        with self._step if threading.current_thread().daemon else nullcontext():
            return self._execute(plan)

    def _execute(self, plan: Plan) -> StepResult:
        began = self._clock()
        model = self.loaded.model
        if (model.device, model.dtype) != self._kind:
            raise ValueError(
                f"model {self.loaded.name!r} was moved to {model.device} and {model.dtype} from "
                f"{self._kind[0]} and {self._kind[1]} while an executor was using it; load it twice"
            )
        # As often as that costs nothing.
        is_fresh = len(plan.admitted) == len(plan.scheduled)
        if is_fresh and list(map(id, _parts(model))) != list(map(id, self._parts)):
            raise ValueError(
                f"model {self.loaded.name!r} was given other weights, modules or hooks while an executor was "
                "using it, which follows only weights that change in place; build a new one"
            )
        if plan.transfers:
            self.cache.transfer(plan.transfers)
        for admission in plan.admitted:
            self._seat(admission.request, admission.seat, admission.output_token_ids)
        for entry in plan.scheduled:
            if entry.new_block_ids:
                self._append_blocks(entry.seat, entry.new_block_ids)
        if not plan.scheduled and not plan.padding:
            # The step only made room.
            return StepResult(self._clock() - began, {})
        with self._threads():
            return self._result(plan, began, *self._sampled(plan))

    def _sampled(self, plan: Plan) -> tuple[dict[int, SamplerOutput], float]:
        """Compute a batch; return what was chosen for each seat, and the seconds that the device took."""
        # A padding row computes its last position over again; what comes of it is thrown away.
        padding = [
            Scheduled(row.request_id, row.seat, row.context_length - 1, 1, False, True, ())
            for row in plan.padding
        ]
        # As `PagedStep` wants them: single queries first, long contexts before short.
        rows = sorted((*plan.scheduled, *padding), key=lambda row: (row.num_tokens > 1, -row.start))
        seats = np.array([row.seat for row in rows])
        num_tokens = np.array([row.num_tokens for row in rows])
        num_blocks = -(-max(row.context_length for row in rows) // self.cache.config.block_size)
        step = PagedStep(
            self.cache,
            self._block_tables[seats, :num_blocks],
            np.array([row.start for row in rows]),
            num_tokens,
            is_stored=np.array([row not in padding for row in rows]) if padding else None,
        )
        token_ids = self._token_ids[np.repeat(seats, num_tokens), step.positions]
        places = np.cumsum(num_tokens)[[row.samples for row in rows]] - 1
        known = {row.seat: self._token_ids[row.seat, : row.context_length] for row in rows if row.samples}
        began = self._clock()
        # A GPU works later than it is told to, so that its own queue has to tell the time.
        events = None
        if self.cache.kv[0].is_cuda:
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
            events[0].record()
        # A step of unfinished prompts samples nothing; it still runs, on one place's logits.
        logits = self._run_model(token_ids, step, places if len(places) else np.zeros(1, dtype=np.int64))
        outputs = self._sampler.choose(logits[: len(places)], known)
        if events is None:
            return outputs, self._clock() - began
        events[1].record()
        events[1].synchronize()
        return outputs, events[0].elapsed_time(events[1]) / 1e3

    def _result(
        self, plan: Plan, began: float, outputs: Mapping[int, SamplerOutput], device_duration: float
    ) -> StepResult:
        tokens, stopped, failed, logprobs = {}, set(), {}, {}
        for entry in plan.scheduled:
            if not entry.samples:
                continue
            seat, request_id = entry.seat, entry.request_id
            token, its_logprobs, error = outputs[seat]
            if token is not None:
                if entry.context_length < self._token_ids.shape[1]:
                    self._token_ids[seat, entry.context_length] = token
                try:
                    if self._stops(seat, token):
                        stopped.add(request_id)
                except Exception as problem:
                    # A tokenizer is another's code, and this request's text may be what it cannot take.
                    error = f"its text could not be decoded: {type(problem).__name__}: {problem}"
            if token is None or error is not None:
                failed[request_id] = (
                    f"request {request_id!r} failed in step {plan.step}, at position "
                    f"{entry.context_length - 1}, on {self.loaded.name!r}: {error}"
                )
                continue
            tokens[request_id] = token
            if its_logprobs is not None:
                logprobs[request_id] = its_logprobs
        duration = self._clock() - began
        return StepResult(duration, tokens, frozenset(stopped), failed, logprobs, device_duration)

    def _stops(self, seat: int, token: int) -> bool:
        """Return whether a new token ends its request's output."""
        if detokenizer := self._detokenizers.get(seat):
            detokenizer.push(token)
            if detokenizer.stopped_by is not None:
                return True
        return self._sampler.ends(seat, token)

    def _seat(self, request: Request, seat: int, output_token_ids: tuple[int, ...]) -> None:
        prompt, sampling = request.prompt, request.sampling
        assert isinstance(prompt, tuple)
        length = len(prompt) + request.max_tokens
        self._token_ids = _widened(self._token_ids, length)
        self._block_tables = _widened(self._block_tables, -(-length // self.cache.config.block_size))
        known = prompt + output_token_ids
        self._token_ids[seat, : len(known)] = known
        self._num_blocks[seat] = 0
        self._sampler.seat(seat, request)
        self._detokenizers.pop(seat, None)
        if sampling.stop:
            decode = self.loaded.decode_for(sampling.stop)
            self._detokenizers[seat] = Detokenizer(decode, sampling.stop, sampling.min_tokens)
            self._detokenizers[seat].push(*output_token_ids)

    def _append_blocks(self, seat: int, block_ids: tuple[int, ...]) -> None:
        held = self._num_blocks[seat]
        self._num_blocks[seat] = held + len(block_ids)
        # A reservation can be longer than its request.
        self._block_tables = _widened(self._block_tables, self._num_blocks[seat])
        self._block_tables[seat, held : self._num_blocks[seat]] = block_ids


def _parts(model: torch.nn.Module) -> list[Any]:
    """Return what computes a model's answers, of which an executor's copy has what was there."""
    kinds = ("_modules", "_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks")
    owned = (part for module in model.modules() for kind in kinds for part in vars(module)[kind].values())
    # Where a user asks for hidden states, transformers hooks each layer, for good and for itself.
    return [part for part in owned if "transformers.utils." not in str(getattr(part, "__module__", ""))]


@functools.cache
def _interpreter() -> threading.Lock:
    """Return what keeps Triton's interpreter, which has one program at a time, to one thread."""
    return threading.Lock()


def default_cache(shape: ModelShape, limits: SchedulerConfig, block_size: int = 16) -> CacheConfig:
    """Return a pool of 1 GiB, or of what full seats can fill at most if that is less.

    Args:
        shape: The model's shape.
        limits: The limits of a step; their seats count.
        block_size: Tokens in a block.
    """
    num_blocks = _DEFAULT_POOL_BYTES // (shape.kv_bytes_per_token * block_size)
    lengths = [length for length in (limits.max_model_len, shape.max_model_len) if length is not None]
    if lengths:
        num_blocks = min(num_blocks, limits.max_num_seqs * -(-min(lengths) // block_size))
    return CacheConfig(max(1, num_blocks), block_size)


def _check_window(name: str, shape: ModelShape, cache: CacheConfig) -> None:
    """Reject to free blocks behind a window that is not, or is less than, what every layer attends to."""
    if cache.sliding_window is None:
        return
    num_whole = shape.num_layers - shape.num_sliding_layers
    if num_whole or shape.sliding_window is None:
        reading = f"{num_whole} of {shape.num_layers} layers of {name!r} attend to the whole context"
    elif cache.sliding_window < shape.sliding_window:
        reading = f"the layers of {name!r} attend to {shape.sliding_window} tokens"
    else:
        return
    raise ValueError(
        f"CacheConfig.sliding_window is {cache.sliding_window}, but {reading}: blocks that they still read "
        "would be freed; leave it None"
    )


def _widened(array: np.ndarray, width: int) -> np.ndarray:
    """Return the array with at least `width` columns, at least doubled if it has to grow."""
    if width <= array.shape[1]:
        return array
    return np.pad(array, ((0, 0), (0, max(width, 2 * array.shape[1]) - array.shape[1])))


def _let_no_step_begin(step: threading.Lock, process: int) -> None:
    """Wait for the step in progress, for half a minute at most; a fork has none."""
    if os.getpid() == process:
        step.acquire(timeout=30)
