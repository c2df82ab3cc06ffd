"""Carry out plans on a transformers model, and measure how long they take."""

import inspect
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from cbresearch.attention import LatentCache, PagedCache, PagedStep, batch_order, choose_backend, paged_model
from cbresearch.config import CacheConfig, ModelShape, SchedulerConfig
from cbresearch.models import LoadedModel, layer_windows
from cbresearch.plan import Plan, StepResult
from cbresearch.request import Request


class ModelExecutor:
    """Run each plan as one flat forward of a real model; decoding is greedy.

    The scheduler owns all bookkeeping; the executor only mirrors each seat's tokens and block table in
    arrays that are written as the plan says.

    Args:
        loaded: The model.
        scheduler: The limits that the plans obey.
        cache: The KV pool to allocate.
        backend: What computes the attention: "torch", "triton", or None for what suits the device.
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
            backend=choose_backend(backend, loaded.shape, model.device),
            dtype=model.dtype,
            device=model.device,
            fill=fill,
        )
        # transformers 5.24 renamed the argument.
        takes_cache = "cache" in inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if takes_cache else "past_key_values"
        self._clock = clock
        self._block_size = cache.block_size
        self._token_ids = np.zeros((scheduler.max_num_seqs, 0), dtype=np.int64)
        self._block_tables = np.zeros((scheduler.max_num_seqs, 0), dtype=np.int64)
        self._num_blocks = [0] * scheduler.max_num_seqs
        self._eos: list[frozenset[int]] = [frozenset()] * scheduler.max_num_seqs

    def check(self, request: Request) -> None:
        """Refuse a request that the model cannot serve.

        Raises:
            ValueError: The prompt is not token ids, an id is outside the vocabulary, or the request is longer
                than the model's context.
        """
        if not isinstance(request.prompt, tuple):
            raise ValueError(
                f"request {request.id!r}: the prompt is {request.prompt!r}; a model needs token ids "
                "(workloads.resolve_prompts makes them from text or a length)"
            )
        shape = self.loaded.shape
        if shape.vocab_size is not None:
            for token in request.prompt:
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
            step = PagedStep.build(self.cache, blocks[:, None], np.zeros_like(ones), ones)
            self._forward(step, ones, blocks)
        untouched = [place for place, layer in enumerate(self.cache.kv) if bool((layer[0] == mark).all())]
        if untouched:
            raise ValueError(
                f"layers {untouched} of {self.loaded.name!r} do not attend through the paged cache; only "
                "models that use transformers' attention interface in every layer can be served"
            )

    def execute(self, plan: Plan) -> StepResult:
        """Carry out one step and time it, preparation included.

        Raises:
            FloatingPointError: The model returned NaN or infinite logits.
        """
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
        step = PagedStep.build(
            self.cache,
            self._block_tables[seats, :num_blocks],
            starts,
            num_tokens,
            is_stored[order].astype(bool) if plan.padding else None,
        )
        token_ids = self._token_ids[np.repeat(seats, num_tokens), step.positions]
        sampled = np.flatnonzero(samples)
        new_tokens = self._forward(step, token_ids, np.cumsum(num_tokens)[sampled] - 1)

        by_seat = dict(zip(seats[sampled].tolist(), new_tokens, strict=True))
        tokens, stopped = {}, []
        for entry in plan.scheduled:
            if not entry.samples:
                continue
            seat = entry.seat
            token = by_seat[seat]
            if token is None:
                raise FloatingPointError(
                    f"the model {self.loaded.name!r} returned logits that are not finite for request "
                    f"{entry.request_id!r} in step {plan.step}, at position {entry.context_length - 1}; "
                    "its weights or its dtype are at fault, so the run stops"
                )
            tokens[entry.request_id] = token
            if entry.context_length < self._token_ids.shape[1]:
                self._token_ids[seat, entry.context_length] = token
            if token in self._eos[seat]:
                stopped.append(entry.request_id)
        return StepResult(self._clock() - began, tokens, frozenset(stopped))

    @torch.inference_mode()
    def _forward(self, step: PagedStep, token_ids: np.ndarray, keep: np.ndarray) -> Sequence[int | None]:
        """Return the greedy token behind each kept place of the batch, or None where it is not finite."""
        model = self.loaded.model
        device = model.device
        # A step of unfinished prompts samples nothing; it still runs, on one place's logits.
        places = keep if len(keep) else np.array([len(token_ids) - 1])
        # Other models hand the attention function what there is to cache.
        latents = {} if self.cache.latent_dim is None else {self._cache_argument: LatentCache(step)}
        with paged_model(model):
            logits = model(
                input_ids=torch.from_numpy(token_ids)[None].to(device),
                position_ids=torch.from_numpy(step.positions)[None].to(device),
                use_cache=False,
                logits_to_keep=torch.from_numpy(places).to(device),
                paged=step,
                **latents,
            ).logits[0, : len(keep)]
        best = logits.argmax(-1)
        finite = logits.gather(-1, best[:, None])[:, 0].isfinite()
        return [token if fine else None for token, fine in zip(best.tolist(), finite.tolist(), strict=True)]

    def _seat(self, request: Request, seat: int, output_token_ids: tuple[int, ...]) -> None:
        prompt = request.prompt
        assert isinstance(prompt, tuple)
        length = len(prompt) + request.max_tokens
        self._token_ids = _widened(self._token_ids, length)
        self._block_tables = _widened(self._block_tables, -(-length // self._block_size))
        known = prompt + output_token_ids
        self._token_ids[seat, : len(known)] = known
        self._num_blocks[seat] = 0
        self._eos[seat] = frozenset() if request.sampling.ignore_eos else self.loaded.eos_token_ids

    def _append_blocks(self, seat: int, block_ids: tuple[int, ...]) -> None:
        held = self._num_blocks[seat]
        # A contiguous reservation has more blocks than its request can come to fill.
        self._block_tables = _widened(self._block_tables, held + len(block_ids))
        self._block_tables[seat, held : held + len(block_ids)] = block_ids
        self._num_blocks[seat] = held + len(block_ids)


def _check_window(name: str, shape: ModelShape, cache: CacheConfig) -> None:
    """Refuse to free blocks behind a window that is not, or is less than, what every layer attends to."""
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
