"""What the tests of figures share."""

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import pytest
from helpers.demo_runs import classic, pressed


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


@pytest.fixture(scope="session")
def traces():
    return {policy: classic(policy) for policy in ("static", "static:release", "fcfs")}


@pytest.fixture(scope="session")
def preempting():
    return {policy: pressed(policy) for policy in ("static", "prefill_first", "fcfs")}
