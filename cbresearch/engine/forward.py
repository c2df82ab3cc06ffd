"""Run a step's tokens through the model in PyTorch: as it is, or as captured graphs."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from cbresearch.attention import LatentCache, PagedCache, PagedStep, StaticStep, paged_copy, paged_logits

# Token ids, the step, and the places whose logits are wanted, to logits `[num places, vocab]`.
Forward = Callable[[np.ndarray, PagedStep, np.ndarray], Tensor]


class EagerForward:
    """Call a model as transformers wrote it, on a copy of its modules."""

    def __init__(self, model: PreTrainedModel, cache: PagedCache) -> None:
        self._model = paged_copy(model)
        self._has_latents = cache.latent_dim is not None
        # transformers 5.24 renamed the argument.
        takes_cache = "cache" in inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if takes_cache else "past_key_values"

    @torch.inference_mode()
    def __call__(self, token_ids: np.ndarray, step: PagedStep, places: np.ndarray) -> Tensor:
        """Return the logits `[num places, vocab]` behind some places of a step."""
        device = self._model.device
        # Such models hand over what there is to cache before they attend.
        latents = {self._cache_argument: LatentCache(step)} if self._has_latents else {}
        ids, positions, keep = (
            torch.from_numpy(array).to(device) for array in (token_ids, step.positions, places)
        )
        return paged_logits(self._model, ids[None], positions[None], step, logits_to_keep=keep, **latents)


class GraphForward(EagerForward):
    """Replay decode steps as CUDA graphs, captured once for each of a few batch sizes.

    A step is padded to the next size. Steps with prompt tokens, and larger ones, run as they are. Weights
    that change in place are followed; those that are moved in memory are not. On a CPU, where there is
    nothing to capture, a replay runs the same function on the same tensors again.

    Args:
        model: The model.
        cache: The pool; its attention runs in Triton.
        max_num_seqs: The largest batch.
        max_context: Tokens of the longest context that may come.
        num_splits: Pieces that each context is cut into; by default as many as fill the device.

    Raises:
        ValueError: The attention does not run in Triton.
    """

    def __init__(
        self, model: PreTrainedModel, cache: PagedCache,
        max_num_seqs: int, max_context: int, num_splits: int | None = None,
    ) -> None:  # fmt: skip
        if cache.backend != "triton":
            raise ValueError(
                f"graphs replay Triton's kernels, and the attention backend is {cache.backend!r}; leave "
                "graphs out, or take the backend 'triton'"
            )
        super().__init__(model, cache)
        sizes = sorted({*(2**n for n in range(max_num_seqs.bit_length())), max_num_seqs})
        self._pool: Any = None
        self._graphs: dict[int, tuple[StaticStep, Callable[[], Tensor]]] = {}
        # The largest first, so that the others fit into its memory.
        for size in reversed(sizes):
            step = StaticStep(cache, size, max_context, num_splits)
            self._graphs[size] = step, self._capture(step)

    @torch.inference_mode()
    def __call__(self, token_ids: np.ndarray, step: PagedStep, places: np.ndarray) -> Tensor:
        """Return the logits `[num places, vocab]` behind some places of a step."""
        num = len(token_ids)
        sizes = [size for size in self._graphs if size >= num]
        if num > len(step.starts) or not sizes:
            return super().__call__(token_ids, step, places)
        static, replay = self._graphs[min(sizes)]
        static.fill(token_ids, step)
        logits = replay()
        return logits[torch.from_numpy(places).to(logits.device)]

    def _run(self, step: StaticStep) -> Tensor:
        return paged_logits(self._model, step.token_ids, step.positions, step)

    @torch.inference_mode()
    def _capture(self, step: StaticStep) -> Callable[[], Tensor]:
        if step.token_ids.device.type != "cuda":
            return lambda: self._run(step)
        # What is compiled or allocated at a first call must not fall into the graph.
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._run(step)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Another engine's thread may allocate meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = self._run(step)
        self._pool = graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay
