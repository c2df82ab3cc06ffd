"""Files as they are published, packed and saved: each is read right, or refused with the remedy."""

import bz2
import gzip
import json
import lzma
import pickle
from decimal import Decimal
from functools import reduce

import pytest
from helpers.drawing import rng

from cbresearch import workloads
from cbresearch.config import CacheConfig
from cbresearch.request import Rejected, Request, SamplingParams
from cbresearch.simulator import simulate
from cbresearch.workloads.common import relative_seconds
from cbresearch.workloads.readers import EXAMPLES

TO_THE_END = SamplingParams(ignore_eos=True)
LINE = '{"prompt": 4, "max_tokens": 3}'
VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
MOONCAKE = {"timestamp": 0, "input_length": 700, "output_length": 32, "hash_ids": [0, 1]}
QWEN = {
    "chat_id": 159,
    "parent_chat_id": 55,
    "timestamp": 61.114,
    "input_length": 33,
    "output_length": 132,
    "type": "text",
    "turn": 2,
    "hash_ids": [1089, 1090, 6326],
}
TALK = [{"from": "human", "value": "Hi there"}, {"from": "gpt", "value": "Hello!"}]


def write(tmp_path, content, name="work.jsonl"):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def read(tmp_path, content, name="work.jsonl", **options):
    return workloads.read_trace(write(tmp_path, content, name), rng(), **options).requests


def lines(*fields):
    return "\n".join(json.dumps(each) for each in fields)


# Published formats.


@pytest.mark.parametrize("kind", EXAMPLES)
def test_example_in_the_messages_is_an_object_of_its_kind(tmp_path, kind):
    trace = workloads.read_trace(write(tmp_path, EXAMPLES[kind]))
    assert trace.kind == kind
    assert [type(request) for request in trace.requests] == [Request]


def test_qwen_trace_has_seconds_and_blocks_of_16_tokens(tmp_path):
    later = QWEN | {"timestamp": 61.2, "hash_ids": [1089, 1090, 7]}
    first, second = read(tmp_path, lines(QWEN, later))
    assert (first.id, first.num_prompt_tokens, first.max_tokens, first.arrival) == ("0", 33, 132, 61.114)
    assert (first.output_length, first.sampling) == (132, TO_THE_END)
    assert first.prompt[:32] == second.prompt[:32] and first.prompt != second.prompt
    trace = simulate([first, second], cache=CacheConfig(100, 16, prefix_caching=True))
    assert [record.num_cached_tokens for record in trace.requests] == [0, 32]
    assert read(tmp_path, lines(QWEN), tokens_per_id=1)[0].prompt == (1089, 1090, 6326)


@pytest.mark.parametrize(
    ("spoilt", "said"),
    [
        ({"hash_ids": [1, 2]}, "hash_ids has 2 ids, but input_length 33 makes 3 blocks of 16 tokens"),
        ({"timestamp": -1}, "timestamp is -1; write seconds, 0 or more"),
        ({"output_length": 0}, "output_length is 0; it must be an integer of at least 1"),
        ({"input_length": "33"}, "input_length is '33'; it must be an integer"),
    ],
)
def test_qwen_trace_rejects_a_bad_line_and_keeps_the_others(tmp_path, spoilt, said):
    before, rejected, after = read(tmp_path, lines(QWEN, QWEN | spoilt, QWEN))
    assert (before.id, after.id) == ("0", "2")
    assert rejected.error.startswith(f"line 2: {said}")


@pytest.mark.parametrize("fields", [MOONCAKE, QWEN], ids=["mooncake", "qwen"])
def test_json_trace_takes_a_whole_number_of_tokens_however_it_is_written(tmp_path, fields):
    content = lines(fields | {"input_length": "IN", "output_length": 44.0})
    requests = [
        request
        for length in ("33.0", "3.3e1", "33.5", "1e300")
        for request in read(tmp_path, content.replace('"IN"', length).replace("[0, 1]", "[0]"))
    ]
    assert [(request.num_prompt_tokens, request.max_tokens) for request in requests[:2]] == [(33, 44)] * 2
    assert "input_length is 33.5; it must be an integer" in requests[2].error
    assert "input_length is 1e+300; it must be an integer" in requests[3].error


def test_qwen_id_stands_for_16_tokens_at_most(tmp_path):
    with pytest.raises(ValueError, match="tokens_per_id is 17; it must be an integer from 1 to 16"):
        read(tmp_path, lines(QWEN), tokens_per_id=17)


@pytest.mark.parametrize("layout", ["array", "indented", "lines"])
def test_sharegpt_conversation_becomes_its_first_question_and_answer(tmp_path, layout):
    items = [
        {"id": "a_0", "conversations": TALK + TALK},
        {
            "id": "b",
            "conversations": [{"from": "gpt", "value": "and"}, {"from": "system", "value": "s"}, *TALK],
        },
        {"id": 7, "conversations": TALK},
    ]
    content = lines(*items) if layout == "lines" else json.dumps(items, indent=layout == "indented" or None)
    assert read(tmp_path, content, "ShareGPT.json") == [
        Request("a_0", "Hi there", 2, 0.0, TO_THE_END),
        Request("b", "and\n\ns\n\nHi there", 2, 0.0, TO_THE_END),
        Request("7", "Hi there", 2, 0.0, TO_THE_END),
    ]


BAD_TALKS = [
    [],
    "text",
    None,
    TALK[:1],
    TALK[1:],
    [TALK[0], TALK[0]],
    [{"from": "human", "value": None}, TALK[1]],
    [{"from": "human"}, TALK[1]],
    ["Hi", "Hello"],
    [TALK[0], {"from": "gpt", "value": ""}],
    [TALK[0], {"from": "gpt", "value": "\ud83d"}],
    [{"from": "human", "value": ""}, TALK[1]],
]


@pytest.mark.parametrize("talk", BAD_TALKS)
def test_sharegpt_conversation_without_a_question_and_an_answer_is_rejected_alone(tmp_path, talk):
    good = {"id": "a", "conversations": TALK}
    rejected, kept = read(tmp_path, json.dumps([{"id": "x", "conversations": talk}, good]))
    assert (rejected.id, kept.id) == ("x", "a")
    assert rejected.error.startswith("line 1: ") and "; " in rejected.error


def test_sharegpt_conversations_without_an_id_are_named_by_their_position(tmp_path):
    talk = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    found = read(tmp_path, lines(*[{"id": None, "conversations": talk}] * 3))
    assert [(type(one), one.id) for one in found] == [(Request, name) for name in "012"]


def test_openai_batch_file_gives_texts_lengths_and_sampling_parameters(tmp_path):
    def line(name, body):
        return {
            "custom_id": name,
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "m"} | body,
        }

    said = [
        {"role": "system", "content": "You are"},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    requests = read(
        tmp_path,
        lines(
            line("r1", {"messages": said, "max_tokens": 300, "temperature": 0.5, "seed": 7, "stream": True}),
            line("r2", {"prompt": [5, 6], "max_tokens": None, "max_completion_tokens": 4, "stop": "a"}),
            line("r3", {"input": "Hello", "max_output_tokens": 2, "max_tokens": 2, "top_p": None}),
        ),
    )
    assert requests == [
        Request("r1", "You are\n\nHi", 300, sampling=SamplingParams(temperature=0.5, seed=7)),
        Request("r2", (5, 6), 4, sampling=SamplingParams(stop="a")),
        Request("r3", "Hello", 2),
    ]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            {"messages": [{"role": "user", "content": "Hi"}]},
            f"max_tokens is missing; a line needs both, such as {EXAMPLES['openai_batch']}",
        ),
        ({"max_tokens": 3}, "prompt is missing"),
        ({"messages": [], "max_tokens": 3}, "the prompt is empty"),
        ({"messages": [{"role": "assistant", "content": None}], "max_tokens": 3}, "only text is read"),
        ({"messages": [{"content": [{"type": "image_url"}]}], "max_tokens": 3}, "only text is read"),
        ({"messages": [{"content": "a"}, "b"], "max_tokens": 3}, "only text is read"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens is 0"),
        (
            {"prompt": "a", "max_tokens": 3, "max_completion_tokens": 4},
            "max_tokens is given twice, by max_completion_tokens as 4; give it once",
        ),
        ({"prompt": "a", "messages": [{"content": "b"}], "max_tokens": 3}, "prompt is given twice"),
        ({"prompt": "a", "max_tokens": 3, "temperature": -1}, "temperature is -1"),
        ("text", "body is 'text'; give an object"),
    ],
)
def test_openai_batch_file_rejects_a_line_by_itself_and_by_its_own_name(tmp_path, body, said):
    good = {"custom_id": "b", "body": {"prompt": "a", "max_tokens": 3}}
    rejected, kept = read(tmp_path, lines({"custom_id": "a", "body": body}, good))
    assert (rejected.id, kept.id) == ("a", "b")
    assert rejected.error.startswith("line 1: ") and said in rejected.error


def test_rate_option_draws_arrivals_where_a_format_has_none(tmp_path):
    path = write(tmp_path, json.dumps([{"conversations": TALK}] * 50))
    drawn = workloads.load(f"{path}:rate=4", rng(1))
    assert [request.arrival for request in drawn] == workloads.Poisson(4.0)(rng(1), 50).tolist()
    for source in (None, 7):
        with pytest.raises(ValueError, match=f"rng is {source}; give a random generator as rng"):
            workloads.read_trace(path, source, rate=4.0)
    with pytest.raises(ValueError, match="rate is for vidur_lengths or sharegpt or openai_batch"):
        read(tmp_path, lines(MOONCAKE), rate=4.0)


# Layouts of JSON and CSV.

LAYOUTS = {
    "one object": (LINE, [1]),
    "one over many lines": (json.dumps(json.loads(LINE), indent=1), [1]),
    "one behind another": ("\n\n".join([json.dumps(json.loads(LINE), indent=1)] * 2), [1, 6]),
    "array on a line": (f"[{LINE}, {LINE}]", [1, 1]),
    "array of lines": (f"\n[\n{LINE},\n\n{LINE}\n]\n", [3, 5]),
    "last comma": (f"[{LINE},\n{LINE},\n]", [1, 2]),
    "lines with commas": (f"{LINE},\n{LINE},\n", [1, 2]),
    "array behind a mark": (f"\ufeff[{LINE},\r\n{LINE}]", [1, 2]),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_json_file_is_read_in_every_layout_and_counts_its_lines(tmp_path, name):
    content, numbers = LAYOUTS[name]
    assert read(tmp_path, content) == [Request(str(place), 4, 3) for place in range(len(numbers))]
    spoilt = read(tmp_path, content.replace("3", "0"))
    assert [request.error.partition(":")[0] for request in spoilt] == [f"line {number}" for number in numbers]


@pytest.mark.parametrize(
    ("content", "kinds", "said"),
    [
        (f"[{LINE},\n{{bad}},\n{LINE}]", "RxR", "line 2: '{bad},' is not JSON"),
        (f"[\n{LINE},\n{LINE},\n", "RRx", "line 3: the array has no end"),
        (f"// hello\n{LINE}", "xR", "line 1: '// hello' is not JSON"),
        (f'{{"prompt": 4, "max_tokens": 3,}}\n{LINE}', "xR", "line 1: "),
        (f'{{"prompt": 4, "max_tokens": 3\n{LINE}\n{LINE}', "xRR", "line 1: "),
        (f"{{'prompt': 4}}\n{LINE}", "xR", "line 1: "),
        ("[1, 2]", "xx", "line 1: 1 is not an object"),
        (f'[{LINE},\n{{"prompt": "\udcff", "max_tokens": 3}}]', "Rx", "line 2: request '1': the prompt has"),
        ("[" * 100_000 + LINE, "Rx", "line 1: the array has no end"),
        (LINE.replace("4", "4, \0"), "x", "line 1: "),
    ],
)
def test_json_that_is_spoilt_is_rejected_by_its_line_and_the_rest_is_read(tmp_path, content, kinds, said):
    requests = read(tmp_path, content.encode(errors="surrogateescape"))
    assert "".join("x" if isinstance(request, Rejected) else "R" for request in requests) == kinds
    first = next(request for request in requests if isinstance(request, Rejected))
    assert first.error.startswith(said) and len(first.error) < 350


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"prompt": 4, "prompt": 5, "max_tokens": 3}', "line 1: the key 'prompt' is given twice"),
        (LINE[:-1] + ', "max_tokens": 3}', "line 1: the key 'max_tokens' is given twice"),
        ('{"custom_id": "a", "body": {"prompt": "a", "max_tokens": 3, "max_tokens": 9}}', "given twice"),
    ],
)
def test_json_key_that_is_given_twice_is_rejected(tmp_path, content, said):
    rejected, _ = read(
        tmp_path, f"{content}\n{EXAMPLES['openai_batch' if 'body' in content else 'workload']}"
    )
    assert said in rejected.error


def test_json_array_rejects_a_repeated_id_on_one_line(tmp_path):
    line = '{"id": "a", "prompt": 4, "max_tokens": 3}'
    assert [type(request) for request in read(tmp_path, f"[{line}, {line}]")] == [Request, Rejected]


def test_first_line_may_be_longer_than_a_csv_field(tmp_path):
    text = "a, " * 50_000
    (request, _) = read(tmp_path, f'{{"prompt": "{text}", "max_tokens": 3}}\n{LINE}')
    assert request.prompt == text
    (request,) = read(tmp_path, f"{VIDUR},{'x' * 140_000}\n0,3,4,1", "long.csv")
    assert (request.prompt, request.max_tokens) == (3, 4)
    rejected, kept = read(tmp_path, f'{VIDUR}\n0,"{"3" * 140_000}",4\n1,3,4', "long.csv")
    assert rejected.error.startswith("line 2: ") and kept.prompt == 3


@pytest.mark.parametrize("delimiter", [";", "\t"])
@pytest.mark.parametrize("name", ["trace.csv", "trace.tsv", "trace.txt"])
def test_csv_trace_may_be_parted_by_semicolons_or_tabs(tmp_path, delimiter, name):
    content = f'{AZURE}\n2023-11-16 18:15:46.5,3,"4"\n2023-11-16 18:15:47,3,4'.replace(",", delimiter)
    requests = read(tmp_path, content, name)
    assert [(r.prompt, r.max_tokens, r.arrival) for r in requests] == [(3, 4, 0.0), (3, 4, 0.5)]


@pytest.mark.parametrize("header", [VIDUR, BURSTGPT.replace("Model", "Session ID")])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_csv_trace_is_refused_if_a_column_that_is_read_is_there_twice(tmp_path, header, place):
    column = header.split(",")[place]
    with pytest.raises(ValueError, match=f"the column '{column}' is given twice; leave one of them"):
        read(tmp_path, f"{header},{column}\n0,3,4,5", "trace.csv")


def test_csv_trace_rejects_a_row_with_a_nul_byte(tmp_path):
    kinds = [type(row) for row in read(tmp_path, f"{VIDUR}\n0,3,4\n1,3\0,4\n2,3\0003,4\n3,5,6", "nul.csv")]
    assert kinds == [Request, Rejected, Rejected, Request]


# Packed files, and files that are no text.


@pytest.mark.parametrize("module", [gzip, bz2, lzma])
@pytest.mark.parametrize("name", ["trace.csv", "trace.jsonl", "trace.csv.gz", "trace"])
def test_packed_file_is_known_by_its_bytes_whatever_its_name(tmp_path, module, name):
    (request,) = read(tmp_path, module.compress(f"{AZURE}\n2023-11-16 18:15:46.68,4,5\n".encode()), name)
    assert (request.prompt, request.max_tokens) == (4, 5)
    with pytest.raises(ValueError, match=r"cannot be unpacked: .*; the file was cut"):
        read(tmp_path, module.compress(bytes(range(256)) * 9)[:-12], name)


@pytest.mark.parametrize("module", [gzip, bz2, lzma])
def test_file_that_is_packed_twice_is_read(tmp_path, module):
    assert read(tmp_path, gzip.compress(module.compress(LINE.encode()))) == [Request("0", 4, 3)]


NO_TEXTS = {
    "utf-16": (LINE.encode("utf-16"), "text in UTF-16; save it in UTF-8"),
    "utf-16 big end": (b"\xfe\xff" + AZURE.encode("utf-16-be"), "text in UTF-16; save it in UTF-8"),
    "utf-16 without a mark": (AZURE.encode("utf-16-le"), "text in UTF-16, or binary; save it as text"),
    "utf-16 behind a NUL": (LINE.encode("utf-16-be"), "text in UTF-16, or binary; save it as text"),
    "utf-32": (LINE.encode("utf-32"), "text in UTF-32; save it in UTF-8"),
    "utf-32 big end": (b"\0\0\xfe\xff" + LINE.encode("utf-32-be"), "text in UTF-32; save it in UTF-8"),
    "web page": ("\n<!DOCTYPE html>\n<html>", "a web page; download the file itself, on GitHub behind"),
    "page without a type": ("<HTML><head>", "a web page"),
    "lfs": (
        "version https://git-lfs.github.com/spec/v1\noid sha256:4\nsize 3\n",
        "a Git LFS pointer; run git",
    ),
    "cr": (f"{LINE}\r{LINE}\r", "text with line ends of CR alone; save it with those of LF"),
    "cr csv": (f"{AZURE}\r2023-11-16 18:15:46.68,4,5", "text with line ends of CR alone"),
    "zeros": (bytes(100), "text in UTF-16, or binary"),
    "parquet": (b"PAR1\x15\x00\x00", "a Parquet file; write it as CSV"),
    "zip": (b"PK\x03\x04\x14\x00", "a ZIP archive or a workbook; unpack it"),
    "zstd": (b"(\xb5/\xfd\x04\x00", "packed by zstd; unpack it with unzstd"),
    "packed page": (gzip.compress(b"<html>"), "a web page"),
    "page packed twice": (gzip.compress(bz2.compress(b"<html>")), "a web page"),
    "packed five times": (reduce(lambda it, _: gzip.compress(it), range(5), b"{}"), "no text, but"),
    "png": (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\n{}", "no text, but binary, such as an image; save"),
    "jpeg": (b"\xff\xd8\xff\xe0\0\x10JFIF", "no text, but"),
    "gif": (b"GIF89a\x80\x02\xe0\x01\xf7\0\0", "no text, but"),
    "pickle": (pickle.dumps([{"prompt": 4, "max_tokens": 3}]), "no text, but"),
    "numpy": (b"\x93NUMPY\x01\0v\0{'descr': '<i8'}\n{", "no text, but"),
    "xls": (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(16), "no text, but"),
    "tar": (b"trace.jsonl" + bytes(89) + b"0000644\0" + bytes(404) + LINE.encode() + b"\n", "no text, but"),
    "sqlite": (b"SQLite format 3\0\x10\0\x01\x01\0@  " + bytes(60), "no text, but"),
}


@pytest.mark.parametrize("ending", [".jsonl", ".csv"])
@pytest.mark.parametrize("name", NO_TEXTS)
def test_file_that_is_no_text_is_refused_in_one_line_with_the_remedy(tmp_path, name, ending):
    content, said = NO_TEXTS[name]
    with pytest.raises(ValueError) as caught:
        read(tmp_path, content, f"file{ending}")
    assert f"file{ending}' is {said}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_file_that_ends_in_zeros_keeps_its_lines(tmp_path):
    kept, rejected = read(tmp_path, LINE.encode() + b"\n" + bytes(600))
    assert (kept.prompt, type(rejected)) == (4, Rejected)


@pytest.mark.parametrize(
    "content", ["Tell me a joke\nAnother", "prompt: x\nmax_tokens: 3\n", "a,b\n1,2", "%PDF-1.7"]
)
def test_text_of_another_kind_is_refused_as_a_whole(tmp_path, content):
    with pytest.raises(ValueError, match="no header of a known trace, and no line is an object such as"):
        read(tmp_path, content, "work.txt")


@pytest.mark.parametrize("name", ["work.csv", "work.jsonl"])
def test_empty_file_is_said_to_be_empty(tmp_path, name):
    with pytest.raises(ValueError, match=r"is empty; write one request a line"):
        read(tmp_path, gzip.compress(b" \r\n"), name)


def test_file_may_lie_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path, LINE)
    assert workloads.load("~/work.jsonl:n=1", rng()) == workloads.load(b"~/work.jsonl", rng())


# Times.

EPOCH = 1_700_000_000


@pytest.mark.parametrize("power", [0, 3, 6, 9])
@pytest.mark.parametrize("gap", ["0.0010001", "1e-7", "0", "0.5", "123456.000001", "86400000"])
def test_epoch_times_of_every_unit_lose_no_digit(power, gap):
    first, second = (str((EPOCH + Decimal(more)).scaleb(power)) for more in ("0", gap))
    assert relative_seconds([second, first]) == [float(gap), 0.0]
    assert relative_seconds([first, "nan", second], 3, since_first=False)[::2] == [0.0, float(gap)]


def test_times_that_count_from_the_start_keep_their_unit():
    assert relative_seconds([27.5, 28, "1e3"], 3, since_first=False) == [0.0275, 0.028, 1.0]
    assert relative_seconds(["0.3", "0.1"]) == [0.2, 0.0]
    # The thirteenth day in milliseconds.
    assert relative_seconds([5, 1_100_000_000], 3, since_first=False)[1] == 1.1e6
    odd = [
        -1,
        "1_0",
        "٣",
        None,
        True,
        "inf",
        float("nan"),
        10**400,
        "0x10",
        [1],
        "1e-999999999",
        "1e999999999",
    ]
    assert str(relative_seconds(odd)) == str([float("nan")] * 10 + [0.0, float("nan")])
    # Two clocks in one file.
    assert str(relative_seconds([0, EPOCH])) == "[0.0, nan]"
    assert relative_seconds([]) == []
    assert relative_seconds(["0e30", 2]) == [0.0, 2.0]


@pytest.mark.parametrize(
    ("first", "second", "gap"),
    [
        ("1700000000", "1700000000.0010001", 0.0010001),
        ("1700000000000", "1700000000001.0001", 0.0010001),
        ("1700000000000000000", "1700000000000000001", 1e-9),
        ("2023-11-16T18:15:46Z", "2023-11-16 20:15:46.000000001+02:00", 1e-9),
    ],
)
@pytest.mark.parametrize("header", [VIDUR, AZURE, BURSTGPT])
def test_csv_times_that_count_from_an_epoch_lose_no_digit(tmp_path, header, first, second, gap):
    rest = ",m,4,3,7,x" if header == BURSTGPT else ",4,3"
    requests = read(tmp_path, f"{header}\n{second}{rest}\n{first}{rest}", "trace.csv")
    assert [request.arrival for request in requests] == [0.0, gap]
    assert {request.id for request in requests} == {"0", "1"}


@pytest.mark.parametrize("fields", [MOONCAKE, QWEN], ids=["mooncake", "qwen"])
@pytest.mark.parametrize(
    ("first", "second", "gap"),
    [
        ("1700000000", "1700000000.0010001", 0.0010001),
        ("1700000000000", "1700000000001.0001", 0.0010001),
        ("1700000000000000001", "1700000000000000002", 1e-9),
    ],
)
def test_json_times_that_count_from_an_epoch_lose_no_digit(tmp_path, fields, first, second, gap):
    text = json.dumps(fields | {"timestamp": "TIME"})
    requests = read(tmp_path, "\n".join(text.replace('"TIME"', time) for time in (second, first)))
    assert [request.arrival for request in requests] == [gap, 0.0]


def test_mooncake_times_may_be_fractions_of_milliseconds(tmp_path):
    requests = read(tmp_path, lines(MOONCAKE | {"timestamp": 27.5}, MOONCAKE))
    assert [(type(request), request.arrival) for request in requests] == [(Request, 0.0275), (Request, 0)]
