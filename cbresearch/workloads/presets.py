"""The workloads that are known by name: small ones, and what a service of each kind is asked.

`load("chat:rate=8,n=500", rng)` or `chat(rng, rate=8, n=500)`. The presets by application, from `chat` on,
have the same options:

- `rate`: requests (or sessions) per second on average; `batch` has none;
- `n`: how many requests (or sessions);
- `size`: factor of all lengths in tokens; 0.05 makes a workload that a small model serves.
"""

import math
import random
from collections.abc import Callable, Mapping
from importlib.resources import files
from inspect import getdoc
from types import MappingProxyType
from typing import Any

from cbresearch.workloads.arrivals import AtOnce, Gamma, OnOff, Poisson
from cbresearch.workloads.common import Requests, Rng
from cbresearch.workloads.lengths import Coupled, Fixed, Geometric, Lognormal, Quantiles
from cbresearch.workloads.readers import read
from cbresearch.workloads.requests import Prefixes, bundled, make_requests
from cbresearch.workloads.sessions import Exponential, Sessions, conversations

TOKEN_SECONDS = 0.03
"""Nominal seconds of an output token, by which the turns of `multi_turn` and `agents` are timed."""

# Tokens by trace: mean, minimum, p50, p90, p99 and maximum.
_STATISTICS: Mapping[str, tuple[float, ...]] = {
    "azure_conv prompts": (1154.70, 2, 1020, 2734.5, 4142, 14050),
    "azure_conv outputs": (211.13, 7, 129, 424, 601, 1000),
    "azure_code prompts": (2047.85, 3, 1469, 5187.6, 7436, 7437),
    "azure_code outputs": (27.88, 6, 13, 55, 251.5, 1899),
    "arxiv_summarization prompts": (2588.08, 1, 2730, 3702, 3933, 4054),
    "arxiv_summarization outputs": (291.43, 5, 167, 372, 3271, 4056),
    "mooncake_conversation outputs": (342.62, 1, 350, 597, 1118.5, 2000),
    "mooncake_synthetic outputs": (149.12, 1, 69, 389, 768, 893),
}


def chat24(rng: Rng) -> Requests:
    """Send 24 real prompts of mixed length at time 0 and ask for 8 to 96 output tokens each (mean 34).

    The prompts are plain user texts, without a chat template. Answers may end early.
    """
    content = files("cbresearch").joinpath("data", "chat24.jsonl").read_bytes()
    return read(content, "workload")[0]


def classic60(rng: Rng) -> Requests:
    """Send 60 requests of 1 prompt token at time 0, with 4 to 12 output tokens each, always the same.

    The output lengths are `random.randint(4, 12)` after `random.seed(2024)`: the textbook example.
    """
    source = random.Random(2024)
    return bundled([1] * 60, [source.randint(4, 12) for _ in range(60)], [0.0] * 60)


def lognormal128(rng: Rng) -> Requests:
    """Send 128 requests at time 0, with lognormal prompts (mean 62) and outputs (mean 54, at most 384).

    The logarithm's standard deviation is 0.6 for the prompts (at most 256) and 1 for the outputs.
    """
    prompts = Lognormal(62, 0.6, 256, by_inversion=False)(rng, 128)
    outputs = Lognormal(54, 1.0, 384, by_inversion=False)(rng, 128)
    return bundled(prompts.tolist(), outputs.tolist(), [0.0] * 128)


def poisson64(rng: Rng) -> Requests:
    """Send 64 requests, 4 a second on average, with lognormal prompts (mean 48) and outputs (mean 32).

    The requests ask for about 128 output tokens a second during some 16 seconds. Prompts have at most 192
    tokens and outputs 128; the logarithm's standard deviation is 0.6 and 0.8.
    """
    arrivals = Poisson(4.0)(rng, 64)
    prompts = Lognormal(48, 0.6, 192, by_inversion=False)(rng, 64)
    outputs = Lognormal(32, 0.8, 128, by_inversion=False)(rng, 64)
    return bundled(prompts.tolist(), outputs.tolist(), arrivals.tolist())


def chat(rng: Rng, *, rate: float = 5.53, n: int = 200, size: float = 1.0) -> Requests:
    """Send chat requests as to Azure's conversation service: prompts of mean 1,155 tokens, outputs 211.

    Source: Azure LLM inference trace 2023, conversation: 5.530 requests a second, coefficient of variation
    of the gaps 1.094, correlation of prompt and output -0.11. Assumed: gaps are gamma distributed, and the
    rate does not drift (there it does: the variance of the arrivals in a minute is 20.6 times their mean).
    """
    return make_requests(Gamma(rate, 1 / 1.094**2), _pairs("azure_conv", size, -0.13), n, rng)


def code(rng: Rng, *, rate: float = 2.567, n: int = 200, size: float = 1.0) -> Requests:
    """Send code completions as to Azure's coding service, in bursts: prompts of mean 2,048, outputs 28.

    Source: Azure LLM inference trace 2023, code: 2.567 requests a second; the variance of the arrivals in 1,
    10 and 60 seconds is 13.2, 71.3 and 160.5 times their mean. Assumed: bursts are those of an interrupted
    Poisson process, fitted to the latter two (it says 10.2 for 1 second); prompt and output are independent
    (their correlation is 0.001). Burst and pause stay as long when `rate` is changed.
    """
    arrivals = OnOff(rate, on_seconds=12.7, off_seconds=47.2)
    return make_requests(arrivals, _pairs("azure_code", size, 0.0), n, rng)


def rag(rng: Rng, *, rate: float = 1.0, n: int = 64, size: float = 1.0) -> Requests:
    """Send questions about a few long documents, which prompts begin with: mean 15,325 tokens, outputs 149.

    Source: Mooncake's synthetic trace: mean prompt and outputs; an endless cache finds 64 % of its blocks.
    Assumed: the shared part is 64 % of the mean prompt, one of 16 documents of equal length whose popularity
    follows Zipf's law with exponent 1; the rest, passages and a question, is lognormal with sigma 1 and up
    to 16,384 tokens; arrivals are Poisson at 1 a second. A cache finds less than 64 % of the tokens, since
    each document has to be read once.
    """
    mean, shared = 15325.48, 0.64
    own = Lognormal(mean * (1 - shared), 1.0, 16384).scaled(size)
    documents = Prefixes(16, _fixed(mean * shared, size), exponent=1.0)
    lengths = (own, _of("mooncake_synthetic outputs", size))
    return make_requests(Poisson(rate), lengths, n, rng, prefixes=documents)


def summarization(rng: Rng, *, rate: float = 1.0, n: int = 200, size: float = 1.0) -> Requests:
    """Send articles to be summarized: prompts of mean 2,588 tokens, outputs of 291, the longer the shorter.

    Source: Vidur's arxiv_summarization trace, which keeps what has at most 4,096 tokens in all: hence the
    correlation of -0.46 between prompt and output. Assumed: arrivals, which it lacks, are Poisson at 1 a
    second; the coupling is Gaussian, so that 2 % of the requests have more than 4,096 tokens.
    """
    return make_requests(Poisson(rate), _pairs("arxiv_summarization", size, -0.65), n, rng)


def multi_turn(rng: Rng, *, rate: float = 0.5, n: int = 32, size: float = 1.0) -> Requests:
    """Send chats of several turns, each prompt being all that was said before, as a reading user goes on.

    Source: outputs as in Mooncake's conversation trace (mean 343 tokens). Assumed: everything else. A chat
    has 4 turns on average (geometric), a system prompt of 512 tokens that all share, texts of mean 512
    (lognormal, sigma 1, up to 8,192), pauses of 20 seconds on average (exponential), and ends before 131,072
    tokens; chats begin in a Poisson process. Arrivals are nominal, see `Sessions.flat`;
    with `multi_turn_sessions` each user waits for the answers.
    """
    return multi_turn_sessions(rng, rate=rate, n=n, size=size).flat(TOKEN_SECONDS)


def multi_turn_sessions(rng: Rng, *, rate: float = 0.5, n: int = 32, size: float = 1.0) -> Sessions:
    """Return the chats of `multi_turn` for a closed loop: `start()` gives the requests and `on_finish`."""
    texts, outputs = Lognormal(512, 1.0, 8192).scaled(size), _of("mooncake_conversation outputs", size)
    drawn = {"turns": Geometric(4.0), "texts": texts, "outputs": outputs, "think": Exponential(20.0)}
    return _sessions(rng, rate, n, size, Prefixes(1, _fixed(512, size)), drawn)


def agents(rng: Rng, *, rate: float = 0.2, n: int = 16, size: float = 1.0) -> Requests:
    """Send the steps of agents: a long shared prompt of tools, short outputs, and tool results in between.

    Source: none; everything is assumed. An agent takes 8 steps on average (geometric, at least 2) behind one
    of 4 prompts of 2,048 tokens; a tool's result has 1,024 tokens on average (lognormal, sigma 1, up to
    16,384) and takes 2 seconds (exponential); a step's output has 182 (lognormal, sigma 1, up to 4,096); it
    ends before 131,072 tokens; agents begin in a Poisson process. For comparison: of the blocks of
    Mooncake's tool and agent trace, a cache finds 59 % (Qin et al., FAST'25). Arrivals are nominal, see
    `Sessions.flat`; with `agents_sessions` each agent waits for the answers.
    """
    return agents_sessions(rng, rate=rate, n=n, size=size).flat(TOKEN_SECONDS)


def agents_sessions(rng: Rng, *, rate: float = 0.2, n: int = 16, size: float = 1.0) -> Sessions:
    """Return the agents of `agents` for a closed loop: `start()` gives the requests and `on_finish`."""
    texts, outputs = Lognormal(1024, 1.0, 16384).scaled(size), Lognormal(182, 1.0, 4096).scaled(size)
    drawn = {
        "turns": Geometric(8.0, minimum=2),
        "texts": texts,
        "outputs": outputs,
        "think": Exponential(2.0),
    }
    return _sessions(rng, rate, n, size, Prefixes(4, _fixed(2048, size)), drawn)


def batch(rng: Rng, *, n: int = 256, size: float = 1.0) -> Requests:
    """Send an offline job, all at once: prompts of mean 161 tokens and outputs of 338, as in ShareGPT.

    Source: the means in the vLLM paper (Kwon et al., SOSP 2023), and an output coefficient of variation of
    0.87 that its figures imply. Assumed: both are lognormal (sigma 1 and 0.75) and at most 1,024 and 2,048
    tokens. It has no `rate`: no client waits for an answer.
    """
    prompts = Lognormal(161.31, 1.0, 1024).scaled(size)
    outputs = Lognormal(337.99, 0.75, 2048).scaled(size)
    return make_requests(AtOnce(), (prompts, outputs), n, rng)


_ALL = (chat24, classic60, lognormal128, poisson64, chat, code, rag, summarization, multi_turn, agents, batch)

PRESETS: Mapping[str, Callable[..., Requests]] = MappingProxyType({one.__name__: one for one in _ALL})
"""The presets by name: each makes requests with a random generator; its keywords are the name's options."""


def presets() -> dict[str, str]:
    """Return the presets' names, each with a one-line description."""
    return {name: (getdoc(preset) or "").partition("\n")[0] for name, preset in PRESETS.items()}


def _of(part: str, size: float) -> Quantiles:
    """Return the distribution with the statistics of a trace's lengths, all times `size`."""
    mean, *lengths = _STATISTICS[part]
    return Quantiles(mean, tuple(zip((0, 0.5, 0.9, 0.99, 1), lengths, strict=True))).scaled(size)


def _pairs(trace: str, size: float, correlation: float) -> Coupled:
    return Coupled(_of(f"{trace} prompts", size), _of(f"{trace} outputs", size), correlation)


def _fixed(tokens: float, size: float) -> Fixed:
    return Fixed(max(1, round(tokens * size)))


def _sessions(rng: Rng, rate: float, n: int, size: float, prefixes: Prefixes, drawn: Any) -> Sessions:
    limit = math.ceil(131_072 * size)
    return conversations(Poisson(rate), n, rng, prefixes=prefixes, max_context=limit, **drawn)
