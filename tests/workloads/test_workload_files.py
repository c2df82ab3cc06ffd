"""Presets, public traces and files are found by name, and CSV traces read as published."""

import hashlib
import json
import sys
import time

import numpy as np
import pytest
from helpers.drawing import rng

from cbresearch import workloads
from cbresearch.request import Rejected, Request, SamplingParams
from cbresearch.simulator import simulate
from cbresearch.workloads import TRACES, files

# Published with the traces: requests, span in seconds, requests a second, coefficient of variation of the
# gaps; then mean, minimum, p50, p90, p99 and maximum of the prompts and of the outputs.
PUBLISHED = {
    "azure_code": (
        (8_819, 3435.95, 2.567, 13.15),
        (2047.85, 3, 1469, 5187.6, 7436, 7437),
        (27.88, 6, 13, 55, 251.5, 1899),
    ),
    "azure_conv": (
        (19_366, 3501.72, 5.530, 1.094),
        (1154.70, 2, 1020, 2734.5, 4142, 14050),
        (211.13, 7, 129, 424, 601, 1000),
    ),
    "mooncake_conversation": (
        (12_031, 3537.00, 3.402, 3.03),
        (12035.06, 891, 6909, 27367, 85400, 126195),
        (342.62, 1, 350, 597, 1118.5, 2000),
    ),
    "mooncake_synthetic": (
        (3_993, 1022.03, 3.907, 1.011),
        (15325.48, 13, 11587, 38611, 66456, 191378),
        (149.12, 1, 69, 389, 768, 893),
    ),
}

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens"
ARXIV = "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio"
BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
EPOCH = 1_700_158_546.0
TO_THE_END = SamplingParams(ignore_eos=True)


def write(tmp_path, *lines, name="trace.csv", newline="\n", end=True):
    path = tmp_path / name
    path.write_bytes((newline.join(lines) + (newline if end else "")).encode())
    return path


def read(tmp_path, *lines, **options):
    return workloads.read_trace(write(tmp_path, *lines), rng(), **options)


def raw_columns(name):
    """Return arrivals, prompt and output lengths of a trace, read by other means than the package's."""
    path = workloads.find(TRACES[name].file)
    if path is None:
        pytest.skip(f"{TRACES[name].file} is not there; name its folder in CBRESEARCH_DATA")
    if path.suffix == ".csv":
        import pandas as pd

        frame = pd.read_csv(path)
        stamps = pd.to_datetime(frame["TIMESTAMP"]).astype("datetime64[ns]").astype("int64").to_numpy()
        arrivals = (stamps - stamps[0]) / 1e9
        return arrivals, frame["ContextTokens"].to_numpy(), frame["GeneratedTokens"].to_numpy()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    columns = [[row[key] for row in rows] for key in ("timestamp", "input_length", "output_length")]
    return np.array(columns[0]) / 1000, np.array(columns[1]), np.array(columns[2])


@pytest.mark.parametrize("name", PUBLISHED)
def test_public_trace_has_the_published_count_span_means_and_percentiles(name):
    arrivals, prompts, outputs = raw_columns(name)
    option = ":tokens_per_id=1" if "mooncake" in name else ""
    requests = workloads.load(name + option, rng())
    (count, span, rate, variation), *published = PUBLISHED[name]
    assert all(isinstance(request, Request) for request in requests)
    assert not workloads.read_trace(name, n=100).repairs
    assert [request.arrival for request in requests] == arrivals.tolist()
    assert [request.max_tokens for request in requests] == outputs.tolist()
    lengths = [request.num_prompt_tokens for request in requests]
    assert lengths == (prompts if not option else -(-prompts // 512)).tolist()
    assert len(requests) == count
    assert requests[-1].arrival - requests[0].arrival == pytest.approx(span, abs=0.006)
    assert len(requests) / span == pytest.approx(rate, abs=6e-4)
    gaps = np.diff(arrivals)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, abs=0.006)
    for column, said in zip((prompts, outputs), published, strict=True):
        quantiles = np.percentile(column, [50, 90, 99])
        assert [column.mean(), column.min(), *quantiles, column.max()] == pytest.approx(
            said, abs=0.09, rel=1e-5
        )


def test_spread_option_spreads_mooncake_arrivals_inside_their_ticks():
    plain, *_ = raw_columns("mooncake_conversation")
    plain = plain.tolist()
    spread = [r.arrival for r in workloads.load("mooncake_conversation:tokens_per_id=1,spread", rng())]
    assert len(set(plain)) == 1_180 and np.count_nonzero(np.diff(plain) == 0) == 10_851
    assert len(set(spread)) == 12_031
    assert np.all(np.diff(spread) >= 0)
    later = np.subtract(spread, plain)
    assert later.min() >= 0 and later.max() < 3.0 + 1e-9
    gaps = np.diff(spread)
    assert 0.9 < gaps.std() / gaps.mean() < 1.3


def test_csv_trace_of_20000_rows_is_read_well_under_a_second(tmp_path):
    rows = [
        f"2023-11-16 18:{k // 600 % 60:02d}:{k // 10 % 60:02d}.{k % 10}680590,374,44" for k in range(20_000)
    ]
    path = write(tmp_path, AZURE, *rows)
    best = min(timed(path) for _ in range(3))
    assert best < 1


def timed(path):
    start = time.process_time()
    workloads.load(path, rng())
    return time.process_time() - start


# Each kind by its header.


def test_azure_trace_keeps_the_seventh_digit_of_a_second(tmp_path):
    trace = read(tmp_path, AZURE, "2023-11-16 18:15:46.6805900,374,44", "2023-11-16 18:15:50.9951697,396,109")
    assert trace.kind == "azure"
    assert trace.requests == [
        Request("0", 374, 44, 0.0, TO_THE_END),
        Request("1", 396, 109, 4.3145797, TO_THE_END),
    ]
    assert [request.output_length for request in trace.requests] == [44, 109]


@pytest.mark.parametrize(
    ("stamp", "arrival"),
    [
        ("2023-11-16 18:15:47", 1.0),
        ("2023-11-16T18:15:46.5Z", 0.5),
        ("2023-11-16 18:15:46.000000001+00:00", 1e-9),
        ("2023-11-17 00:00:00", 20_654.0),
        ("2024-02-29 18:15:46", 105 * 86_400.0),
        ("2023-11-16 20:15:46.25+02:00", 0.25),
        ("2023-11-16T23:45:46.25+0530", 0.25),
        ("2023-11-16 18:15:46.25 -00", 0.25),
        ("2023-11-16 18:15:46.25 UTC", 0.25),
        ("2023-11-16 18:15:46.25GMT", 0.25),
        ("2023-11-16t18:15:46.25z", 0.25),
        ("2023-11-16 18:15:46.25  Z", 0.25),
        ("2023-11-16 19:15:46.25 +01:00", 0.25),
        ("1700158546.25", 0.25),
        ("1700158546250", 0.25),
    ],
)
def test_azure_stamp_becomes_seconds_since_the_first(tmp_path, stamp, arrival):
    requests = read(tmp_path, AZURE, "2023-11-16 18:15:46.0000000,3,4", f"{stamp},3,4").requests
    assert requests[1].arrival == arrival


def test_vidur_trace_has_seconds_and_columns_in_any_order(tmp_path):
    trace = read(
        tmp_path, "num_decode_tokens,extra,arrived_at,num_prefill_tokens", "44,x,0.0,374", "9,y,4.314579,3"
    )
    assert trace.kind == "vidur"
    assert [(r.prompt, r.max_tokens, r.arrival) for r in trace.requests] == [(374, 44, 0.0), (3, 9, 4.314579)]


def test_vidur_trace_without_arrivals_arrives_at_once_or_at_a_rate(tmp_path):
    path = write(tmp_path, ARXIV, *["3000,200,3200,15.0"] * 2000)
    assert workloads.read_trace(path).kind == "vidur_lengths"
    assert {request.arrival for request in workloads.load(path, rng())} == {0.0}
    drawn = workloads.load(f"{path}:rate=4", rng(1))
    assert [r.arrival for r in drawn] == workloads.Poisson(4.0)(rng(1), 2000).tolist()
    assert workloads.load(f"{path}:rate=4", rng(1)) == drawn != workloads.load(f"{path}:rate=4", rng(2))
    with pytest.raises(ValueError, match="give a random generator as rng"):
        workloads.read_trace(path, rate=4.0)


def test_burstgpt_trace_names_its_sessions_and_counts_its_failures(tmp_path):
    header = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"
    lines = (
        header,
        "5,s1,2.5,ChatGPT,472,18,490,Conversation log",
        "45.5,s2,,GPT-4,1087,0,1087,API log",
        '118,"s,3",,GPT-4,417,276,693,"API log"',
    )
    trace = read(tmp_path, *lines)
    assert trace.kind == "burstgpt"
    assert [(r.id, r.prompt, r.max_tokens, r.arrival, r.client) for r in trace.requests] == [
        ("0", 472, 18, 0.0, "s1"),
        ("2", 417, 276, 113.0, "s,3"),
    ]
    assert trace.repairs == {"failed requests left out": 1}
    rejected = read(tmp_path, *lines, failures="reject").requests[1]
    assert rejected == Rejected(
        "1", "line 3: Response tokens is 0; it must be an integer of at least 1", 40.5
    )
    assert len(workloads.load(f"{tmp_path / 'trace.csv'}:failures=reject", rng())) == 3


def test_csv_trace_is_known_by_its_header_not_by_its_ending(tmp_path):
    path = write(tmp_path, BURSTGPT, "5,ChatGPT,472,18,490,Conversation log", name="trace.txt")
    assert workloads.load(path, rng())[0].prompt == 472
    with pytest.raises(
        ValueError, match=r"'5,ChatGPT,472', is no header of a known trace, and no line is .*; there is 'Cont"
    ):
        read(tmp_path, "5,ChatGPT,472")
    with pytest.raises(ValueError, match="did you mean 'num_prefill_tokens'"):
        read(tmp_path, "num_prefil_tokens,num_decode_tokens", "3,4")


@pytest.mark.parametrize("lines", [(AZURE,), (AZURE, ""), (BURSTGPT, "5,GPT-4,3,0,3,API log")])
def test_csv_trace_without_requests_raises(tmp_path, lines):
    with pytest.raises(ValueError, match="is empty"):
        read(tmp_path, *lines)


# Bad rows. The bad one, what its error says, and its arrival.

GOOD = "2023-11-16 18:15:46.6805900,374,44"
BAD_ROWS = {
    "short": ("2023-11-16 18:15:48.6805900,374", "2 values where the header names 3"),
    "long": ("2023-11-16 18:15:48.6805900,374,44,1", "4 values where the header names 3"),
    "one word": ("oops", "1 values where the header names 3: 'oops'"),
    "no time": (",374,44", "TIMESTAMP is ''; write a UTC time such as"),
    "bad time": ("yesterday,374,44", "TIMESTAMP is 'yesterday'"),
    "no such day": ("2023-02-30 18:15:46.6805900,374,44", "TIMESTAMP is '2023-02-30 18:15:46.6805900'"),
    "no such hour": ("2023-11-16 25:15:46,374,44", "TIMESTAMP is '2023-11-16 25:15:46'"),
    "a word for a time": ("now,374,44", "TIMESTAMP is 'now'; write a UTC time such as"),
    "no such zone": ("2023-11-16 18:15:46+99:00,374,44", "write a UTC time"),
    "a zone by name": ("2023-11-16 18:15:46 CET,374,44", "write a UTC time"),
    "negative prompt": (
        "2023-11-16 18:15:48.6805900,-374,44",
        "ContextTokens is '-374'; it must be an integer",
    ),
    "negative output": (
        "2023-11-16 18:15:48.6805900,374,-1",
        "GeneratedTokens is '-1'; it must be an integer",
    ),
    "no prompt": (
        "2023-11-16 18:15:48.6805900,0,44",
        "ContextTokens is 0; it must be an integer of at least 1",
    ),
    "no output": (
        "2023-11-16 18:15:48.6805900,374,0",
        "GeneratedTokens is 0; it must be an integer of at least 1",
    ),
    "empty": ("2023-11-16 18:15:48.6805900,,44", "ContextTokens is ''"),
    "half a token": (
        "2023-11-16 18:15:48.6805900,374,4.5",
        "GeneratedTokens is '4.5'; it must be an integer",
    ),
    "not a number": ("2023-11-16 18:15:48.6805900,nan,44", "ContextTokens is 'nan'"),
    "other digits": ("2023-11-16 18:15:48.6805900,٣,44", "ContextTokens is '٣'"),
    "endless": ("2023-11-16 18:15:48.6805900,%s,44" % ("9" * 5000), "it must be an integer of at least 1"),
    "open quote": ('"2023-11-16 18:15:48.6805900,374,44', "1 values where the header names 3"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_csv_trace_rejects_a_bad_row_by_line_value_and_remedy_and_keeps_the_others(tmp_path, name):
    row, said = BAD_ROWS[name]
    after = "2023-11-16 18:15:50.6805900,9,8"
    first, rejected, last = read(tmp_path, AZURE, GOOD, "", row, after).requests
    assert (first.prompt, last.prompt, last.arrival) == (374, 9, 4.0)
    assert isinstance(rejected, Rejected)
    assert rejected.id == "1"
    assert rejected.error.startswith("line 4: ")
    assert said in rejected.error
    assert len(rejected.error) < 350


@pytest.mark.parametrize("tokens", ["20", "20.0", "+20", "020", "2e1", "2E+01"])
def test_csv_trace_takes_a_whole_number_of_tokens_however_it_is_written(tmp_path, tokens):
    (request,) = read(tmp_path, VIDUR, f"0,{tokens},{tokens}").requests
    assert (request.prompt, request.max_tokens) == (20, 20)


@pytest.mark.parametrize("arrived", ["-1.0", "nan", "inf", "1e400", "", "1,5", "0x10"])
def test_csv_trace_rejects_a_time_that_is_no_number_of_seconds(tmp_path, arrived):
    rejected, good = read(tmp_path, VIDUR, f'"{arrived}",3,4', "2.5,3,4").requests
    assert f"arrived_at is {arrived!r}; write seconds, 0 or more" in rejected.error
    assert good.arrival == 0.0


def test_csv_trace_rejects_a_row_that_is_not_utf8(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_bytes(f"{VIDUR}\n0.0,3,4\n1.0,\xff\xfe,4\n2.0,3,4\n".encode("latin-1"))
    assert [type(row) for row in workloads.load(path, rng())] == [Request, Rejected, Request]


def test_simulator_serves_good_rows_and_records_the_bad_ones(tmp_path):
    trace = simulate(read(tmp_path, VIDUR, "0.0,3,4", "1.0,3,0", "2.0,5,2").requests)
    assert [len(record.tokens) for record in trace.requests] == [4, 0, 2]
    assert trace.requests[1].error.startswith("line 3: num_decode_tokens is 0")


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("end", [True, False])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_csv_trace_may_have_a_byte_order_mark_crlf_and_no_last_newline(tmp_path, mark, end, newline):
    path = write(tmp_path, mark + VIDUR, "0.0,3,4", "1.5,5,6", newline=newline, end=end)
    trace = workloads.read_trace(path)
    assert [(r.prompt, r.max_tokens, r.arrival) for r in trace.requests] == [(3, 4, 0.0), (5, 6, 1.5)]
    assert not trace.repairs


def test_csv_trace_sorts_rows_by_arrival_counts_them_and_keeps_their_names(tmp_path):
    trace = read(tmp_path, VIDUR, "5.0,1,1", "3.0,2,1", "oops", "9.0,3,1", "3.0,4,1")
    assert [(r.id, r.arrival) for r in trace.requests] == [
        ("1", 0.0),
        ("2", 0.0),
        ("4", 0.0),
        ("0", 2.0),
        ("3", 6.0),
    ]
    assert trace.repairs == {"rows sorted by arrival": 2}


@pytest.mark.parametrize(
    "lines",
    [
        (
            AZURE,
            "2023-11-16 18:15:46.5000000,4,3",
            "2023-11-16 18:15:47.0000000,4,3",
            "2023-11-16 18:15:50,4,3",
        ),
        (VIDUR, f"{EPOCH},4,3", f"{EPOCH + 0.5},4,3", f"{EPOCH + 3.5},4,3"),
        (BURSTGPT, f"{EPOCH},m,4,3,7,x", f"{EPOCH + 0.5},m,4,3,7,x", f"{EPOCH + 3.5},m,4,3,7,x"),
    ],
)
def test_csv_trace_that_counts_from_an_epoch_begins_at_0_and_keeps_its_span(tmp_path, lines):
    requests = read(tmp_path, *lines).requests
    assert [request.arrival for request in requests] == [0.0, 0.5, 3.5]


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        ((AZURE, "2023-11-16 18:15:46,4,7"), "trace.csv"),
        ((VIDUR, "0.0,4,7"), "trace.csv"),
        ((BURSTGPT, "5,GPT-4,4,7,11,API log"), "trace.csv"),
        (('{"timestamp": 0, "input_length": 4, "output_length": 7, "hash_ids": [3]}',), "trace.jsonl"),
    ],
)
def test_trace_requests_run_to_their_recorded_length(tmp_path, lines, name):
    (request,) = workloads.load(write(tmp_path, *lines, name=name), rng())
    assert (request.max_tokens, request.output_length, request.sampling.ignore_eos) == (7, 7, True)
    assert not request.sampling.stop and not request.sampling.stop_token_ids
    assert len(simulate([request]).requests[0].tokens) == 7


# Options.


def test_n_and_speed_are_options_of_every_kind_of_file(tmp_path):
    table = write(tmp_path, VIDUR, "0.0,3,4", "1.5,5,6", "4.0,7,8")
    lines = write(
        tmp_path, *['{"prompt": 3, "max_tokens": 4, "arrival": 1.5, "deadline": 2.0}'] * 3, name="w.jsonl"
    )
    assert [r.arrival for r in workloads.load(f"{table}:n=2,speed=3", rng())] == [0.0, 0.5]
    assert [(r.arrival, r.deadline) for r in workloads.load(f"{lines}:n=1,speed=3", rng())] == [(0.5, 1.0)]
    assert len(workloads.read_trace(lines, n=2).requests) == 2


@pytest.mark.parametrize("factor", [0.5, 2.0, 7.0])
def test_speed_option_divides_the_intervals(tmp_path, factor):
    times = [0.0, 1.5, 1.5, 4.0, 10.0]
    path = write(tmp_path, VIDUR, *[f"{time},4,3" for time in times])
    requests = workloads.load(f"{path}:speed={factor}", rng())
    assert [request.arrival for request in requests] == pytest.approx([time / factor for time in times])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("sped=2", "has no option 'sped'; did you mean 'speed'"),
        ("zzz", "there is 'n', 'speed', 'rate', 'failures', 'spread', 'tokens_per_id'"),
        ("spread", "is of the kind vidur; spread is for mooncake"),
        ("rate=2", "rate is for vidur_lengths or sharegpt or openai_batch; scale its arrivals by speed"),
        ("failures=reject", "failures is for burstgpt"),
        ("tokens_per_id=4", "tokens_per_id is for mooncake or qwen"),
        ("n=0", "option n is 0; it must be an integer of at least 1"),
        ("n=1.5", "option n is 1.5"),
        ("speed=0", "factor is 0"),
        ("speed=fast", "option speed is 'fast'; it must be a number"),
    ],
)
def test_option_that_a_file_does_not_have_raises(tmp_path, options, said):
    path = write(tmp_path, VIDUR, "0.0,3,4")
    with pytest.raises(ValueError) as caught:
        workloads.load(f"{path}:{options}", rng())
    assert said in str(caught.value)


def test_load_takes_a_file_with_a_colon_in_its_name_first(tmp_path):
    write(tmp_path, VIDUR, "0.0,3,4", name="a.csv")
    path = write(tmp_path, VIDUR, "0.0,3,4", "1.0,3,4", name="a.csv:n=1")
    assert len(workloads.load(path, rng())) == 2
    path.unlink()
    assert len(workloads.load(path, rng())) == 1


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("chat42", "did you mean 'chat24'"),
        ("Lognormal", "'lognormal128'"),
        ("nowhere/x.jsonl", "there is 'chat24', 'classic60', 'lognormal128', 'poisson64'"),
        ("", "there is 'chat24'"),
        ("azure_con", "did you mean 'azure_conv'"),
        ("summary:n=3", "did you mean 'summarization'"),
        ("azure.parquet", "did you mean 'azure_code'"),
        ("a" * 5000, "there is 'chat24'"),
        ("a\0b", "there is 'chat24'"),
        ("\ud83d", "there is 'chat24'"),
    ],
)
def test_load_raises_on_an_unknown_name_with_the_near_misses(name, said):
    with pytest.raises(ValueError) as caught:
        workloads.load(name, rng())
    assert repr(name) in str(caught.value)
    assert said in str(caught.value)


@pytest.mark.parametrize("content", ["", "\n", " \r\n\t\n", "\ufeff"])
def test_load_raises_on_an_empty_file(tmp_path, content):
    path = tmp_path / "work.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"is empty; write one request a line"):
        workloads.load(path, rng())


def test_load_raises_on_a_folder(tmp_path):
    with pytest.raises(ValueError, match=r"cannot be read: Is a directory; name a file"):
        workloads.load(str(tmp_path), rng())


def test_load_takes_a_preset_before_a_file_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chat24").write_text('{"prompt": 4, "max_tokens": 3}')
    assert len(workloads.load("chat24", rng())) == 24
    assert len(workloads.load("./chat24", rng())) == 1


# Public traces by name.


@pytest.fixture
def tale(tmp_path, monkeypatch):
    """Put a small trace of its own name in the place of the public ones; return its bytes."""
    content = f"{VIDUR}\n0.0,3,4\n".encode()
    digest = hashlib.sha256(content).hexdigest()
    trace = files.PublicTrace("tale.csv", "https://example.org/tale.csv", digest)
    monkeypatch.setattr(files, "TRACES", {"tale": trace})
    monkeypatch.setenv("CBRESEARCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CBRESEARCH_DATA", str(tmp_path / "data"))
    (tmp_path / "data").mkdir()
    return content


def forbidden(*arguments):
    raise AssertionError("nothing is downloaded")


def test_fetch_takes_the_data_folder_before_any_download(tmp_path, tale):
    (tmp_path / "data" / "tale.csv").write_bytes(tale)
    assert workloads.fetch("tale", forbidden) == tmp_path / "data" / "tale.csv"
    assert len(workloads.load("tale", rng())) == 1
    assert workloads.load("tale:speed=2,n=1", rng())[0].prompt == 3
    assert not (tmp_path / "cache").exists()


def test_fetch_raises_on_a_file_in_the_data_folder_that_is_not_the_published_one(tmp_path, tale):
    (tmp_path / "data" / "tale.csv").write_bytes(tale[:-3])
    with pytest.raises(ValueError, match=r"has the SHA-256 \w{12}…, .*; replace it, or load it by its path"):
        workloads.load("tale", rng())


def test_fetch_without_pooch_says_how_to_get_the_file(tmp_path, tale, monkeypatch):
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(ValueError) as caught:
        workloads.load("tale", rng())
    for said in ("pip install pooch", "https://example.org/tale.csv", "CBRESEARCH_DATA"):
        assert said in str(caught.value)
    (tmp_path / "cache" / "traces").mkdir(parents=True)
    (tmp_path / "cache" / "traces" / "tale.csv").write_bytes(tale)
    assert len(workloads.load("tale", rng())) == 1


def test_fetch_downloads_once_and_again_when_the_cached_file_is_spoilt(tmp_path, tale):
    pytest.importorskip("pooch", reason="pooch is not installed")
    asked = []

    def downloader(url, path, pooch):
        asked.append(url)
        with open(path, "wb") as file:
            file.write(tale)

    for _ in range(2):
        assert workloads.fetch("tale", downloader) == tmp_path / "cache" / "traces" / "tale.csv"
    assert asked == ["https://example.org/tale.csv"]
    (tmp_path / "cache" / "traces" / "tale.csv").write_bytes(b"spoilt")
    assert workloads.fetch("tale", downloader).read_bytes() == tale


def test_fetch_rejects_a_download_of_other_bytes_and_keeps_none(tmp_path, tale):
    pytest.importorskip("pooch", reason="pooch is not installed")

    def downloader(url, path, pooch):
        with open(path, "wb") as file:
            file.write(b"<html>Not found</html>")

    with pytest.raises(
        ValueError, match=r"cannot be downloaded: .*hash.*; download https://example.org/tale.csv"
    ):
        workloads.fetch("tale", downloader)
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_fetch_without_a_network_says_how_to_get_the_file(tale):
    pytest.importorskip("pooch", reason="pooch is not installed")

    def downloader(url, path, pooch):
        raise OSError("no route to host")

    with pytest.raises(ValueError, match=r"no route to host; download https://example\.org/tale\.csv into"):
        workloads.fetch("tale", downloader)


def test_fetch_of_an_unknown_trace_names_the_near_misses():
    with pytest.raises(ValueError, match="unknown trace 'azure_con'; did you mean 'azure_conv'"):
        workloads.fetch("azure_con", forbidden)


def test_public_traces_have_addresses_and_whole_hashes():
    for name, trace in TRACES.items():
        assert trace.url.startswith("https://raw.githubusercontent.com/")
        assert len(trace.sha256) == 64
        path = workloads.find(trace.file)
        if path is not None:
            assert workloads.fetch(name, forbidden) == path
