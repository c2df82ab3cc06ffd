"""Looks that stay with a policy, numbers with their units, and titles that fit."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
from helpers.artists import by_gid
from helpers.demo_runs import HOSTILE

from cbresearch import policies, viz
from cbresearch.config import CacheConfig
from cbresearch.request import Request
from cbresearch.simulator import simulate
from cbresearch.viz import style, text
from cbresearch.viz.style import REQUEST_COLORS, ink_on


def test_each_baseline_has_a_colour_and_a_marker_of_its_own():
    looks = [viz.policy_look(name) for name in ("static", "static:release", "fcfs", "prefill_first", "sjf")]
    assert len({look.color for look in looks}) == len({look.marker for look in looks}) == len(looks)
    other = viz.policy_look("a policy of mine")
    assert other.color not in {look.color for look in looks}
    assert other.marker not in {look.marker for look in looks}


def known_policies():
    return [name for name in policies.table() if policies.get(name).__module__.startswith("cbresearch.")]


def test_every_policy_of_the_package_has_a_look_of_its_own():
    names = known_policies()
    assert len(names) >= 20
    looks = [viz.policy_look(name) for name in [*names, "static:release"]]
    assert len({(look.color, look.marker) for look in looks}) == len(looks)
    assert all(viz.policy_look(f"mine {n}") not in looks for n in range(300))


def test_runs_of_a_figure_never_share_a_look_and_known_policies_keep_theirs():
    known = known_policies()
    given = {name: name for name in [*known, *(f"mine {n}" for n in range(40))]}
    found = style.looks(given)
    assert list(found) == list(given)
    assert len(set(found.values())) == len(given)
    assert all(found[name] == viz.policy_look(name) for name in known)


def test_two_runs_of_one_policy_look_different(traces):
    fig = viz.latency_cdfs({"first": traces["fcfs"], "second": traces["fcfs"]})
    first, second = (by_gid(fig.axes[0], f"ttft of {label}") for label in ("first", "second"))
    assert first.get_color() != second.get_color()


def test_long_labels_are_shortened_but_stay_apart(traces):
    fig = viz.occupancy({"x" * 60: traces["fcfs"], "x" * 61: traces["static"]})
    labels = [ax.get_title("left").partition(":")[0] for ax in fig.axes]
    assert labels == ["x" * 31 + "…", "x" * 31 + "… (2)"]


def test_a_label_that_looks_like_a_shortened_one_loses_no_run(traces):
    given = {"x (3)": traces["fcfs"], "x": traces["static"], "x ": traces["fcfs"], " x": traces["static"]}
    found = style.labelled(given)
    assert list(found.values()) == list(given.values())


def test_every_axis_names_its_unit(traces, preempting):
    drawn = [
        viz.seats(preempting),
        viz.occupancy(traces),
        viz.kv_memory(traces["fcfs"]),
        viz.kv_categories(traces["fcfs"]),
        viz.latency_cdfs(traces),
    ]
    for fig in drawn:
        assert fig.axes[-1].get_xlabel().endswith(("(s)", "(ms)"))
        assert fig.axes[0].get_ylabel().endswith(("seat", "fraction of requests", "(requests)", "(tokens)"))


def test_a_given_title_stands_in_for_the_computed_one(traces):
    assert viz.seats(traces["fcfs"], title="Mine").axes[0].get_title("left") == "Mine"
    assert viz.seats(traces, title="Mine").get_suptitle() == "Mine"
    assert viz.latency_cdfs(traces, title="Mine").get_suptitle() == "Mine"


@pytest.mark.filterwarnings("ignore:Glyph")
def test_ids_and_labels_of_any_letters_are_drawn():
    name = HOSTILE + "\ud800\x00</b>\u202e"
    trace = simulate(
        [Request(name.replace("\ud800", ""), 3, 5), Request("$", 9, 3)], "fcfs", cache=CacheConfig(8, 4)
    )
    for fig in (
        viz.kv_categories({name: trace, "$": trace}),
        viz.kv_memory(trace, title=name),
        viz.occupancy({name: trace}),
        viz.latency_cdfs({name: trace}),
        viz.tradeoff({name: {1.0: trace}}),
        viz.pareto({name: trace, "$": trace}),
        viz.seats({name: trace}),
    ):
        fig.canvas.draw()


@pytest.mark.parametrize("pair", ["1.38 times", "12 %", "3.5 s", "1 step", "90 steps", "70 tokens/s"])
def test_a_title_breaks_no_number_from_its_unit(pair):
    for width in np.arange(3, 9, 1.0):
        fig, ax = plt.subplots(figsize=(width, 2))
        style.title(ax, f"one run takes up to {pair} as long as another one does")
        style.suptitle(fig, f"one run takes up to {pair} as long as another one does")
        plt.close(fig)
        assert pair in ax.get_title("left") and pair in fig.get_suptitle()


def test_runs_without_a_step_can_be_drawn():
    empty = simulate([], "fcfs")
    assert viz.seats(empty).axes[0].get_title("left") == "fcfs: no step was run"
    assert viz.kv_categories(empty).axes[0].get_title("left") == "fcfs: no KV is held"
    assert viz.kv_memory(empty).axes[0].get_title("left") == "fcfs: no KV is held"
    assert viz.occupancy(empty).axes[0].get_title("left") == "fcfs: no step was run"
    assert viz.pareto({"a": empty}).axes[0].get_title("left") == "No run defines both"
    assert viz.tradeoff({"a": {1.0: empty}}).get_suptitle() == "No request got a token"


def test_style_is_fixed_and_large_enough_to_read():
    with plt.rc_context():
        viz.use_style()
        assert plt.rcParams["svg.hashsalt"] == "cbresearch"
        assert min(plt.rcParams[f"{key}.labelsize"] for key in ("axes", "xtick", "ytick")) >= 11
        assert all(contrast(color, ink_on(color)) > 4.5 for color in REQUEST_COLORS)


def contrast(one, other):
    def luminance(color):
        channels = np.array([int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)])
        linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
        return linear @ [0.2126, 0.7152, 0.0722]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (text.number(None), "–"),
        (text.number(float("nan")), "–"),
        (text.number(0), "0"),
        (text.number(12345), "12,345"),
        (text.number(0.123456), "0.1235"),
        (text.duration(None), "–"),
        (text.duration(0.0123), "12.3 ms"),
        (text.duration(0.00004), "40 µs"),
        (text.duration(91.0), "91 s"),
        (text.percent(-0.0312), "−3.12 %"),
        (text.percent(None), "–"),
    ],
)
def test_a_number_is_shown_with_its_unit_or_a_dash(shown, expected):
    assert shown == expected


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("ttft_p99_s", "TTFT p99 (s)"),
        ("output_throughput_tokens_per_s", "output throughput (tokens/s)"),
        ("goodput_requests_per_s", "goodput (requests/s)"),
        ("utilization", "utilization"),
    ],
)
def test_a_metric_is_named_as_a_reader_knows_it(name, shown):
    assert text.metric(name) == shown


def test_what_can_be_seen_is_left_as_it_is():
    words = "Grüße, 你好 槽位 · 👩\u200d🚀 \N{REPLACEMENT CHARACTER} a\u00a0b\tb\nc {{x}} <b>"
    assert text.visible(words) == words
    assert text.visible(words, lines=False) == words.replace("\t", "⟨U+0009⟩").replace("\n", "⟨U+000A⟩")


def test_characters_without_a_picture_or_that_move_others_are_written_out():
    # Soft hyphen, zero width space, Arabic mark, isolate, word joiner, a tag beyond 16 bits, no characters.
    for letter in "\xad\u200b\u061c\u2066\u2060\U000e0041\ufdd0\uffff\U0001fffe":
        assert text.visible(f"a{letter}b") == f"a⟨U+{ord(letter):04X}⟩b"
