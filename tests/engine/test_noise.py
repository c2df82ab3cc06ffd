"""What is drawn depends on the request and the place, and is spread as a Gumbel distribution says."""

import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from sampling_cases import SplitMix64, plain_noise

from cbresearch.engine.noise import gumbel, noise_key

# What SplitMix64 puts out when it is seeded with 1234567; the numbers go round as its test vector.
VECTOR = (
    6457827717110365317,
    3203168211198807973,
    9817491932198370423,
    4593380528125082431,
    16408922859458223821,
)


def uniforms(keys, places, num_tokens):
    noise = gumbel(torch.tensor(keys), torch.tensor(places), num_tokens)
    return torch.exp(-torch.exp(-noise)).numpy()


def kolmogorov_smirnov(values):
    """Return the largest distance to the uniform distribution, times the root of the number."""
    values = np.sort(np.ravel(values))
    steps = np.arange(len(values) + 1) / len(values)
    return max((steps[1:] - values).max(), (values - steps[:-1]).max()) * math.sqrt(len(values))


def test_the_reference_gives_the_published_numbers():
    stream = SplitMix64(1234567)
    assert tuple(stream.next() for _ in VECTOR) == VECTOR


def test_the_noise_is_that_of_splitmix64_in_plain_integers():
    keys = [0, 1, -1, 2**63 - 1, -(2**63), noise_key("seed", 5)]
    for place in (0, 1, 7, 2047, 2**31):
        noise = gumbel(torch.tensor(keys), torch.full((len(keys),), place), 33)
        expected = torch.tensor([plain_noise(key, place, 33) for key in keys], dtype=torch.float64)
        torch.testing.assert_close(noise, expected, rtol=1e-12, atol=1e-14)


def test_the_noise_is_finite_for_the_least_and_the_largest_of_the_random_numbers(monkeypatch):
    # A number that rounds to 1 would be an infinite noise, which no logit can stand up to.
    for bits in (0, -1):
        monkeypatch.setattr("cbresearch.engine.noise._mixed", lambda values, bits=bits: values * 0 + bits)
        noise = gumbel(torch.tensor([3]), torch.tensor([0]), 2)
        assert noise.dtype == torch.float64
        assert bool(noise.isfinite().all())
    assert noise[0, 0] == pytest.approx(53 * math.log(2), rel=1e-6)


def test_the_noise_is_float64_whatever_the_default_is():
    expected = gumbel(torch.tensor([3]), torch.tensor([4]), 50)
    for default in (torch.float16, torch.float64):
        torch.set_default_dtype(default)
        try:
            assert torch.equal(gumbel(torch.tensor([3]), torch.tensor([4]), 50), expected)
        finally:
            torch.set_default_dtype(torch.float32)


def test_random_numbers_are_finer_than_float32_can_tell():
    values = uniforms([noise_key("seed", 0)], [0], 50_000)
    assert len(np.unique(values)) == values.size


@pytest.mark.parametrize("along", ["tokens", "places", "keys", "seeds"])
def test_random_numbers_are_uniform_along_each_axis(along):
    number = 40_000
    several = range(number)
    values = {
        "tokens": lambda: uniforms([noise_key("seed", 1)], [0], number),
        "places": lambda: uniforms([noise_key("seed", 1)] * number, list(several), 1),
        "keys": lambda: uniforms(list(several), [0] * number, 1),
        "seeds": lambda: uniforms([noise_key("seed", seed) for seed in several], [0] * number, 1),
    }[along]()
    # 1.95 is passed by one sample in a thousand.
    assert kolmogorov_smirnov(values) < 1.95


def test_random_numbers_do_not_depend_on_those_of_the_token_the_place_and_the_key_beside_them():
    keys = [key for key in range(60) for _ in range(60)]
    cube = uniforms(keys, list(range(60)) * 60, 60).reshape(60, 60, 60)
    for axis in range(3):
        for distance in (1, 2, 7):
            first = np.moveaxis(cube, axis, 0)[:-distance].ravel()
            second = np.moveaxis(cube, axis, 0)[distance:].ravel()
            for one, other in ((first, second), (first > 0.99, second > 0.99), (first % 0.125, second)):
                correlation = np.corrcoef(one, other)[0, 1]
                assert abs(correlation) * math.sqrt(len(one)) < 4.5, (axis, distance)


def test_a_place_of_one_request_is_no_other_place_of_another():
    tables = {
        (key, place): gumbel(torch.tensor([key]), torch.tensor([place]), 8)[0].tolist()
        for key in range(-20, 20)
        for place in range(40)
    }
    numbers = [number for row in tables.values() for number in row]
    assert len(set(numbers)) == len(numbers)


def test_rows_do_not_depend_on_the_rows_beside_them():
    keys, places = torch.arange(9) - 4, torch.arange(9) * 3
    together = gumbel(keys, places, 100)
    for row in range(9):
        assert torch.equal(gumbel(keys[row : row + 1], places[row : row + 1], 100)[0], together[row])
        # A larger vocabulary goes on where a smaller one ends.
        assert torch.equal(gumbel(keys, places, 130)[row, :100], together[row])


def test_keys_tell_seeds_ids_and_their_kinds_apart():
    parts = [("seed", n) for n in range(50)]
    parts += [("request", seed, str(n)) for seed in range(5) for n in range(50)]
    parts += [
        ("request", 1, "1, 2"),
        ("request", 11, "2x"),
        ("request", 112, "x"),
        ("seed", "1"),
        ("seed", -1),
    ]
    assert len({noise_key(*part) for part in parts}) == len(parts)
    assert noise_key("seed", 10**400) != noise_key("seed", 10**400 + 1)
    assert all(-(2**63) <= noise_key(*part) < 2**63 for part in parts)


def test_noise_is_the_same_in_another_process_whatever_the_hash_seed():
    code = (
        "import torch\n"
        "from cbresearch.engine.noise import gumbel, noise_key\n"
        "keys = [noise_key('seed', 7), noise_key('request', 3, 'a/1 ä')]\n"
        "print(keys, gumbel(torch.tensor(keys), torch.tensor([0, 5]), 6).tolist())\n"
    )
    keys = [noise_key("seed", 7), noise_key("request", 3, "a/1 ä")]
    expected = f"{keys} {gumbel(torch.tensor(keys), torch.tensor([0, 5]), 6).tolist()}\n"
    answer = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONHASHSEED": "77"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout == expected


def test_noise_leaves_the_global_generators_alone():
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    first = gumbel(torch.tensor([1]), torch.tensor([2]), 10)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(6)
    assert torch.equal(gumbel(torch.tensor([1]), torch.tensor([2]), 10), first)
