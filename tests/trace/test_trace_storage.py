"""Traces as files: load gives back what was saved, a kill costs at most a line, strangers get a reason."""

import gzip
import json
import math
import random
import subprocess
import sys
import textwrap
import warnings
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbresearch import CacheConfig, Request, SchedulerConfig, simulate
from cbresearch.costs import Linear
from cbresearch.request import Rejected, SamplingParams, TokenLogprobs
from cbresearch.serve import record_of
from cbresearch.step import (
    Admission,
    BlockEvents,
    DecodeRun,
    Padding,
    Plan,
    PoolState,
    Scheduled,
    Skipped,
    Transfer,
)
from cbresearch.trace import Origin, RequestRecord, StepRecord, Steps, Trace, TraceWriter, load

LIMITS = SchedulerConfig(3, 9)
POOL = CacheConfig(num_blocks=9, block_size=4)


def run_of(seed, policy="fcfs"):
    """Return a run with decode runs, preemptions and rejections; one id is given twice."""
    generator = random.Random(seed)
    requests = [
        Request(str(place), generator.randint(1, 16), generator.randint(1, 16), generator.random() * 40)
        for place in range(10)
    ]
    requests.insert(4, Request("too long", 99, 9, arrival=2.5))
    requests += [Rejected("line", 'line 3: "it" is not\nJSON, é', 0.5), Rejected("3", "given twice", 1.0)]
    return simulate(requests, policy, cost=Linear(0.5, 0.01, 0.001), scheduler=LIMITS, cache=POOL)


def spelled(trace):
    """Return all that a trace holds, with what equality leaves out, floats to the last bit."""
    records = [tuple(getattr(record, name) for name in record.__slots__) for record in trace.requests]
    return repr((replace(trace, steps=()), trace.parts, records))


# --- what is loaded equals what was saved

SECONDS = st.floats(0, 1e9, allow_nan=False)
COUNTS = st.integers(0, 2**40)
NAMES = st.text(min_size=1, max_size=5)


def tuples(items, **limits):
    return st.lists(items, max_size=3, **limits).map(tuple)


LOGPROBS = st.builds(
    TokenLogprobs,
    st.one_of(st.just(-math.inf), st.floats(-100, 0)),
    tuples(COUNTS),
    tuples(st.one_of(st.just(-math.inf), st.floats(-100, 0))),
)
REQUESTS = st.builds(
    # In order, since a deadline before the arrival is rejected.
    lambda *given, late, **more: Request(*given, **more, deadline=None if late is None else given[3] + late),
    NAMES,
    st.one_of(st.integers(1, 99), tuples(st.integers(0, 99), min_size=1), st.just("a text")),
    st.integers(1, 99),
    SECONDS,
    st.builds(SamplingParams, seed=st.one_of(st.none(), COUNTS), stop=tuples(NAMES)),
    st.integers(-9, 9),
    st.text(max_size=3),
    late=st.one_of(st.none(), SECONDS),
    output_length=st.one_of(st.none(), st.integers(1, 9)),
)
PAIRS = tuples(st.tuples(NAMES, COUNTS))
EVENTS = st.builds(BlockEvents, tuples(COUNTS), tuples(COUNTS), tuples(COUNTS), PAIRS, PAIRS, tuples(COUNTS))
POOLS = st.builds(PoolState, *[COUNTS] * 9)
SKIPPED = tuples(st.builds(Skipped, NAMES, st.sampled_from(["budget", "seats"])))
PADDING = tuples(st.builds(Padding, NAMES, COUNTS, COUNTS))
PLANS = st.builds(
    Plan,
    COUNTS,
    tuples(st.builds(Scheduled, NAMES, COUNTS, COUNTS, COUNTS, st.booleans(), st.booleans(), tuples(COUNTS))),
    tuples(st.builds(Admission, REQUESTS, COUNTS, tuples(COUNTS))),
    tuples(NAMES),
    PADDING,
    tuples(NAMES),
    tuples(NAMES),
    tuples(st.builds(Transfer, st.sampled_from(["copy", "swap_in"]), COUNTS, COUNTS)),
    SKIPPED,
    st.sampled_from([None, "seats"]),
)
STEPS = st.builds(
    StepRecord, SECONDS, SECONDS, PLANS, tuples(NAMES), POOLS, EVENTS, st.one_of(st.none(), SECONDS)
)
RECORDS = st.builds(
    lambda times, **given: RequestRecord(tokens=tuple(range(len(times))), token_times=times, **given),
    tuples(SECONDS),
    id=NAMES,
    arrival=SECONDS,
    num_prompt_tokens=st.one_of(st.none(), COUNTS),
    max_tokens=st.one_of(st.none(), COUNTS),
    client=st.text(max_size=3),
    queued=st.one_of(st.none(), SECONDS),
    first_scheduled=st.one_of(st.none(), SECONDS),
    finish_reason=st.sampled_from([None, "stop", "length", "abort", "error"]),
    num_preemptions=COUNTS,
    error=st.one_of(st.none(), st.text(max_size=5)),
    logprobs=tuples(LOGPROBS),
)


@st.composite
def decode_runs(draw):
    length, rows = draw(st.integers(1, 4)), draw(st.integers(1, 3))

    def column(items, size):
        return tuple(draw(st.lists(items, min_size=size, max_size=size)))

    taken = draw(st.integers(0, 3))
    return DecodeRun(
        first_step=draw(COUNTS),
        start=draw(SECONDS),
        durations=column(SECONDS, length),
        ends=column(SECONDS, length),
        request_ids=column(NAMES, rows),
        seats=column(COUNTS, rows),
        starts=column(COUNTS, rows),
        num_steps=column(st.integers(1, length), rows),
        taken_in=tuple(sorted(column(st.integers(0, length - 1), taken))),
        taken_by=column(st.integers(0, rows - 1), taken),
        blocks=column(COUNTS, taken),
        segments=((0, rows, draw(st.sampled_from([None, "budget"])), tuple(draw(POOLS))),),
        finished=((length - 1, draw(tuples(NAMES))),),
        freed=((length - 1, draw(tuples(COUNTS))),),
        events=draw(EVENTS),
        padding=draw(PADDING),
        skipped=draw(SKIPPED),
        is_short=draw(st.booleans()),
    )


TRACES = st.builds(
    Trace,
    NAMES,
    st.builds(SchedulerConfig, st.integers(1, 9), max_model_len=st.one_of(st.none(), st.integers(1, 9))),
    st.builds(CacheConfig, st.integers(1, 9), prefix_caching=st.booleans()),
    st.lists(st.one_of(STEPS, decode_runs()), max_size=3).map(Steps),
    st.lists(RECORDS, max_size=3).map(tuple),
    st.builds(Origin, NAMES, NAMES, st.one_of(st.none(), NAMES)),
)


@given(TRACES)
@settings(max_examples=60, deadline=None)
def test_loaded_trace_equals_the_saved_one_to_the_last_bit(tmp_path_factory, trace):
    path = tmp_path_factory.mktemp("traces") / "trace.jsonl"
    found = load(trace.save(path))
    assert found == trace
    assert spelled(found) == spelled(trace)


@pytest.mark.parametrize("policy", ["fcfs", "static", "vllm_v0"])
@pytest.mark.parametrize("name", ["run.jsonl", "run.jsonl.gz"])
def test_loaded_run_has_the_columns_of_the_run(tmp_path, policy, name):
    trace = run_of(1, policy)
    assert any(isinstance(part, DecodeRun) for part in trace.parts)
    found = load(trace.save(tmp_path / "new" / name))
    assert spelled(found) == spelled(trace)
    for columns, its in (
        (found.step_columns, trace.step_columns),
        (found.request_columns, trace.request_columns),
    ):
        assert list(columns) == list(its)
        assert all(repr(columns[key].tolist()) == repr(its[key].tolist()) for key in its)
    assert (tmp_path / "new" / name).read_bytes() == trace.save(tmp_path / f"again.{name}").read_bytes()


def test_file_is_json_that_any_program_reads(tmp_path):
    trace = run_of(2)
    head, *lines = map(json.loads, trace.save(tmp_path / "a.jsonl").read_text().splitlines())
    assert (head["format"], head["version"], head["policy"]) == ("cbresearch.trace", 1, "fcfs")
    assert head["origin"]["version"] == trace.origin.version
    assert [next(iter(line)) for line in lines].count("request") == len(trace.requests)


def test_numbers_of_numpy_are_saved_as_plain_ones(tmp_path):
    record = RequestRecord(
        "a", np.float64(0.1), np.int64(3), tokens=(np.int64(7),), token_times=(np.float64(1 / 3),)
    )
    (found,) = load(Trace("fcfs", LIMITS, POOL, requests=(record,)).save(tmp_path / "a.jsonl")).requests
    assert found == record and type(found.tokens[0]) is int


def test_half_a_surrogate_pair_is_read_back(tmp_path):
    half, whole = Request("a", (1, 2, 3), 40), Request("b\U0001f600", 5, 30)
    trace = simulate(
        [half, whole, Rejected("c\ud800", "\ud83d is bad")], scheduler=SchedulerConfig(max_num_seqs=2)
    )
    found = load(trace.save(tmp_path / "a.jsonl"))
    assert found == trace and any(isinstance(part, DecodeRun) for part in found.parts)
    assert type(found.steps[0].plan.admitted[0].request.prompt) is tuple


@pytest.mark.parametrize("line", [b'{"step":"\\ud800"}', b'["\\ud800",' * 100_000, b'{"\\ud800":'])
def test_a_bad_line_with_half_a_surrogate_pair_is_named(line, tmp_path):
    path = run_of(2).save(tmp_path / "a.jsonl")
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(ValueError, match=r"a\.jsonl, line \d+: "):
        load(path)


# --- a writer that is killed


def write(path, trace, num_parts=None):
    """Write a simulated run as its server would: requests when they are queued and when they end."""
    given_ids = {record.id: record for record in trace.requests if not record.is_rejected}
    writer = TraceWriter(path, policy=trace.policy, scheduler=trace.scheduler, cache=trace.cache)
    with writer:
        queued = sorted(given_ids.values(), key=lambda record: record.arrival)
        for record in trace.requests:
            if record.is_rejected:
                writer.request(record)
        for part in trace.parts[:num_parts]:
            start = part.start
            while queued and queued[0].arrival <= start:
                first = queued.pop(0)
                known = RequestRecord(
                    first.id, first.arrival, first.num_prompt_tokens, first.max_tokens, queued=start
                )
                writer.queued(known)
            if isinstance(part, StepRecord):
                got = {entry.request_id: 0 for entry in part.plan.scheduled if entry.samples}
                finished = part.finished
            else:
                got = {name: [0] * num for name, num in zip(part.request_ids, part.num_steps, strict=True)}
                finished = tuple(name for _, names in part.finished for name in names)
            writer.step(part, got)
            for name in finished:
                writer.request(given_ids[name])


def test_writer_gives_the_trace_of_the_run(tmp_path):
    trace = run_of(3)
    write(tmp_path / "a.jsonl", trace)
    found = load(tmp_path / "a.jsonl")
    assert found.steps == trace.steps and found.origin == trace.origin
    assert sorted(found.requests, key=repr) == sorted(trace.requests, key=repr)


def test_writer_rejects_to_append_to_a_compressed_file(tmp_path):
    with pytest.raises(ValueError, match=r"a\.jsonl\.gz: what is appended is not compressed"):
        TraceWriter(tmp_path / "a.jsonl.gz", policy="fcfs", scheduler=LIMITS, cache=POOL)


def test_file_cut_at_any_byte_loads_up_to_the_line_that_is_cut(tmp_path):
    trace = simulate([Request("a", 3, 3)], cache=CacheConfig(4, 4))
    assert {type(part) for part in trace.parts} == {StepRecord, DecodeRun}
    path, cut = tmp_path / "a.jsonl", tmp_path / "cut.jsonl"
    write(path, trace)
    data, whole = path.read_bytes(), load(path)
    kinds = [next(iter(json.loads(line))) for line in data.splitlines()]
    for size in range(len(data)):
        cut.write_bytes(data[:size])
        # A last line that lacks nothing but its newline is whole.
        num_lines = data[: size + 1].count(b"\n")
        if not num_lines:
            with pytest.raises(ValueError, match=r"cut\.jsonl"):
                load(cut)
            continue
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = load(cut)
        is_cut = data[size - 1 : size] != b"\n" and data[size : size + 1] != b"\n"
        said = [str(warning.message) for warning in caught if warning.filename == __file__]
        assert said == [f"{cut}, line {num_lines + 1}: the line is cut off and left out"] * is_cut
        num_parts = kinds[:num_lines].count("step") + kinds[:num_lines].count("run")
        assert found.parts == whole.parts[:num_parts]
        assert len(found.requests) == kinds[:num_lines].count("queued")


def test_unfinished_requests_have_the_tokens_of_the_steps_before_the_kill(tmp_path):
    trace, path = run_of(5), tmp_path / "a.jsonl"
    complete = {record.id: record for record in trace.requests if not record.is_rejected}
    for num_parts in range(1, len(trace.parts)):
        write(path, trace, num_parts)
        found = load(path)
        end = found.duration
        for record in found.requests:
            if record.is_rejected:
                continue
            whole = complete[record.id]
            num_tokens = sum(seconds <= end for seconds in whole.token_times)
            assert record.tokens == whole.tokens[:num_tokens]
            assert record.token_times == whole.token_times[:num_tokens]
            first = whole.first_scheduled
            assert record.first_scheduled == (first if first is not None and first < end else None)
        preempted = [name for step in found.steps for name in step.plan.preempted]
        assert sum(record.num_preemptions for record in found.requests) == len(preempted)


def test_what_a_killed_process_wrote_can_be_loaded(tmp_path):
    path = tmp_path / "a.jsonl"
    code = f"""
        import os
        from cbresearch import CacheConfig, Request, SchedulerConfig, simulate
        from cbresearch.trace import TraceWriter

        trace = simulate([Request("a", 5, 4)], fast_forward=False)
        writer = TraceWriter({str(path)!r}, policy="fcfs", scheduler=trace.scheduler, cache=trace.cache)
        for step in trace.steps[:3]:
            writer.step(step)
        os.kill(os.getpid(), 9)
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False).returncode == -9
    assert load(path).steps == simulate([Request("a", 5, 4)], fast_forward=False).steps[:3]


def test_rejected_request_does_not_end_another_one_of_its_id(tmp_path):
    queued = RequestRecord("a", 1.0, 3, 4, queued=1.5)
    rejected = record_of(Rejected("a", "given twice", 2.0), None)
    with TraceWriter(tmp_path / "a.jsonl", policy="fcfs", scheduler=LIMITS, cache=POOL) as writer:
        writer.queued(queued)
        writer.request(rejected)
    assert load(tmp_path / "a.jsonl").requests == (queued, rejected)


# --- files of strangers

HEAD = {
    "format": "cbresearch.trace",
    "version": 1,
    "policy": "fcfs",
    "scheduler": {},
    "cache": {"num_blocks": 4},
    "origin": {"version": "9"},
}


def step(**changes):
    plan = {"step": 0, "scheduled": [["a", 0, 0, 5, True, True, [1, 2]]]}
    content = {"start": 0.0, "duration": 1, "plan": plan, "finished": [], "pool": [1, 0, 2, 5, 0, 0, 0, 0, 0]}
    return {"step": {**content, **changes}}


def test_line_by_hand_is_read(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, [HEAD, step(), {"request": {"id": "a", "arrival": 0.5}}])))
    trace = load(path)
    assert trace.steps[0].plan.scheduled[0] == Scheduled("a", 0, 0, 5, True, True, (1, 2))
    assert trace.requests == (RequestRecord("a", 0.5),)
    assert trace.origin == Origin("cbresearch", "9")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"steps": {}}, r"line 2: steps: Unexpected keyword"),
        ([], r"line 2: Input should be an object; it is \[\]"),
        (step(start="0"), r"line 2: step: start: Input should be a valid number; it is '0'"),
        (step(start=True), r"line 2: step: start: Input should be a valid number; it is True"),
        (step(duration=math.nan), r"line 2: step: duration: Input should be a finite number; it is nan"),
        (step(duration=math.inf), r"line 2: step: duration: Input should be a finite number; it is inf"),
        (step(finished="a"), r"line 2: step: finished: Input should be a valid array; it is 'a'"),
        (step(finished=["a", 3]), r"line 2: step: finished: 1: Input should be a valid string; it is 3"),
        (step(pool=[1, 2]), r"line 2: step: pool: 2: Field required; it is \[1, 2\]"),
        (step(plan={"step": 0}), r"line 2: step: plan: scheduled: Field required"),
        (
            step(plan={"step": 0, "scheduled": [["a", 0.5, 0, 5, True, True, []]]}),
            r"scheduled: 0: 1: Input should be a valid integer; it is 0\.5",
        ),
        (
            step(plan={"step": 0, "scheduled": [["a", 0, 0, 5, 1, True, []]]}),
            r"scheduled: 0: 4: Input should be a valid boolean; it is 1",
        ),
        (
            step(plan={"step": 0, "scheduled": [], "admitted": [[{"id": ""}, 0, []]]}),
            r"admitted: 0: 0: prompt: Field required",
        ),
        (
            step(
                plan={
                    "step": 0,
                    "scheduled": [],
                    "admitted": [[{"id": "a", "prompt": 0, "max_tokens": 3}, 0, []]],
                }
            ),
            r"line 2: step: plan: admitted: 0: 0: request 'a'",
        ),
        (step(surprise=1), r"line 2: step: surprise: Unexpected keyword"),
        ({"request": {"id": "a"}}, r"line 2: request: arrival: Field required"),
        (
            {"request": {"id": "a", "arrival": None}},
            r"line 2: request: arrival: Input should be a valid number; it is None",
        ),
        (
            {"request": {"id": "a", "arrival": 0, "tokens": [1]}},
            r"line 2: columns that belong together have \[1, 0\] values",
        ),
        ({"request": {"id": "a", "arrival": 10**400}}, r"line 2: inf is no number"),
        ({"request": {"id": "a", "arrival": math.nan}}, r"line 2: nan is no number"),
        (
            {"request": {"id": "a", "arrival": 0, "logprobs": [[math.nan, [], []]]}},
            r"line 2: nan is no number",
        ),
        (step(duration=10**400), r"line 2: step: duration: Input should be a finite number; it is 1000"),
        ({**step(), "tokens": {"a": 3}}, r"line 2: tokens: a: Input should be a valid array; it is 3"),
    ],
)
def test_malformed_line_is_rejected_with_file_line_and_reason(tmp_path, content, reason):
    path = tmp_path / "strange.jsonl"
    path.write_text(json.dumps(HEAD) + "\n" + json.dumps(content) + "\n" + json.dumps(step()) + "\n")
    with pytest.raises(
        ValueError, match=rf"strange\.jsonl, {reason}" if reason.startswith("line") else reason
    ):
        load(path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "empty"),
        (b"\n", "line 1"),
        (b"\x80\x04K\x01.\n", "line 1"),
        (b"{}\n", "no header of a trace"),
        (b'{"format": "cbresearch.trace", "version": 2}\n', "version: Input should be 1; it is 2"),
        (
            json.dumps({**HEAD, "cache": {"num_blocks": 0}}).encode() + b"\n",
            "cache: CacheConfig: num_blocks is 0",
        ),
        (json.dumps({**HEAD, "steps": []}).encode() + b"\n", "steps"),
        (json.dumps(HEAD).encode() + b"\n" + b"[" * 100_000 + b"\n", "line 2"),
        (json.dumps(HEAD).encode() + b"\n\xff\xfe\n", "line 2"),
        (json.dumps(HEAD).encode() + b"\n\n", "line 2"),
    ],
)
def test_file_that_is_no_trace_is_rejected_with_its_name_and_reason(tmp_path, text, reason):
    path = tmp_path / "strange.jsonl"
    path.write_bytes(text)
    with pytest.raises(ValueError, match=rf"strange\.jsonl.*{reason}"):
        load(path)


def test_compressed_file_that_is_cut_or_none_is_rejected(tmp_path):
    path = run_of(1).save(tmp_path / "a.jsonl.gz")
    for data in (path.read_bytes()[:-20], b"plain text", gzip.compress(b"x" * 99)[:20] + b"y" * 30):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"a\.jsonl\.gz: this is no whole gzip file"):
            load(path)


@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(
                st.sampled_from(
                    ["step", "run", "queued", "request", "tokens", "plan", "id", "arrival", "pool"]
                ),
                inner,
                max_size=3,
            ),
        ),
        max_leaves=8,
    )
)
@settings(max_examples=150, deadline=None)
def test_any_json_behind_a_header_is_loaded_or_rejected_by_line(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("strangers") / "a.jsonl"
    path.write_text(json.dumps(HEAD) + "\n" + json.dumps(content) + "\n")
    try:
        load(path)
    except ValueError as error:
        assert "a.jsonl, line 2: " in str(error)
