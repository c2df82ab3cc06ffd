"""Each policy's rule on situations to follow by hand, the registry, and policies that misbehave."""

import random
import sys
from types import SimpleNamespace

import pytest

from cbresearch import CacheConfig, Policy, Request, Scheduler, SchedulerConfig, policies, simulate
from cbresearch.policies.batching import Static
from cbresearch.request import RequestState

BUILT_IN = [*policies.available(), "static:release", "vllm_v1:priority"]


@pytest.fixture
def registry(monkeypatch):
    """Let a test register policies that no other test sees."""
    monkeypatch.setattr(policies, "_REGISTRY", dict(policies._REGISTRY))


def request(identity, prompt, max_tokens, **fields):
    return Request(identity, prompt, max_tokens, **fields)


def run(requests, policy, *, seats=8, budget=100, num_blocks=1000, block_size=1):
    return simulate(
        requests,
        policy,
        scheduler=SchedulerConfig(seats, budget),
        cache=CacheConfig(num_blocks, block_size),
    )


def served(trace):
    """Return the tokens of each request in each step, in the plan's order, such as "a3 b1"."""
    return [
        " ".join(f"{entry.request_id}{entry.num_tokens}" for entry in step.plan.scheduled)
        for step in trace.steps
    ]


def padded(trace):
    return ["".join(row.request_id for row in step.plan.padding) for step in trace.steps]


def admitted(trace):
    return ["".join(admission.request.id for admission in step.plan.admitted) for step in trace.steps]


def random_requests(seed, arrivals=True):
    generator = random.Random(seed)
    return [
        request(
            str(place),
            generator.randint(1, 12),
            generator.randint(1, 9),
            arrival=generator.choice((0.0, generator.uniform(0, 9))) if arrivals else 0.0,
            predicted_output=generator.choice((None, generator.randint(1, 9))),
            output_length=generator.choice((None, generator.randint(1, 9))),
        )
        for place in range(generator.randint(2, 14))
    ]


# --- first come, first served


def test_fcfs_decodes_first_and_chunks_the_next_prompt_into_the_rest_of_the_budget():
    trace = run([request("a", 3, 3), request("b", 6, 1), request("c", 1, 1)], "fcfs", budget=4)
    assert served(trace) == ["a3 b1", "a1 b3", "a1 b2 c1"]


def test_fcfs_gives_a_free_seat_to_the_head_of_the_queue_in_the_next_step():
    requests = [request("a", 1, 1), request("b", 1, 3), request("c", 1, 9), request("d", 1, 1)]
    trace = run(requests, "fcfs", seats=2)
    assert served(trace)[:3] == ["a1 b1", "b1 c1", "b1 c1"]
    assert admitted(trace)[:4] == ["ab", "c", "", "d"]


@pytest.mark.parametrize("seed", range(10))
def test_fcfs_seats_requests_in_order_of_arrival(seed):
    trace = run(random_requests(seed), "fcfs", seats=3, budget=7)
    by_arrival = sorted(trace.requests, key=lambda record: record.arrival)
    starts = [record.first_scheduled for record in by_arrival]
    assert starts == sorted(starts)


def test_fcfs_lets_no_small_request_overtake_a_large_one_without_memory():
    requests = [request("a", 5, 3), request("large", 8, 2), request("small", 1, 1)]
    trace = run(requests, "fcfs", num_blocks=10)
    assert admitted(trace) == ["a", "", "", "largesmall", ""]


# --- shortest job first


def test_sjf_admits_the_shortest_prediction_first_and_the_earlier_of_equals():
    requests = [
        request("long", 1, 9, predicted_output=7),
        request("twin", 1, 9, predicted_output=4),
        request("short", 1, 9, predicted_output=2),
        request("other twin", 1, 9, predicted_output=4),
    ]
    trace = run(requests, "sjf", seats=1)
    assert [name for name in admitted(trace) if name] == ["short", "twin", "other twin", "long"]


def test_sjf_takes_max_tokens_without_a_prediction():
    requests = [request("a", 1, 5), request("b", 1, 9, predicted_output=3), request("c", 1, 4)]
    trace = run(requests, "sjf", seats=1)
    assert [name for name in admitted(trace) if name] == ["b", "c", "a"]


def test_sjf_cannot_see_where_an_output_really_ends():
    requests = [request("a", 1, 9, output_length=1), request("b", 1, 5, output_length=5)]
    assert admitted(run(requests, "sjf", seats=1))[0] == "b"


def test_sjf_does_not_preempt_a_long_request_for_a_short_one():
    requests = [request("long", 1, 6), request("short", 1, 1, arrival=1.0)]
    trace = run(requests, "sjf", seats=1)
    assert served(trace) == ["long1"] * 6 + ["short1"]
    assert all(not step.plan.preempted for step in trace.steps)


def test_sjf_ignores_the_order_of_arrival_in_the_queue():
    requests = [request("a", 1, 3), request("b", 1, 5, arrival=1.0), request("c", 1, 2, arrival=2.0)]
    assert [name for name in admitted(run(requests, "sjf", seats=1)) if name] == ["a", "c", "b"]


def test_sjf_starves_a_long_request_where_fcfs_does_not():
    requests = [
        request("long", 1, 9),
        *(request(str(place), 1, 2, arrival=2.0 * place) for place in range(20)),
    ]
    start = {name: run(requests, name, seats=1).requests[0].first_scheduled for name in ("sjf", "fcfs")}
    assert start == {"sjf": 40.0, "fcfs": 0.0}


# --- prefill first


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("budget", [2, 7, 100])
def test_prefill_first_never_mixes_prompts_and_decodes(seed, budget):
    trace = run(random_requests(seed), "prefill_first", seats=3, budget=budget)
    phases = [{entry.is_prefill for entry in step.plan.scheduled} for step in trace.steps]
    assert {len(phase) for phase in phases} == {1}


def test_prefill_first_lets_a_prompt_that_arrives_stop_the_decodes():
    requests = [request("a", 2, 5), request("b", 5, 2, arrival=2.0)]
    trace = run(requests, "prefill_first", budget=4)
    assert served(trace) == ["a2", "a1", "b4", "b1", "a1 b1", "a1", "a1"]


def test_prefill_first_finishes_a_chunked_prompt_before_it_starts_another():
    trace = run([request("a", 3, 2), request("b", 3, 1)], "prefill_first", budget=2)
    assert served(trace) == ["a2", "a1 b1", "b2", "a1"]


def test_prefill_first_decodes_while_the_waiting_prompt_finds_no_memory():
    requests = [request("a", 3, 3), request("b", 3, 1)]
    trace = run(requests, "prefill_first", num_blocks=5)
    assert served(trace) == ["a3", "a1", "a1", "b3"]


# --- static batches


def test_static_pads_finished_rows_until_the_longest_request_is_done():
    requests = [request("a", 2, 1), request("b", 3, 4), request("c", 1, 2), request("d", 1, 1)]
    trace = run(requests, "static", seats=3)
    assert served(trace) == ["a2 b3 c1", "b1 c1", "b1", "b1", "d1"]
    assert padded(trace) == ["", "a", "ac", "ac", ""]
    assert [len(record.tokens) for record in trace.requests] == [1, 4, 2, 1]


def test_static_padding_row_keeps_its_seat_and_context():
    trace = run([request("a", 5, 2), request("b", 1, 5)], "static")
    seat = trace.steps[0].plan.scheduled[0].seat
    rows = [row for step in trace.steps for row in step.plan.padding]
    # The second of a's tokens was never fed back, so the row holds 5 prompt tokens and 1 output token.
    assert [tuple(row) for row in rows] == [("a", seat, 6)] * 3


def test_static_release_lets_rows_leave_and_no_request_join():
    requests = [request("a", 2, 1), request("b", 3, 4), request("c", 1, 2), request("d", 1, 1)]
    trace = run(requests, "static:release", seats=3)
    assert served(trace) == ["a2 b3 c1", "b1 c1", "b1", "b1", "d1"]
    assert padded(trace) == [""] * 5
    held = [step.num_held_blocks for step in trace.steps]
    assert held == [6, 6, 5, 6, 1]


@pytest.mark.parametrize("policy", ["static", "static:release"])
@pytest.mark.parametrize("budget", [2, 7, 100])
@pytest.mark.parametrize("seed", range(5))
def test_static_fills_a_batch_from_empty_and_closes_it_before_decoding(policy, budget, seed):
    trace = run(random_requests(seed), policy, seats=3, budget=budget)
    inside: set[str] = set()
    decoding = False
    for step in trace.steps:
        joining = {admission.request.id for admission in step.plan.admitted}
        if joining and decoding:
            assert not inside, "a request joined a batch that decodes"
        decoding = any(not entry.is_prefill for entry in step.plan.scheduled)
        assert not (joining and decoding), "a request joined in a step that decodes"
        assert len({entry.is_prefill for entry in step.plan.scheduled}) == 1, "a prompt beside a decode"
        inside = (inside | joining) - set(step.finished)
        if decoding:
            assert {entry.request_id for entry in step.plan.scheduled} <= inside | set(step.finished)


@pytest.mark.parametrize("policy", ["static", "static:release"])
@pytest.mark.parametrize("seed", range(5))
def test_static_decodes_only_after_the_last_prompt_of_the_batch(policy, seed):
    trace = run(random_requests(seed, arrivals=False), policy, seats=4, budget=5)
    batches: list[list[bool]] = []
    for step in trace.steps:
        prefill = step.plan.scheduled[0].is_prefill
        if prefill and (not batches or not batches[-1][-1]):
            batches.append([])
        batches[-1].append(prefill)
    sizes = [0] * len(batches)
    steps = iter(trace.steps)
    for place, batch in enumerate(batches):
        assert batch == sorted(batch, reverse=True)
        sizes[place] = sum(len(next(steps).plan.admitted) for _ in batch)
    # All requests are there, so every batch but the last is full.
    assert sizes[:-1] == [4] * (len(sizes) - 1)


def test_static_fills_a_batch_over_several_steps_of_a_small_budget():
    requests = [request(name, 3, 2) for name in "abcd"]
    trace = run(requests, "static", seats=3, budget=4)
    assert served(trace)[:5] == ["a3 b1", "b2 c2", "c1", "a1 b1 c1", "d3"]
    assert admitted(trace)[:5] == ["ab", "c", "", "", "d"]


def test_static_takes_no_request_that_arrives_while_the_batch_is_filled():
    requests = [request("a", 3, 1), request("b", 3, 1), request("late", 1, 1, arrival=1.0)]
    trace = run(requests, "static", seats=3, budget=2)
    assert "".join(admitted(trace)) == "ablate"
    last_of_batch = max(step.plan.step for step in trace.steps if "b" in step.finished)
    assert admitted(trace).index("late") == last_of_batch + 1


@pytest.mark.parametrize("policy", ["static", "static:release"])
def test_static_closes_a_batch_at_the_pool_and_forms_the_next_from_the_rest(policy):
    requests = [request("a", 3, 2), request("b", 3, 2), request("c", 3, 2)]
    trace = run(requests, policy, num_blocks=8)
    assert served(trace) == ["a3 b3", "a1 b1", "c3", "c1"]


def test_static_release_admits_no_request_to_a_batch_that_empties():
    requests = [request("a", 3, 1), request("b", 3, 4), request("c", 3, 2)]
    trace = run(requests, "static:release", num_blocks=8)
    assert served(trace) == ["a3 b3", "b1", "b1", "b1", "c3", "c1"]


# --- what every policy leaves to the mechanism


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_policy_serves_every_request_to_its_end(name):
    for seed in range(5):
        requests = random_requests(seed)
        trace = run(requests, name, seats=2, budget=5, num_blocks=20)
        for given, record in zip(requests, trace.requests, strict=True):
            assert len(record.tokens) == min(given.max_tokens, given.output_length or given.max_tokens)


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_policy_goes_on_with_running_requests_while_a_prompt_finds_no_memory(name):
    requests = [request("a", 4, 4), request("b", 6, 2), request("c", 6, 2)]
    trace = run(requests, name, num_blocks=7)
    assert [record.finish_reason for record in trace.requests] == ["length"] * 3


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_policy_forgets_a_run_that_was_broken_off(name):
    policy = policies.get(name)
    broken = Scheduler(policy, SchedulerConfig(2, 3), CacheConfig(100, 1))
    for given in random_requests(4, arrivals=False):
        broken.submit(given)
    broken.schedule(0.0)
    fresh = run(random_requests(3), policies.get(name), seats=2, budget=5)
    assert run(random_requests(3), policy, seats=2, budget=5).steps == fresh.steps


# --- names and options


def test_available_policies_have_a_one_line_rule_and_can_be_built():
    rules = policies.available()
    assert {"fcfs", "prefill_first", "sjf", "static", "vllm_v1"} < set(rules)
    for name, rule in rules.items():
        assert rule.endswith(".") or rule.endswith(")")
        assert policies.get(name).name == name


@pytest.mark.parametrize(
    ("asked", "near", "far"),
    [
        ("fcsf", "fcfs", "static"),
        ("Static", "static", "fcfs"),
        ("SJF", "sjf", "edf"),
        ("prefil_first", "prefill_first", "sjf"),
    ],
)
def test_get_answers_an_unknown_policy_with_its_near_misses(asked, near, far):
    with pytest.raises(ValueError, match=f"unknown policy {asked!r}") as rejection:
        policies.get(asked)
    assert repr(near) in str(rejection.value)
    assert repr(far) not in str(rejection.value)


@pytest.mark.parametrize("asked", ["", "zzzzzzzz", ":release"])
def test_get_answers_a_name_without_near_misses_with_all_policies(asked):
    with pytest.raises(ValueError, match="unknown policy") as rejection:
        policies.get(asked)
    for name in policies.available():
        assert repr(name) in str(rejection.value)


def test_get_answers_an_unknown_option_with_its_near_miss():
    with pytest.raises(ValueError, match=r"policy 'static' has no option 'realease'.*'release'"):
        policies.get("static:realease")
    with pytest.raises(ValueError, match="policy 'fcfs' has no option 'release'"):
        policies.get("fcfs:release")


@pytest.mark.parametrize(
    ("options", "weight", "label", "flag"),
    [
        ("", 1.0, "x", False),
        (":", 1.0, "x", False),
        (":flag", 1.0, "x", True),
        (":weight=0.05", 0.05, "x", False),
        (":label=abc,weight=-3,flag=True", -3, "abc", True),
        (":flag=False", 1.0, "x", False),
        (":label=a=b", 1.0, "a=b", False),
    ],
)
def test_get_reads_options_as_python_values_or_plain_words(registry, options, weight, label, flag):
    @policies.register
    class Optional(Policy):
        """Take options."""

        name = "optional"

        def __init__(self, weight=1.0, label="x", flag=False):
            self.options = (weight, label, flag)

    assert policies.get(f"optional{options}").options == (weight, label, flag)


def test_static_release_turns_padding_off():
    assert policies.get("static").pads_finished_rows
    assert policies.get("static:release=False").pads_finished_rows
    assert not policies.get("static:release").pads_finished_rows


def test_register_lets_a_cell_that_is_run_again_replace_its_policy(registry):
    def cell(rule):
        class Mine(Policy):
            name = "mine"
            __doc__ = rule

        return policies.register(Mine)

    cell("First rule.")
    again = cell("Second rule.")
    assert policies.available()["mine"] == "Second rule."
    assert type(policies.get("mine")) is again


def test_register_rejects_a_name_of_another_policy(registry):
    class Impostor(Policy):
        name = "static"

    with pytest.raises(ValueError, match="'static' belongs to Static"):
        policies.register(Impostor)
    assert type(policies.get("static")) is Static


@pytest.mark.parametrize("body", [{}, {"name": ""}], ids=["inherited", "empty"])
def test_register_rejects_a_policy_without_a_name_of_its_own(registry, body):
    before = dict(policies.available())
    with pytest.raises(ValueError, match="Nameless has no `name` of its own"):
        policies.register(type("Nameless", (Static,), body))
    assert policies.available() == before


def test_register_makes_a_policy_of_a_few_lines_run_by_name(registry):
    @policies.register
    class Newest(Policy):
        """Serve the newest request first."""

        name = "newest"

        def propose(self, view):
            for state in [*view.running, *sorted(view.waiting, key=lambda state: -state.order)]:
                yield state, state.num_pending_tokens

    trace = run([request(name, 1, 2) for name in "abc"], "newest", seats=1)
    assert "".join(admitted(trace)) == "cba"
    assert trace.policy == "newest"


@pytest.fixture
def own_policy(tmp_path, monkeypatch):
    """Write a policy of one's own to a file in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        """
from cbresearch import Request, policies


class LongestFirst(policies.Policy):
    def __init__(self, factor: float = 1.0):
        self.factor = factor

    def propose(self, view):
        yield from policies.whole(view.running)
        yield from policies.joining(view, sorted(view.waiting, key=lambda one: -one.num_prompt_tokens))
"""
    )
    return "mine.py:LongestFirst"


def test_get_builds_a_policy_of_a_file_with_options(own_policy):
    trace = run([request("a", 1, 1), request("b", 3, 1), request("c", 2, 1)], own_policy, seats=1)
    assert "".join(admitted(trace)) == "bca"
    assert trace.policy == own_policy
    built = policies.get(f"{own_policy}:factor=0.5")
    assert (built.factor, built.name) == (0.5, f"{own_policy}:factor=0.5")
    assert own_policy not in policies.available()


def test_the_file_of_a_policy_imports_files_beside_it_then_and_in_its_hooks(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", before := list(sys.path))
    (tmp_path / "beside_first.py").write_text("from cbresearch.policies import Policy as Base\n")
    (tmp_path / "beside_later.py").write_text("def order(view): return list(view.running)\n")
    (tmp_path / "copy.py").write_text("raise ImportError('hides what others import')\n")
    (tmp_path / "mine.py").write_text(
        """
from beside_first import Base


class Mine(Base):
    def propose(self, view):
        from beside_later import order

        assert order(view) == list(view.running)
        return super().propose(view)
"""
    )
    for _ in range(2):
        trace = run([request("a", 1, 1), request("b", 3, 1)], f"{tmp_path / 'mine.py'}:Mine")
        assert [len(record.tokens) for record in trace.requests] == [1, 1]
    assert sys.path.count(str(tmp_path)) == 1 and sys.path[-1] == str(tmp_path) and before is sys.path


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("your.py:LongestFirst", "policy 'your.py:LongestFirst': there is no file 'your.py'"),
        ("mine.py:LongestFrist", "defines no Policy 'LongestFrist'; did you mean 'LongestFirst'?"),
        ("mine.py:Request", "defines no Policy 'Request'"),
        ("mine.py:LongestFirst:fcator=2", "has no option 'fcator'; did you mean 'factor'?"),
        ("mine.py:LongestFirst:factor=two", "option factor is 'two'; it must be a number"),
    ],
)
def test_get_rejects_a_policy_that_its_file_does_not_define(own_policy, name, said):
    with pytest.raises(ValueError) as rejection:
        policies.get(name)
    assert said in str(rejection.value)


@pytest.mark.parametrize(("alias", "name"), [("max_utilization", "fcfs"), ("splitfuse", "sarathi")])
def test_alias_schedules_as_the_policy_it_stands_for(alias, name):
    requests = random_requests(9)
    limits = {"seats": 3, "budget": 5, "num_blocks": 20}
    assert run(requests, alias, **limits).steps == run(requests, name, **limits).steps
    assert policies.get(alias).name == alias
    assert policies.table()[alias] != policies.table()[name]


# --- the view


def test_view_shows_the_step_fill_up_as_proposals_are_taken():
    seen = []

    class Watching(Policy):
        name = "watching"

        def propose(self, view):
            for state, wanted in super().propose(view):
                seen.append(self.look(view))
                yield state, wanted
            seen.append(self.look(view))

        @staticmethod
        def look(view):
            return (
                view.now,
                view.token_budget,
                view.num_free_seats,
                view.num_free_blocks,
                "".join(state.id for state in view.running),
                (view.max_num_batched_tokens, view.max_num_seqs, view.block_size),
            )

    requests = [request("a", 4, 2, arrival=0.5), request("b", 3, 1, arrival=0.5)]
    run(requests, Watching(), seats=3, budget=9, num_blocks=5, block_size=2)
    limits = (9, 3, 2)
    assert seen == [
        (0.5, 9, 3, 5, "", limits),
        (0.5, 5, 2, 3, "a", limits),
        (0.5, 2, 1, 1, "ab", limits),
        (1.5, 9, 2, 3, "a", limits),
        (1.5, 8, 2, 2, "a", limits),
    ]


def test_served_is_told_every_scheduled_token():
    told: dict[str, int] = {}

    class Accounting(Policy):
        name = "accounting"

        def served(self, state, num_tokens):
            told[state.id] = told.get(state.id, 0) + num_tokens

    trace = run([request("a", 5, 3), request("b", 2, 1)], Accounting(), budget=3)
    # Each output token but the last is fed back once.
    assert told == {"a": 5 + 2, "b": 2}
    assert sum(told.values()) == sum(step.plan.num_tokens for step in trace.steps)


def test_view_shows_when_no_request_can_join_any_more():
    seen = []

    class Watching(Policy):
        name = "watching"

        def propose(self, view):
            for state in [*view.running, *view.waiting]:
                before = view.admitting
                yield state, state.num_pending_tokens
                seen.append((state.id, before, view.admitting))

    # Memory rejects c; in the second step a and b hold all seats, and in the third b's block goes to a.
    requests = [request("a", 2, 3), request("b", 2, 3), request("c", 9, 1)]
    run(requests, Watching(), seats=2, num_blocks=9)
    assert seen[:3] == [("a", True, True), ("b", True, False), ("c", False, False)]
    seen.clear()
    run(requests, Watching(), seats=3, num_blocks=9)
    assert seen[:3] == [("a", True, True), ("b", True, True), ("c", True, False)]
    seen.clear()
    run(requests[:2], Watching(), seats=3, num_blocks=5)
    assert seen[2:4] == [("a", True, True), ("b", True, False)]


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_policy_stops_walking_a_long_queue_once_no_request_can_join(name):
    policy = policies.get(name)
    propose, num_proposals = policy.propose, []

    def counting(view):
        num_proposals.append(0)
        for proposal in propose(view):
            num_proposals[-1] += 1
            yield proposal

    policy.propose = counting
    seats = 10
    for num_blocks in (1000, 14):
        num_proposals.clear()
        requests = [request(str(place), 3, 3) for place in range(300)]
        run(requests, policy, seats=seats, budget=1000, num_blocks=num_blocks)
        # At most the running requests, those that join, and one that no longer can.
        assert max(num_proposals) <= 2 * seats + 1


# --- policies that misbehave


class Silent(Policy):
    name = "silent"

    def propose(self, view):
        return iter(())


class Lazy(Policy):
    """Propose running requests only, so that none ever runs."""

    name = "lazy"

    def propose(self, view):
        return ((state, 1) for state in view.running)


class Wanting(Policy):
    """Propose the same number of tokens for each request."""

    name = "wanting"

    def __init__(self, wanted):
        self.wanted = wanted

    def propose(self, view):
        for state, _ in super().propose(view):
            yield state, self.wanted


@pytest.mark.parametrize("policy", [Silent(), Lazy(), Wanting(0), Wanting(-5)])
def test_policy_that_leaves_a_step_without_work_is_named_with_the_numbers(policy):
    with pytest.raises(RuntimeError) as rejection:
        run([request("a", 7, 2), request("b", 3, 2)], policy, seats=3, budget=50, num_blocks=11)
    for fact in (policy.name, "step 0", "0 running", "2 waiting", "3 of 3 seats", "11 of 11 blocks", "50"):
        assert fact in str(rejection.value)
    assert "'a'" in str(rejection.value)


def test_policy_that_falls_silent_midway_is_named_with_the_numbers():
    class Tired(Policy):
        name = "tired"

        def propose(self, view):
            return super().propose(view) if view.now < 2 else iter(())

    with pytest.raises(RuntimeError, match="'tired' left step 2 without work: 1 running, 0 waiting"):
        run([request("a", 7, 5)], Tired())


@pytest.mark.parametrize("wanted", [10**30, float("inf")])
def test_proposal_beyond_the_request_and_the_budget_is_clipped(wanted):
    requests = random_requests(5)
    greedy = run(requests, Wanting(wanted), seats=3, budget=6)
    assert greedy.steps == run(requests, "fcfs", seats=3, budget=6).steps


def test_proposal_of_one_token_prefills_one_token_a_step():
    trace = run([request("a", 3, 2), request("b", 2, 1)], Wanting(1))
    assert served(trace) == ["a1 b1", "a1 b1", "a1", "a1"]


def test_proposal_that_repeats_a_request_is_scheduled_once():
    class Stuttering(Policy):
        name = "stuttering"

        def propose(self, view):
            for state, wanted in super().propose(view):
                yield from [(state, 1), (state, wanted), (state, 1)]

    requests = random_requests(6)
    assert run(requests, Stuttering(), budget=6).steps == run(requests, Wanting(1), budget=6).steps


def test_proposal_of_a_finished_request_is_passed_over():
    class Remembering(Policy):
        name = "remembering"

        def __init__(self):
            self.ever_seen = {}

        def propose(self, view):
            self.ever_seen |= {state.id: state for state in [*view.running, *view.waiting]}
            for state in self.ever_seen.values():
                yield state, 100

    for keeps in (False, True):
        policy = Remembering()
        policy.pads_finished_rows = keeps
        requests = random_requests(7)
        trace = run(requests, policy, seats=3)
        assert all(record.finish_reason for record in trace.requests)
        for given, record in zip(requests, trace.requests, strict=True):
            assert len(record.tokens) <= given.max_tokens


@pytest.mark.parametrize("identity", ["stranger", "a"])
def test_proposal_of_an_unknown_request_is_an_error_that_names_the_policy(identity):
    class Confused(Policy):
        name = "confused"

        def propose(self, view):
            yield RequestState(request(identity, 2, 2), order=0), 2
            yield from super().propose(view)

    with pytest.raises((ValueError, RuntimeError), match="'confused'"):
        run([request("a", 3, 2)], Confused())


@pytest.mark.parametrize("choice", ["waiting", "finished", "stranger", "none"])
def test_victim_that_is_no_candidate_is_an_error_that_names_the_policy(choice):
    class Vicious(Policy):
        name = "vicious"

        def __init__(self):
            self.seen = SimpleNamespace(finished=None)

        def propose(self, view):
            self.seen.finished = next(iter(view.running), None) if view.now == 1 else self.seen.finished
            return super().propose(view)

        def victim(self, view, candidates):
            stranger = RequestState(request("z", 1, 1), order=0)
            stranger.status = candidates[0].status
            return {
                "waiting": next(iter(view.waiting)),
                "finished": self.seen.finished,
                "stranger": stranger,
                "none": None,
            }[choice]

    requests = [request("f", 1, 2), request("a", 3, 7), request("b", 3, 7), request("c", 3, 7)]
    with pytest.raises(ValueError, match="'vicious'"):
        run(requests, Vicious(), seats=3, num_blocks=10)


def test_victim_candidates_are_the_running_requests_in_order_of_admission():
    asked = []

    class Polite(Policy):
        name = "polite"

        def victim(self, view, candidates):
            asked.append("".join(state.id for state in candidates))
            assert list(candidates) == list(view.running)
            return candidates[-1]

    trace = run([request(name, 3, 4) for name in "abc"], Polite(), num_blocks=10)
    assert asked[0] == "abc"
    assert sum(len(step.plan.preempted) for step in trace.steps) == len(asked)


@pytest.mark.parametrize(
    ("text", "keeps"), [("false", True), ("False", True), ("true", False), ("TRUE", False)]
)
def test_get_reads_true_and_false_in_any_case(text, keeps):
    assert policies.get(f"static:release={text}").pads_finished_rows == keeps


def test_get_rejects_an_option_of_another_type_or_a_missing_one_by_name():
    with pytest.raises(ValueError, match="option release is 'maybe'; it must be True or False"):
        policies.get("static:release=maybe")

    class Needs(policies.Policy):
        """Need an option."""

        name = "needs an option"

        def __init__(self, share):
            self.share = share

    policies.register(Needs)
    try:
        with pytest.raises(ValueError, match="needs the option 'share'"):
            policies.get(Needs.name)
        assert policies.get(f"{Needs.name}:share=0.5").share == 0.5
    finally:
        del policies._REGISTRY[Needs.name]


@pytest.mark.parametrize("policy", ["fcfs", "sjf", "prefill_first", "static", "static:release"])
def test_policies_take_turns_when_the_budget_is_below_the_running_rows(policy):
    requests = [Request(str(n), 1, 12) for n in range(6)]
    trace = simulate(requests, policy, scheduler=SchedulerConfig(8, 4))
    gaps = [gap for record in trace.requests for gap in record.itl]
    assert max(gaps) <= 2
    assert all(len(record.tokens) == 12 for record in trace.requests)


def test_proposals_without_end_are_an_error():
    class Endless(policies.Policy):
        """Propose the same requests for ever."""

        name = "endless"

        def propose(self, view):
            while True:
                yield from policies.whole(view.running)
                yield from policies.whole(view.waiting)

    with pytest.raises(RuntimeError, match=r"policy 'endless' made over \d+ proposals in step 0"):
        simulate([Request("a", 1, 3)], Endless())


def in_module(module, qualname, name):
    """Return a policy class as a cell or a file defines it."""
    made = type(qualname, (Policy,), {"name": name, "__module__": module, "__qualname__": qualname})
    made.__doc__ = f"{qualname} of {module}."
    return made


def test_register_lets_a_notebook_rename_a_class_or_its_policy(registry):
    policies.register(in_module("__main__", "Mine", "mine"))
    policies.register(in_module("__main__", "Renamed", "mine"))
    assert policies.available()["mine"] == "Renamed of __main__."
    policies.register(in_module("__main__", "Renamed", "another"))
    assert policies.available()["another"] == "Renamed of __main__."


@pytest.mark.parametrize(
    ("module", "qualname", "name", "owner"),
    [
        ("__main__", "Mine", "static", "Static of cbresearch.policies.batching"),
        ("__main__", "Static", "static", "Static of cbresearch.policies.batching"),
        ("__main__", "Mine", "continuous", "Policy of cbresearch.policies.base"),
        ("lib", "Other", "taken", "Mine of lib"),
        ("__main__", "Mine", "taken", "Mine of lib"),
    ],
)
def test_register_keeps_the_name_of_a_policy_of_another_module(registry, module, qualname, name, owner):
    policies.register(in_module("lib", "Mine", "taken"))
    with pytest.raises(ValueError, match=f"policy name '{name}' belongs to {owner}; choose another"):
        policies.register(in_module(module, qualname, name))


@pytest.mark.parametrize("given", [Policy(), "mine", int, None], ids=lambda one: type(one).__name__)
def test_register_takes_a_policy_class_only(registry, given):
    with pytest.raises(TypeError, match="is no policy class; register the class itself, derived from Policy"):
        policies.register(given)


@pytest.mark.parametrize("name", ["a:b", 5, "a:"])
def test_register_rejects_a_name_that_cannot_be_asked_for(registry, name):
    with pytest.raises(ValueError, match="no `name` of its own; set one, without a colon"):
        policies.register(in_module("__main__", "Mine", name))
