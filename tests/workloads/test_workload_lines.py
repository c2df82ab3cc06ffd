"""Workload files: a line is read field by field, and a bad one is rejected by itself."""

import dataclasses
import json

import pytest
from helpers.drawing import rng

from cbresearch import workloads
from cbresearch.config import SchedulerConfig
from cbresearch.costs import Linear
from cbresearch.request import Rejected, Request, SamplingParams
from cbresearch.simulator import simulate


def read(tmp_path, *lines):
    path = tmp_path / "work.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    return workloads.load(path, rng())


def test_workload_file_sets_every_field_of_a_request(tmp_path):
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


def test_workload_file_sets_every_sampling_parameter_but_log_probabilities(tmp_path):
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
    # No result file holds log-probabilities.
    assert {*sampling, "num_logprobs"} == {field.name for field in dataclasses.fields(SamplingParams)}
    nothing = json.dumps({"prompt": 4, "max_tokens": 3} | dict.fromkeys(sampling))
    assert read(tmp_path, nothing) == [Request("0", 4, 3)]


def test_workload_file_takes_one_stop_text_alone(tmp_path):
    (request,) = read(tmp_path, '{"prompt": 4, "max_tokens": 3, "stop": "Ende"}')
    assert request.sampling.stop == ("Ende",)


@pytest.mark.parametrize("prompt", ["Grüße, 世界 🙂\nnew line", [0, 1, 2], 1, 4096])
def test_workload_file_keeps_each_kind_of_prompt(tmp_path, prompt):
    (request,) = read(tmp_path, json.dumps({"prompt": prompt, "max_tokens": 1}))
    assert request.prompt == (tuple(prompt) if isinstance(prompt, list) else prompt)


@pytest.mark.parametrize("rest", ["", ', "id": null, "arrival": null, "deadline": null, "client": null'])
def test_workload_file_leaves_missing_and_null_fields_at_the_defaults(tmp_path, rest):
    (request,) = read(tmp_path, f'{{"prompt": "Hello", "max_tokens": 3{rest}}}')
    assert request == Request("0", "Hello", 3)


def test_workload_file_numbers_requests_by_position_without_blank_lines(tmp_path):
    line = '{"prompt": 4, "max_tokens": 3}'
    requests = read(tmp_path, "", line, "  ", "oops", line, "\t", line, "")
    assert [request.id for request in requests] == ["0", "1", "2", "3"]
    assert [type(request) for request in requests] == [Request, Rejected, Request, Request]
    assert requests[1].error.startswith("line 4: ")


def test_workload_file_keeps_its_order_and_serve_sorts_by_arrival(tmp_path):
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
def test_workload_file_may_have_a_byte_order_mark_and_crlf(tmp_path, mark, newline):
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
        ["is not JSON", "max_tokens", "write one request a line"],
    ),
    "two objects": ('{"prompt": 1, "max_tokens": 3} {}', ["Extra data", "write one request a line"]),
    "nested too deep": (DEEP, ["[[[", "is not JSON", "write one request a line"]),
    "a number of 5000 digits": (
        '{"prompt": %s, "max_tokens": 3}' % ("9" * 5000),
        ["prompt is inf", "a list of token ids"],
    ),
    "not utf-8": (
        b'{"prompt": "caf\xe9", "max_tokens": 3}',
        ["caf", "UTF-8", "0xe9", "write one request a line"],
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
    "negative token": ('{"prompt": [4, -1], "max_tokens": 3}', ["prompt has -1", "integers of at least 0"]),
    "text token": ('{"prompt": ["4"], "max_tokens": 3}', ["prompt is ['4']", "a list of token ids"]),
    "fractional token": ('{"prompt": [1.5], "max_tokens": 3}', ["prompt is [1.5]", "a list of token ids"]),
    "true as token": ('{"prompt": [true], "max_tokens": 3}', ["prompt has True", "integers of at least 0"]),
    "list as token": ('{"prompt": [[1]], "max_tokens": 3}', ["prompt is [[1]]", "a list of token ids"]),
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
    "text arrival": (
        '{"prompt": 4, "max_tokens": 3, "arrival": "1"}',
        ["arrival is '1'", "number of seconds"],
    ),
    "true arrival": (
        '{"prompt": 4, "max_tokens": 3, "arrival": true}',
        ["arrival is True", "number of seconds"],
    ),
    "NaN deadline": ('{"prompt": 4, "max_tokens": 3, "deadline": NaN}', ["deadline is nan", "finite"]),
    "deadline before the arrival": (
        '{"prompt": 4, "max_tokens": 3, "arrival": 60, "deadline": 2.5}',
        ["deadline is 2.5", "60.0", "since the start of the run"],
    ),
    "number as id": ('{"id": 7, "prompt": 4, "max_tokens": 3}', ["id is 7", "text that is not empty"]),
    "empty id": ('{"id": "", "prompt": 4, "max_tokens": 3}', ["id is ''", "not empty"]),
    "number as ignore_eos": (
        '{"prompt": 4, "max_tokens": 3, "ignore_eos": 1}',
        ["ignore_eos is 1", "True or False"],
    ),
    "fractional priority": (
        '{"prompt": 4, "max_tokens": 3, "priority": 1.5}',
        ["priority is 1.5", "an integer"],
    ),
    "number as client": ('{"prompt": 4, "max_tokens": 3, "client": 2}', ["client is 2", "it must be a text"]),
    "misspelt key": (
        '{"prompt": 4, "max_token": 3}',
        ["unknown key 'max_token'", "did you mean 'max_tokens'"],
    ),
    "text temperature": (
        '{"prompt": 4, "max_tokens": 3, "temperature": "0.7"}',
        ["temperature is '0.7'", "a number from 0 to 100"],
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
    "fractional n": ('{"prompt": 4, "max_tokens": 3, "n": 2.0}', ["n is 2.0", "an integer of at least 1"]),
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
        ["stop_token_ids has -2", "at least 0"],
    ),
    "true stop token": (
        '{"prompt": 4, "max_tokens": 3, "stop_token_ids": [true]}',
        ["stop_token_ids has True", "at least 0"],
    ),
    "foreign key": ('{"prompt": 4, "max_tokens": 3, "?!": 1}', ["unknown key '?!'", "'id'", "'deadline'"]),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_workload_file_rejects_a_bad_line_by_number_value_and_remedy_and_keeps_the_others(tmp_path, name):
    line, said = BAD_LINES[name]
    good = '{"id": "%s", "prompt": 4, "max_tokens": 3}'
    requests = read(tmp_path, good % "before", "", line, good % "after")
    before, rejected, after = requests
    assert (before, after) == (Request("before", 4, 3), Request("after", 4, 3))
    assert isinstance(rejected, Rejected)
    assert rejected.id == "1"
    assert rejected.error.startswith("line 3: ")
    for text in said:
        assert text in rejected.error
    assert len(rejected.error) < 350
    records = simulate(requests).requests
    assert [record.error for record in records] == [None, rejected.error, None]


def test_rejection_keeps_the_id_and_the_arrival_of_its_line(tmp_path):
    (rejected,) = read(tmp_path, '{"id": "x", "arrival": 2.5, "prompt": 4, "max_tokens": 0}')
    assert (rejected.id, rejected.arrival) == ("x", 2.5)


def test_rejection_is_not_named_by_half_a_surrogate_pair(tmp_path):
    (rejected,) = read(tmp_path, r'{"id": "\ud83d", "prompt": 4, "max_tokens": 3}')
    assert rejected.id == "0"
    assert rejected.error.encode()


def test_workload_file_rejects_a_repeated_id_and_names_both_lines(tmp_path):
    requests = read(
        tmp_path,
        '{"id": "a", "prompt": 4, "max_tokens": 3}',
        '{"id": "b", "prompt": 5, "max_tokens": 3}',
        '{"id": "a", "prompt": 6, "max_tokens": 3}',
    )
    assert requests[:2] == [Request("a", 4, 3), Request("b", 5, 3)]
    assert requests[2] == Rejected("a", "line 3: id 'a' belongs to line 1 already; give it one of its own")


def test_workload_file_rejects_an_id_that_equals_a_position(tmp_path):
    requests = read(tmp_path, '{"id": "1", "prompt": 4, "max_tokens": 3}', '{"prompt": 5, "max_tokens": 3}')
    assert [type(request) for request in requests] == [Request, Rejected]
    assert "line 2: id '1' belongs to line 1" in requests[1].error


def test_workload_file_lets_a_later_line_take_the_id_of_a_rejected_one(tmp_path):
    requests = read(
        tmp_path, '{"id": "a", "prompt": 4, "max_tokens": 0}', '{"id": "a", "prompt": 4, "max_tokens": 3}'
    )
    assert [type(request) for request in requests] == [Rejected, Request]


def test_workload_file_rejects_a_deadline_that_counts_from_the_arrival(tmp_path):
    line = {"prompt": 4, "max_tokens": 3, "arrival": 1_700_158_546.0, "deadline": 2.5}
    (rejected,) = read(tmp_path, json.dumps(line))
    assert "deadline is 2.5, before the arrival" in rejected.error


def test_workload_file_on_an_epoch_clock_has_the_same_waits(tmp_path):
    # The run's clock jumps to the first arrival; deadlines are on the same clock as arrivals.
    traces = []
    for start in (0.0, 1_700_158_546.0):
        lines = [
            json.dumps({"prompt": 4, "max_tokens": 3, "arrival": start + gap, "deadline": start + gap + 9})
            for gap in (0.0, 0.01, 0.01, 5.0)
        ]
        cost, scheduler = Linear(step=0.02), SchedulerConfig(2, 512)
        traces.append(simulate(read(tmp_path, *lines), cost=cost, scheduler=scheduler))
    for early, late in zip(*(trace.requests for trace in traces), strict=True):
        assert late.is_complete
        assert late.ttft == pytest.approx(early.ttft, abs=1e-5)


@pytest.mark.parametrize(
    ("first", "second", "gap"),
    [
        ("1700000000123", "1700000000999", 0.876),
        ("1700000000.0010001", "1700000000.0010002", 1e-7),
        ("1700000000000000001", "1700000000000000002", 1e-9),
        ("0.25", "1.5", 1.25),
    ],
)
def test_workload_file_counts_arrivals_and_deadlines_by_one_clock_without_the_loss_of_a_digit(
    tmp_path, first, second, gap
):
    text = '{"prompt": 4, "max_tokens": 3, "arrival": %s, "deadline": %s}'
    early, late, last = read(
        tmp_path, text % (first, second), text % (second, second), '{"prompt": 4, "max_tokens": 3}'
    )
    start = 0.25 if first == "0.25" else 0.0
    assert (early.arrival, early.deadline) == (start, start + gap)
    assert (late.arrival, late.deadline, last.arrival) == (start + gap, start + gap, 0.0)


@pytest.mark.parametrize(
    ("times", "said"),
    [
        ('"arrival": 1700000000', "arrival is 1700000000, by another clock than the first arrival"),
        ('"deadline": 1700000000.5', "deadline is 1700000000.5, by another clock"),
        ('"deadline": {"a": 1, "a": 2}', "the key 'a' is given twice"),
    ],
)
def test_workload_file_rejects_a_time_by_another_clock_alone(tmp_path, times, said):
    good = '{"id": "%s", "arrival": 3, "prompt": 4, "max_tokens": 3}'
    line = f'{{"prompt": 4, "max_tokens": 3, {times}}}'
    before, rejected, after = read(tmp_path, good % "a", line, good % "b")
    assert (before.arrival, after.arrival) == (3.0, 3.0)
    assert rejected.error.startswith(f"line 2: {said}")


def test_workload_file_begins_at_the_first_arrival_whatever_deadline_is_earlier(tmp_path):
    line = '{"prompt": 4, "max_tokens": 3, "arrival": 1700000009, "deadline": %s}'
    rejected, kept = read(tmp_path, line % 1_700_000_003, line % 1_700_000_010)
    assert "deadline is 1700000003, before the arrival" in rejected.error
    assert (rejected.arrival, kept.arrival, kept.deadline) == (0.0, 0.0, 1.0)
