"""Batching disciplines: when requests may join a batch and which phase goes first."""

from collections.abc import Iterator
from itertools import islice

from cbresearch.checks import Size
from cbresearch.policies.base import Policy, Proposal, View, in_turn, joining, queued, whole
from cbresearch.policies.servers import Sarathi
from cbresearch.request import RequestState


class Static(Policy):
    """Request-level batching, as in FasterTransformer or `generate` on a padded batch.

    The seats are filled only when all are empty. All prompts are computed before any request decodes, and a
    finished request keeps its seat, its blocks and its row until the longest request is done. A batch that a
    small token budget fills over several steps ends early if all its requests so far are done. Such a server
    reserves memory for the longest output, which is left to `CacheConfig.reservation`.

    Args:
        release: Let finished rows leave at once; no request joins in their place.
        wait: Seconds for which a batch is gathered after its first request arrives, unless it is full before.
    """

    name = "static"
    source = "FasterTransformer; the baseline of Orca (OSDI'22)"
    fast_forward = True
    joins_running_batch = False

    def __init__(self, release: bool = False, wait: Size = 0.0) -> None:
        self.pads_finished_rows = not release
        self.wait = wait

    def begin(self) -> None:
        """Start without a batch to fill."""
        self._joining: list[RequestState] = []

    def wakes(self, view: View) -> float | None:
        """Wait for the batch to fill, or for its time to be up."""
        gathered = list(islice(queued(view), view.max_num_seqs))
        if not self.wait or len(gathered) == view.max_num_seqs:
            return None
        return min(request.arrival for request in gathered) + self.wait

    def propose(self, view: View) -> Iterator[Proposal]:
        """Compute the prompts of a batch that is being filled; decode once it is closed."""
        if not view.running:
            self._joining = list(islice(queued(view), view.max_num_seqs))
        yield from whole([request for request in view.running if request.is_prefill])
        yield from whole([request for request in self._joining if request.seat is None])
        # Resumed with budget left: what has no seat yet did not fit the pool, so the batch is closed.
        self._joining = []
        if view.token_budget == view.max_num_batched_tokens:
            yield from whole(in_turn(view))


class SplitFuse(Sarathi):
    """Fill each step to the token budget with split and composed prompts, in the order of `sarathi`."""

    name = "splitfuse"
    source = "Dynamic SplitFuse (DeepSpeed-FastGen, 2024)"
    fast_forward = True


class PrefillFirst(Policy):
    """Prompts before decodes, never both in one step; decodes starve for as long as prompts come.

    As in vLLM v0, no prompt is scheduled while a request is swapped out, and a decode waits for every prompt
    that finds a seat and blocks: its wait grows with their number.
    """

    name = "prefill_first"
    source = "vLLM v0 (SOSP'23), without its watermark"
    fast_forward = True

    def propose(self, view: View) -> Iterator[Proposal]:
        """Propose prompts; decodes only if no prompt could be scheduled."""
        yield from whole([request for request in view.running if request.is_prefill])
        if not any(True for _ in view.swapped):
            yield from joining(view, view.waiting)
        if view.token_budget == view.max_num_batched_tokens:
            yield from whole(in_turn(view))
            yield from joining(view, view.swapped)
