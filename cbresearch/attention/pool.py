"""The tensors of the paged KV cache on two tiers, and the copies of blocks within and between them."""

import math
from collections.abc import Iterable, Iterator, Sequence

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
        if shape.latent_dim is None:
            self.key_dim = shape.head_dim
            slot = (shape.num_kv_heads, shape.head_dim + (shape.value_head_dim or shape.head_dim))
        else:
            self.key_dim = shape.latent_dim
            slot = (1, shape.latent_dim)
        on_device = (shape.num_layers, config.num_tokens, *slot)
        on_host = (config.num_host_blocks, shape.num_layers, config.block_size, *slot)
        try:
            self.kv = [
                torch.empty(on_device[1:], dtype=dtype, device=device) for _ in range(shape.num_layers)
            ]
        except RuntimeError as error:
            raise _no_room("num_blocks", config.num_blocks, config, on_device, dtype, device) from error
        try:
            # Only page-locked memory is copied to and from a GPU at full speed.
            pinned = bool(config.num_host_blocks) and self.kv[0].is_cuda
            self.host = torch.empty(on_host, dtype=dtype, pin_memory=pinned)
        except RuntimeError as error:
            raise _no_room(
                "num_host_blocks", config.num_host_blocks, config, on_host, dtype, "the host"
            ) from error
        self._blocks = [layer.unflatten(0, (config.num_blocks, config.block_size)) for layer in self.kv]
        if fill is not None:
            for pool in (*self.kv, self.host):
                pool.fill_(fill)

    @property
    def num_bytes(self) -> int:
        """Return the bytes that the device's pool occupies."""
        return sum(layer.numel() * layer.element_size() for layer in self.kv)

    @property
    def num_host_bytes(self) -> int:
        """Return the bytes that the host's pool occupies."""
        return self.host.numel() * self.host.element_size()

    def block_views(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return views of a layer's keys and values, `[num_blocks, block_size, num_kv_heads, head size]`.

        With latent attention the keys are the latents, and the values have no elements.
        """
        blocks = self._blocks[layer]
        return blocks[..., : self.key_dim], blocks[..., self.key_dim :]

    def transfer(self, transfers: Iterable[Transfer]) -> None:
        """Copy blocks of all layers, with the outcome of one copy after the other in the given order.

        Raises:
            ValueError: A kind of transfer is unknown.
            IndexError: A block id is outside its pool.
        """
        block_bytes = self.num_bytes // self.config.num_blocks
        for kind, sources, targets in _runs(transfers, max(1, _STAGED_BYTES // block_bytes)):
            for ids, pool in ((sources, kind == "swap_in"), (targets, kind == "swap_out")):
                size = self.config.num_host_blocks if pool else self.config.num_blocks
                # Tensors take negative ids too, counted from the end: a freed block's null id is one.
                if min(ids) < 0 or max(ids) >= size:
                    raise IndexError(f"a {kind!r} names a block outside 0 to {size - 1}: {ids}")
            if kind == "copy":
                self._copy(sources, targets)
            elif kind == "swap_out":
                self._swap_out(sources, targets)
            else:
                self._swap_in(sources, targets)

    def _copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        read, write = self._on_device(sources), self._on_device(targets)
        for blocks in self._blocks:
            blocks.index_copy_(0, write, blocks.index_select(0, read))

    def _swap_out(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        read = self._on_device(sources)
        moved = torch.stack([blocks.index_select(0, read) for blocks in self._blocks], dim=1)
        # On a GPU the copies queue up behind one another, so that waiting for each is not needed: only
        # other copies ever read the host's pool.
        for place, target in enumerate(targets):
            self.host[target].copy_(moved[place], non_blocking=True)

    def _swap_in(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        write = self._on_device(targets)
        moved = self.kv[0].new_empty((len(sources), *self.host.shape[1:]))
        for place, source in enumerate(sources):
            moved[place].copy_(self.host[source], non_blocking=True)
        for layer, blocks in enumerate(self._blocks):
            blocks.index_copy_(0, write, moved[:, layer])

    def _on_device(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor(ids, device=self.kv[0].device)


def _runs(transfers: Iterable[Transfer], most: int) -> Iterator[tuple[str, list[int], list[int]]]:
    """Cut transfers into runs, as long as may be done at once but at most `most`: (kind, sources, targets).

    A run reads all of its sources before it writes. So it ends before a block that it would write twice, and
    before a copy that reads what the run writes; that a later copy overwrites a source does no harm.
    """
    kind, sources, targets = "", [], []
    written: set[int] = set()
    for transfer in transfers:
        if transfer.kind not in ("copy", "swap_out", "swap_in"):
            raise ValueError(f"unknown kind of transfer {transfer.kind!r}")
        depends = transfer.target in written or (transfer.kind == "copy" and transfer.source in written)
        if sources and (transfer.kind != kind or depends or len(sources) == most):
            yield kind, sources, targets
            sources, targets, written = [], [], set()
        kind = transfer.kind
        sources.append(transfer.source)
        targets.append(transfer.target)
        written.add(transfer.target)
    if sources:
        yield kind, sources, targets


def _no_room(
    name: str,
    num_blocks: int,
    config: CacheConfig,
    size: tuple[int, ...],
    dtype: torch.dtype,
    where: torch.device | str,
) -> ValueError:
    num_bytes = math.prod(size) * dtype.itemsize
    return ValueError(
        f"a pool of {num_blocks} blocks of {config.block_size} tokens needs {num_bytes:,} bytes, which "
        f"{where} does not have; lower {name}"
    )
