"""What prompts that begin alike save: blocks held once, tokens found, hits of a finite cache.

Letters: b tokens per block, P a prompt, n its parallel samples, x the output tokens of each, S the tokens
with which prompts begin alike, U those of each alone, N requests, C blocks of a cache.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from cbresearch.formulas.checks import count

__all__ = [
    "popularity_hits", "prefix_hit_rate", "prefix_hit_tokens", "reuse_depths", "sample_blocks",
    "sample_copies", "sample_prefill_tokens",
]  # fmt: skip


def sample_blocks(
    prompt: int, num_outputs: int, num_samples: int, block_size: int, *, shared: bool = True
) -> int:
    """Return the blocks that n samples of one prompt hold, ⌊(P−1)/b⌋ + n·(⌈(P+x−1)/b⌉ − ⌊(P−1)/b⌋).

    Each has P + x − 1 tokens in the cache, for the newest is not fed back yet. The prompt's last token is
    computed by every sample, since the answer begins with its logits; so the full blocks before it are shared
    and all else is private. Without sharing it is n·⌈(P+x−1)/b⌉.
    Source: vLLM (PagedAttention), SOSP'23, section 4.4 (parallel sampling); the count is ours.

    Args:
        prompt: Prompt length P in tokens.
        num_outputs: Output tokens x that each sample has.
        num_samples: Samples n.
        block_size: Tokens per block b.
        shared: Whether the prompt's blocks are shared at all.
    """
    tokens = count("prompt", prompt) + count("num_outputs", num_outputs) - 1
    size, samples = count("block_size", block_size), count("num_samples", num_samples)
    common = (prompt - 1) // size if shared else 0
    return common + samples * (-(-tokens // size) - common)


def sample_copies(prompt: int, num_samples: int, block_size: int) -> int:
    """Return the blocks that n samples of one prompt copy on write: n − 1, or 0 if b divides P − 1.

    The block into which the prompt's last token goes is shared with what stands before it. All samples but
    the last to write need a copy; where the last token begins a block, nothing is written that is shared.
    Source: vLLM (PagedAttention), SOSP'23, section 4.4; the count is ours.

    Args:
        prompt: Prompt length P in tokens.
        num_samples: Samples n.
        block_size: Tokens per block b.
    """
    copies = count("num_samples", num_samples) - 1
    return copies if (count("prompt", prompt) - 1) % count("block_size", block_size) else 0


def sample_prefill_tokens(prompt: int, num_samples: int, *, shared: bool = True) -> int:
    """Return the prompt tokens that n samples compute: P + n − 1 if they share, otherwise n·P.

    The first computes the prompt, and each of the others its last token. Source: definition.

    Args:
        prompt: Prompt length P in tokens.
        num_samples: Samples n.
        shared: Whether the samples share the prompt.
    """
    tokens, samples = count("prompt", prompt), count("num_samples", num_samples)
    return tokens + samples - 1 if shared else samples * tokens


def prefix_hit_tokens(shared: int, unique: int, block_size: int) -> int:
    """Return the prompt tokens that a request finds cached, ⌊S/b⌋·b.

    Only full blocks are found, and of a prompt that is all cached the last token is computed again: with
    U = 0 it is ⌊(S−1)/b⌋·b. Source: block hashes as in vLLM's prefix caching; the count is ours.

    Args:
        shared: Tokens S with which the prompts begin alike.
        unique: Tokens U behind them that no other prompt has, 0 or more.
        block_size: Tokens per block b.
    """
    tokens, size = count("shared", shared), count("block_size", block_size)
    if unique:
        count("unique", unique)
    return (tokens if unique else tokens - 1) // size * size


def prefix_hit_rate(shared: int, unique: int, block_size: int, num_requests: int | None = None) -> float:
    """Return the share of prompt tokens found cached, ⌊S/b⌋·b/(S+U) · (1 − 1/N).

    The first of N requests finds nothing; without N there is no end of requests. Source: own derivation; it
    assumes that nothing is evicted and that the first is computed before the second comes.

    Args:
        shared: Tokens S with which the prompts begin alike.
        unique: Tokens U behind them that no other prompt has.
        block_size: Tokens per block b.
        num_requests: Requests N, or None for no end of them.
    """
    found = prefix_hit_tokens(shared, unique, block_size)
    warm = 1.0 if num_requests is None else 1 - 1 / count("num_requests", num_requests)
    return found / (shared + unique) * warm


def reuse_depths(chains: Iterable[Sequence[int]]) -> npt.NDArray[np.int64]:
    """Return how deep in the list of recently used blocks each block lies when it is asked for again.

    A cache of C blocks that evicts the least recently used, a request's tail before its head, and that holds
    no request but the newest, always has the C blocks that were used last. So it hits just the references
    with a depth of at most C, and one pass tells of every size: `(depths <= C).sum()` hits, if C is at least
    the longest chain. Blocks are listed as they stand when the request comes, since what it hits is pinned
    before room is made for the rest.
    Source: stack distances (Mattson et al., IBM Systems Journal 9, 1970), with a whole request as one step.

    Args:
        chains: The blocks of each request, head first, in the order of service. A number stands for a block
            together with all blocks before it.

    Returns:
        The depths, from 1, of all references but the first of each block.

    Raises:
        ValueError: A chain has a block twice.
    """
    requests = [tuple(chain) for chain in chains]
    num_times = sum(map(len, requests))
    # A binary indexed tree over the times of use: 1 at the last use of each block, so that sums count blocks.
    tree = [0] * (num_times + 1)
    last_used: dict[int, int] = {}
    depths: list[int] = []
    now = 0
    for chain in requests:
        if len(set(chain)) != len(chain):
            raise ValueError(f"chains holds one with a block twice, of {len(chain)} blocks")
        for block in chain:
            if block in last_used:
                older, place = 0, last_used[block] - 1
                while place:
                    older += tree[place]
                    place &= place - 1
                depths.append(len(last_used) - older)
        # The head is used last, for the tail is evicted before it.
        for block in reversed(chain):
            now += 1
            for place, change in ((last_used.get(block, 0), -1), (now, 1)):
                while 0 < place <= num_times:
                    tree[place] += change
                    place += place & -place
            last_used[block] = now
    return np.array(depths, dtype=np.int64)


def popularity_hits(references: npt.ArrayLike, num_blocks: int) -> float:
    """Return the hits of a cache of C blocks if popularity were all: Σ (nᵢ − 1)·(1 − exp(−nᵢT)).

    Block i is asked for nᵢ times, at random moments. It is evicted once it has not been asked for during T,
    in which C different blocks are asked for: Σ (1 − exp(−nᵢT)) = C. Each block's first reference is a miss.
    Source: Che, Tung and Wang, IEEE JSAC 20(7), 2002, less the first references. It says nothing of when a
    block is asked for, so it is far off where requests for one block follow each other.

    Args:
        references: How often each block is asked for, nᵢ.
        num_blocks: Blocks C of the cache.
    """
    size = count("num_blocks", num_blocks)
    times = np.asarray(references, dtype=np.float64)
    if times.ndim != 1 or not times.size or not (np.isfinite(times) & (times >= 1)).all():
        raise ValueError(f"references has shape {times.shape}; give a list of counts of at least 1")
    if size >= times.size:
        return float((times - 1).sum())
    # Blocks asked for equally often count alike, and there are few such numbers.
    times, blocks = np.unique(times, return_counts=True)
    low, high = 0.0, 1.0
    while blocks @ -np.expm1(-times * high) < size:
        high *= 2
    # The number of blocks in the cache grows with T, and 100 halvings use up the digits of a float.
    for _ in range(100):
        window = (low + high) / 2
        too_short = blocks @ -np.expm1(-times * window) < size
        low, high = (window, high) if too_short else (low, window)
    return float((blocks * (times - 1)) @ -np.expm1(-times * high))
