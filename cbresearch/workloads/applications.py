"""Presets by application: what a service of each kind is asked, from the statistics of public traces.

`load("chat:rate=8,n=500", rng)` or `chat(rng, rate=8, n=500)`. Every preset has the same options:

- `rate`: requests (or sessions) per second on average; `batch` has none;
- `n`: how many requests (or sessions);
- `size`: factor of all lengths in tokens; 0.05 makes a workload that a small model serves.

The statistics of a trace are its minimum, p50, p90, p99, maximum and mean, which `Quantiles` reproduces.
"""

import math
from collections.abc import Sequence

import numpy as np

from cbresearch.request import Request
from cbresearch.workloads.arrivals import AtOnce, Gamma, OnOff, Poisson
from cbresearch.workloads.lengths import Coupled, Fixed, Geometric, Lognormal, Quantiles
from cbresearch.workloads.mix import Prefixes, make_requests
from cbresearch.workloads.sessions import Exponential, Sessions, conversations

TOKEN_SECONDS = 0.03
"""Nominal seconds of an output token, by which the turns of `multi_turn` and `agents` are timed."""


def chat(
    rng: np.random.Generator, *, rate: float = 5.53, n: int = 200, size: float = 1.0
) -> Sequence[Request]:
    """Send chat requests as to Azure's conversation service: prompts of mean 1,155 tokens, outputs 211.

    Source: Azure LLM inference trace 2023, conversation: 5.530 requests a second, coefficient of variation
    of the gaps 1.094, correlation of prompt and output -0.11. Assumed: gaps are gamma distributed, and the
    rate does not drift (there it does: the variance of the arrivals in a minute is 20.6 times their mean).
    """
    lengths = Coupled(
        _table(size, 1154.70, 2, 1020, 2734.5, 4142, 14050),
        _table(size, 211.13, 7, 129, 424, 601, 1000),
        correlation=-0.13,
    )
    return make_requests(Gamma(rate, 1 / 1.094**2), lengths, n, rng)


def code(
    rng: np.random.Generator, *, rate: float = 2.567, n: int = 200, size: float = 1.0
) -> Sequence[Request]:
    """Send code completions as to Azure's coding service, in bursts: prompts of mean 2,048, outputs 28.

    Source: Azure LLM inference trace 2023, code: 2.567 requests a second; the variance of the arrivals in 1,
    10 and 60 seconds is 13.2, 71.3 and 160.5 times their mean. Assumed: bursts are those of an interrupted
    Poisson process, fitted to the latter two (it says 10.2 for 1 second); prompt and output are independent
    (their correlation is 0.001). Burst and pause stay as long when `rate` is changed.
    """
    lengths = Coupled(
        _table(size, 2047.85, 3, 1469, 5187.6, 7436, 7437), _table(size, 27.88, 6, 13, 55, 251.5, 1899)
    )
    return make_requests(OnOff(rate, on_seconds=12.7, off_seconds=47.2), lengths, n, rng)


def rag(rng: np.random.Generator, *, rate: float = 1.0, n: int = 64, size: float = 1.0) -> Sequence[Request]:
    """Send questions about a few long documents, which prompts begin with: mean 15,325 tokens, outputs 149.

    Source: Mooncake's synthetic trace: mean prompt and outputs; an endless cache finds 64 % of its blocks.
    Assumed: the shared part is 64 % of the mean prompt, one of 16 documents of equal length whose popularity
    follows Zipf's law with exponent 1; the rest, passages and a question, is lognormal with sigma 1 and up
    to 16,384 tokens; arrivals are Poisson at 1 a second. A cache finds less than 64 % of the tokens, since
    each document has to be read once.
    """
    mean, shared = 15325.48, 0.64
    own = Lognormal(mean * (1 - shared), 1.0, 16384).scaled(size)
    documents = Prefixes(16, Fixed(max(1, round(mean * shared * size))), exponent=1.0)
    outputs = _table(size, 149.12, 1, 69, 389, 768, 893)
    return make_requests(Poisson(rate), (own, outputs), n, rng, prefixes=documents)


def summarization(
    rng: np.random.Generator, *, rate: float = 1.0, n: int = 200, size: float = 1.0
) -> Sequence[Request]:
    """Send articles to be summarized: prompts of mean 2,588 tokens, outputs of 291, the longer the shorter.

    Source: Vidur's arxiv_summarization trace, which keeps what has at most 4,096 tokens in all: hence the
    correlation of -0.46 between prompt and output. Assumed: arrivals, which it lacks, are Poisson at 1 a
    second; the coupling is Gaussian, so that 2 % of the requests have more than 4,096 tokens.
    """
    lengths = Coupled(
        _table(size, 2588.08, 1, 2730, 3702, 3933, 4054),
        _table(size, 291.43, 5, 167, 372, 3271, 4056),
        correlation=-0.65,
    )
    return make_requests(Poisson(rate), lengths, n, rng)


def multi_turn(
    rng: np.random.Generator, *, rate: float = 0.5, n: int = 32, size: float = 1.0
) -> Sequence[Request]:
    """Send chats of several turns, each prompt being all that was said before, as a reading user goes on.

    Source: outputs as in Mooncake's conversation trace (mean 343 tokens). Assumed: everything else. A chat
    has 4 turns on average (geometric), a system prompt of 512 tokens that all share, texts of mean 512
    (lognormal, sigma 1, up to 8,192), pauses of 20 seconds on average (exponential), and ends before 131,072
    tokens; chats begin in a Poisson process. Arrivals are nominal, see `Sessions.flat`;
    `multi_turn_sessions` returns users who really wait.
    """
    return multi_turn_sessions(rng, rate=rate, n=n, size=size).flat(TOKEN_SECONDS)


def multi_turn_sessions(
    rng: np.random.Generator, *, rate: float = 0.5, n: int = 32, size: float = 1.0
) -> Sessions:
    """Return the chats of `multi_turn` for a closed loop: `start()` gives the requests and `then`."""
    return conversations(
        Poisson(rate),
        n,
        rng,
        turns=Geometric(4.0),
        texts=Lognormal(512, 1.0, 8192).scaled(size),
        outputs=_table(size, 342.62, 1, 350, 597, 1118.5, 2000),
        think=Exponential(20.0),
        prefixes=Prefixes(1, Fixed(max(1, round(512 * size)))),
        max_context=math.ceil(131_072 * size),
    )


def agents(
    rng: np.random.Generator, *, rate: float = 0.2, n: int = 16, size: float = 1.0
) -> Sequence[Request]:
    """Send the steps of agents: a long shared prompt of tools, short outputs, and tool results in between.

    Source: none; everything is assumed. An agent takes 8 steps on average (geometric, at least 2) behind one
    of 4 prompts of 2,048 tokens; a tool's result has 1,024 tokens on average (lognormal, sigma 1, up to
    16,384) and takes 2 seconds (exponential); a step's output has 182 (lognormal, sigma 1, up to 4,096); it
    ends before 131,072 tokens; agents begin in a Poisson process. For comparison: of the blocks of
    Mooncake's tool and agent trace, a cache finds 59 % (Qin et al., FAST'25). Arrivals are nominal, see
    `Sessions.flat`; `agents_sessions` returns agents who really wait.
    """
    return agents_sessions(rng, rate=rate, n=n, size=size).flat(TOKEN_SECONDS)


def agents_sessions(
    rng: np.random.Generator, *, rate: float = 0.2, n: int = 16, size: float = 1.0
) -> Sessions:
    """Return the agents of `agents` for a closed loop: `start()` gives the requests and `then`."""
    return conversations(
        Poisson(rate),
        n,
        rng,
        turns=Geometric(8.0, minimum=2),
        texts=Lognormal(1024, 1.0, 16384).scaled(size),
        outputs=Lognormal(182, 1.0, 4096).scaled(size),
        think=Exponential(2.0),
        prefixes=Prefixes(4, Fixed(max(1, round(2048 * size)))),
        max_context=math.ceil(131_072 * size),
    )


def batch(rng: np.random.Generator, *, n: int = 256, size: float = 1.0) -> Sequence[Request]:
    """Send an offline job, all at once: prompts of mean 161 tokens and outputs of 338, as in ShareGPT.

    Source: the means in the vLLM paper (Kwon et al., SOSP 2023), and an output coefficient of variation of
    0.87 that its figures imply. Assumed: both are lognormal (sigma 1 and 0.75) and at most 1,024 and 2,048
    tokens. It has no `rate`: nobody waits for an answer.
    """
    prompts = Lognormal(161.31, 1.0, 1024).scaled(size)
    outputs = Lognormal(337.99, 0.75, 2048).scaled(size)
    return make_requests(AtOnce(), (prompts, outputs), n, rng)


def _table(
    size: float, mean: float, minimum: float, p50: float, p90: float, p99: float, maximum: float
) -> Quantiles:
    """Return the distribution with one row of a trace's statistics, all times `size`."""
    points = ((0, minimum), (0.5, p50), (0.9, p90), (0.99, p99), (1, maximum))
    return Quantiles(mean, points).scaled(size)
