"""What several test files share: a small real model, and what it answers to each prompt alone."""

import datetime
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

# Triton chooses between compiler and interpreter when it is imported, and pytest imports this file before any
# test, in every worker. `make gpu` sets it to 0.
os.environ.setdefault("TRITON_INTERPRET", "1")


@dataclass(frozen=True)
class Alone:
    """A prompt and the greedy continuation that `model.generate` gives for it, served alone and unpadded."""

    prompt: tuple[int, ...]
    continuation: tuple[int, ...]


def generate_alone(model, prompt: Sequence[int], max_tokens: int) -> tuple[int, ...]:
    """Return the greedy continuation by transformers, without any end-of-sequence token."""
    import torch
    from transformers import GenerationConfig

    input_ids = torch.tensor([list(prompt)])
    config = GenerationConfig(max_new_tokens=max_tokens, do_sample=False, pad_token_id=0)
    output = model.generate(input_ids, attention_mask=torch.ones_like(input_ids), generation_config=config)
    return tuple(output[0, len(prompt) :].tolist())


@pytest.fixture(scope="session")
def tiny():
    from cbresearch import models

    loaded = models.load("tiny")
    loaded.model.generation_config.eos_token_id = None
    return loaded


@pytest.fixture(scope="session")
def alone(tiny) -> list[Alone]:
    """Prompts of 1 to 48 tokens, some of which begin alike, each with 24 tokens of its continuation."""
    rng = np.random.default_rng(7)
    lengths = [1, 2, 3, 15, 16, 17, 31, 32, 33, 48, *rng.integers(1, 48, size=10)]
    prompts = [tuple(rng.integers(3, 4096, size=length).tolist()) for length in lengths]
    longest = prompts[9]
    prompts += [longest[:32], longest[:33], longest[:20] + prompts[4], longest + prompts[3]]
    return [Alone(prompt, generate_alone(tiny.model, prompt, 24)) for prompt in prompts]


@pytest.fixture(scope="session")
def top_two_gap() -> Callable[..., float]:
    """Return a function that gives the gap between the two best logits after some token ids."""
    import torch

    def gap(model, token_ids: Sequence[int]) -> float:
        with torch.inference_mode():
            best = model(torch.tensor([list(token_ids)]), use_cache=False).logits[0, -1].topk(2).values
        return float(best[0] - best[1])

    return gap


@pytest.fixture
def no_clocks(monkeypatch) -> Callable[..., AbstractContextManager]:
    """Return a context in which whoever looks at the host's clock fails."""

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("the host's clock was looked at")

    @contextmanager
    def context() -> Iterator[None]:
        with monkeypatch.context() as patch:
            for name in (
                "time",
                "perf_counter",
                "monotonic",
                "process_time",
                "time_ns",
                "perf_counter_ns",
                "sleep",
            ):
                patch.setattr(time, name, forbidden)
            patch.setattr(datetime, "datetime", SimpleNamespace(now=forbidden, utcnow=forbidden))
            yield

    return context
