"""The committed lengths of four public traces are the traces', and give the published speed-ups."""

import numpy as np
import pytest
import traffic_counts

from cbresearch import formulas, workloads

NUM_REQUESTS = {
    "azure_conv": 19_366,
    "azure_code": 8_819,
    "mooncake_conversation": 12_031,
    "mooncake_synthetic": 3_993,
}
MEAN_OUTPUTS = {
    "azure_conv": 211.13,
    "azure_code": 27.88,
    "mooncake_conversation": 342.62,
    "mooncake_synthetic": 149.12,
}
# E[M_B]/E[X] for 2, 4, 8, ..., 256 slots, computed once from the files.
SPEED_UPS = {
    "azure_code": (1.565, 2.447, 3.770, 5.666, 8.287, 11.81, 16.36, 21.98),
    "azure_conv": (1.413, 1.834, 2.159, 2.400, 2.663, 2.975, 3.322, 3.713),
    "mooncake_conversation": (1.381, 1.729, 2.082, 2.499, 3.026, 3.682, 4.441, 5.169),
    "mooncake_synthetic": (1.608, 2.334, 3.064, 3.748, 4.372, 4.871, 5.193, 5.369),
}


@pytest.mark.parametrize("trace", workloads.TRACES)
def test_committed_traffic_lengths_have_the_published_numbers_means_and_speed_ups(trace):
    outputs = traffic_counts.committed_lengths(trace, "output")
    assert len(outputs) == NUM_REQUESTS[trace]
    assert round(outputs.mean(), 2) == MEAN_OUTPUTS[trace]
    found = [formulas.speed_up(outputs.mean(), formulas.expected_max(outputs, 2**k)) for k in range(1, 9)]
    assert [float(f"{value:.4g}") for value in found] == list(SPEED_UPS[trace])


def test_committed_traffic_pairs_are_all_requests_in_parts_of_equal_size():
    pairs = traffic_counts.committed_pairs()
    prompts = traffic_counts.committed_lengths(traffic_counts.COUPLED, "prompt")
    assert pairs.sum() == len(prompts) == NUM_REQUESTS[traffic_counts.COUPLED]
    for axis in (0, 1):
        assert np.ptp(pairs.sum(axis)) <= 1


def test_count_pairs_tells_equal_lengths_apart():
    pairs = traffic_counts.count_pairs(np.full(32, 7), np.arange(32)[::-1])
    assert (pairs == 2 * np.eye(16, dtype=int)[::-1]).all()


@pytest.fixture(params=list(workloads.TRACES))
def trace(request):
    if workloads.find(workloads.TRACES[request.param].file) is None:
        pytest.skip(f"the trace {request.param} is not there; name its folder in CBRESEARCH_DATA")
    return request.param


def test_committed_traffic_counts_follow_from_the_trace(trace):
    prompts, outputs = traffic_counts.read(trace)
    assert (traffic_counts.committed_lengths(trace, "output") == np.sort(outputs)).all()
    if trace == traffic_counts.COUPLED:
        assert (traffic_counts.committed_lengths(trace, "prompt") == np.sort(prompts)).all()
        assert (traffic_counts.count_pairs(prompts, outputs) == traffic_counts.committed_pairs()).all()
