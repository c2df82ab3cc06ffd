"""The report's first section answers a dispatcher with the metrics' numbers, and shows every text as text."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import matplotlib

matplotlib.use("Agg")

import pytest

from cbresearch import metrics, policies, viz
from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.costs import Linear
from cbresearch.metrics import Slo
from cbresearch.request import Refusal, Request
from cbresearch.scheduler import Scheduler
from cbresearch.serve import serve
from cbresearch.simulator import CostExecutor, simulate
from cbresearch.viz.dispatcher import longest_wait, questions
from cbresearch.viz.words import visible

SLO = Slo(ttft=0.05, tpot=0.01)


def run(policy):
    requests = [Request(f"q{n}", 10 + n % 7, 4 + (n * 7) % 30, arrival=n / 60) for n in range(40)]
    return simulate(requests, policy, cost=Linear(step=0.004, token=0.0002), scheduler=SchedulerConfig(4, 64))


@pytest.fixture(scope="module")
def traces():
    return {label: run(policy) for label, policy in (("static", "static"), ("mine", "sjf"))}


class Tables(HTMLParser):
    """The tables of a page by caption, as lists of rows of texts; and its headings."""

    def __init__(self, html):
        super().__init__()
        self.rows, self.headings, self._cell, self._tag = [], [], None, ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self._tag = tag
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if re.fullmatch("h[1-6]", tag):
            self.headings.append((int(tag[1]), ""))

    def handle_data(self, data):
        if self._tag in ("td", "th"):
            self.rows[-1][-1] += data.strip()
        elif re.fullmatch("h[1-6]", self._tag) and data.strip():
            self.headings[-1] = (self.headings[-1][0], data)

    def handle_endtag(self, tag):
        self._tag = ""

    def row(self, name):
        return next(row for row in self.rows if row and row[0] == name)


def number(text):
    return float(text.replace(",", ""))


def test_the_questions_come_first_and_in_order(traces, tmp_path):
    path = viz.write_report(tmp_path / "r.html", title="t", traces=traces, kpi=metrics.kpi_table(traces))
    headings = Tables(path.read_text(encoding="utf-8")).headings
    names = [name for _, name in headings]
    assert names[1:6] == [
        "Three questions of a dispatcher",
        "How much was carried?",
        "Who waited longest?",
        "What did it cost?",
        "Key figures",
    ]
    assert all(deeper - level <= 1 for (level, _), (deeper, _) in pairwise(headings))


def test_the_numbers_of_the_questions_are_those_of_the_metrics(traces):
    page = Tables(
        viz.first_section(traces, bytes_per_token=1024, slo=SLO, price_per_hour=3.0, currency="CHF")
    )
    expected = {
        ("output throughput", "tokens/s"): metrics.output_throughput,
        ("throughput with prompts", "tokens/s"): metrics.total_throughput,
        ("finished requests", "requests/s"): metrics.request_throughput,
        ("busy seats, mean of all steps", "%"): lambda trace: 100 * metrics.utilization(trace),
        ("time to first token, p99", "ms"): lambda trace: 1e3 * metrics.ttft(trace).p99,
        ("gap between two tokens, p99", "ms"): lambda trace: 1e3 * metrics.itl(trace).p99,
        ("peak KV memory", "MiB"): lambda trace: metrics.peak_kv_bytes(trace, 1024) / 2**20,
        ("held KV without a token in use", "%"): lambda trace: 100 * metrics.fragmentation(trace),
        ("million output tokens", "CHF"): lambda t: metrics.cost_per_million_tokens(t, 3.0),
        ("million tokens, prompts included", "CHF"): lambda t: metrics.cost_per_million_total_tokens(t, 3.0),
        ("requests that kept the SLO", "%"): lambda trace: 100 * metrics.slo_attainment(trace, SLO),
        ("goodput", "requests/s"): lambda trace: metrics.goodput(trace, SLO),
    }
    for (name, unit), measure in expected.items():
        row = page.row(name)
        assert row[1] == unit
        for cell, trace in zip(row[2:], traces.values(), strict=True):
            assert number(cell.partition("n =")[0]) == pytest.approx(measure(trace), rel=6e-3), name


def test_the_longest_wait_is_named_with_its_reason(traces):
    for wait, trace in zip(questions(traces)[1].waits, traces.values(), strict=True):
        waits = {record.id: record.ttft for record in trace.requests}
        assert wait.request_id == max(waits, key=lambda name: waits[name])
        assert wait.seconds == waits[wait.request_id]
        assert "no seat was free" in wait.reason
        assert wait.life.splitlines() == [
            line.strip() for line in trace.explain(wait.request_id).splitlines()[1:]
        ]


def test_who_never_got_a_token_waited_until_the_end():
    trace = run("fcfs")
    (first, *others) = trace.requests
    silent = type(first)(id="silent", arrival=0.0, num_prompt_tokens=5, max_tokens=4)
    record, seconds = longest_wait(
        type(trace)("fcfs", trace.scheduler, trace.cache, trace.steps, (silent, *others))
    )
    assert (record.id, seconds) == ("silent", trace.duration)


def failing(error):
    """Serve requests of which one fails in its first step, long before the others are done."""
    requests = [Request(f"q{n}", 10, 40) for n in range(3)]
    executor = CostExecutor(Linear(step=0.1), outputs={"q1": ()}, errors={"q1": error})
    limits = SchedulerConfig(4, 64)
    return serve(requests, Scheduler(policies.get("fcfs"), limits, CacheConfig(64, 4)), executor)


def test_who_failed_waited_until_then_and_is_not_called_refused(tmp_path):
    trace = failing("took 1-2 s too long")
    record, seconds = longest_wait(replace(trace, requests=trace.requests[1:2]))
    assert record.finish_reason == "error" and seconds == trace.steps[0].end < trace.duration
    path = viz.write_report(tmp_path / "r.html", title="t", traces={"a": trace})
    page = path.read_text(encoding="utf-8")
    assert "1 failed while they were served" in page and "Refused requests" not in page


def test_a_run_that_defines_no_wait_is_neither_a_choice_nor_beaten(traces, tmp_path):
    runs = {**traces, "none": simulate([Refusal("x", "too long")], "fcfs")}
    page = viz.write_report(tmp_path / "r.html", title="t", traces=runs).read_text(encoding="utf-8")
    after = page.split("<h2>Which policy is a choice</h2>")[1].split("</section>")[0]
    assert [row[1:] for row in Tables(after).rows if row[0] == "none"] == [["–", "–", "–"]]
    assert "None of the 2 runs beats another" in after or "is best in both" in after


def test_what_is_not_given_is_named_instead_of_guessed(traces):
    html = viz.first_section(traces)
    assert "No price of an hour was given" in html and "No SLO was given" in html
    assert "goodput</th>" not in html and "million output tokens</th><td>USD" not in html
    hours = Tables(html).row("machine time of a million output tokens")
    for cell, trace in zip(hours[2:], traces.values(), strict=True):
        assert number(cell) == pytest.approx(1e6 / metrics.output_throughput(trace) / 3600, rel=6e-3)


def test_runs_without_a_token_have_dashes():
    empty = simulate([Refusal("too long", "needs 9 blocks, there are 4")], "fcfs")
    html = viz.first_section({"a": empty}, slo=SLO, price_per_hour=1.0)
    assert "No run gave a token." in html and "Nobody came." in html and "nobody came." in html
    assert Tables(html).row("output throughput")[2] == "–"
    instant = simulate([Request("a", 3, 4)], "fcfs", cost=lambda plan: 0.0)
    carried, waited, cost = questions({"a": instant}, slo=SLO)
    assert carried.finding == cost.finding == "The runs took no time."
    assert "0 s for its first token" in waited.finding


@pytest.mark.parametrize("price", [-1.0, float("nan"), float("inf")])
def test_a_price_that_is_none_is_refused(traces, price, tmp_path):
    with pytest.raises(ValueError, match="price_per_hour"):
        viz.write_report(tmp_path / "r.html", title="t", traces=traces, price_per_hour=price)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="at least one trace"):
        viz.first_section({})


def test_each_figure_has_its_numbers_in_a_table_after_it(traces, tmp_path):
    html = viz.write_report(tmp_path / "r.html", title="t", traces=traces).read_text(encoding="utf-8")
    for heading in (
        "Who sits where",
        "How full the batch is",
        "KV memory",
        "Latency",
        "Which policy is a choice",
    ):
        after = html.split(f"<h2>{heading}</h2>")[1].split("</section>")[0]
        assert after.index("<figcaption>") < after.index(f"Numbers: {heading}")
    page = Tables(html)
    for label, trace in traces.items():
        share = next(r for r in page.rows if r[0] == label and len(r) == 7)[1]
        assert share == f"{100 * metrics.memory_shares(trace)['token_states']:.1f} %"


def test_characters_that_nobody_sees_are_written_out(tmp_path):
    name = "a\x00b\x1bc\x85d\u202ee\ufefff\ud800g\r"
    trace = simulate([Request(name, 3, 5)], "fcfs")
    path = viz.write_report(
        tmp_path / "r.html",
        title=name,
        traces={name: trace},
        slo=SLO,
        price_per_hour=1.0,
        currency=name,
        answers=[(name, {name: "one\n\ttwo\x07"})],
        environment={name: name},
    )
    html = path.read_text(encoding="utf-8")
    shown = "a⟨U+0000⟩b⟨U+001B⟩c⟨U+0085⟩d⟨U+202E⟩e⟨U+FEFF⟩f⟨U+D800⟩g⟨U+000D⟩"
    assert html.count(shown) > 10
    assert "one\n\ttwo⟨U+0007⟩" in html
    outside = re.sub(r"<script.*?</script>", "", html, flags=re.DOTALL)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\ufeff]", outside)


def test_what_can_be_seen_is_left_as_it_is():
    text = "Grüße, 你好 槽位 · 👩\u200d🚀 \N{REPLACEMENT CHARACTER} a\u00a0b\tb\nc {{x}} <b>"
    assert visible(text) == text
    assert visible(text, lines=False) == text.replace("\t", "⟨U+0009⟩").replace("\n", "⟨U+000A⟩")


def test_whatever_has_no_picture_or_moves_others_is_written_out():
    # Soft hyphen, zero width space, Arabic mark, isolate, word joiner, a tag beyond 16 bits, no characters.
    for letter in "\xad\u200b\u061c\u2066\u2060\U000e0041\ufdd0\uffff\U0001fffe":
        assert visible(f"a{letter}b") == f"a⟨U+{ord(letter):04X}⟩b"


def test_the_findings_name_the_best_and_the_worst(traces):
    carried, waited, cost = questions(traces, slo=SLO, price_per_hour=3.0)
    fast = max(traces, key=lambda label: metrics.output_throughput(traces[label]))
    slow = min(traces, key=lambda label: metrics.output_throughput(traces[label]))
    ratio = metrics.speed_up(traces[slow], traces[fast])
    assert carried.finding.startswith(f"{fast} carried most: ")
    assert carried.finding.endswith(f"{fast} is {ratio:.2f} times as fast.")
    late = max(traces, key=lambda label: metrics.ttft(traces[label]).max)
    assert re.match(rf"Request q\d+ in {late}: it waited ", waited.finding)
    assert re.match(
        rf"A million output tokens cost [\d.,]+ USD with {fast}, and [\d.,]+ with {slow}\.", cost.finding
    )
    kept = max(traces, key=lambda label: metrics.goodput(traces[label], SLO))
    assert f"{kept} has the most goodput" in cost.finding


def test_equal_runs_are_not_ranked(traces):
    carried, waited, cost = questions({"a": traces["mine"], "b": traces["mine"]}, slo=SLO)
    assert carried.finding.startswith("Every run carried its load") and "least" not in carried.finding
    assert "nobody waited longer" not in waited.finding
    assert ", and " not in cost.finding and "most goodput" not in cost.finding
    empty = simulate([Refusal("x", "too long")], "fcfs")
    carried, _, _ = questions({"a": traces["mine"], "b": traces["mine"], "c": empty})
    assert carried.finding.startswith("a and b carried their load")
