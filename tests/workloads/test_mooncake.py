"""The Mooncake reader shares KV just where ids are equal; the committed counts are those of the traces."""

import json
from collections import OrderedDict

import mooncake_counts
import numpy as np
import pytest
from helpers.drawing import rng

from cbresearch import formulas, workloads
from cbresearch.config import CacheConfig
from cbresearch.request import Rejected, Request, SamplingParams
from cbresearch.simulator import simulate
from cbresearch.workloads.readers import EXAMPLES

LINE = {"timestamp": 27_500, "input_length": 1200, "output_length": 52, "hash_ids": [0, 7, 300]}

# Published with the traces: requests, blocks, and blocks that an endless cache would hold already.
ENDLESS = {"conversation": (12_031, 288_500, 105_710), "synthetic": (3_993, 121_877, 77_953)}


def write(tmp_path, *lines):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def read(tmp_path, *lines, **options):
    return workloads.read_trace(write(tmp_path, *lines), **options).requests


def common(first, second):
    """Return with how many tokens two prompts begin alike."""
    pairs = zip(first.prompt, second.prompt, strict=False)
    return next(
        (place for place, (a, b) in enumerate(pairs) if a != b), min(map(len, (first.prompt, second.prompt)))
    )


def test_mooncake_line_sets_every_field_of_a_request(tmp_path):
    (request,) = read(tmp_path, LINE)
    assert request == Request("0", request.prompt, 52, 27.5, SamplingParams(ignore_eos=True))
    assert (request.num_prompt_tokens, request.output_length) == (1200, 52)


def test_load_knows_a_mooncake_trace_by_its_hash_ids(tmp_path):
    path = write(tmp_path, "oops", LINE)
    rejected, request = workloads.load(path, rng())
    assert "input_length" in rejected.error
    assert request == workloads.read_trace(path).requests[1]


def test_mooncake_example_in_the_messages_is_a_line(tmp_path):
    (request,) = read(tmp_path, EXAMPLES["mooncake"])
    assert request.num_prompt_tokens == 700


def test_mooncake_line_may_have_other_keys(tmp_path):
    assert read(tmp_path, LINE | {"type": "chat"}) == read(tmp_path, LINE)


def test_find_looks_in_the_data_folder(tmp_path, monkeypatch):
    write(tmp_path, LINE)
    monkeypatch.delenv("CBRESEARCH_DATA", raising=False)
    assert workloads.find("trace.jsonl") is None
    with pytest.raises(ValueError, match="neither a preset nor a file"):
        workloads.load("trace.jsonl", rng())
    monkeypatch.setenv("CBRESEARCH_DATA", str(tmp_path))
    assert workloads.find("trace.jsonl") == tmp_path / "trace.jsonl"
    assert workloads.find("") is None
    assert len(workloads.load("trace.jsonl", rng())) == 1


def test_find_takes_a_path_before_the_data_folder(tmp_path, monkeypatch):
    write(tmp_path, LINE)
    (tmp_path / "data").mkdir()
    write(tmp_path / "data", LINE, LINE)
    monkeypatch.setenv("CBRESEARCH_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    assert len(workloads.load("trace.jsonl", rng())) == 1


@pytest.mark.parametrize("tokens_per_id", [1, 3, 4, 16, 511, 512])
@pytest.mark.parametrize("length", [1, 511, 512, 513, 1536])
def test_mooncake_id_becomes_so_many_tokens_and_a_prompt_one_block_per_id(tmp_path, tokens_per_id, length):
    line = LINE | {"input_length": length, "hash_ids": list(range(-(-length // 512)))}
    (request,) = read(tmp_path, line, tokens_per_id=tokens_per_id)
    assert request.num_prompt_tokens == -(-length * tokens_per_id // 512)
    assert -(-request.num_prompt_tokens // tokens_per_id) == len(line["hash_ids"])


@pytest.mark.parametrize("tokens_per_id", [1, 3, 4, 16, 512])
def test_mooncake_prompts_share_tokens_just_where_their_ids_are_equal(tmp_path, tokens_per_id):
    length, generator = 5 * 512, rng()
    lines = [
        LINE | {"input_length": length, "hash_ids": generator.integers(0, 3, 5).tolist()} for _ in range(40)
    ]
    requests = read(tmp_path, *lines, tokens_per_id=tokens_per_id)
    for line, request in zip(lines, requests, strict=True):
        for other_line, other in zip(lines, requests, strict=True):
            ids = zip(line["hash_ids"], other_line["hash_ids"], strict=True)
            num_ids = next((place for place, (a, b) in enumerate(ids) if a != b), 5)
            # Two ids may have 3 of their 4 digits in common, which is less than a block.
            assert 0 <= common(request, other) - num_ids * tokens_per_id <= 3


ALIKE = [(0, 1), (255, 256), (65_535, 65_536), (1, 2**24 + 1), (0, 2**32 - 1)]
ALIKE_IN_HALVES = [(7, 7 + 2**32), (7 + 7 * 2**32, 7), (2**63, 0), (2**64 - 1, 2**32 - 1)]


@pytest.mark.parametrize("ids", ALIKE + ALIKE_IN_HALVES)
@pytest.mark.parametrize("tokens_per_id", [1, 2, 4, 7, 8, 512])
def test_mooncake_ids_have_different_tokens(tmp_path, ids, tokens_per_id):
    lines = [LINE | {"input_length": 512, "hash_ids": [hash_id]} for hash_id in ids]
    first, second = read(tmp_path, *lines, tokens_per_id=tokens_per_id)
    assert common(first, second) <= (3 if ids in ALIKE else 7)
    assert first.prompt != second.prompt


def test_mooncake_tokens_are_in_every_vocabulary(tmp_path):
    (request,) = workloads.resolve_prompts(
        read(tmp_path, LINE | {"hash_ids": [1, 2**31, 2**64 - 1]}), None, 256, rng()
    )
    assert isinstance(request, Request)


def test_mooncake_token_of_one_per_id_is_the_id(tmp_path):
    (request,) = read(tmp_path, LINE, tokens_per_id=1)
    assert request.prompt == (0, 7, 300)


def test_mooncake_blocks_are_prefix_cache_hits(tmp_path):
    later = LINE | {"timestamp": 10**6, "hash_ids": [0, 7, 9]}
    requests = read(tmp_path, LINE, later, tokens_per_id=16)
    trace = simulate(requests, cache=CacheConfig(100, 16, prefix_caching=True))
    assert [record.num_cached_tokens for record in trace.requests] == [0, 32]


BAD_LINES = {
    "no timestamp": (
        {"timestamp": None},
        "timestamp is None; write milliseconds, 0 or more",
    ),
    "endless": ({"timestamp": float("inf")}, "timestamp is inf; write milliseconds"),
    "negative time": ({"timestamp": -1}, "timestamp is -1"),
    "no input": (
        {"input_length": 0, "hash_ids": []},
        "input_length is 0; it must be an integer of at least 1",
    ),
    "no output": ({"output_length": 0}, "output_length is 0; it must be an integer of at least 1"),
    "true": ({"output_length": True}, "output_length is True"),
    "too few ids": ({"hash_ids": [0, 7]}, "hash_ids has 2 ids, but input_length 1200 makes 3 blocks of 512"),
    "too many ids": ({"hash_ids": [0, 7, 8, 9]}, "hash_ids has 4 ids, but input_length 1200 makes 3"),
    "no ids": ({"hash_ids": None}, "hash_ids is None; it must be a list of integers"),
    "a text": (
        {"hash_ids": [0, "7", 8]},
        "an id of hash_ids is '7'; it must be an integer from 0 to 18446744073709551615",
    ),
    "a negative id": ({"hash_ids": [0, 7, -8]}, "an id of hash_ids is -8"),
    "an id of 65 bits": ({"hash_ids": [0, 7, 2**64]}, "an id of hash_ids is 18446744073709551616"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_mooncake_trace_rejects_a_bad_line_by_number_and_value_and_keeps_the_others(tmp_path, name):
    spoilt, said = BAD_LINES[name]
    before, rejected, after = read(tmp_path, LINE, LINE | spoilt, LINE)
    assert (before.id, after.id) == ("0", "2")
    assert isinstance(rejected, Rejected)
    assert rejected.error.startswith("line 2: ")
    assert said in rejected.error


@pytest.mark.parametrize(("spoilt", "arrival"), [({"hash_ids": []}, 27.5), ({"timestamp": -1}, 0.0)])
def test_mooncake_rejection_keeps_the_arrival_of_its_line(tmp_path, spoilt, arrival):
    (rejected,) = read(tmp_path, LINE | spoilt)
    assert rejected.arrival == arrival


def test_mooncake_rejection_of_unknown_time_stays_behind_the_line_before(tmp_path):
    requests = read(tmp_path, LINE, LINE | {"timestamp": None}, "oops", LINE)
    assert [request.arrival for request in requests] == [27.5] * 4
    assert len(workloads.spread_arrivals(requests, rng(), 3.0)) == 4


@pytest.mark.parametrize("tokens_per_id", [0, 513, 1.0, True])
def test_mooncake_id_stands_for_1_to_512_tokens(tmp_path, tokens_per_id):
    with pytest.raises(ValueError, match=r"tokens_per_id is .*; it must be an integer from 1 to 512"):
        read(tmp_path, LINE, tokens_per_id=tokens_per_id)


# Spreading what a trace rounded.


def at(*arrivals):
    return [Request(str(place), 1, 1, arrival) for place, arrival in enumerate(arrivals)]


def test_spread_arrivals_spreads_a_tick_in_its_order():
    spread = workloads.spread_arrivals(at(*[0.0] * 500, *[3.0] * 500), rng(), 3.0)
    times = [request.arrival for request in spread]
    assert times == sorted(times)
    assert [request.id for request in spread] == [str(place) for place in range(1000)]
    assert times[0] >= 0 and times[499] < 3 <= times[500] and times[-1] < 6
    # Uniform over [0, 6): the mean of 1,000 lies within 4 standard errors.
    assert abs(np.mean(times) - 3) < 4 * 6 / np.sqrt(12 * 1000)


def test_spread_arrivals_never_passes_the_next_arrival():
    times = [request.arrival for request in workloads.spread_arrivals(at(0, 0, 0, 0.5, 0.5), rng(), 3.0)]
    assert max(times[:3]) < 0.5 <= min(times[3:])


def test_spread_arrivals_keeps_rejections_and_all_else():
    given = [Request("a", (1, 2), 5, 3.0, client="c"), Rejected("b", "no", 3.0)]
    spread = workloads.spread_arrivals(given, rng(), 3.0)
    assert [request.id for request in spread] == ["a", "b"]
    assert (spread[0].prompt, spread[0].client, spread[1].error) == ((1, 2), "c", "no")


def test_spread_arrivals_depends_on_the_seed():
    first, second, other = (workloads.spread_arrivals(at(*[0.0] * 9), rng(seed), 3.0) for seed in (1, 1, 2))
    assert first == second != other


@pytest.mark.parametrize("tick", [0, -1.0, float("nan"), float("inf")])
def test_spread_arrivals_takes_a_positive_tick(tick):
    with pytest.raises(ValueError, match="tick is"):
        workloads.spread_arrivals(at(0.0), rng(), tick)


def test_spread_arrivals_needs_arrivals_in_order():
    with pytest.raises(ValueError, match=r"0.0 follows one at 3.0; sort by arrival"):
        workloads.spread_arrivals(at(3.0, 0.0), rng(), 3.0)


# The counts that are committed, and the traces that they come from.


@pytest.mark.parametrize("trace", ENDLESS)
def test_committed_mooncake_counts_are_the_published_ones(trace):
    committed = mooncake_counts.committed_sizes()[trace]
    num_requests, num_blocks, num_hits = ENDLESS[trace]
    references = mooncake_counts.committed_references()[trace]
    assert (references @ np.arange(len(references))) == num_blocks
    assert references.sum() == num_blocks - num_hits
    assert max(committed.values()) == num_hits == committed[max(committed)]
    assert list(committed.values()) == sorted(committed.values())
    assert num_requests < num_blocks


@pytest.fixture(scope="module", params=list(ENDLESS))
def trace(request):
    name = mooncake_counts.FILES[request.param]
    if workloads.find(name) is None:
        pytest.skip(f"{name} is not there; name its folder in CBRESEARCH_DATA")
    return request.param, [request.prompt for request in workloads.read_trace(name, tokens_per_id=1).requests]


def test_mooncake_trace_repeats_366_and_640_of_1000_blocks(trace):
    name, chains = trace
    seen, num_hits = set(), 0
    for chain in chains:
        num_hits += sum(hash_id in seen for hash_id in chain)
        seen.update(chain)
    num_blocks = sum(map(len, chains))
    assert (len(chains), num_blocks, num_hits) == ENDLESS[name]
    assert round(num_hits / num_blocks, 3) == {"conversation": 0.366, "synthetic": 0.640}[name]


def test_block_manager_of_endless_size_hits_all_repeated_mooncake_blocks(trace):
    name, chains = trace
    assert mooncake_counts.measured_hits(chains, 400_000) == ENDLESS[name][2]


@pytest.mark.parametrize("num_blocks", [10_000])
def test_block_manager_hits_the_committed_counts_of_mooncake_blocks(trace, num_blocks):
    name, chains = trace
    assert (
        mooncake_counts.measured_hits(chains, num_blocks)
        == mooncake_counts.committed_sizes()[name][num_blocks]
    )


def test_committed_mooncake_counts_follow_from_the_trace(trace):
    name, chains = trace
    depths = formulas.reuse_depths(chains)
    for num_blocks, num_hits in mooncake_counts.committed_sizes()[name].items():
        assert np.count_nonzero(depths <= num_blocks) == num_hits
    references = mooncake_counts.count_references(chains)
    assert references.tolist() == mooncake_counts.committed_references()[name].tolist()


def test_committed_mooncake_counts_are_those_of_a_plain_lru_list(trace):
    name, chains = trace
    for num_blocks in (1_000, 30_000):
        recent: OrderedDict[int, None] = OrderedDict()
        num_hits = 0
        for chain in chains:
            hits = [hash_id for hash_id in chain if hash_id in recent]
            num_hits += len(hits)
            for hash_id in hits:
                del recent[hash_id]
            # What the request holds cannot be evicted; its own blocks come back tail first.
            while len(recent) + len(chain) > num_blocks:
                recent.popitem(last=False)
            recent.update(dict.fromkeys(reversed(chain)))
        assert num_hits == mooncake_counts.committed_sizes()[name][num_blocks]
