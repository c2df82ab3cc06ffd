"""Carry out plans on a transformers model, and measure how long they take."""

import time
from collections.abc import Callable

import numpy as np
import torch

from cbresearch.attention import PagedCache, PagedStep, batch_order, choose_backend
from cbresearch.config import CacheConfig, ModelShape, SchedulerConfig
from cbresearch.engine.forward import CompiledForward, EagerForward, Forward, GraphForward
from cbresearch.engine.sampler import Choice, Row, Sampler
from cbresearch.engine.text import TextStream
from cbresearch.engine.timing import DeviceTimer
from cbresearch.formulas import kv_bytes_per_token
from cbresearch.models import LoadedModel, layer_windows
from cbresearch.request import Request
from cbresearch.step import Plan, Scheduled, StepResult

_DEFAULT_POOL_BYTES = 2**30


class ModelExecutor:
    """Run each plan as one flat forward of a real model, and choose each request's tokens as it asks.

    The scheduler owns all bookkeeping; the executor only mirrors each seat's tokens and block table in
    arrays that are written as the plan says. What goes wrong for one request ends that one alone.

    Args:
        loaded: The model.
        scheduler: The limits that the plans obey.
        cache: The KV pool to allocate.
        backend: What computes the attention: "torch", "triton", "native" (C++), or None for what suits.
        compile: Compile the model, for float32 on a CPU; see `CompiledForward`. The first forward then takes
            long, so that `warm_up` is best called first.
        graphs: Capture decode steps as CUDA graphs; see `GraphForward`.
        seed: For what is drawn for requests that have no seed of their own; their ids make them differ.
        clock: Seconds, for the durations.
        fill: Value to fill the KV pools with, for tests; by default they are left uninitialised.

    Raises:
        ValueError: There is no room for the pools, or the cache frees blocks that some layer reads.
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
        model = loaded.model
        _check_window(loaded.name, loaded.shape, cache)
        self.cache = PagedCache(
            loaded.shape,
            cache,
            windows=layer_windows(model.config, loaded.shape.num_layers),
            backend=choose_backend("native" if compile else backend, loaded.shape, model.device, model.dtype),
            dtype=model.dtype,
            device=model.device,
            fill=fill,
        )
        self._run_model: Forward
        if graphs:
            longest = min(cache.num_tokens, loaded.shape.max_model_len or cache.num_tokens)
            self._run_model = GraphForward(model, self.cache, scheduler.max_num_seqs, longest)
        else:
            self._run_model = (CompiledForward if compile else EagerForward)(model, self.cache)
        self._clock = clock
        self._block_size = cache.block_size
        self._token_ids = np.zeros((scheduler.max_num_seqs, 0), dtype=np.int64)
        self._block_tables = np.zeros((scheduler.max_num_seqs, 0), dtype=np.int64)
        self._num_blocks = [0] * scheduler.max_num_seqs
        self._sampler = Sampler(scheduler.max_num_seqs, loaded.eos_token_ids, seed)
        self._stops_from = [0] * scheduler.max_num_seqs
        self._texts: list[TextStream | None] = [None] * scheduler.max_num_seqs
        self._timer = DeviceTimer(model.device, clock)

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
        if shape.vocab_size is not None:
            for token in (*request.prompt, *request.sampling.stop_token_ids):
                if not 0 <= token < shape.vocab_size:
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
        """Run a few forwards before anything is measured, so that no first-time cost is in the numbers.

        Raises:
            ValueError: The model has layers that do not attend through the paged cache.
        """
        mark = 12345.0
        for layer in self.cache.kv:
            layer[0].fill_(mark)
        num_seqs = min(num_seqs, len(self._num_blocks), self.cache.config.num_blocks)
        blocks, ones = np.arange(num_seqs), np.ones(num_seqs, dtype=np.int64)
        for _ in range(num_steps):
            step = PagedStep(self.cache, blocks[:, None], np.zeros_like(ones), ones)
            self._forward(step, ones, blocks)
        untouched = [place for place, layer in enumerate(self.cache.kv) if bool((layer[0] == mark).all())]
        if untouched:
            raise ValueError(
                f"layers {untouched} of {self.loaded.name!r} do not attend through the paged cache; only "
                "models that use transformers' attention interface in every layer can be served"
            )

    @torch.inference_mode()
    def execute(self, plan: Plan) -> StepResult:
        """Carry out one step and time it until its tokens are there, preparation included."""
        began = self._clock()
        if plan.transfers:
            self.cache.transfer(plan.transfers)
        for admission in plan.admitted:
            self._seat(admission.request, admission.seat, admission.output_token_ids)
        for entry in plan.scheduled:
            if entry.new_block_ids:
                self._append_blocks(entry.seat, entry.new_block_ids)
        rows = [(entry.seat, entry.start, entry.num_tokens, entry.samples, True) for entry in plan.scheduled]
        # A padding row computes its last position over again; what comes of it is thrown away.
        rows += [(row.seat, row.context_length - 1, 1, True, False) for row in plan.padding]
        if not rows:
            # The step only made room.
            return StepResult(self._clock() - began, {})
        seats, starts, num_tokens, samples, is_stored = np.array(rows, dtype=np.int64).T
        order = batch_order(starts, num_tokens)
        seats, starts, num_tokens, samples = seats[order], starts[order], num_tokens[order], samples[order]
        num_blocks = -(-int((starts + num_tokens).max()) // self._block_size)
        step = PagedStep(
            self.cache,
            self._block_tables[seats, :num_blocks],
            starts,
            num_tokens,
            is_stored[order].astype(bool) if plan.padding else None,
        )
        token_ids = self._token_ids[np.repeat(seats, num_tokens), step.positions]
        sampled = np.flatnonzero(samples)
        ends = zip(seats[sampled].tolist(), (starts + num_tokens)[sampled].tolist(), strict=True)
        wanted = [Row(seat, self._token_ids[seat, :length]) for seat, length in ends]
        self._timer.start()
        logits = self._forward(step, token_ids, np.cumsum(num_tokens)[sampled] - 1)
        choices = self._sampler.choose(logits, wanted)
        device_duration = self._timer.stop()
        by_seat = {row.seat: choice for row, choice in zip(wanted, choices, strict=True)}
        return self._result(plan, by_seat, began, device_duration)

    def _result(
        self, plan: Plan, choices: dict[int, Choice], began: float, device_duration: float
    ) -> StepResult:
        tokens, stopped, failed, logprobs = {}, [], {}, {}
        for entry in plan.scheduled:
            if not entry.samples:
                continue
            seat, request_id = entry.seat, entry.request_id
            token, its_logprobs, error = choices[seat]
            is_stopped = False
            if token is not None:
                if entry.context_length < self._token_ids.shape[1]:
                    self._token_ids[seat, entry.context_length] = token
                try:
                    is_stopped = self._stops(entry, token)
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
            if is_stopped:
                stopped.append(request_id)
        return StepResult(
            self._clock() - began, tokens, frozenset(stopped), failed, logprobs, device_duration
        )

    def _stops(self, entry: Scheduled, token: int) -> bool:
        """Return whether a new token ends its request's output."""
        text = self._texts[entry.seat]
        if text is not None:
            text.push(token, entry.context_length + 1 >= self._stops_from[entry.seat])
        is_stopped = text is not None and text.stopped_by is not None
        return is_stopped or self._sampler.ends(entry.seat, token)

    @torch.inference_mode()
    def _forward(self, step: PagedStep, token_ids: np.ndarray, keep: np.ndarray) -> torch.Tensor:
        """Return the logits behind each kept place of the batch, `[num_kept, vocab_size]`."""
        # A step of unfinished prompts samples nothing; it still runs, on one place's logits.
        places = keep if len(keep) else np.array([len(token_ids) - 1])
        return self._run_model(token_ids, step, places)[: len(keep)]

    def _seat(self, request: Request, seat: int, output_token_ids: tuple[int, ...]) -> None:
        prompt = request.prompt
        assert isinstance(prompt, tuple)
        length = len(prompt) + request.max_tokens
        self._token_ids = _widened(self._token_ids, length)
        self._block_tables = _widened(self._block_tables, -(-length // self._block_size))
        known = prompt + output_token_ids
        self._token_ids[seat, : len(known)] = known
        self._num_blocks[seat] = 0
        self._sampler.seat(seat, request)
        self._texts[seat] = None
        if request.sampling.stop:
            self._stops_from[seat] = len(prompt) + request.sampling.min_tokens
            text = self._texts[seat] = TextStream(self.loaded.decode, request.sampling.stop)
            for place, token in enumerate(output_token_ids, start=len(prompt) + 1):
                text.push(token, place >= self._stops_from[seat])

    def _append_blocks(self, seat: int, block_ids: tuple[int, ...]) -> None:
        held = self._num_blocks[seat]
        # A reservation can be longer than its request.
        self._block_tables = _widened(self._block_tables, held + len(block_ids))
        self._block_tables[seat, held : held + len(block_ids)] = block_ids
        self._num_blocks[seat] = held + len(block_ids)


def default_cache(shape: ModelShape, limits: SchedulerConfig, block_size: int = 16) -> CacheConfig:
    """Return a pool of 1 GiB, or of what full seats can fill at most if that is less.

    Args:
        shape: The model.
        limits: The seats.
        block_size: Tokens in a block.
    """
    num_blocks = _DEFAULT_POOL_BYTES // (kv_bytes_per_token(shape) * block_size)
    lengths = [length for length in (limits.max_model_len, shape.max_model_len) if length is not None]
    if lengths:
        num_blocks = min(num_blocks, limits.max_num_seqs * -(-min(lengths) // block_size))
    return CacheConfig(max(1, num_blocks), block_size)


def _check_window(name: str, shape: ModelShape, cache: CacheConfig) -> None:
    """Reject to free blocks behind a window that is not, or is less than, what every layer attends to."""
    if cache.sliding_window is None:
        return
    num_whole = shape.num_layers - shape.num_sliding_layers
    if shape.sliding_window is None or num_whole:
        raise ValueError(
            f"CacheConfig.sliding_window is {cache.sliding_window}, but {num_whole} of {shape.num_layers} "
            f"layers of {name!r} attend to the whole context, so that no block may be freed; leave it None"
        )
    if cache.sliding_window < shape.sliding_window:
        raise ValueError(
            f"CacheConfig.sliding_window is {cache.sliding_window}, but the layers of {name!r} attend to "
            f"{shape.sliding_window} tokens; blocks that they still read would be freed"
        )


def _widened(array: np.ndarray, width: int) -> np.ndarray:
    """Return the array with at least `width` columns, at least doubled if it has to grow."""
    if width <= array.shape[1]:
        return array
    grown = np.zeros((array.shape[0], max(width, 2 * array.shape[1])), dtype=array.dtype)
    grown[:, : array.shape[1]] = array
    return grown
