"""The workloads that are known by name."""

import random
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from inspect import getdoc
from types import MappingProxyType

import numpy as np

from cbresearch.request import Refusal, Request, SamplingParams
from cbresearch.workloads import applications
from cbresearch.workloads.draws import lognormal_lengths, poisson_arrivals
from cbresearch.workloads.lines import parse


def presets() -> dict[str, str]:
    """Return the presets' names, each with a one-line description."""
    return {name: (getdoc(preset) or "").partition("\n")[0] for name, preset in PRESETS.items()}


def chat24(rng: np.random.Generator) -> Sequence[Request | Refusal]:
    """Send 24 real prompts of mixed length at time 0 and ask for 8 to 96 output tokens each (mean 34).

    The prompts are plain user texts, without a chat template. Answers may end early.
    """
    return parse(files("cbresearch").joinpath("data", "chat24.jsonl").read_bytes())


def classic60(rng: np.random.Generator) -> Sequence[Request]:
    """Send 60 requests of 1 prompt token at time 0, with 4 to 12 output tokens each, always the same.

    The output lengths are `random.randint(4, 12)` after `random.seed(2024)`: the textbook example.
    """
    source = random.Random(2024)
    return _to_the_end([0.0] * 60, [1] * 60, [source.randint(4, 12) for _ in range(60)])


def lognormal128(rng: np.random.Generator) -> Sequence[Request]:
    """Send 128 requests at time 0, with lognormal prompts (mean 62) and outputs (mean 54, at most 384).

    The logarithm's standard deviation is 0.6 for the prompts (at most 256) and 1 for the outputs.
    """
    prompts = lognormal_lengths(rng, 128, mean=62, sigma=0.6, maximum=256)
    outputs = lognormal_lengths(rng, 128, mean=54, sigma=1.0, maximum=384)
    return _to_the_end([0.0] * 128, prompts, outputs)


def poisson64(rng: np.random.Generator) -> Sequence[Request]:
    """Send 64 requests, 4 a second on average, with lognormal prompts (mean 48) and outputs (mean 32).

    They ask for about 128 output tokens a second during some 16 seconds. Prompts have at most 192 tokens
    and outputs 128; the logarithm's standard deviation is 0.6 and 0.8.
    """
    arrivals = poisson_arrivals(rng, 64, rate=4.0)
    prompts = lognormal_lengths(rng, 64, mean=48, sigma=0.6, maximum=192)
    outputs = lognormal_lengths(rng, 64, mean=32, sigma=0.8, maximum=128)
    return _to_the_end(arrivals, prompts, outputs)


Preset = Callable[..., Sequence[Request | Refusal]]
"""Makes requests, given a generator; what it takes by keyword are the options behind its name."""

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        preset.__name__: preset
        for preset in (
            chat24,
            classic60,
            lognormal128,
            poisson64,
            applications.chat,
            applications.code,
            applications.rag,
            applications.summarization,
            applications.multi_turn,
            applications.agents,
            applications.batch,
        )
    }
)
"""The workloads that are known by name."""


def _to_the_end(arrivals: list[float], prompts: list[int], outputs: list[int]) -> list[Request]:
    return [
        Request(str(position), prompt, output, arrival, SamplingParams(ignore_eos=True))
        for position, (arrival, prompt, output) in enumerate(zip(arrivals, prompts, outputs, strict=True))
    ]
