"""How a token is chosen: against `model.generate`, plain definitions in float64, and the laws of chance."""

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from sampling_cases import EOS, VOCAB_SIZE, plain_scores, small_model, softmax
from transformers import GenerationConfig

from cbresearch.engine import sampler as sampler_module
from cbresearch.engine.sampler import Sampler
from cbresearch.request import Request, SamplingParams

NUM_MIXES = 60


def wilson_hilferty(degrees, quantile=3.72):
    """Return what a chi-squared value passes once in ten thousand times."""
    return degrees * (1 - 2 / (9 * degrees) + quantile * (2 / (9 * degrees)) ** 0.5) ** 3


def chi_squared(counts, probabilities):
    """Return the value and its degrees of freedom; what is expected less than five times is put together."""
    expected = probabilities * counts.sum()
    assert not counts[expected == 0].any()
    rare = expected < 5
    counts, expected = (
        np.append(counts[~rare], counts[rare].sum()),
        np.append(expected[~rare], expected[rare].sum()),
    )
    counts, expected = counts[expected > 0], expected[expected > 0]
    return ((counts - expected) ** 2 / expected).sum(), len(counts) - 1


class Row(NamedTuple):
    seat: int
    token_ids: np.ndarray


class ListSampler(Sampler):
    """Take rows and return what is chosen for them in their order."""

    def choose(self, logits, rows):
        return list(super().choose(logits, dict(rows)).values())


def sampler_of(samplings, num_prompt_tokens=3, eos=EOS, seed=0):
    sampler = ListSampler(frozenset(eos), seed)
    lengths = (
        num_prompt_tokens if isinstance(num_prompt_tokens, list) else [num_prompt_tokens] * len(samplings)
    )
    for seat, (sampling, length) in enumerate(zip(samplings, lengths, strict=True)):
        sampler.seat(seat, Request(f"r{seat}", length, 1000, sampling=sampling))
    return sampler


def rows_of(sequences):
    return [Row(seat, np.array(token_ids)) for seat, token_ids in enumerate(sequences)]


def tokens_of(choices):
    return [choice.token for choice in choices]


@pytest.fixture
def scores_of(monkeypatch):
    """Return a function that chooses in a batch without noise, and gives the scores of each row as well."""

    def scores_of(sampler, logits, rows):
        seen = {}
        inner = sampler_module._scores

        def spy(processors, scores, its_rows):
            scores = inner(processors, scores, its_rows)
            seen.update(zip([id(token_ids) for _, token_ids in its_rows], scores, strict=True))
            return scores

        with monkeypatch.context() as patch:
            patch.setattr(sampler_module, "_scores", spy)
            patch.setattr(sampler_module, "gumbel", lambda keys, places, size: 0.0)
            choices = sampler.choose(logits, rows)
        found = [seen.get(id(row.token_ids), logits[place]) for place, row in enumerate(rows)]
        return found, tokens_of(choices)

    return scores_of


def random_mix(rng):
    """Draw parameters that `generate` has too, each of them off at times."""

    def maybe(value, off):
        return value if rng.random() < 0.6 else off

    return SamplingParams(
        temperature=float(rng.choice([0.0, 1.0, rng.uniform(0.1, 3.0), rng.uniform(0.1, 3.0)])),
        top_k=maybe(int(rng.choice([1, 2, 5, 20, VOCAB_SIZE, VOCAB_SIZE + 1, 10**6])), None),
        top_p=maybe(float(rng.choice([1e-6, 0.3, 0.9, 0.999])), 1.0),
        min_p=maybe(float(rng.choice([0.01, 0.2, 1.0])), 0.0),
        repetition_penalty=maybe(float(rng.choice([0.5, 1.1, 1.8, 10.0])), 1.0),
        min_tokens=int(rng.choice([0, 0, 2, 4, 6])),
    )


def generated(model, prompt, sampling, max_tokens, seed=0):
    """Return the output, the logits and the processed scores of `generate` for each of its tokens."""
    options = {}
    if sampling.temperature:
        options = {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k or 0,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
        }
    config = GenerationConfig(
        max_new_tokens=max_tokens,
        min_new_tokens=sampling.min_tokens or None,
        do_sample=sampling.temperature > 0,
        repetition_penalty=sampling.repetition_penalty,
        eos_token_id=sorted(EOS),
        pad_token_id=0,
        output_scores=True,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )
    input_ids = torch.tensor([prompt])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        answer = model.generate(
            input_ids, attention_mask=torch.ones_like(input_ids), generation_config=config
        )
    output = answer.sequences[0, len(prompt) :].tolist()
    return output, [row[0] for row in answer.logits], [row[0] for row in answer.scores]


def test_probabilities_in_a_mixed_batch_are_those_of_generate_row_by_row(scores_of):
    model = small_model().model
    rng = np.random.default_rng(1)
    mixes = [random_mix(rng) for _ in range(NUM_MIXES)]
    prompts = [rng.integers(VOCAB_SIZE, size=int(rng.integers(1, 12))).tolist() for _ in mixes]
    answers = [generated(model, *pair, 8, seed) for seed, pair in enumerate(zip(prompts, mixes, strict=True))]
    sampler = sampler_of(mixes, [len(prompt) for prompt in prompts])
    num_compared = num_narrowed = 0
    # Rows are at different places of their outputs.
    for shift in range(8):
        batch = []
        for seat, (output, logits, scores) in enumerate(answers):
            place = (shift + seat) % 8
            if place < len(output):
                row = Row(seat, np.array([*prompts[seat], *output[:place]]))
                batch.append((row, logits[place], scores[place]))
        rows = [row for row, _, _ in batch]
        found, tokens = scores_of(sampler, torch.stack([logits for _, logits, _ in batch]), rows)
        for got, token, (row, _, expected) in zip(found, tokens, batch, strict=True):
            mix = mixes[row.seat]
            if mix.temperature:
                # Not one bit differs: `generate` hands out float32.
                assert torch.equal(got.float(), expected), mix
            else:
                assert token == int(expected.argmax()), mix
            num_compared += 1
            num_narrowed += not bool(expected.isfinite().all())
    assert num_compared > 400
    assert num_narrowed > 200


@pytest.mark.parametrize("penalty", [0.7, 1.2, 2.0])
@pytest.mark.parametrize("min_tokens", [0, 5])
def test_greedy_tokens_with_a_repetition_penalty_are_those_of_generate(penalty, min_tokens):
    model = small_model(torch.float64).model
    rng = np.random.default_rng(2)
    sampling = SamplingParams(repetition_penalty=penalty, min_tokens=min_tokens)
    prompts = [rng.integers(VOCAB_SIZE, size=5 + n).tolist() for n in range(6)]
    answers = [generated(model, prompt, sampling, 20) for prompt in prompts]
    sampler = sampler_of([sampling] * 6, [len(prompt) for prompt in prompts])
    for place in range(20):
        seats = [seat for seat, (output, _, _) in enumerate(answers) if place < len(output)]
        if not seats:
            break
        logits = torch.stack([answers[seat][1][place] for seat in seats])
        rows = [Row(seat, np.array([*prompts[seat], *answers[seat][0][:place]])) for seat in seats]
        assert tokens_of(sampler.choose(logits, rows)) == [answers[seat][0][place] for seat in seats]


def test_scores_of_any_parameters_are_those_of_the_plain_definition(scores_of):
    # OpenAI's: mu[j] - c[j] * alpha_frequency - (c[j] > 0) * alpha_presence, over the output alone.
    rng = np.random.default_rng(3)
    mixes = [
        replace(
            random_mix(rng),
            presence_penalty=float(rng.choice([0.0, -2.0, 0.5, 2.0])),
            frequency_penalty=float(rng.choice([0.0, -1.0, 0.3, 2.0])),
            stop_token_ids=tuple(rng.integers(VOCAB_SIZE, size=3).tolist()),
            ignore_eos=bool(rng.integers(2)),
        )
        for _ in range(200)
    ]
    lengths = [int(rng.integers(1, 9)) for _ in mixes]
    # Few different tokens, so that they come often, in the prompt and in the output.
    sequences = [rng.integers(12, size=length + int(rng.integers(0, 9))).tolist() for length in lengths]
    logits = torch.from_numpy(rng.normal(scale=3, size=(len(mixes), VOCAB_SIZE)))
    found, tokens = scores_of(sampler_of(mixes, lengths), logits, rows_of(sequences))
    for place, (mix, length, token_ids) in enumerate(zip(mixes, lengths, sequences, strict=True)):
        ends = set(mix.stop_token_ids) | (set() if mix.ignore_eos else EOS)
        expected = plain_scores(logits[place].numpy(), token_ids[:length], token_ids[length:], mix, ends)
        assert tokens[place] == int(expected.argmax())
        np.testing.assert_allclose(softmax(found[place].numpy()), softmax(expected), rtol=1e-9, atol=1e-15)


def test_a_penalty_for_presence_or_frequency_leaves_the_prompt_alone():
    logits = torch.zeros(4, 8)
    logits[:, 3], logits[:, 5] = 1.0, 0.9
    samplings = [SamplingParams(presence_penalty=0.2), SamplingParams(frequency_penalty=0.06)] * 2
    sequences = [[3, 3, 3]] * 2 + [[0, 0, 0, 3, 3]] * 2
    assert tokens_of(sampler_of(samplings).choose(logits, rows_of(sequences))) == [3, 3, 5, 5]


def test_a_greedy_row_is_exactly_the_argmax_whatever_is_beside_it():
    rng = np.random.default_rng(4)
    logits = torch.from_numpy(rng.normal(size=(30, VOCAB_SIZE))).float()
    # Next to the largest: nothing but an exact comparison tells them apart.
    best = logits.argmax(-1)
    logits[torch.arange(30), (best + 1) % VOCAB_SIZE] = torch.nextafter(
        logits.max(-1).values, torch.tensor(-math.inf)
    )
    samplings = [SamplingParams(temperature=2.0 * (n % 3), seed=n) for n in range(30)]
    tokens = tokens_of(sampler_of(samplings, eos=()).choose(logits, rows_of([[1, 2, 3]] * 30)))
    assert tokens[::3] == best[::3].tolist()
    assert tokens != best.tolist()


def test_a_row_does_not_depend_on_the_rows_beside_it_nor_on_its_seat():
    rng = np.random.default_rng(5)
    samplings = [
        replace(random_mix(rng), seed=n, presence_penalty=0.1 * (n % 3), num_logprobs=n % 7 or None)
        for n in range(40)
    ]
    logits = torch.from_numpy(rng.normal(size=(40, VOCAB_SIZE))).to(torch.bfloat16)
    sequences = [rng.integers(VOCAB_SIZE, size=3 + n % 5).tolist() for n in range(40)]
    together = sampler_of(samplings).choose(logits, rows_of(sequences))
    for order in (range(39, -1, -1), rng.permutation(40)[:11]):
        again = sampler_of([samplings[n] for n in order]).choose(
            logits[list(order)], rows_of([sequences[n] for n in order])
        )
        assert again == [together[n] for n in order]
    for n in range(40):
        assert sampler_of([samplings[n]]).choose(logits[n : n + 1], rows_of([sequences[n]])) == [together[n]]


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=2.0, top_k=4),
        SamplingParams(temperature=1.0, top_p=0.8),
        SamplingParams(temperature=1.5, min_p=0.2),
        SamplingParams(temperature=1.0, presence_penalty=1.0, repetition_penalty=1.3),
    ],
    ids=lambda sampling: repr(sampling)[15:60],
)
@pytest.mark.parametrize("along", ["seeds", "places"])
def test_drawn_tokens_follow_the_probabilities(along, sampling):
    number, size = 8000, 12
    logits = torch.from_numpy(np.random.default_rng(6).normal(scale=1.5, size=size))
    known = [1, 2, 3, 5, 5, 7]
    if along == "seeds":
        samplings = [replace(sampling, seed=seed) for seed in range(number)]
        rows = rows_of([known] * number)
        choices = sampler_of(samplings, eos=()).choose(logits.expand(number, -1), rows)
    else:
        # Later and later in one output, which holds the same tokens once and again.
        sampler = sampler_of([replace(sampling, seed=3)], eos=())
        rows = [Row(0, np.array([1, 2, 3, *([5, 7] * (1 + n))])) for n in range(number // 20)]
        choices = [choice for row in rows for choice in sampler.choose(logits[None], [row])]
    counts = np.bincount(tokens_of(choices), minlength=size)
    expected = softmax(plain_scores(logits.numpy(), known[:3], known[3:], sampling, ()))
    value, degrees = chi_squared(counts, expected)
    assert value < wilson_hilferty(degrees)


def test_two_places_and_two_seeds_are_drawn_independently():
    number, size = 6000, 5
    logits = torch.from_numpy(np.random.default_rng(7).normal(size=size)).expand(number, -1)
    sampler = sampler_of([SamplingParams(temperature=1.0, seed=seed) for seed in range(number)], eos=())
    first, second = (
        np.array(tokens_of(sampler.choose(logits, rows_of([known] * number))))
        for known in ([1, 1, 1], [1, 1, 1, 0])
    )
    probabilities = np.outer(*[softmax(logits[0].numpy())] * 2).ravel()
    for one, other in ((first, second), (first[:-1], first[1:])):
        counts = np.bincount(one * size + other, minlength=size**2)
        value, degrees = chi_squared(counts, probabilities)
        assert value < wilson_hilferty(degrees)


@pytest.mark.parametrize("size", [1, 3])
def test_parameters_above_the_vocabulary_take_all_of_it(size):
    sampling = SamplingParams(temperature=1.0, top_k=50, num_logprobs=50, seed=1)
    (choice,) = sampler_of([sampling], eos=()).choose(torch.zeros(1, size), rows_of([[0, 0, 0]]))
    assert choice.logprobs.top_ids == tuple(range(size))
    assert choice.logprobs.top_logprobs == pytest.approx([-math.log(size)] * size)


def test_log_probabilities_are_those_of_the_logits_before_any_parameter():
    rng = np.random.default_rng(8)
    logits = torch.from_numpy(rng.normal(scale=2, size=(5, VOCAB_SIZE)))
    samplings = [
        SamplingParams(temperature=3.0, top_k=2, seed=n, presence_penalty=3.0, num_logprobs=number)
        for n, number in enumerate((0, 1, 5, VOCAB_SIZE, None))
    ]
    choices = sampler_of(samplings).choose(logits, rows_of([[1, 2, 3, 4]] * 5))
    for n, number in enumerate((0, 1, 5, VOCAB_SIZE)):
        expected = np.log(softmax(logits[n].numpy()))
        logprob, ids, values = choices[n].logprobs
        assert logprob == pytest.approx(expected[choices[n].token], abs=1e-12)
        assert ids == tuple(np.argsort(-expected)[:number])
        np.testing.assert_allclose(values, np.sort(expected)[::-1][:number], rtol=0, atol=1e-12)
    assert choices[4].logprobs is None


def test_of_equally_likely_tokens_the_smaller_ids_are_listed_whatever_others_ask_for():
    logits = torch.tensor([0.0, 1.0, 1.0, -1.0, 1.0, 1.0, 0.0]).repeat(6, 1)
    samplings = [SamplingParams(num_logprobs=number) for number in range(1, 7)]
    choices = sampler_of(samplings, eos=()).choose(logits, rows_of([[0, 0, 0]] * 6))
    for number, choice in enumerate(choices, start=1):
        assert choice.logprobs.top_ids == (1, 2, 4, 5, 0, 6, 3)[:number]
        assert choice.token == choice.logprobs.top_ids[0]


NOT_FINITE = {
    "nan": torch.full((8,), math.nan),
    "one nan": torch.tensor([0.0, 1, 2, math.nan, 4, 5, 6, 7]),
    "inf": torch.tensor([0.0, 1, 2, math.inf, 4, 5, 6, 7]),
    "-inf": torch.full((8,), -math.inf),
}


@pytest.mark.parametrize("row", NOT_FINITE.values(), ids=NOT_FINITE)
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(num_logprobs=3),
        SamplingParams(temperature=1.0, top_k=3, top_p=0.9, min_p=0.1, num_logprobs=2, seed=0),
        SamplingParams(min_tokens=5, presence_penalty=1.0),
    ],
    ids=["greedy", "drawn", "penalty"],
)
def test_a_row_that_is_not_finite_gets_an_error_and_the_others_their_tokens(row, sampling):
    good = torch.from_numpy(np.random.default_rng(9).normal(size=8)).float()
    alone = sampler_of([sampling] * 3, eos=()).choose(torch.stack([good] * 3), rows_of([[1, 2, 3]] * 3))
    choices = sampler_of([sampling] * 3, eos=()).choose(
        torch.stack([good, row, good]), rows_of([[1, 2, 3]] * 3)
    )
    assert (choices[0], choices[2]) == (alone[0], alone[2])
    assert (choices[1].token, choices[1].logprobs) == (None, None)
    assert "no logit is finite" in choices[1].error


def test_a_single_token_that_is_ruled_out_is_no_failure():
    logits = torch.zeros(2, 8)
    logits[:, 4] = -math.inf
    samplings = [SamplingParams(), SamplingParams(temperature=1.0, seed=0)]
    assert all(
        choice.error is None for choice in sampler_of(samplings).choose(logits, rows_of([[1, 2, 3]] * 2))
    )


def test_a_row_whose_tokens_all_end_the_output_too_early_fails_alone():
    samplings = [
        SamplingParams(min_tokens=2, stop_token_ids=tuple(range(8))),
        SamplingParams(min_tokens=2, stop_token_ids=tuple(range(8)), temperature=1.0, seed=0),
        SamplingParams(min_tokens=2, stop_token_ids=tuple(range(7)), temperature=1.0, top_p=0.1, seed=0),
    ]
    logits = torch.zeros(3, 8)
    for place in range(3):
        choices = sampler_of(samplings).choose(logits, rows_of([[1, 2, 3, *([7] * place)]] * 3))
        assert [choice.error is None for choice in choices] == [place == 2, place == 2, True]
        if place < 2:
            assert "allowed to be chosen" in choices[0].error
            assert choices[2].token == 7


def test_an_end_outside_the_vocabulary_bans_nothing():
    samplings = [SamplingParams(min_tokens=2), SamplingParams(min_tokens=2, temperature=1.0, seed=0)]
    choices = sampler_of(samplings, eos={7, 8, 5000}).choose(
        torch.arange(16.0).reshape(2, 8), rows_of([[1, 2, 3]] * 2)
    )
    assert choices[0].token == 6
    assert choices[1].error is None


@pytest.mark.parametrize("temperature", [1e-3, 0.01, 100.0])
def test_extreme_temperatures_are_finite_in_16_bits(temperature):
    logits = torch.linspace(-60, 60, VOCAB_SIZE).to(torch.float16).repeat(50, 1)
    samplings = [SamplingParams(temperature=temperature, seed=seed) for seed in range(50)]
    choices = sampler_of(samplings).choose(logits, rows_of([[1, 2, 3]] * 50))
    assert all(choice.error is None for choice in choices)
    if temperature == 1e-3:
        assert set(tokens_of(choices)) == {VOCAB_SIZE - 1}


def test_what_is_drawn_without_a_seed_depends_on_the_samplers_seed_and_the_id():
    logits = torch.zeros(4, 4096)
    sampling = SamplingParams(temperature=1.0)
    draws = [
        tokens_of(sampler_of([sampling] * 4, eos=(), seed=seed).choose(logits, rows_of([[1, 2, 3]] * 4)))
        for seed in (0, 0, 1)
    ]
    assert draws[0] == draws[1]
    assert len({*draws[0], *draws[2]}) == 8


def test_an_empty_batch_has_no_choices():
    assert sampler_of([]).choose(torch.zeros(0, 8), []) == []
