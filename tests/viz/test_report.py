"""The report needs nothing else, answers with the metrics' numbers, and shows every text as text."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import matplotlib.pyplot as plt
import pytest
from helpers.demo_runs import HOSTILE, HOSTILE_AS_SHOWN, Page

from cbresearch import metrics, policies, viz
from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.costs import Linear
from cbresearch.metrics import Slo
from cbresearch.metrics.reporting import Reporting
from cbresearch.request import Rejected, Request
from cbresearch.scheduler import Scheduler
from cbresearch.serve import serve
from cbresearch.simulator import CostExecutor, simulate
from cbresearch.viz.report import summary_of

TERMS = Reporting(Slo(ttft=0.05, tpot=0.01), price_per_hour=3.0, currency="CHF")


def run(policy):
    requests = [Request(f"q{n}", 10 + n % 7, 4 + (n * 7) % 30, arrival=n / 60) for n in range(40)]
    return simulate(requests, policy, cost=Linear(step=0.004, token=0.0002), scheduler=SchedulerConfig(4, 64))


@pytest.fixture(scope="module")
def runs():
    return {label: run(policy) for label, policy in (("static", "static"), ("mine", "sjf"))}


@pytest.fixture(scope="module")
def hostile():
    requests = [
        Request(HOSTILE, 3, 5),
        Request("plain", 3, 2),
        Rejected(f"rejected {HOSTILE}", f"why {HOSTILE}"),
    ]
    return simulate(requests, "fcfs", scheduler=SchedulerConfig(max_num_seqs=2))


@pytest.fixture(scope="module")
def hostile_report(hostile, tmp_path_factory):
    return written(
        tmp_path_factory.mktemp("report"),
        {f"label {HOSTILE}": hostile},
        title=f"title {HOSTILE}",
        note=f"note {HOSTILE}",
        predictions=[(f"quantity {HOSTILE}", 2.0, 2.5, 0.25)],
        answers=[(f"prompt {HOSTILE}", {f"label {HOSTILE}": f"answer {HOSTILE}"})],
        environment={f"name {HOSTILE}": f"value {HOSTILE}"},
    )


def written(folder, traces, title="t", **options):
    path = viz.write_report(folder / "new folder" / "report.html", title=title, traces=traces, **options)
    return path.read_text(encoding="utf-8")


class Tables(HTMLParser):
    """The tables of a page as lists of rows of texts, and its headings with their levels."""

    def __init__(self, html):
        super().__init__()
        self.rows, self.headings, self._tag = [], [], ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self._tag = tag
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data):
        if self._tag in ("td", "th"):
            self.rows[-1][-1] += data.strip()
        elif re.fullmatch("h[1-6]", self._tag) and data.strip():
            self.headings.append((int(self._tag[1]), data))

    def handle_endtag(self, tag):
        self._tag = ""


def test_report_needs_nothing_from_outside(hostile_report):
    page = Page(hostile_report)
    assert "://" not in hostile_report
    assert not page.all("link") and not page.all("iframe") and "@import" not in hostile_report
    assert not re.search(r"\burl\(", hostile_report)
    for _, attributes in page.elements:
        assert "href" not in attributes
        assert attributes.get("src", "data:image/png;base64,").startswith("data:image/png;base64,")


def test_report_says_in_words_what_its_figures_show(hostile_report):
    page = Page(hostile_report)
    assert len(page.all("img")) == len(page.all("figcaption")) == len(page.all("figure")) == 4
    assert all(len(image["alt"]) > 40 for image in page.all("img"))


def test_report_is_readable_by_machine_phone_and_in_the_dark(hostile_report):
    page = Page(hostile_report)
    assert page.all("html") == [{"lang": "en"}]
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.all("meta")
    assert "prefers-color-scheme: dark" in hostile_report
    # Key figures, predictions, rejections and the environment.
    assert len(page.all("caption")) == len(page.all("table")) == 4
    assert all(cell["scope"] in ("row", "col") for cell in page.all("th"))
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1 and all(deeper - level <= 1 for level, deeper in pairwise(levels))


def test_text_from_users_stays_text_in_the_report(hostile_report):
    page = Page(hostile_report)
    assert len(page.scripts) == 2
    assert not any("onerror" in attributes for _, attributes in page.elements)
    shown = "\n".join(page.text)
    for what in (
        "title",
        "note",
        "label",
        "quantity",
        "prompt",
        "answer",
        "name",
        "value",
        "rejected",
        "why",
    ):
        assert f"{what} {HOSTILE_AS_SHOWN}" in shown, what


def test_report_shows_tables_as_given(traces, tmp_path):
    html = written(
        tmp_path,
        traces,
        kpi=[metrics.KpiRow("wait", "s", ("1", "–", "3"), ("60",) * 3)],
        predictions=[("ratio", 1.3, 1.319, 0.0146), ("other", 2, None, None)],
        answers=[
            ("same?", {"static": "yes", "fcfs": "yes"}),
            ("different?", {"static": "one", "fcfs": "two"}),
        ],
    )
    text = Page(html).text
    assert {"n = 60", "1.319", "+1.46 %"} <= set(text)
    assert ["wait", "s", "1", "–", "3"] in Tables(html).rows
    assert text["The same answer in static, fcfs:"] == text["yes"] == text["one"] == text["two"] == 1


def test_summary_and_key_figures_come_first(runs, tmp_path):
    headings = Tables(written(tmp_path, runs)).headings
    assert [name for _, name in headings][1:6] == [
        "Summary",
        "How much was served?",
        "Which request waited longest?",
        "What did it cost?",
        "Key figures",
    ]


def test_first_section_shows_the_metrics_own_table(runs):
    rows = Tables(viz.first_section(runs, bytes_per_token=1024, reporting=TERMS)).rows
    table = metrics.kpi_table(runs, 1024, TERMS)
    assert [row[0] for row in rows[1:]] == [row.name for row in table]
    assert [row[1:] for row in rows[1:]] == [[row.unit, *row.values] for row in table]


def test_summary_answers_with_the_metrics_numbers(runs):
    served, waited, cost = (answer for _, answer in summary_of(runs, TERMS))
    speed = {label: f"{metrics.output_throughput(trace):.3g}" for label, trace in runs.items()}
    assert served == f"Output tokens a second: mine {speed['mine']}, static {speed['static']}."
    longest = max(runs["static"].served, key=lambda record: record.ttft)
    assert re.match(rf"Longest wait for a first token: \S+ m?s \(static, request {longest.id}\), ", waited)
    price = {label: f"{metrics.cost_per_million_tokens(trace, 3.0):.3g}" for label, trace in runs.items()}
    assert cost.startswith(
        f"CHF for a million output tokens: mine {price['mine']}, static {price['static']}. "
        "Requests a second with TTFT within 50 ms and TPOT within 10 ms: "
    )


def test_summary_does_not_rank_equal_runs(runs):
    served, _, cost = (a for _, a in summary_of({"a": runs["mine"], "b": runs["mine"]}, Reporting()))
    assert served.endswith(" in every run.") and cost.endswith(
        " in every run. No price of an hour was given."
    )
    assert cost.startswith("Hours of the machine for a million output tokens: ")


def test_summary_counts_the_wait_of_a_request_without_a_token():
    trace = run("fcfs")
    silent = type(trace.requests[0])(id="silent", arrival=0.0, num_prompt_tokens=5, max_tokens=4)
    _, (_, waited), _ = summary_of({"a": replace(trace, requests=(silent, *trace.requests[1:]))}, Reporting())
    assert re.fullmatch(r"Longest wait for a first token: .* \(a, request silent, no token\)\.", waited)


def test_runs_without_a_token_have_dashes(tmp_path):
    empty = simulate([Rejected("too long", "needs 9 blocks, there are 4")], "fcfs")
    answers = [answer for _, answer in summary_of({"a": empty}, Reporting(price_per_hour=1.0))]
    assert answers == ["No request got a token.", "No request was served.", "No request got a token."]
    html = written(tmp_path, {"a": empty})
    assert next(row for row in Tables(html).rows if row[0] == "output throughput")[2] == "–"
    text = Page(html).text
    assert text["needs 9 blocks, there are 4"] == 1
    assert text["a: no step was run, so there is nothing to play."] == 1
    instant = simulate([Request("a", 3, 4)], "fcfs", cost=lambda plan: 0.0)
    assert summary_of({"a": instant}, Reporting())[0][1] == "The runs took no time."


def test_a_failed_request_is_not_called_rejected(tmp_path):
    requests = [Request(f"q{n}", 10, 40) for n in range(3)]
    executor = CostExecutor(Linear(step=0.1), outputs={"q1": ()}, errors={"q1": "took 1-2 s too long"})
    scheduler = Scheduler(policies.get("fcfs"), SchedulerConfig(4, 64), CacheConfig(64, 4))
    page = written(tmp_path, {"a": serve(requests, scheduler, executor)})
    assert "1 failed while they were served" in page and "Rejected requests" not in page


def test_three_runs_have_a_figure_of_throughput_and_wait(traces, runs, tmp_path):
    assert "<h2>Throughput and wait</h2>" in written(tmp_path, traces)
    assert "<h2>Throughput and wait</h2>" not in written(tmp_path, runs)


def test_same_traces_give_the_same_report_under_any_style_of_the_caller(hostile, tmp_path):
    first = written(tmp_path, {"a": hostile})
    with plt.style.context("dark_background"):
        assert written(tmp_path, {"a": hostile}) == first


def test_report_leaves_style_and_open_figures_as_they_were(hostile, tmp_path):
    before = dict(plt.rcParams)
    written(tmp_path, {"a": hostile})
    assert dict(plt.rcParams) == before
    assert not plt.get_fignums()


def test_report_is_absent_if_it_cannot_be_made(runs, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no ink")

    monkeypatch.setattr("cbresearch.viz.charts.latency_cdfs", fail)
    with pytest.raises(RuntimeError, match="no ink"):
        written(tmp_path, runs)
    assert not list(tmp_path.iterdir())


def test_wrong_arguments_are_named(traces, tmp_path):
    with pytest.raises(ValueError, match="at least one trace"):
        written(tmp_path, {})
    with pytest.raises(ValueError, match="at least one trace"):
        viz.first_section({})
    with pytest.raises(ValueError, match="'speed' has 1 values for 3 runs"):
        written(tmp_path, traces, kpi=[metrics.KpiRow("speed", "s", ("1",))])
    with pytest.raises(ValueError, match="relative error"):
        written(tmp_path, traces, predictions=[("speed", 1, 2)])
    for price in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="price_per_hour"):
            Reporting(price_per_hour=price)


def test_characters_that_are_not_seen_are_written_out(tmp_path):
    name = "a\x00b\x1bc\x85d\u202ee\ufefff\ud800g\r"
    html = written(
        tmp_path,
        {name: simulate([Request(name.replace("\ud800", ""), 3, 5)], "fcfs")},
        title=name,
        reporting=Reporting(price_per_hour=1.0, currency=name),
        answers=[(name, {name: "one\n\ttwo\x07"})],
        environment={name: name},
    )
    shown = "a⟨U+0000⟩b⟨U+001B⟩c⟨U+0085⟩d⟨U+202E⟩e⟨U+FEFF⟩f⟨U+D800⟩g⟨U+000D⟩"
    assert html.count(shown) > 10
    assert "one\n\ttwo⟨U+0007⟩" in html
    outside = re.sub(r"<script.*?</script>", "", html, flags=re.DOTALL)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\ufeff]", outside)
