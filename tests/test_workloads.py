"""Workloads say exactly whom to serve; a bad line costs itself alone."""

import dataclasses
import json
import math
import random

import numpy as np
import pytest
from hygiene import printed_by_two_processes

from cbresearch import workloads
from cbresearch.request import Refusal, Request, SamplingParams
from cbresearch.simulator import simulate

SEEDS = range(3)


def rng(seed=0):
    return np.random.default_rng(seed)


def write(tmp_path, *lines):
    path = tmp_path / "work.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    return str(path)


def read(tmp_path, *lines):
    return workloads.load(write(tmp_path, *lines), rng())


def standard_errors_off(values, mean):
    return abs(np.mean(values) - mean) / (np.std(values, ddof=1) / math.sqrt(len(values)))


def test_every_field_of_a_line_arrives(tmp_path):
    fields = {
        "id": "a",
        "arrival": 1.5,
        "prompt": [3, 0, 7],
        "max_tokens": 32,
        "ignore_eos": True,
        "priority": -2,
        "client": "c1",
        "deadline": 2.5,
    }
    assert read(tmp_path, json.dumps(fields)) == [
        Request("a", (3, 0, 7), 32, 1.5, SamplingParams(ignore_eos=True), -2, "c1", 2.5)
    ]


def test_every_way_to_sample_arrives(tmp_path):
    sampling = {
        "temperature": 1,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.05,
        "seed": 2**63,
        "n": 3,
        "repetition_penalty": 1.1,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.25,
        "min_tokens": 2,
        "stop": ["Ende", "🙂"],
        "stop_token_ids": [7, 0],
        "ignore_eos": True,
    }
    (request,) = read(tmp_path, json.dumps({"prompt": 4, "max_tokens": 3} | sampling))
    assert request == Request("0", 4, 3, sampling=SamplingParams(**sampling))
    # Whatever may be asked for, log-probabilities aside, which no result file holds.
    assert {*sampling, "num_logprobs"} == {field.name for field in dataclasses.fields(SamplingParams)}
    nothing = json.dumps({"prompt": 4, "max_tokens": 3} | dict.fromkeys(sampling))
    assert read(tmp_path, nothing) == [Request("0", 4, 3)]


def test_one_stop_text_may_be_given_alone(tmp_path):
    (request,) = read(tmp_path, '{"prompt": 4, "max_tokens": 3, "stop": "Ende"}')
    assert request.sampling.stop == ("Ende",)


@pytest.mark.parametrize("prompt", ["Grüße, 世界 🙂\nnew line", [0, 1, 2], 1, 4096])
def test_each_kind_of_prompt_comes_back_as_it_was_written(tmp_path, prompt):
    (request,) = read(tmp_path, json.dumps({"prompt": prompt, "max_tokens": 1}))
    assert request.prompt == (tuple(prompt) if isinstance(prompt, list) else prompt)


@pytest.mark.parametrize("rest", ["", ', "id": null, "arrival": null, "deadline": null, "client": null'])
def test_what_a_line_leaves_out_has_the_defaults_of_a_request(tmp_path, rest):
    (request,) = read(tmp_path, f'{{"prompt": "Hello", "max_tokens": 3{rest}}}')
    assert request == Request("0", "Hello", 3)


def test_requests_without_an_id_are_numbered_by_position_and_blank_lines_do_not_count(tmp_path):
    line = '{"prompt": 4, "max_tokens": 3}'
    requests = read(tmp_path, "", line, "  ", "oops", line, "\t", line, "")
    assert [request.id for request in requests] == ["0", "1", "2", "3"]
    assert [type(request) for request in requests] == [Request, Refusal, Request, Request]
    assert requests[1].error.startswith("line 4: ")


def test_the_order_of_the_file_is_kept_and_serve_sorts_by_arrival(tmp_path):
    requests = read(
        tmp_path,
        '{"id": "late", "prompt": 4, "max_tokens": 1, "arrival": 9}',
        '{"id": "early", "prompt": 4, "max_tokens": 1, "arrival": 0.5}',
    )
    assert [request.id for request in requests] == ["late", "early"]
    starts = {record.id: record.first_scheduled for record in simulate(requests).requests}
    assert starts == {"late": 9.0, "early": 0.5}


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_files_written_on_other_systems_are_read(tmp_path, mark, newline):
    # A line separator inside a text ends no line of the file.
    line = '{"prompt": "one\u2028two", "max_tokens": 3}'
    assert [request.prompt for request in read(tmp_path, mark + newline.join([line, line, ""]))] == [
        "one\u2028two"
    ] * 2


DEEP = "[" * 100_000
LONG = "9" * 400

# The bad line, and what its error must say: the value first, then the remedy.
BAD_LINES = {
    "malformed": (
        '{"prompt": "x", "max_tokens": 3',
        ["is not JSON", "max_tokens", "write one object a line"],
    ),
    "two objects": ('{"prompt": 1, "max_tokens": 3} {}', ["Extra data", "write one object a line"]),
    "nested too deep": (DEEP, ["[[[", "is not JSON", "write one object a line"]),
    "a number of 5000 digits": ('{"prompt": %s}' % ("9" * 5000), ["is not JSON", "write one object a line"]),
    "not utf-8": (
        b'{"prompt": "caf\xe9", "max_tokens": 3}',
        ["caf", "UTF-8", "0xe9", "write one object a line"],
    ),
    "a list": ("[1, 2]", ["[1, 2] is not an object", '{"prompt"']),
    "a number": ("17", ["17 is not an object", '{"prompt"']),
    "null": ("null", ["None is not an object", '{"prompt"']),
    "no prompt": ('{"max_tokens": 3}', ["prompt is missing", '{"prompt"']),
    "null prompt": ('{"prompt": null, "max_tokens": 3}', ["prompt is missing", '{"prompt"']),
    "empty text": ('{"prompt": "", "max_tokens": 3}', ["prompt is ''", "at least one token"]),
    "empty list": ('{"prompt": [], "max_tokens": 3}', ["prompt is empty", "at least one token"]),
    "length 0": ('{"prompt": 0, "max_tokens": 3}', ["prompt is 0", "at least one token"]),
    "negative length": ('{"prompt": -5, "max_tokens": 3}', ["prompt is -5", "at least one token"]),
    "fractional length": ('{"prompt": 5.0, "max_tokens": 3}', ["prompt is 5.0", "a list of token ids"]),
    "true as prompt": ('{"prompt": true, "max_tokens": 3}', ["prompt is True", "a list of token ids"]),
    "object as prompt": ('{"prompt": {"a": 1}, "max_tokens": 3}', ["{'a': 1}", "a list of token ids"]),
    "negative token": ('{"prompt": [4, -1], "max_tokens": 3}', ["token 1 is -1", "integers of at least 0"]),
    "text token": ('{"prompt": ["4"], "max_tokens": 3}', ["token 0 is '4'", "integers of at least 0"]),
    "fractional token": ('{"prompt": [1.5], "max_tokens": 3}', ["token 0 is 1.5", "integers of at least 0"]),
    "true as token": ('{"prompt": [true], "max_tokens": 3}', ["token 0 is True", "integers of at least 0"]),
    "list as token": ('{"prompt": [[1]], "max_tokens": 3}', ["token 0 is [1]", "integers of at least 0"]),
    "half a character": (
        r'{"prompt": "a\ud83d", "max_tokens": 3}',
        [r"'\ud83d'", "write the whole character"],
    ),
    "no max_tokens": ('{"prompt": 4}', ["max_tokens is missing", '"max_tokens": 32']),
    "max_tokens 0": ('{"prompt": 4, "max_tokens": 0}', ["max_tokens is 0", "integer of at least 1"]),
    "negative max_tokens": ('{"prompt": 4, "max_tokens": -7}', ["max_tokens is -7", "integer of at least 1"]),
    "fractional max_tokens": ('{"prompt": 4, "max_tokens": 2.0}', ["max_tokens is 2.0", "an integer"]),
    "text max_tokens": ('{"prompt": 4, "max_tokens": "8"}', ["max_tokens is '8'", "an integer"]),
    "true max_tokens": ('{"prompt": 4, "max_tokens": true}', ["max_tokens is True", "an integer"]),
    "negative arrival": ('{"prompt": 4, "max_tokens": 3, "arrival": -0.5}', ["arrival is -0.5", "0 or more"]),
    "NaN arrival": ('{"prompt": 4, "max_tokens": 3, "arrival": NaN}', ["arrival is nan", "finite"]),
    "infinite arrival": ('{"prompt": 4, "max_tokens": 3, "arrival": Infinity}', ["arrival is inf", "finite"]),
    "arrival past floats": ('{"prompt": 4, "max_tokens": 3, "arrival": 1e999}', ["arrival is inf", "finite"]),
    "arrival of 400 digits": (
        f'{{"prompt": 4, "max_tokens": 3, "arrival": {LONG}}}',
        ["arrival is inf", "finite"],
    ),
    "text arrival": ('{"prompt": 4, "max_tokens": 3, "arrival": "1"}', ["arrival is '1'", "seconds since"]),
    "true arrival": ('{"prompt": 4, "max_tokens": 3, "arrival": true}', ["arrival is True", "seconds since"]),
    "NaN deadline": ('{"prompt": 4, "max_tokens": 3, "deadline": NaN}', ["deadline is nan", "finite"]),
    "deadline before the arrival": (
        '{"prompt": 4, "max_tokens": 3, "arrival": 60, "deadline": 2.5}',
        ["deadline is 2.5", "60.0", "since the start of the run"],
    ),
    "number as id": ('{"id": 7, "prompt": 4, "max_tokens": 3}', ["id is 7", 'text, such as "a"']),
    "empty id": ('{"id": "", "prompt": 4, "max_tokens": 3}', ["id is ''", "not empty"]),
    "number as ignore_eos": (
        '{"prompt": 4, "max_tokens": 3, "ignore_eos": 1}',
        ["ignore_eos is 1", "true or"],
    ),
    "fractional priority": (
        '{"prompt": 4, "max_tokens": 3, "priority": 1.5}',
        ["priority is 1.5", "an integer"],
    ),
    "number as client": ('{"prompt": 4, "max_tokens": 3, "client": 2}', ["client is 2", 'such as "c1"']),
    "misspelt key": (
        '{"prompt": 4, "max_token": 3}',
        ["unknown key 'max_token'", "did you mean 'max_tokens'"],
    ),
    "text temperature": (
        '{"prompt": 4, "max_tokens": 3, "temperature": "0.7"}',
        ["temperature is '0.7'", "a number; 0 takes"],
    ),
    "infinite temperature": (
        '{"prompt": 4, "max_tokens": 3, "temperature": 1e999}',
        ["temperature is inf", "from 0 to 100"],
    ),
    "tiny temperature": (
        '{"prompt": 4, "max_tokens": 3, "temperature": 1e-9}',
        ["temperature is 1e-09", "at least 0.001"],
    ),
    "true top_k": ('{"prompt": 4, "max_tokens": 3, "top_k": true}', ["top_k is True", "at least 1"]),
    "top_k 0": ('{"prompt": 4, "max_tokens": 3, "top_k": 0}', ["top_k is 0", "at least 1"]),
    "top_p 0": ('{"prompt": 4, "max_tokens": 3, "top_p": 0}', ["top_p is 0", "above 0"]),
    "NaN min_p": ('{"prompt": 4, "max_tokens": 3, "min_p": NaN}', ["min_p is nan", "from 0 to 1"]),
    "negative seed": ('{"prompt": 4, "max_tokens": 3, "seed": -1}', ["seed is -1", "at least 0"]),
    "fractional n": ('{"prompt": 4, "max_tokens": 3, "n": 2.0}', ["n is 2.0", "at least 1"]),
    "too many answers": ('{"prompt": 4, "max_tokens": 3, "n": 99999999}', ["n is 99999999", "to 10000"]),
    "penalty of 400 digits": (
        f'{{"prompt": 4, "max_tokens": 3, "presence_penalty": {LONG}}}',
        ["presence_penalty is inf", "from -100 to 100"],
    ),
    "min_tokens over max_tokens": (
        '{"prompt": 4, "max_tokens": 3, "min_tokens": 4}',
        ["min_tokens is 4", "max_tokens of 3"],
    ),
    "empty stop": ('{"prompt": 4, "max_tokens": 3, "stop": [""]}', ["stop has ''", "not empty"]),
    "number as stop": ('{"prompt": 4, "max_tokens": 3, "stop": [5]}', ["stop has 5", "give texts"]),
    "half a character as stop": (
        r'{"prompt": 4, "max_tokens": 3, "stop": ["ok", "a\ud83d"]}',
        [r"'\ud83d'", "write the whole character"],
    ),
    "a stop token alone": (
        '{"prompt": 4, "max_tokens": 3, "stop_token_ids": 5}',
        ["stop_token_ids is 5", "a list of token ids"],
    ),
    "negative stop token": (
        '{"prompt": 4, "max_tokens": 3, "stop_token_ids": [3, -2]}',
        ["stop_token_ids's token 1 is -2", "at least 0"],
    ),
    "true stop token": (
        '{"prompt": 4, "max_tokens": 3, "stop_token_ids": [true]}',
        ["stop_token_ids's token 0 is True", "at least 0"],
    ),
    "foreign key": ('{"prompt": 4, "max_tokens": 3, "?!": 1}', ["unknown key '?!'", "'id'", "'deadline'"]),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_refused_by_line_value_and_remedy_and_the_others_survive(tmp_path, name):
    line, said = BAD_LINES[name]
    good = '{"id": "%s", "prompt": 4, "max_tokens": 3}'
    before, refused, after = read(tmp_path, good % "before", "", line, good % "after")
    assert (before, after) == (Request("before", 4, 3), Request("after", 4, 3))
    assert isinstance(refused, Refusal)
    assert refused.id == "1"
    assert refused.error.startswith("line 3: ")
    for text in said:
        assert text in refused.error
    assert len(refused.error) < 350


@pytest.mark.parametrize("name", BAD_LINES)
def test_the_simulator_serves_the_others_and_records_the_error(tmp_path, name):
    good = '{"id": "good", "prompt": 4, "max_tokens": 3}'
    requests = workloads.resolve_prompts(read(tmp_path, BAD_LINES[name][0], good), None, None, rng())
    bad, served = simulate(requests).requests
    assert bad.error.startswith("line 1: ")
    assert (len(served.tokens), served.error) == (3, None)


def test_a_refusal_keeps_the_id_and_the_arrival_that_its_line_gives(tmp_path):
    (refused,) = read(tmp_path, '{"id": "x", "arrival": 2.5, "prompt": 4, "max_tokens": 0}')
    assert (refused.id, refused.arrival) == ("x", 2.5)


def test_a_refusal_is_never_named_by_what_cannot_be_written_to_a_file(tmp_path):
    (refused,) = read(tmp_path, r'{"id": "\ud83d", "prompt": 4, "max_tokens": 3}')
    assert refused.id == "0"
    assert refused.error.encode()


def test_a_second_request_of_the_same_id_is_refused_and_both_lines_are_named(tmp_path):
    requests = read(
        tmp_path,
        '{"id": "a", "prompt": 4, "max_tokens": 3}',
        '{"id": "b", "prompt": 5, "max_tokens": 3}',
        '{"id": "a", "prompt": 6, "max_tokens": 3}',
    )
    assert requests[:2] == [Request("a", 4, 3), Request("b", 5, 3)]
    assert requests[2] == Refusal("a", "line 3: id 'a' belongs to line 1 already; give it one of its own")


def test_an_id_by_position_counts_as_taken_too(tmp_path):
    requests = read(tmp_path, '{"id": "1", "prompt": 4, "max_tokens": 3}', '{"prompt": 5, "max_tokens": 3}')
    assert [type(request) for request in requests] == [Request, Refusal]
    assert "line 2: id '1' belongs to line 1" in requests[1].error


def test_a_refused_line_does_not_take_its_id(tmp_path):
    requests = read(
        tmp_path, '{"id": "a", "prompt": 4, "max_tokens": 0}', '{"id": "a", "prompt": 4, "max_tokens": 3}'
    )
    assert [type(request) for request in requests] == [Refusal, Request]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("chat42", "did you mean 'chat24'"),
        ("Lognormal", "'lognormal128'"),
        ("nowhere/x.jsonl", "there is 'chat24', 'classic60', 'lognormal128', 'poisson64'"),
        ("", "there is 'chat24'"),
        ("azure_con", "did you mean 'azure_conv'"),
        ("summary:n=3", "did you mean 'summarization'"),
        ("azure.parquet", "(.jsonl)"),
        ("AZURE.CSV.GZ", "(.jsonl)"),
    ],
)
def test_an_unknown_workload_raises_with_what_there_is(name, said):
    with pytest.raises(ValueError) as caught:
        workloads.load(name, rng())
    assert repr(name) in str(caught.value)
    assert said in str(caught.value)


def test_a_table_that_exists_is_refused_by_its_ending(tmp_path):
    path = tmp_path / "azure.tsv"
    path.write_text("TIMESTAMP\tContextTokens\tGeneratedTokens\n")
    with pytest.raises(ValueError, match=r"files with this ending are not read; give a preset \(chat24"):
        workloads.load(path, rng())


@pytest.mark.parametrize("content", ["", "\n", " \r\n\t\n", "\ufeff"])
def test_an_empty_file_raises(tmp_path, content):
    with pytest.raises(ValueError, match=r"is empty; write one request a line"):
        read(tmp_path, content)


def test_a_folder_raises(tmp_path):
    with pytest.raises(ValueError, match=r"cannot be read: Is a directory; name a file"):
        workloads.load(str(tmp_path), rng())


def test_a_preset_goes_before_a_file_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chat24").write_text('{"prompt": 4, "max_tokens": 3}')
    assert len(workloads.load("chat24", rng())) == 24
    assert len(workloads.load("./chat24", rng())) == 1


def by_characters(text):
    return [ord(character) for character in text]


def test_text_becomes_token_ids_and_ids_stay():
    requests = [Request("a", "Hi", 3, 1.5, client="c"), Request("b", (5, 6), 3)]
    assert workloads.resolve_prompts(requests, by_characters, 128, rng()) == [
        Request("a", (72, 105), 3, 1.5, client="c"),
        Request("b", (5, 6), 3),
    ]


@pytest.mark.parametrize(
    ("text", "length"), [("a", 1), ("abcd", 1), ("abcde", 2), ("世界", 2), ("🙂" * 3, 3)]
)
@pytest.mark.parametrize("vocab_size", [None, 100])
def test_without_a_tokenizer_text_becomes_a_quarter_of_its_bytes_rounded_up(text, length, vocab_size):
    (request,) = workloads.resolve_prompts([Request("a", text, 3)], None, vocab_size, rng())
    assert request.prompt == length


def test_without_a_vocabulary_lengths_and_ids_stay():
    requests = [Request("a", 5, 3), Request("b", (10**9,), 3)]
    assert workloads.resolve_prompts(requests, by_characters, None, rng()) == requests


@pytest.mark.parametrize("vocab_size", [1, 2, 4096])
def test_a_length_becomes_that_many_ids_of_the_whole_vocabulary(vocab_size):
    lengths = [1, 2, 500]
    requests = [Request(str(length), length, 3) for length in lengths]
    resolved = workloads.resolve_prompts(requests, None, vocab_size, rng())
    assert [len(request.prompt) for request in resolved] == lengths
    assert all(0 <= token < vocab_size for request in resolved for token in request.prompt)
    assert len(set(resolved[-1].prompt)) >= min(vocab_size, 400)


def test_drawn_ids_do_not_depend_on_the_other_requests():
    requests = [Request(str(position), 20, 3) for position in range(4)]
    other = [Request("x", 7, 9), Refusal("y", "no"), requests[2], Request("z", "text", 1)]
    alone = workloads.resolve_prompts(requests, by_characters, 4096, rng(5))
    mixed = workloads.resolve_prompts(other, by_characters, 4096, rng(5))
    assert mixed[2] == alone[2]
    assert len({request.prompt for request in alone}) == 4
    assert workloads.resolve_prompts(requests, by_characters, 4096, rng(6))[2] != alone[2]


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ((1, 100), "token 1 is 100, outside the vocabulary of 100 tokens; use ids from 0 to 99"),
        ((-1, 5), "token 0 is -1, outside the vocabulary of 100 tokens; use ids from 0 to 99"),
        ("é", "token 0 is 233, outside the vocabulary of 100 tokens"),
        ("   ", "the prompt '   ' encodes to no token; give at least one"),
        ("\ud83d", "half a surrogate pair; write the whole character"),
        (10**12, "length is 1000000000000; give at most 16777216"),
    ],
)
def test_a_prompt_that_cannot_be_resolved_is_refused_and_the_others_go_on(prompt, said):
    requests = [Request("before", 3, 3), Request("bad", prompt, 3, arrival=4.0), Request("after", 3, 3)]
    before, refused, after = workloads.resolve_prompts(
        requests, lambda text: by_characters(text.strip()), 100, rng()
    )
    assert len(before.prompt) == len(after.prompt) == 3
    assert (refused.id, refused.arrival) == ("bad", 4.0)
    assert refused.error.startswith("request 'bad': ")
    assert said in refused.error


def test_a_refusal_is_passed_on():
    refusal = Refusal("a", "line 1: no", 2.0)
    assert workloads.resolve_prompts([refusal], None, 100, rng()) == [refusal]


def test_an_encoder_may_return_numpy_integers():
    (request,) = workloads.resolve_prompts(
        [Request("a", "Hi", 3)], lambda text: np.array(by_characters(text)), 128, rng()
    )
    assert request.prompt == (72, 105)
    assert {type(token) for token in request.prompt} == {int}


@pytest.mark.parametrize("vocab_size", [0, -1])
def test_a_vocabulary_of_nothing_raises(vocab_size):
    with pytest.raises(ValueError, match=f"vocab_size is {vocab_size}; it must be at least 1"):
        workloads.resolve_prompts([], None, vocab_size, rng())


# Arrivals and lengths. The seeds are fixed, so the bound of 4 standard errors decides once and for all.


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("rate", [0.2, 4.0, 200.0])
def test_arrivals_have_the_rate_that_was_asked_for(rate, seed):
    num_requests = 100_000
    arrivals = workloads.poisson_arrivals(rng(seed), num_requests, rate)
    gaps = np.diff([0.0, *arrivals])
    assert len(arrivals) == num_requests
    assert gaps.min() > 0
    assert standard_errors_off(gaps, 1 / rate) < 4
    # An exponential's deviation equals its mean, and the variance of its sample variance is 8 / n.
    assert abs(gaps.var() * rate**2 - 1) < 4 * math.sqrt(8 / num_requests)
    assert arrivals[-1] == pytest.approx(num_requests / rate, rel=4 / math.sqrt(num_requests))


def test_the_first_arrivals_do_not_depend_on_how_many_follow():
    assert workloads.poisson_arrivals(rng(), 10, 2.0) == workloads.poisson_arrivals(rng(), 100, 2.0)[:10]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("mean", "sigma", "maximum", "minimum"),
    [
        (54, 1.0, 384, 1),
        (62, 0.6, 256, 1),
        (2, 1.5, 64, 1),
        (300, 2.0, 384, 1),
        (9.5, 0.1, 40, 8),
        (1.01, 3, 9, 1),
    ],
)
def test_lognormal_lengths_have_the_mean_that_was_asked_for_after_clipping(
    mean, sigma, maximum, minimum, seed
):
    lengths = workloads.lognormal_lengths(rng(seed), 20_000, mean, sigma, maximum, minimum)
    assert {type(length) for length in lengths} == {int}
    assert minimum <= min(lengths) and max(lengths) <= maximum
    assert standard_errors_off(lengths, mean) < 4


def test_the_logarithms_of_long_lognormal_lengths_have_the_sigma_that_was_asked_for():
    lengths = workloads.lognormal_lengths(rng(), 20_000, 1e6, 0.5, 10**9)
    # The deviation of a normal sample's deviation is sigma / sqrt(2 n).
    assert abs(np.std(np.log(lengths)) - 0.5) < 4 * 0.5 / math.sqrt(40_000)


def test_lengths_are_rounded_so_that_the_mean_stays():
    lengths = workloads.lognormal_lengths(rng(), 20_000, 54.25, 0, 384)
    assert set(lengths) == {54, 55}
    assert standard_errors_off(lengths, 54.25) < 4


def test_lognormal_lengths_may_all_be_equal():
    assert workloads.lognormal_lengths(rng(), 50, 54, 0, 54) == [54] * 50


@pytest.mark.parametrize("seed", SEEDS)
def test_uniform_lengths_cover_their_range_evenly(seed):
    lengths = workloads.uniform_lengths(rng(seed), 9_000, 4, 12)
    assert set(lengths) == set(range(4, 13))
    assert {type(length) for length in lengths} == {int}
    assert standard_errors_off(lengths, 8) < 4
    assert standard_errors_off(np.square(np.subtract(lengths, 8)), 60 / 9) < 4
    assert workloads.uniform_lengths(rng(), 3, 5, 5) == [5, 5, 5]


def test_nobody_may_come():
    assert workloads.poisson_arrivals(rng(), 0, 1.0) == []
    assert workloads.lognormal_lengths(rng(), 0, 54, 1.0, 384) == []
    assert workloads.uniform_lengths(rng(), 0, 4, 12) == []


@pytest.mark.parametrize(
    ("draw", "said"),
    [
        (lambda: workloads.poisson_arrivals(rng(), 3, 0), "rate is 0"),
        (lambda: workloads.poisson_arrivals(rng(), 3, -1.0), "rate is -1.0"),
        (lambda: workloads.poisson_arrivals(rng(), 3, math.nan), "rate is nan"),
        (lambda: workloads.poisson_arrivals(rng(), 3, math.inf), "rate is inf"),
        (lambda: workloads.poisson_arrivals(rng(), -3, 1.0), "negative"),
        (lambda: workloads.lognormal_lengths(rng(), 3, 54, -1.0, 384), "sigma is -1.0"),
        (lambda: workloads.lognormal_lengths(rng(), 3, 54, math.nan, 384), "sigma is nan"),
        (lambda: workloads.lognormal_lengths(rng(), 3, 500, 1.0, 384), "mean is 500.*maximum = 384"),
        (lambda: workloads.lognormal_lengths(rng(), 3, 384, 1.0, 384), "mean is 384.*maximum = 384"),
        (lambda: workloads.lognormal_lengths(rng(), 3, 0.5, 0, 384), "mean is 0.5.*minimum = 1"),
        (lambda: workloads.lognormal_lengths(rng(), 3, math.nan, 1.0, 384), "mean is nan"),
        (lambda: workloads.lognormal_lengths(rng(), 3, 54, 1.0, 384, minimum=0), "from 0 to 384"),
        (lambda: workloads.uniform_lengths(rng(), 3, 5, 4), "from 5 to 4"),
        (lambda: workloads.uniform_lengths(rng(), 3, 0, 4), "from 0 to 4"),
    ],
)
def test_an_impossible_distribution_raises_and_names_the_value(draw, said):
    with pytest.raises(ValueError, match=said):
        draw()


def test_presets_are_listed_with_what_they_send():
    listed = workloads.presets()
    assert list(listed) == [
        *("chat24", "classic60", "lognormal128", "poisson64"),
        *("chat", "code", "rag", "summarization", "multi_turn", "agents", "batch"),
    ]
    for line in listed.values():
        assert line.startswith("Send ") and line.endswith(".")


def test_presets_cannot_be_mutated():
    with pytest.raises(TypeError):
        workloads.PRESETS["chat24"] = workloads.classic60
    workloads.presets().clear()
    workloads.load("chat24", rng()).clear()
    assert len(workloads.presets()) == 11
    assert len(workloads.load("chat24", rng())) == 24


@pytest.mark.parametrize("name", workloads.PRESETS)
def test_presets_have_distinct_ids_and_no_predictions(name):
    requests = workloads.load(name, rng())
    assert all(isinstance(request, Request) for request in requests)
    assert len({request.id for request in requests}) == len(requests)
    assert all(request.predicted_output is None and request.output_length is None for request in requests)


def test_chat24_has_24_distinct_texts_of_mixed_lengths():
    requests = workloads.load("chat24", rng())
    lengths = sorted(len(request.prompt.split()) for request in requests)
    assert len({request.prompt for request in requests}) == len(requests) == 24
    assert lengths[4] <= 7 and 140 <= lengths[-1] <= 170
    assert sum(length > 60 for length in lengths) >= 4 and sum(15 <= length <= 60 for length in lengths) >= 8
    assert all(request.prompt == request.prompt.strip() for request in requests)
    assert {request.arrival for request in requests} == {0.0}
    assert not any(request.sampling.ignore_eos for request in requests)


def test_chat24_answers_are_so_uneven_that_a_static_batch_of_8_wastes_over_half():
    lengths = [request.max_tokens for request in workloads.load("chat24", rng())]
    assert (min(lengths), max(lengths)) == (8, 96)
    assert np.mean(lengths) == pytest.approx(34, abs=0.5)
    seat_steps = sum(8 * max(lengths[start : start + 8]) for start in (0, 8, 16))
    assert sum(lengths) / seat_steps < 0.45


def test_classic60_has_the_numbers_of_the_module_level_random_functions():
    requests = workloads.load("classic60", rng())
    state = random.getstate()
    try:
        random.seed(2024)
        expected = [random.randint(4, 12) for _ in range(60)]
    finally:
        random.setstate(state)
    assert [request.max_tokens for request in requests] == expected
    assert sum(expected) == 510
    assert {request.prompt for request in requests} == {1}
    assert all(request.sampling.ignore_eos for request in requests)


def test_presets_leave_the_module_level_random_state_alone():
    before, before_numpy = random.getstate(), np.random.get_state()[1].tolist()
    for name in workloads.PRESETS:
        workloads.load(name, rng())
    assert random.getstate() == before
    assert np.random.get_state()[1].tolist() == before_numpy


@pytest.mark.parametrize(
    ("name", "prompt_mean", "output_mean", "largest"),
    [("lognormal128", 62, 54, (256, 384)), ("poisson64", 48, 32, (192, 128))],
)
def test_random_presets_have_the_means_and_limits_that_they_state(name, prompt_mean, output_mean, largest):
    requests = [request for seed in range(50) for request in workloads.load(name, rng(seed))]
    prompts, outputs = [request.prompt for request in requests], [request.max_tokens for request in requests]
    assert standard_errors_off(prompts, prompt_mean) < 4
    assert standard_errors_off(outputs, output_mean) < 4
    assert max(prompts) <= largest[0] and max(outputs) <= largest[1]
    assert all(request.sampling.ignore_eos for request in requests)


def test_lognormal128_is_there_at_once():
    requests = workloads.load("lognormal128", rng())
    assert len(requests) == 128
    assert {request.arrival for request in requests} == {0.0}


def test_poisson64_arrives_over_time_at_4_a_second():
    spans = [workloads.load("poisson64", rng(seed))[-1].arrival for seed in range(50)]
    assert len(workloads.load("poisson64", rng())) == 64
    assert standard_errors_off(spans, 64 / 4) < 4


SHOW_ALL = """
import numpy as np
from cbresearch import workloads

for name, preset in workloads.PRESETS.items():
    rng = np.random.default_rng(3)
    name += ":size=0.05" if preset.__kwdefaults__ else ""
    print(name, workloads.resolve_prompts(workloads.load(name, rng), str.encode, 256, rng))
"""


def test_the_same_seed_gives_the_same_requests_in_another_process_under_another_hash_seed():
    first, second = printed_by_two_processes(SHOW_ALL)
    assert first == second
    assert len(first) > 50_000


@pytest.mark.parametrize("name", ["lognormal128", "poisson64"])
def test_another_seed_gives_other_requests(name):
    assert workloads.load(name, rng(1)) == workloads.load(name, rng(1)) != workloads.load(name, rng(2))
