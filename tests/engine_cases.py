"""Random schedules for the engine, and what each of their requests has to be answered."""

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from fuzz_policies import POLICIES
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from cbresearch import models, policies
from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.engine import ModelExecutor
from cbresearch.models import LoadedModel
from cbresearch.request import Rejected, Request, SamplingParams, TokenLogprobs, parallel_samples
from cbresearch.scheduler import Scheduler
from cbresearch.serve import serve

VOCABULARY = 97
LONGEST_PROMPT = 44
LONGEST_ANSWER = 16
CONTEXT = 72
WINDOW = 9
# Tokens that the models emit often, so that many answers end early.
EOS = frozenset({7, 42, 89})
# Whoever has this token made into text fails.
POISON = 96
# Few letters, so that texts which end an answer come up by chance, and the two halves of others.
PIECES = [*(letter.encode() for letter in "abcd" * 20), *(bytes([byte]) for byte in b"\xc3\xa9\xa8" * 6)]
# Seeds that share their prompts, so that each is answered alone once and served many times.
SEEDS_PER_LIBRARY = 1000


def decode(token_ids: list[int]) -> str:
    """Return the text of tokens, of which some are halves of a character."""
    if POISON in token_ids:
        raise ArithmeticError(f"token {POISON} has no text")
    return b"".join(PIECES[token] for token in token_ids).decode(errors="replace")


@cache
def small_model(windowed: bool, dtype: torch.dtype) -> LoadedModel:
    """Return a seeded random model of two layers whose answers depend on all that they may attend to."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = (
            MistralForCausalLM(MistralConfig(**sizes, sliding_window=WINDOW))
            if windowed
            else LlamaForCausalLM(LlamaConfig(**sizes))
        )
    # For `generate` alone: it goes on to the longest answer, which serves for all shorter ones.
    model.generation_config.eos_token_id = None
    return replace(models.wrap("small", model.to(dtype)), eos_token_ids=EOS, decode=decode)


@dataclass(frozen=True)
class Answer:
    """What a request is answered alone.

    Attributes:
        token_ids: The answer, as long as any request for it may be.
        reason: Why it ends.
        gaps: By how much the best logit leads the second at each token; empty for what is not plainly greedy.
        logprobs: Of each token, if the request asks for them.
    """

    token_ids: tuple[int, ...]
    reason: str
    gaps: tuple[float, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()

    def within(self, max_tokens: int) -> tuple[tuple[int, ...], str]:
        """Return as much of it as a request gets, and why it ends there."""
        num_tokens = len(self.token_ids)
        if num_tokens > max_tokens or (num_tokens == max_tokens and self.reason != "stop"):
            return self.token_ids[:max_tokens], "length"
        return self.token_ids, self.reason


class Library:
    """Prompts of which many begin alike, and their answers, each computed when it is first asked for.

    Args:
        number: Seeds the prompts.
        windowed: Whether every layer of the model has a sliding window.
        dtype: Of the model.
    """

    def __init__(self, number: int, windowed: bool, dtype: torch.dtype) -> None:
        self.loaded = small_model(windowed, dtype)
        self._generated: dict[tuple[int, ...], Answer] = {}
        self._served: dict[tuple[tuple[int, ...], SamplingParams, str], Answer] = {}
        rng = np.random.default_rng([number, 1])
        stems = [rng.integers(0, VOCABULARY, LONGEST_PROMPT).tolist() for _ in range(3)]
        self.prompts: list[tuple[int, ...]] = []
        for place in range(24):
            stem = stems[place % 4][: int(rng.integers(0, 33))] if place % 4 < 3 else []
            tail = rng.integers(0, VOCABULARY, int(rng.integers(1, 12))).tolist()
            self.prompts.append((*stem, *tail))
        # Later turns of a conversation: they begin with an earlier prompt and its answer.
        for prompt in self.prompts[:4]:
            answer = self._generate(prompt).token_ids[: int(rng.integers(1, LONGEST_ANSWER))]
            self.prompts.append((*prompt, *answer, *rng.integers(0, VOCABULARY, 3).tolist())[:LONGEST_PROMPT])
        self.recipes = [draw_sampling(rng) for _ in range(8)]

    def answer(self, request: Request) -> Answer:
        """Return the answer to a request alone.

        By `generate` of transformers if it is greedy, else by the engine with one seat and a roomy pool.
        """
        sampling = request.sampling
        if sampling != SamplingParams(ignore_eos=sampling.ignore_eos):
            # Without a seed of its own, a request's id is its seed.
            key = request.prompt, sampling, request.id if sampling.seed is None else ""
            if key not in self._served:
                self._served[key] = self._serve(request)
            return self._served[key]
        whole = self._generate(request.prompt)
        places = [place for place, token in enumerate(whole.token_ids, start=1) if token in EOS]
        if sampling.ignore_eos or not places:
            return whole
        return Answer(whole.token_ids[: places[0]], "stop", whole.gaps)

    def _generate(self, prompt: tuple[int, ...]) -> Answer:
        if prompt in self._generated:
            return self._generated[prompt]
        input_ids = torch.tensor([prompt])
        config = GenerationConfig(
            max_new_tokens=LONGEST_ANSWER,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        output = self.loaded.model.generate(
            input_ids, attention_mask=torch.ones_like(input_ids), generation_config=config
        )
        best, second = torch.cat(output.logits).topk(2).values.T
        answer = Answer(
            tuple(output.sequences[0, len(prompt) :].tolist()), "length", tuple((best - second).tolist())
        )
        self._generated[prompt] = answer
        return answer

    def _serve(self, request: Request) -> Answer:
        limits, cache = SchedulerConfig(1), CacheConfig(-(-CONTEXT // 16))
        alone = Request(request.id, request.prompt, LONGEST_ANSWER, sampling=request.sampling)
        scheduler = Scheduler(policies.get("fcfs"), limits, cache)
        (record,) = serve([alone], scheduler, ModelExecutor(self.loaded, limits, cache)).requests
        return Answer(record.tokens, record.finish_reason, logprobs=record.logprobs)


def draw_sampling(rng: np.random.Generator) -> SamplingParams:
    """Draw how an answer is chosen and what ends it."""
    return SamplingParams(
        temperature=float(rng.choice([0.0, 0.5, 1.0, 2.0])),
        top_k=int(rng.integers(1, 60)) if rng.integers(3) == 0 else None,
        top_p=float(rng.choice([1.0, 1.0, 0.9, 0.5])),
        min_p=float(rng.choice([0.0, 0.0, 0.05, 0.2])),
        seed=int(rng.integers(2)) if rng.integers(6) else None,
        repetition_penalty=float(rng.choice([1.0, 1.0, 0.8, 1.3])),
        presence_penalty=float(rng.choice([0.0, 0.0, -0.5, 1.0])),
        frequency_penalty=float(rng.choice([0.0, 0.0, -0.2, 0.7])),
        min_tokens=int(rng.choice([0, 0, 3, 8])),
        stop=[(), ("ab",), ("é", "cd"), ("dca", "bbb")][int(rng.integers(4))],
        stop_token_ids=tuple(rng.integers(0, VOCABULARY, int(rng.choice([0, 0, 3]))).tolist()),
        ignore_eos=bool(rng.integers(2)),
        num_logprobs=int(rng.integers(0, 4)) if rng.integers(2) else None,
    )


@cache
def library(number: int, windowed: bool, dtype: torch.dtype) -> Library:
    """Return a library, the same one for the same arguments."""
    return Library(number, windowed, dtype)


@dataclass(frozen=True)
class Schedule:
    """What is served, under which limits, and how much it is disturbed.

    Attributes:
        requests: Who comes.
        policy: The policy's name.
        limits: Seats, budget, preemption.
        cache: The pools.
        shelf: Where the prompts and their answers come from.
        chance: Of one more disturbance after a step.
        most_forced: Disturbances at most.
        share_aborted: Share of them that are aborts.
    """

    requests: list[Request | Rejected]
    policy: str
    limits: SchedulerConfig
    cache: CacheConfig
    shelf: Library
    chance: float
    most_forced: int
    share_aborted: float


def draw(seed: int, dtype: torch.dtype) -> Schedule:
    """Draw a schedule; the policies take turns.

    Where tokens are drawn at random it is in float64, so that rounding cannot be what makes them differ.
    """
    rng = np.random.default_rng([seed, 0])
    windowed, sampled = rng.random() < 0.15, rng.random() < 0.4
    shelf = library(seed // SEEDS_PER_LIBRARY, windowed, torch.float64 if sampled else dtype)
    budget = int(rng.choice([1, 2, 3, 7, 16, 64, 2048, rng.integers(1, 80)]))
    requests = draw_requests(rng, shelf, budget, 0.7 if sampled else 0.0)
    policy = POLICIES[seed % len(POLICIES)]
    limits = SchedulerConfig(
        int(rng.integers(1, 9)),
        budget,
        max_model_len=int(rng.choice([CONTEXT, rng.integers(40, CONTEXT)])) if rng.integers(5) == 0 else None,
        preemption=str(rng.choice(["recompute", "swap"])),
        max_preemptions=int(rng.choice([1, 3, 8])),
    )
    block_size = int(rng.choice([1, 2, 3, 4, 8, 16, 32, rng.integers(1, 33)]))
    cache = CacheConfig(
        1,
        block_size,
        prefix_caching=bool(rng.integers(2)),
        sliding_window=WINDOW if windowed and rng.integers(3) else None,
    )
    if not windowed and rng.random() < 0.08:
        cache = CacheConfig(1, block_size, reservation=str(rng.choice(["max", "pow2", "oracle"])))
        limits = replace(limits, max_model_len=limits.max_model_len or CONTEXT)
    if rng.integers(4) == 0:
        # Whole prompts: the budget has to hold the longest context, or else its request is rejected.
        lengths = [request.num_prompt_tokens + request.max_tokens - 1 for request in requests]
        budget = max(1, max(lengths) - int(rng.choice([0, 0, 0, 3])) + int(rng.choice([0, 1, 30])))
        limits = replace(limits, max_num_batched_tokens=budget, chunked_prefill=False)
    needed = [num_blocks_needed(request, limits, cache) for request in requests]
    spare = int(rng.choice([0, 0, 1, 2, 3, 6, sum(needed), -1]))
    num_blocks = max(1, max(needed) + spare)
    host = int(rng.choice([0, 1, 3, num_blocks, 3 * num_blocks, 3 * num_blocks]))
    return Schedule(
        add_impossible(rng, requests),
        policy,
        limits,
        replace(cache, num_blocks=num_blocks, num_host_blocks=0 if cache.reservation else host),
        shelf,
        chance=float(rng.choice([0.0, 0.1, 0.3])),
        most_forced=int(rng.integers(2, 25)),
        share_aborted=float(rng.choice([0.0, 0.2, 0.5])),
    )


def draw_requests(
    rng: np.random.Generator, shelf: Library, budget: int, share_sampled: float
) -> list[Request]:
    """Draw requests that can be answered, as many as a token budget serves in some dozens of steps."""
    # Few of the prompts, so that the same ones and those that begin alike meet.
    chosen = rng.choice(len(shelf.prompts), int(rng.integers(1, 7)), replace=False).tolist()
    span = float(rng.choice([0.0, 10.0, 40.0]))
    requests: list[Request] = []
    for place in range(int(rng.integers(1, 9))):
        sampling = SamplingParams(ignore_eos=bool(rng.integers(2)))
        if rng.random() < share_sampled:
            sampling = shelf.recipes[int(rng.integers(len(shelf.recipes)))]
        request = Request(
            f"r{place}",
            shelf.prompts[chosen[int(rng.integers(len(chosen)))]],
            int(rng.integers(max(1, sampling.min_tokens), LONGEST_ANSWER + 1)),
            arrival=(arrival := float(rng.random() * span)),
            sampling=sampling,
            priority=int(rng.integers(-1, 2)),
            client=f"c{int(rng.integers(3))}",
            deadline=arrival + float(rng.random() * 60) if rng.integers(2) else None,
            cache_salt=str(rng.choice(["a", "b"])) if rng.integers(6) == 0 else None,
            predicted_output=int(rng.integers(1, LONGEST_ANSWER + 1)) if rng.integers(2) else None,
        )
        group = parallel_samples(request, int(rng.integers(2, 5))) if rng.integers(5) == 0 else (request,)
        requests += group
    work = np.cumsum([request.num_prompt_tokens + request.max_tokens for request in requests])
    fitting = requests[: max(1, int((work <= 45 * budget).sum()))]
    return [
        replace(request, output_length=true_length(request, shelf)) if rng.integers(2) else request
        for request in fitting
    ]


def true_length(request: Request, shelf: Library) -> int | None:
    """Return how many tokens a request's answer has, or None for one that fails behind them."""
    token_ids, reason = shelf.answer(request).within(request.max_tokens)
    return None if reason == "error" else len(token_ids)


def add_impossible(rng: np.random.Generator, requests: list[Request]) -> list[Request | Rejected]:
    """Put some among the requests that cannot be served."""
    mixed: list[Request | Rejected] = list(requests)
    for place in range(int(rng.choice([0, 0, 0, 1, 2]))):
        arrival = float(rng.random() * 20)
        impossible = [
            Request(f"x{place}", (3, VOCABULARY), 4, arrival),
            Request(f"x{place}", (VOCABULARY, 3), 4, arrival),
            Request(f"x{place}", "text", 4, arrival),
            Request(f"x{place}", 9, 4, arrival),
            Request(f"x{place}", (5,) * CONTEXT, 1, arrival),
            Request(f"x{place}", (5, 3), 4, arrival, sampling=SamplingParams(n=2)),
            requests[int(rng.integers(len(requests)))].moved(arrival),
            Rejected(f"x{place}", "turned away before", arrival),
        ]
        mixed.insert(int(rng.integers(len(mixed) + 1)), impossible[int(rng.integers(len(impossible)))])
    return mixed


def num_blocks_needed(request: Request, limits: SchedulerConfig, cache: CacheConfig) -> int:
    """Return the fewest blocks with which a request can finish alone."""
    output = request.max_tokens
    if cache.reservation is not None:
        longest = limits.max_model_len or CONTEXT
        output = min(output, request.output_length or output)
        if cache.reservation == "max":
            num_tokens = max(longest, request.num_prompt_tokens + output)
        elif cache.reservation == "pow2":
            doubled = 1 << (output - 1).bit_length()
            num_tokens = max(
                request.num_prompt_tokens + output, min(request.num_prompt_tokens + doubled, longest)
            )
        else:
            num_tokens = request.num_prompt_tokens + output - 1
        return 1 << (-(-num_tokens // cache.block_size) - 1).bit_length()
    needed = -(-(request.num_prompt_tokens + output - 1) // cache.block_size)
    if cache.sliding_window is None:
        return needed
    in_flight = cache.sliding_window - 1 + limits.max_num_batched_tokens
    return min(needed, -(-in_flight // cache.block_size) + 1)


def why_impossible(request: Request, schedule: Schedule, taken: set[str]) -> str | None:
    """Return what a request's rejection has to say, or None if it has to be served."""
    limits, cache = schedule.limits, schedule.cache
    if not isinstance(request.prompt, tuple):
        return "a model needs token ids"
    if not all(0 <= token < VOCABULARY for token in request.prompt):
        return "outside the vocabulary"
    num_tokens = request.num_prompt_tokens + request.max_tokens
    if num_tokens > CONTEXT:
        return f"over the {CONTEXT} that"
    if request.id in taken:
        return "the id is taken"
    if request.sampling.n > 1:
        return f"wants {request.sampling.n} answers"
    if limits.max_model_len is not None and num_tokens > limits.max_model_len:
        return f"over the model's length of {limits.max_model_len}"
    if not limits.chunked_prefill and num_tokens - 1 > limits.max_num_batched_tokens:
        return f"over the token budget of {limits.max_num_batched_tokens}"
    if num_blocks_needed(request, limits, cache) > cache.num_blocks:
        return f"the pool has {cache.num_blocks}"
    return None


def expected_rejections(schedule: Schedule) -> list[str | None]:
    """Return for each request what its rejection has to say, or None."""
    reasons: list[str | None] = [None] * len(schedule.requests)
    taken: set[str] = set()
    for place, request in sorted(enumerate(schedule.requests), key=lambda pair: pair[1].arrival):
        if isinstance(request, Rejected):
            reasons[place] = request.error
            continue
        reasons[place] = why_impossible(request, schedule, taken)
        if reasons[place] is None:
            taken.add(request.id)
    return reasons
