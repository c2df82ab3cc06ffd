"""What a run leaves behind: rows, files that appear whole, the Chrome trace, and stays that fit the plans."""

import csv
import itertools
import json
import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cbresearch import CacheConfig, Request, SchedulerConfig, export, metrics, simulate
from cbresearch.costs import Linear
from cbresearch.experiments.compare import Comparison
from cbresearch.request import Rejected
from cbresearch.step import SKIP_REASONS
from cbresearch.trace import RequestRecord, Trace, write_columns, write_json, write_whole

BUILT_IN = ["fcfs", "prefill_first", "sjf", "static", "static:release"]
LIMITS = SchedulerConfig(3, 9)
POOL = CacheConfig(num_blocks=9, block_size=4)


def random_run(policy, seed=0):
    """Serve random requests, one of them rejected, in a pool that preempts."""
    generator = random.Random(seed)
    requests = [
        Request(str(place), generator.randint(1, 16), generator.randint(1, 16), generator.choice((0.0, 1.5)))
        for place in range(12)
    ]
    requests.insert(4, Request("too long", 99, 9, arrival=2.5))
    requests.insert(2, Rejected("line", 'line 3: "it" is not\nJSON, at all', 0.5))
    return simulate(requests, policy, cost=Linear(0.5, 0.01, 0.001), scheduler=LIMITS, cache=POOL)


@pytest.fixture(params=BUILT_IN, scope="module")
def trace(request):
    return random_run(request.param)


def test_the_runs_looked_at_here_preempt_pad_and_reject():
    traces = {name: random_run(name) for name in BUILT_IN}
    assert all(any(record.num_preemptions for record in trace.requests) for trace in traces.values())
    assert any(step.plan.padding for step in traces["static"].steps)
    assert all(len(trace.served) == len(trace.requests) - 2 for trace in traces.values())


# --- rows


def read_csv(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def rows(columns):
    """Return the columns of a trace as one dict a row, with None for what is undefined."""
    lists = {name: values.tolist() for name, values in columns.items()}
    return [
        {name: None if value != value else value for name, value in zip(lists, row, strict=True)}
        for row in zip(*lists.values(), strict=True)
    ]


def test_times_are_named_with_their_unit_and_numbers_of_things_are_not(trace):
    for row in (*rows(trace.step_columns), *rows(trace.request_columns)):
        for name, value in row.items():
            assert isinstance(value, float) <= name.endswith("_s"), name
            if name.endswith("_s"):
                assert value is None or isinstance(value, float), name


def test_csv_file_gives_back_every_row_with_none_as_an_empty_cell(trace, tmp_path):
    for columns in (trace.request_columns, trace.step_columns):
        write_columns(tmp_path / "rows.csv", {trace.policy: columns}, "policy")
        read = read_csv(tmp_path / "rows.csv")
        assert [list(row) for row in read] == [["policy", *columns]] * len(read)
        for given, found in zip(rows(columns), read, strict=True):
            text = {key: "" if value is None else str(value) for key, value in given.items()}
            assert found == {"policy": trace.policy, **text}


def test_csv_file_of_several_runs_has_them_below_each_other(tmp_path):
    traces = {"fcfs": random_run("fcfs"), 'a "b", c\nd': random_run("static")}
    write_columns(tmp_path / "a.csv", {name: run.request_columns for name, run in traces.items()}, "run")
    read = read_csv(tmp_path / "a.csv")
    assert [row["run"] for row in read] == [name for name, run in traces.items() for _ in run.requests]
    assert [row["error"] for row in read] == [
        record.error or "" for run in traces.values() for record in run.requests
    ]
    write_columns(tmp_path / "none.csv", {}, "run")
    assert (tmp_path / "none.csv").read_text() == "run\n"


def test_frames_have_the_rows_and_the_columns_of_the_trace(trace):
    for frame, columns in (
        (trace.steps_frame(), trace.step_columns),
        (trace.requests_frame(), trace.request_columns),
    ):
        assert list(frame.columns) == list(columns)
        found = [
            {name: None if value != value else value for name, value in row.items()}
            for row in frame.to_dict("records")
        ]
        assert found == rows(columns)


def test_step_columns_count_what_the_plans_hold(trace):
    for record, row in zip(trace.steps, rows(trace.step_columns), strict=True):
        plan = record.plan
        prefill = [entry for entry in plan.scheduled if entry.is_prefill]
        assert row["step"] == plan.step
        assert (row["start_s"], row["duration_s"]) == (record.start, record.duration)
        assert row["num_prefill_tokens"] == sum(entry.num_tokens for entry in prefill)
        assert row["num_decode_tokens"] == len(plan.scheduled) - len(prefill)
        assert row["num_scheduled"] == len(plan.scheduled)
        assert row["num_sampled_tokens"] == sum(entry.samples for entry in plan.scheduled)
        assert row["num_tokens"] == row["num_prefill_tokens"] + row["num_decode_tokens"] + len(plan.padding)
        contexts = [entry.start + entry.num_tokens for entry in plan.scheduled]
        contexts += [padding.context_length for padding in plan.padding]
        assert row["num_context_tokens"] == sum(contexts)
        assert row["num_finished"] == len(record.finished)
        assert {name: row[name] for name in record.pool._fields} == record.pool._asdict()
        assert (row["num_admitted"], row["num_preempted"]) == (len(plan.admitted), len(plan.preempted))
        reasons = record.num_skipped()
        assert all(row[f"num_skipped_for_{reason}"] == reasons[reason] for reason in SKIP_REASONS)
        for kind, name in (("copy", "copied"), ("swap_out", "swapped_out"), ("swap_in", "swapped_in")):
            assert row[f"num_{name}_blocks"] == sum(transfer.kind == kind for transfer in plan.transfers)


def test_columns_are_computed_once_and_cannot_be_written_to(trace):
    assert trace.step_columns is trace.step_columns and trace.request_columns is trace.request_columns
    for values in (*trace.step_columns.values(), *trace.request_columns.values()):
        with pytest.raises(ValueError, match="read-only"):
            values[0] = values[1]


@pytest.mark.parametrize("policy", ["fcfs", "static", "vllm_v0"])
@pytest.mark.parametrize("seed", range(6))
def test_columns_of_decode_runs_are_those_of_their_steps_one_by_one(policy, seed):
    generator = random.Random(seed)
    requests = [
        Request(str(place), generator.randint(1, 20), generator.randint(1, 40), generator.random() * 60)
        for place in range(14)
    ]
    limits = SchedulerConfig(3, preemption="swap")
    cache = CacheConfig(25, 4, num_host_blocks=12, prefix_caching=bool(seed % 2) and policy != "static")
    trace = simulate(requests, policy, cost=Linear(0.3, 0.01), scheduler=limits, cache=cache)
    assert len(trace.parts) < len(trace.steps)
    spelled_out = replace(trace, steps=tuple(trace.steps))
    for name, values in spelled_out.step_columns.items():
        assert np.array_equal(trace.step_columns[name], values, equal_nan=True), name
    assert list(metrics.memory(trace)) == list(metrics.memory(spelled_out))
    assert spelled_out == trace


def test_counters_of_the_pool_can_be_read_from_a_step_and_nothing_else(trace):
    step = trace.steps[0]
    assert (step.num_running, step.num_held_blocks) == (step.pool.num_running, step.pool.num_held_blocks)
    with pytest.raises(AttributeError, match="num_runing"):
        step.num_runing  # noqa: B018


def test_step_rows_add_up_to_the_request_rows(trace):
    steps, requests = rows(trace.step_columns), rows(trace.request_columns)

    def total(rows, name):
        return sum(row[name] for row in rows)

    assert total(steps, "num_sampled_tokens") == total(requests, "num_output_tokens")
    assert total(steps, "num_preempted") == total(requests, "num_preemptions")
    assert total(steps, "num_finished") == len(trace.served)
    assert total(steps, "num_admitted") == len(trace.served) + total(steps, "num_preempted")
    # Each output token but the last is fed back, and what a preemption threw away is computed again.
    computed = total(steps, "num_prefill_tokens") + total(steps, "num_decode_tokens")
    fed_back = total(requests, "num_output_tokens") - len(trace.served)
    prompts = sum(record.num_prompt_tokens for record in trace.served)
    assert computed == prompts + fed_back + total(requests, "num_recomputed_tokens")


def test_token_times_of_all_requests_lie_in_one_array(trace):
    times, offsets = trace.token_times
    for record, begin, end in zip(trace.requests, offsets[:-1], offsets[1:], strict=True):
        assert tuple(times[begin:end]) == record.token_times
    assert offsets[-1] == len(times)


def test_a_request_row_has_the_definitions_of_its_times():
    record = RequestRecord(
        "a",
        1.0,
        5,
        9,
        first_scheduled=1.5,
        tokens=(7, 7, 7),
        token_times=(2.0, 3.0, 6.0),
        finish_reason="stop",
    )
    assert (record.first_token, record.finish) == (2.0, 6.0)
    assert (record.ttft, record.latency) == (1.0, 5.0)
    assert record.tpot == (6.0 - 2.0) / 2
    assert record.itl == (1.0, 3.0)


@pytest.mark.parametrize("times", [(), (2.0,)])
def test_what_a_request_does_not_define_is_none(times):
    record = RequestRecord("a", 1.0, tokens=(7,) * len(times), token_times=times)
    undefined = ["tpot", "finish", "latency"] + (["ttft", "first_token"] if not times else [])
    assert [getattr(record, name) for name in undefined] == [None] * len(undefined)
    assert record.itl == ()


def test_a_rejected_request_has_no_times_and_keeps_its_reason(trace):
    found = {row["id"]: row for row in rows(trace.request_columns)}
    for name in ("line", "too long"):
        row = found[name]
        assert row["error"]
        undefined = {key for key, value in row.items() if value is None}
        assert undefined >= {
            "first_token_s",
            "finish_s",
            "ttft_s",
            "tpot_s",
            "latency_s",
            "first_scheduled_s",
        }
        assert row["num_output_tokens"] == 0


# --- json


def test_json_has_the_fields_that_others_script_against(trace, tmp_path):
    Comparison({trace.policy: trace}, {}, ()).write(tmp_path)
    (value,) = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert value["policy"] == trace.policy
    for given, found in zip(trace.requests, value["requests"], strict=True):
        assert found == {
            "id": given.id,
            "tokens": list(given.tokens),
            "arrival": given.arrival,
            "first_token": given.first_token,
            "finish": given.finish,
            "preemptions": given.num_preemptions,
            "error": given.error,
        }


def test_an_undefined_metric_is_null(tmp_path):
    trace = simulate([Rejected("a", "why")])
    write_json(tmp_path / "metrics.json", metrics.summary(trace))
    found = json.loads((tmp_path / "metrics.json").read_text())
    assert found["output_throughput_tokens_per_s"] is None
    assert found["utilization"] is None
    assert found["num_requests"] == found["num_rejected"] == 1
    assert {name: value for name, value in found.items() if value == 0}.keys() <= {
        name for name in found if name.startswith("num_") or name.endswith("_n")
    }


# --- stays


def stays_by_following_each_request(trace):
    """Return who sat where, pieced together from one request's plan entries at a time."""
    found = []
    for record in trace.served:
        stay = None
        for step in trace.steps:
            plan = step.plan
            admissions = [entry for entry in plan.admitted if entry.request.id == record.id]
            scheduled = [entry for entry in plan.scheduled if entry.request_id == record.id]
            padding = [entry for entry in plan.padding if entry.request_id == record.id]
            if record.id in plan.preempted:
                found.append(tuple(stay))
                stay = None
            if admissions:
                assert stay is None
                stay = [record.id, admissions[0].seat, plan.step, plan.step, 0]
            if scheduled or padding:
                assert (scheduled or padding)[0].seat == stay[1]
                stay[3] = plan.step
                stay[4] += len(padding)
        found.append(tuple(stay))
    return found


def test_stays_are_what_each_requests_entries_say(trace):
    assert sorted(map(tuple, export.stays_of(trace))) == sorted(stays_by_following_each_request(trace))


def test_stays_in_one_seat_do_not_overlap_and_there_are_as_many_as_admissions(trace):
    stays = list(export.stays_of(trace))
    assert len(stays) == sum(len(step.plan.admitted) for step in trace.steps)
    assert sum(stay.num_padding_steps for stay in stays) == sum(
        len(step.plan.padding) for step in trace.steps
    )
    for seat in range(LIMITS.max_num_seqs):
        in_seat = sorted(stay[2:4] for stay in stays if stay.seat == seat)
        assert all(earlier[1] < later[0] for earlier, later in itertools.pairwise(in_seat))


def test_the_first_steps_of_a_run_have_as_many_stays_as_admissions(trace):
    for num_steps in range(len(trace.steps)):
        begun = replace(trace, steps=trace.steps[:num_steps])
        assert len(list(export.stays_of(begun))) == sum(len(step.plan.admitted) for step in begun.steps)


# --- the Chrome trace


def test_the_chrome_trace_has_a_track_a_seat_and_a_slice_a_stay(trace):
    value = json.loads(json.dumps(export.to_chrome(trace), allow_nan=False))
    assert value["otherData"]["policy"] == trace.policy
    seats = [event for event in value["traceEvents"] if event["ph"] == "M" and event["name"] == "thread_name"]
    assert [event["args"]["name"] for event in seats] == [
        *(f"seat {seat}" for seat in range(LIMITS.max_num_seqs)),
        "steps",
    ]
    slices = [event for event in value["traceEvents"] if event.get("cat") == "stay"]
    for event, stay in zip(slices, export.stays_of(trace), strict=True):
        start, end = trace.steps[stay.first_step].start, trace.steps[stay.last_step].end
        assert (event["name"], event["tid"]) == (stay.request_id, stay.seat)
        assert event["ts"] / 1e6 == pytest.approx(start)
        assert (event["ts"] + event["dur"]) / 1e6 == pytest.approx(end)
        assert event["args"]["num_padding_steps"] == stay.num_padding_steps


def test_the_chrome_trace_counts_requests_and_blocks_at_every_step(trace):
    found = {}
    for event in export.to_chrome(trace)["traceEvents"]:
        if event["ph"] == "C":
            found.setdefault(event["name"], []).append((event["ts"], event["args"]["value"]))
    expected = {
        "num_requests_running": [step.num_running for step in trace.steps],
        "num_requests_waiting": [step.num_waiting for step in trace.steps],
        "kv_cache_usage_perc": [step.num_held_blocks / POOL.num_blocks for step in trace.steps],
        "held KV blocks": [step.num_held_blocks for step in trace.steps],
        "held KV tokens": [step.num_held_tokens for step in trace.steps],
    }
    assert set(found) == set(expected)
    for name, values in expected.items():
        times, counted = zip(*found[name], strict=True)
        assert list(counted) == [*values, 0], "what the last step held is given back"
        assert times == pytest.approx([*(step.start * 1e6 for step in trace.steps), trace.duration * 1e6])


def test_an_empty_trace_can_be_written_in_every_form():
    trace = Trace("fcfs", LIMITS, POOL, (), ())
    assert trace.duration == 0
    assert list(export.stays_of(trace)) == []
    assert len(trace.steps_frame()) == len(trace.requests_frame()) == 0
    assert all(event["ph"] == "M" for event in export.to_chrome(trace)["traceEvents"])


# --- files


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_written_with_its_folder_and_replaces_the_one_before(tmp_path):
    path = tmp_path / "new" / "folder" / "file.txt"
    write_whole(path, "first, and longer")
    write_whole(path, "second\r\nñ")
    assert path.read_bytes() == "second\r\nñ".encode()
    write_whole(path, b"\xff\r\n\x00")
    assert path.read_bytes() == b"\xff\r\n\x00"
    assert names(path.parent) == ["file.txt"]


@pytest.mark.parametrize("before", [None, "as it was"])
@pytest.mark.parametrize(
    "write",
    [
        # Half a surrogate pair cannot be encoded, and the text before it is long enough to be flushed.
        lambda path: write_whole(path, "x" * 100_000 + "\ud800"),
        lambda path: write_json(path, {"metric": math.nan}),
        lambda path: write_json(path, {"metric": math.inf}),
        lambda path: write_json(path, {"metric": object()}),
        lambda path: write_columns(path, {"a": {"x": np.arange(3), "y": np.arange(2)}}, "run"),
    ],
    ids=["encoding", "nan", "infinity", "no json", "ragged rows"],
)
def test_a_file_that_cannot_be_written_leaves_what_was_there_and_nothing_beside_it(tmp_path, write, before):
    path = tmp_path / "file.txt"
    if before is not None:
        path.write_text(before)
    with pytest.raises((ValueError, TypeError)):
        write(path)
    assert names(tmp_path) == ([] if before is None else ["file.txt"])
    assert before is None or path.read_text() == before


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_a_write_that_is_broken_off_leaves_nothing(tmp_path, monkeypatch, error):
    def broken(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", broken)
        with pytest.raises(type(error)):
            write_whole(tmp_path / "file.txt", "text")
    assert names(tmp_path) == []


def test_csv_file_of_no_rows_has_its_header(tmp_path):
    write_columns(tmp_path / "rows.csv", {"a": Trace("fcfs", LIMITS, POOL).request_columns}, "policy")
    assert (tmp_path / "rows.csv").read_text().startswith("policy,id,client,arrival_s,")
    assert (tmp_path / "rows.csv").read_text().count("\n") == 1
