"""The tensors of the paged KV cache on two tiers, and the copies of blocks within and between them."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from cbresearch.config import CacheConfig, ModelShape
from cbresearch.step import Transfer

# Bytes that are on their way at once; more of them leave the processor's caches and take longer.
_STAGED_BYTES = 2**23


class PagedCache:
    """Hold the keys and values of all layers in blocks.

    `kv[layer]` is `[num_blocks * block_size, num_kv_heads, key_dim + value_dim]`: a slot holds one token's
    keys and values side by side, so that one gather brings both. With multi-head latent attention a slot
    holds one vector for all heads instead, and `kv[layer]` is `[num_blocks * block_size, 1, latent_dim]`.

    `host` is `[num_host_blocks, num_layers, block_size, num_kv_heads, key_dim + value_dim]`, the pool of the
    second tier: its blocks hold all layers together, so that a block moves in one piece.

    Args:
        shape: The model's layers, KV heads and head sizes.
        config: Blocks in the two pools and tokens per block.
        windows: Tokens that each layer attends to at most, None for the whole context; what a layer itself
            asks for goes first. Empty if no layer is windowed.
        backend: What computes the attention, "torch" or "triton" (see `choose_backend`).
        dtype: Element type.
        device: Where the first pool lies.
        fill: Value to fill the pools with; None leaves them uninitialised, since nothing is read unwritten.

    Raises:
        ValueError: There is no room for a pool.
    """

    def __init__(
        self,
        shape: ModelShape,
        config: CacheConfig,
        *,
        windows: Sequence[int | None] = (),
        backend: str = "torch",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        fill: float | None = None,
    ) -> None:
        self.config = config
        self.backend = backend
        self.windows = tuple(windows) or (None,) * shape.num_layers
        self.latent_dim = shape.latent_dim
        self.num_key_elements = shape.num_kv_heads * shape.head_dim
        self._key_dim = shape.latent_dim or shape.head_dim
        value_dim = 0 if shape.latent_dim else shape.value_head_dim or shape.head_dim
        slot = (1 if shape.latent_dim else shape.num_kv_heads, self._key_dim + value_dim)
        token_bytes = shape.num_layers * math.prod(slot) * dtype.itemsize
        with _room_for("num_blocks", config.num_blocks, config.block_size, token_bytes, device):
            layer = (config.num_tokens, *slot)
            self.kv = [torch.empty(layer, dtype=dtype, device=device) for _ in range(shape.num_layers)]
        with _room_for("num_host_blocks", config.num_host_blocks, config.block_size, token_bytes, "the host"):
            # Only page-locked memory is copied to and from a GPU at full speed.
            pinned = bool(config.num_host_blocks) and self.kv[0].is_cuda
            blocks = (config.num_host_blocks, shape.num_layers, config.block_size, *slot)
            self.host = torch.empty(blocks, dtype=dtype, pin_memory=pinned)
        self._blocks = [layer.view(config.num_blocks, config.block_size, *slot) for layer in self.kv]
        if fill is not None:
            for pool in (*self.kv, self.host):
                pool.fill_(fill)

    @property
    def num_bytes(self) -> int:
        """Return the bytes that the device's pool occupies."""
        return sum(layer.nbytes for layer in self.kv)

    @property
    def num_host_bytes(self) -> int:
        """Return the bytes that the host's pool occupies."""
        return self.host.nbytes

    def block_views(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return views of a layer's keys and values, `[num_blocks, block_size, num_kv_heads, head size]`.

        With latent attention the keys are the latents, and the values have no elements.
        """
        blocks = self._blocks[layer]
        return blocks[..., : self._key_dim], blocks[..., self._key_dim :]

    def transfer(self, transfers: Iterable[Transfer]) -> None:
        """Copy blocks of all layers, with the outcome of one copy after the other in the given order.

        Raises:
            ValueError: A kind of transfer is unknown.
            IndexError: A block id is outside its pool.
        """
        block_bytes = self.num_bytes // self.config.num_blocks
        for run in _runs(transfers, max(1, _STAGED_BYTES // block_bytes)):
            kind = run[0].kind
            sources, targets = [copy.source for copy in run], [copy.target for copy in run]
            for ids, pool in ((sources, kind == "swap_in"), (targets, kind == "swap_out")):
                size = self.config.num_host_blocks if pool else self.config.num_blocks
                # Tensors take negative ids too, counted from the end: a freed block's null id is one.
                if min(ids) < 0 or max(ids) >= size:
                    raise IndexError(f"a {kind!r} names a block outside 0 to {size - 1}: {ids}")
            read, write = (torch.tensor(ids, device=self.kv[0].device) for ids in (sources, targets))
            # On a GPU the copies queue up behind one another, so that waiting for each is not needed:
            # only other copies ever read the host's pool.
            if kind == "swap_in":
                moved = self.kv[0].new_empty((len(sources), *self.host.shape[1:]))
                for place, source in enumerate(sources):
                    moved[place].copy_(self.host[source], non_blocking=True)
            else:
                moved = torch.stack([blocks.index_select(0, read) for blocks in self._blocks], dim=1)
            if kind == "swap_out":
                for place, target in enumerate(targets):
                    self.host[target].copy_(moved[place], non_blocking=True)
            else:
                for layer, blocks in enumerate(self._blocks):
                    blocks.index_copy_(0, write, moved[:, layer])


def _runs(transfers: Iterable[Transfer], most: int) -> Iterator[list[Transfer]]:
    """Cut transfers into runs of one kind, as long as may be done at once but at most `most`.

    A run reads all of its sources before it writes. So it ends before a block that it would write twice, and
    before a copy that reads what the run writes; that a later copy overwrites a source does no harm.
    """
    run: list[Transfer] = []
    written: set[int] = set()
    for transfer in transfers:
        if transfer.kind not in ("copy", "swap_out", "swap_in"):
            raise ValueError(f"unknown kind of transfer {transfer.kind!r}")
        depends = transfer.target in written or (transfer.kind == "copy" and transfer.source in written)
        if run and (transfer.kind != run[0].kind or depends or len(run) == most):
            yield run
            run, written = [], set()
        run.append(transfer)
        written.add(transfer.target)
    if run:
        yield run


@contextmanager
def _room_for(
    name: str, num_blocks: int, block_size: int, token_bytes: int, where: torch.device | str
) -> Iterator[None]:
    """Say what does not fit where, and the name of the setting to lower, when an allocation fails."""
    try:
        yield
    except RuntimeError as error:
        raise ValueError(
            f"a pool of {num_blocks} blocks of {block_size} tokens needs "
            f"{num_blocks * block_size * token_bytes:,} bytes, which {where} does not have; lower {name}"
        ) from error
