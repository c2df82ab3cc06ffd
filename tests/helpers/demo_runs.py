"""Runs that figures, player and report are tested with, and a page as a browser would read it."""

import random
from collections import Counter
from html.parser import HTMLParser

import numpy as np

from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.costs import Linear
from cbresearch.request import Rejected, Request, parallel_samples
from cbresearch.simulator import simulate

HOSTILE = "</script><img src=x onerror=alert(1)>\"&'{{7*7}}$x^{2$\u2028"
# What ends a line unseen is written out.
HOSTILE_AS_SHOWN = HOSTILE.replace("\u2028", "⟨U+2028⟩")


def classic(policy):
    """Serve sixty requests of a token of prompt from eight seats, a second a step."""
    generator = random.Random(2024)
    lengths = [generator.randint(4, 12) for _ in range(60)]
    requests = [Request(str(place), 1, length) for place, length in enumerate(lengths)]
    return simulate(requests, policy, scheduler=SchedulerConfig(max_num_seqs=8))


def pressed(policy):
    """Serve requests from a pool so small that some are preempted."""
    requests = [Request(f"r{n}", 20 + 7 * (n % 5), 15 + (n * 13) % 20, arrival=n / 100) for n in range(14)]
    return simulate(
        requests,
        policy,
        cost=Linear(step=0.003, token=0.0001),
        scheduler=SchedulerConfig(max_num_seqs=5, max_num_batched_tokens=64),
        cache=CacheConfig(num_blocks=12),
    )


def swapping_case():
    """Return parallel samples and prompts that begin alike, for a small pool, with one more on the host."""
    requests = []
    for n in range(9):
        start = 100 * (n % 3)
        request = Request(f"u{n}", tuple(range(start, start + 30 + 5 * n)), 20 + 7 * (n % 4), 0.02 * n)
        requests += parallel_samples(request, 2) if n in (1, 4) else [request]
    requests.append(Rejected("huge", "needs 900 blocks, there are 20"))
    limits = SchedulerConfig(5, 64, preemption="swap")
    return requests, limits, CacheConfig(20, 8, prefix_caching=True, num_host_blocks=24)


def hostile():
    """Serve requests whose names are markup, control characters and formulas."""
    requests = [
        Request(HOSTILE + "\x1b[31m\u202e", 3, 5),
        Request("plain", 3, 2),
        Rejected(f"rejected {HOSTILE}\ud800", f"why {HOSTILE}"),
    ]
    return simulate(requests, "fcfs", scheduler=SchedulerConfig(max_num_seqs=2))


def prefixed(num_requests=14):
    """Return requests of which some begin alike, and parallel samples of one more."""
    generator = np.random.default_rng(1)
    begins = (tuple(range(24)), tuple(range(100, 120)), ())
    requests = [
        Request(
            f"r{n}",
            (*begins[n % 3], *generator.integers(0, 50, generator.integers(1, 20)).tolist()),
            int(generator.integers(2, 20)),
            arrival=n / 100,
        )
        for n in range(num_requests)
    ]
    return [*requests, *parallel_samples(Request("p", tuple(range(30, 43)), 9, arrival=0.05), 3)]


def pairs(flat):
    return zip(flat[::2], flat[1::2], strict=True)


def triples(flat):
    return zip(flat[::3], flat[1::3], flat[2::3], strict=True)


def seats_by_step(run, ids):
    """Return what the player shows, by step and seat, decoded as its scripts do."""
    kinds = ("served", "held", "padding")
    shown = [{} for _ in run["end"]]
    for request, seat, first, _, tokens, _, spans, prefills in run["stays"]:
        step = first
        computing = {first + offset: (number, samples) for offset, number, samples in triples(prefills)}
        for kind, length in pairs(spans):
            for _ in range(length):
                assert seat not in shown[step], "two requests in one seat"
                prompt, samples = computing.get(step, (0, True))
                tokens += bool(samples) and kinds[kind] == "served"
                shown[step][seat] = (ids[request], kinds[kind], prompt, tokens)
                step += 1
    return shown


class Page(HTMLParser):
    """What a browser would see in a page: its elements, and the text inside each kind."""

    def __init__(self, html):
        super().__init__()
        self.elements = []
        self.text = Counter()
        self.scripts = []
        self._open = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data):
        if self._open and self._open[-1] == "script":
            self.scripts[-1] += data
        else:
            self.text[data] += 1

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]
