"""What the tests of sampling share: a small model with text, and a plain second opinion on each answer."""

import math
from dataclasses import replace

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cbresearch import models
from cbresearch.engine.noise import noise_key
from cbresearch.request import Request, SamplingParams

UNFINISHED = "\ufffd"
VOCAB_SIZE = 96
EOS = frozenset({21, 88, 91})
MASK = 2**64 - 1

# Letters, pairs of them, and bytes that begin, go on with or end a character.
PIECES = [
    *(bytes([byte]) for byte in range(97, 123)),
    *(f"{first}{second}".encode() for first in "abcdef" for second in "aeiou. \n"),
    *(b"\xe2", b"\x82", b"\xac", b"\xf0\x9f", b"\x99\x82", b"a\xe2", b"\xacb", b"\xc3", b"\xa9", b"\xff"),
    *("€", "🙂", "é", " ", "\n", "the", " end", "0", "1", "2", "3", "4"),
]
PIECES = [piece.encode() if isinstance(piece, str) else piece for piece in PIECES]
assert len(PIECES) == VOCAB_SIZE


def decode(token_ids):
    """Decode as a tokenizer of bytes does, in which a character may be spread over tokens."""
    return b"".join(PIECES[token] for token in token_ids).decode(errors="replace")


def small_model(dtype=torch.float64, spoil=None):
    """Return a random model of two layers, with NaN in the embedding of the token `spoil`."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.25,
        eos_token_id=sorted(EOS),
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        model = LlamaForCausalLM(config).to(dtype)
    if spoil is not None:
        model.model.embed_tokens.weight.data[spoil] = torch.nan
    return replace(models.wrap("small", model), decode=decode)


class SplitMix64:
    """The generator of Steele, Lea and Flood (OOPSLA 2014) in plain integers."""

    def __init__(self, seed):
        self.state = seed & MASK

    def next(self):
        self.state = (self.state + 0x9E3779B97F4A7C15) & MASK
        return self.mixed(self.state)

    @staticmethod
    def mixed(value):
        value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & MASK
        value = ((value ^ value >> 27) * 0x94D049BB133111EB) & MASK
        return value ^ value >> 31


def plain_noise(key, place, num_tokens):
    """Return the noise of a key and a place, in plain integers and floats."""
    start = SplitMix64.mixed(key & MASK) + place * 0x9E3779B97F4A7C15
    numbers = SplitMix64(SplitMix64.mixed(start & MASK))
    uniform = [((numbers.next() >> 12) + 0.5) / 2**52 for _ in range(num_tokens)]
    return [-math.log(-math.log(value)) for value in uniform]


def softmax(scores):
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def plain_scores(logits, prompt, output, sampling, ends):
    """Return what the docstring of `SamplingParams` makes of a row of logits, in float64, noise aside."""
    scores = np.array(logits, dtype=np.float64)
    for token in {*prompt, *output}:
        factor = sampling.repetition_penalty
        scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
    for token in set(output):
        scores[token] -= output.count(token) * sampling.frequency_penalty + sampling.presence_penalty
    if len(output) < sampling.min_tokens:
        scores[list(ends)] = -math.inf
    if not sampling.temperature:
        return scores
    scores /= sampling.temperature
    if sampling.top_k is not None and sampling.top_k < len(scores):
        scores[scores < np.sort(scores)[-sampling.top_k]] = -math.inf
    if sampling.top_p < 1:
        order = np.argsort(-scores, kind="stable")
        together = np.cumsum(softmax(scores)[order])
        scores[order[int(np.searchsorted(together, sampling.top_p)) + 1 :]] = -math.inf
    probabilities = softmax(scores)
    scores[probabilities < sampling.min_p * probabilities.max()] = -math.inf
    return scores


def found_stop(token_ids, stop, num_before):
    """Return the first (place, stop text) of the whole text that ends behind `num_before`, or None."""
    text = decode(token_ids).rstrip(UNFINISHED)
    found = [
        (place, end)
        for end in stop
        for place in range(len(text) - len(end) + 1)
        if text.startswith(end, place) and place + len(end) > num_before
    ]
    return min(found, default=None)


def plain_answer(loaded, request, seed=0):
    """Answer a request alone: a forward of the whole sequence for each token, and no cache.

    Returns:
        The tokens, why they ended, and the log-probabilities by the logits of each token.
    """
    sampling, prompt = request.sampling, request.prompt
    ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else EOS)
    key = noise_key("seed", sampling.seed)
    if sampling.seed is None:
        key = noise_key("request", seed, request.id)
    output, logprobs = [], []
    while True:
        with torch.inference_mode():
            logits = loaded.model(torch.tensor([[*prompt, *output]]), use_cache=False).logits[0, -1]
        logits = logits.double().numpy()
        scores = plain_scores(logits, prompt, output, sampling, ends)
        if sampling.temperature:
            scores = scores + plain_noise(key, len(output), len(scores))
        num_before = len(decode(output).rstrip(UNFINISHED))
        output.append(int(scores.argmax()))
        logprobs.append(np.log(softmax(logits)))
        is_long_enough = len(output) >= sampling.min_tokens
        is_stopped = is_long_enough and found_stop(output, sampling.stop, num_before) is not None
        if output[-1] in ends or is_stopped:
            return tuple(output), "stop", logprobs
        if len(output) == request.max_tokens:
            return tuple(output), "length", logprobs


SAMPLING = {
    "greedy": SamplingParams(ignore_eos=True),
    "greedy to the end": SamplingParams(num_logprobs=0),
    "hot": SamplingParams(temperature=1.0, seed=1, ignore_eos=True, num_logprobs=3),
    "unseeded": SamplingParams(temperature=1.5, ignore_eos=True),
    "few": SamplingParams(temperature=2.0, top_k=4, seed=2, num_logprobs=VOCAB_SIZE + 5),
    "nucleus": SamplingParams(temperature=1.2, top_p=0.7, seed=3, ignore_eos=True),
    "likely": SamplingParams(temperature=3.0, min_p=0.1, top_p=0.95, top_k=30, seed=4),
    "no repeats": SamplingParams(repetition_penalty=1.4, ignore_eos=True, num_logprobs=2),
    "more repeats": SamplingParams(temperature=0.7, repetition_penalty=0.8, seed=5, ignore_eos=True),
    "present": SamplingParams(temperature=0.5, presence_penalty=1.5, seed=6, ignore_eos=True, num_logprobs=1),
    "frequent": SamplingParams(frequency_penalty=0.9, ignore_eos=True),
    "all penalties": SamplingParams(
        temperature=0.8,
        repetition_penalty=1.1,
        presence_penalty=-0.3,
        frequency_penalty=0.4,
        seed=7,
        min_tokens=4,
    ),
    "not yet": SamplingParams(min_tokens=9, stop_token_ids=tuple(range(30)), temperature=1.0, seed=8),
    "token ends": SamplingParams(stop_token_ids=tuple(range(0, 96, 13)), temperature=1.0, seed=9),
    "token ends though": SamplingParams(stop_token_ids=(60, 61, 62), ignore_eos=True, seed=10),
}
MAX_TOKENS = 12


def cases(loaded):
    """Return requests of all kinds, stop texts that span tokens included, and the plain answer to each."""
    rng = np.random.default_rng(3)
    shared = tuple(rng.integers(VOCAB_SIZE, size=13).tolist())
    answers = {}
    for place, (name, sampling) in enumerate(SAMPLING.items()):
        tail = tuple(rng.integers(VOCAB_SIZE, size=int(rng.integers(1, 9))).tolist())
        prompt = shared[: 3 * (place % 5)] + tail
        request = Request(name, prompt, MAX_TOKENS, sampling=sampling)
        answers[request] = plain_answer(loaded, request)
    origins = {request.id: request for request in answers}
    for name, min_tokens in (("hot", 0), ("nucleus", 3), ("no repeats", 7), ("unseeded", 0)):
        origin = origins[name]
        tokens = answers[origin][0]
        # From within the fourth token's text into the sixth's, and for a delayed one something early too.
        text = decode(tokens)
        begin, end = len(decode(tokens[:4])) - 1, len(decode(tokens[:5])) + 1
        stop = (text[begin:end], "never there", *([text[1:2]] if min_tokens else []))
        sampling = replace(origin.sampling, stop=stop, min_tokens=min_tokens)
        if name == "unseeded":
            # Its id is its seed, so it takes the other's place.
            del answers[origin]
        else:
            name += ", stops"
        request = replace(origin, id=name, sampling=sampling)
        answers[request] = plain_answer(loaded, request)
    return answers


def assert_answers(trace, answers, tolerance=1e-9):
    """Each record is the plain answer: tokens, reason and log-probabilities."""
    expected = {request.id: (request, answer) for request, answer in answers.items()}
    for record in trace.requests:
        request, (tokens, reason, logprobs) = expected[record.id]
        where = f"{record.id} under {trace.policy}, {trace.scheduler}, {trace.cache}"
        assert (record.error, record.tokens, record.finish_reason) == (None, tokens, reason), where
        number = request.sampling.num_logprobs
        if number is None:
            assert record.logprobs == ()
            continue
        assert len(record.logprobs) == len(tokens), where
        for token, of_token, row in zip(tokens, record.logprobs, logprobs, strict=True):
            best = np.argsort(-row, kind="stable")[:number]
            assert math.isclose(of_token.logprob, row[token], abs_tol=tolerance), where
            assert of_token.top_ids == tuple(best), where
            np.testing.assert_allclose(of_token.top_logprobs, row[best], rtol=0, atol=tolerance)
