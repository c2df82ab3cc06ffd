"""The online engine: what is streamed is what was generated, and nothing is lost whatever happens."""

import asyncio
import math
import threading
from dataclasses import replace

import numpy as np
import pytest
from conftest import generate_alone
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from cbresearch import policies
from cbresearch.config import CacheConfig, QueueLimits, SchedulerConfig
from cbresearch.engine import Engine, ModelExecutor, QueueFull
from cbresearch.metrics import summary
from cbresearch.request import Request, RequestStatus, SamplingParams
from cbresearch.scheduler import Scheduler
from cbresearch.serve import serve
from cbresearch.simulator import replan
from cbresearch.trace import Origin

NUM_STREAMS = 200


@pytest.fixture
def build(tiny):
    """Return a function that builds an engine on pools full of NaN; all of them are stopped in the end."""
    engines = []

    def built(policy="fcfs", cache=None, queue=None, loaded=tiny, **limits):
        engine = Engine(
            loaded,
            policy,
            scheduler=SchedulerConfig(**limits),
            cache=cache or CacheConfig(200),
            queue=queue,
            fill=math.nan,
        )
        engines.append(engine)
        return engine

    yield built
    for engine in engines:
        try:
            engine.stop()
        except RuntimeError:
            assert engine._failure is not None


class Gate:
    """Let an engine's steps go one by one."""

    def __init__(self, engine):
        self._engine = engine
        self._open = threading.Semaphore(0)
        self._done = threading.Semaphore(0)
        self._is_open = False
        publish, execute = engine._publish, engine._loop.executor.execute

        def gated_execute(plan):
            if not self._is_open:
                self._open.acquire()
            return execute(plan)

        def gated_publish(*arguments):
            publish(*arguments)
            self._done.release()

        engine._loop.executor.execute, engine._publish = gated_execute, gated_publish

    def step(self):
        """Let the next step go, and wait until it is over."""
        self._open.release()
        assert self._done.acquire(timeout=60)

    def open(self):
        """Let all steps go from now on."""
        self._is_open = True
        self._open.release()


def assert_whole(engine):
    """Nothing is held any more, on either tier."""
    scheduler = engine.scheduler
    scheduler.check()
    blocks = scheduler.kv
    assert not scheduler.has_work
    assert blocks.num_held_blocks == blocks.num_held_host_blocks == 0
    assert blocks.num_free_blocks == blocks.num_blocks


def test_streamed_tokens_are_the_final_ones_and_those_of_generate_alone(build, alone):
    engine = build(max_num_seqs=4, max_num_batched_tokens=16, cache=CacheConfig(15, 4))
    # All are there before the first step, so that the pool is too small for those that run.
    with engine._condition:
        streams = [engine.add(answer.prompt, 12) for answer in alone[:12]]
    streamed = [[token.token_id for token in stream] for stream in streams]
    assert streamed == [list(answer.continuation[:12]) for answer in alone[:12]]
    for stream, tokens in zip(streams, streamed, strict=True):
        output = stream.result()
        assert list(output.token_ids) == tokens
        assert (output.finish_reason, output.stop_reason, output.error) == ("length", None, None)
    assert sum(record.num_preemptions for record in engine.trace().requests) > 0
    assert_whole(engine)


def test_streamed_text_joined_is_the_final_text_and_stops_before_a_text_that_spans_tokens(build, tiny, alone):
    whole = tiny.decode(alone[5].continuation)
    # From the middle of one token's text to the middle of the next but one's.
    begin = whole.index(" ", 12) - 1
    stop = whole[begin : begin + 8]
    engine = build()
    stream = engine.add(alone[5].prompt, 24, SamplingParams(stop=(stop, "never")))
    text = "".join(token.text for token in stream)
    output = stream.result()
    assert text == output.text == whole[: whole.index(stop)]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert tiny.decode(output.token_ids[:-1]).find(stop) == -1 < tiny.decode(output.token_ids).find(stop)


@pytest.mark.parametrize("state", ["waiting", "prefilling", "decoding", "preempted", "swapped"])
def test_an_abort_in_any_state_gives_everything_back_and_the_others_go_on(state, build, alone):
    long = alone[9]
    engine = build(
        cache=CacheConfig(18, 4, num_host_blocks=18 if state == "swapped" else 0),
        max_num_seqs=2,
        max_num_batched_tokens=16,
        preemption="swap" if state == "swapped" else "recompute",
    )
    gate = Gate(engine)
    first = engine.add(alone[7].prompt, 24)
    victim = engine.add(alone[8].prompt if state != "prefilling" else long.prompt, 24)
    others = [engine.add(answer.prompt, 5) for answer in alone[:2]]
    ticket = engine._tickets[victim.id]

    def is_there():
        reached = ticket.state
        if reached is None:
            return False
        return {
            "waiting": reached.status is RequestStatus.WAITING and not reached.num_preemptions,
            "prefilling": reached.num_computed_tokens > 0 and not reached.output_token_ids,
            "decoding": len(reached.output_token_ids) > 1,
            "preempted": reached.num_preemptions > 0 and reached.status is RequestStatus.WAITING,
            "swapped": reached.status is RequestStatus.SWAPPED,
        }[state]

    for _ in range(60):
        gate.step()
        if is_there():
            break
    assert is_there(), f"the request was never {state}"
    victim.abort()
    gate.open()
    output = victim.result(timeout=60)
    want = (long if state == "prefilling" else alone[8]).continuation
    assert output.finish_reason == "abort"
    assert output.token_ids == want[: len(output.token_ids)]
    assert [token.token_id for token in victim] == list(output.token_ids)
    assert first.result(timeout=60).token_ids == alone[7].continuation
    assert [other.result(timeout=60).token_ids for other in others] == [
        answer.continuation[:5] for answer in alone[:2]
    ]
    engine.stop(drain=True)
    assert_whole(engine)
    assert {record.finish_reason for record in engine.trace().requests} == {"length", "abort"}
    # It has had its say, and an abort that comes late changes nothing.
    victim.abort()
    assert victim.result() == output


def test_200_concurrent_streams_with_random_aborts_lose_nothing(build, alone):
    rng = np.random.default_rng(5)
    engine = build(
        cache=CacheConfig(24, 4, num_host_blocks=10),
        max_num_seqs=8,
        max_num_batched_tokens=40,
        preemption="swap",
    )
    draws = [(alone[int(rng.integers(16))], int(rng.integers(1, 13))) for _ in range(NUM_STREAMS)]
    cuts = [int(rng.integers(0, 13)) if rng.random() < 0.4 else None for _ in draws]

    async def read(answer, max_tokens, cut):
        await asyncio.sleep(float(rng.random()) * 0.5)
        stream, tokens = engine.add(answer.prompt, max_tokens), []
        if cut == 0:
            stream.abort()
        async for token in stream:
            tokens.append(token.token_id)
            if len(tokens) == cut:
                stream.abort()
        return tokens, await stream

    async def read_all():
        return await asyncio.gather(
            *(read(answer, number, cut) for (answer, number), cut in zip(draws, cuts, strict=True))
        )

    results = asyncio.run(read_all())
    engine.stop(drain=True)
    for (answer, max_tokens), cut, (tokens, output) in zip(draws, cuts, results, strict=True):
        assert tuple(tokens) == output.token_ids == answer.continuation[: len(tokens)]
        if output.finish_reason == "length":
            assert len(tokens) == max_tokens
        else:
            assert output.finish_reason == "abort"
            assert cut is not None
            assert len(tokens) >= min(cut, max_tokens)
    reasons = [output.finish_reason for _, output in results]
    assert len(reasons) == NUM_STREAMS
    assert reasons.count("abort") > 10 < reasons.count("length")
    assert_whole(engine)
    trace = engine.trace()
    assert [len(record.tokens) for record in trace.requests] == [
        len(output.token_ids)
        for _, output in sorted(results, key=lambda pair: int(pair[1].id.removeprefix("request-")))
    ]
    assert summary(trace)["num_aborted"] == reasons.count("abort")


def test_what_can_never_be_served_is_rejected_at_once_and_the_engine_goes_on(build, alone):
    engine = build(cache=CacheConfig(4, 4))
    for arguments, problem in [
        (((5,) * 20, 4), "needs KV for 23 tokens = 6 blocks of 4, but the pool has 4"),
        (((5,) * 2048, 1), "2049 tokens, over the 2048"),
        (((5, 5000), 1), "token id 5000 is outside the vocabulary"),
        (((5,), 0), "max_tokens is 0"),
        (((), 1), "the prompt is empty"),
        (((5,), 3, SamplingParams(n=2)), "wants 2 answers"),
    ]:
        with pytest.raises(ValueError, match=problem):
            engine.add(*arguments)
    assert engine.add(alone[2].prompt, 5).result().token_ids == alone[2].continuation[:5]
    with pytest.raises(ValueError, match="request 'request-6': the id is taken"):
        engine.add(alone[2].prompt, 5, id="request-6")
    assert_whole(engine)


def test_a_full_queue_rejects_with_its_numbers_and_takes_the_next_when_there_is_room(build, alone):
    engine = build(queue=QueueLimits(2, 20), max_num_seqs=1)
    gate = Gate(engine)
    running = engine.add(alone[0].prompt, 4)
    gate.step()
    waiting = [engine.add((5,) * 8, 1), engine.add((5,) * 8, 1)]
    with pytest.raises(QueueFull, match="2 requests wait for a seat, and the queue takes 2"):
        engine.add((5,), 1)
    waiting.pop().abort()
    gate.step()
    with pytest.raises(QueueFull, match=r"its 13 prompt tokens and the 8 that wait .* over the queue.s 20"):
        engine.add((5,) * 13, 1)
    waiting.append(engine.add((5,) * 12, 1))
    gate.open()
    assert [len(stream.result(60).token_ids) for stream in (running, *waiting)] == [4, 1, 1]
    # Whoever waits for answers in line is not rejected by a queue that is shorter than the line.
    answers = engine.generate([answer.prompt for answer in alone[:6]], 3)
    assert [answer.token_ids for answer in answers] == [answer.continuation[:3] for answer in alone[:6]]
    assert "over the queue's 20" in engine.generate([(5,) * 21], 1)[0].error


def test_generate_gives_an_answer_to_each_prompt_in_order_again_and_again(build, tiny, alone):
    engine = build(max_num_seqs=3)
    before = tiny.model.config._attn_implementation
    prompts = [alone[3].prompt, (5,) * 3000, "text", alone[4].prompt, ()]
    for _ in range(2):
        answers = engine.generate(prompts, [4, 4, 4, 9, 1])
        assert [answer.token_ids for answer in answers] == [
            alone[3].continuation[:4],
            (),
            generate_alone(tiny.model, tiny.encode("text"), 4),
            alone[4].continuation[:9],
            (),
        ]
        assert "over the 2048" in answers[1].error
        assert "the prompt is empty" in answers[4].error
        assert answers[0].error is answers[2].error is answers[3].error is None
        assert generate_alone(tiny.model, alone[3].prompt, 24) == alone[3].continuation
    assert tiny.model.config._attn_implementation == before
    assert engine.generate([]) == []
    with pytest.raises(ValueError, match="there are 5 prompts but 2 values of max_tokens"):
        engine.generate(prompts, [1, 2])


def test_several_answers_to_one_prompt_are_those_of_its_seeds(build, alone):
    engine = build()
    drawn = SamplingParams(temperature=1.0, seed=7, n=3)
    (answer,) = engine.generate([alone[5].prompt], 6, drawn)
    singles = [
        engine.generate([alone[5].prompt], 6, replace(drawn, n=1, seed=7 + place))[0].token_ids
        for place in range(3)
    ]
    assert [output.token_ids for output in answer.outputs] == singles
    assert len(set(singles)) == 3


def test_the_engine_gives_the_tokens_that_serve_gives(build, tiny, alone):
    limits, cache = SchedulerConfig(3, 20), CacheConfig(20, 4)
    drawn = SamplingParams(temperature=0.9, top_p=0.95, num_logprobs=2)
    requests = [Request(f"r{n}", answer.prompt, 8, sampling=drawn) for n, answer in enumerate(alone[:8])]
    trace = serve(requests, Scheduler(policies.get("sjf"), limits, cache), ModelExecutor(tiny, limits, cache))
    engine = build("sjf", cache=cache, max_num_seqs=3, max_num_batched_tokens=20)
    streams = [engine.add(request) for request in requests]
    outputs = {stream.id: stream.result() for stream in streams}
    assert {name: output.token_ids for name, output in outputs.items()} == trace.outputs
    for record in trace.requests:
        ours, theirs = outputs[record.id].logprobs, record.logprobs
        assert len(ours) == len(theirs) == 8
        np.testing.assert_allclose([p.logprob for p in ours], [p.logprob for p in theirs], atol=1e-4)


def test_a_stop_aborts_or_drains_and_every_stream_comes_to_its_end(build, alone):
    for drain in (False, True):
        engine = build(max_num_seqs=2)
        gate = Gate(engine)
        done = engine.add(alone[0].prompt, 1)
        gate.step()
        assert done.result(60).token_ids == alone[0].continuation[:1]
        streams = [engine.add(answer.prompt, 20) for answer in alone[1:5]]
        assert engine.num_unfinished == 4
        gate.open()
        next(streams[0])
        engine.stop(drain)
        assert engine.num_unfinished == 0
        outputs = [stream.result(timeout=0) for stream in streams]
        for output, answer in zip(outputs, alone[1:5], strict=True):
            assert output.token_ids == answer.continuation[: len(output.token_ids)]
        # Who had a seat may have come to its end by itself before the stop was heard.
        reasons = [output.finish_reason for output in outputs]
        assert set(reasons) <= ({"length"} if drain else {"length", "abort"})
        assert reasons[-1] == ("length" if drain else "abort")
        assert done.result().token_ids == alone[0].continuation[:1]
        assert_whole(engine)
        with pytest.raises(RuntimeError, match="the engine has stopped"):
            engine.add(alone[0].prompt, 1)
        engine.stop()


def test_an_engine_whose_model_fails_says_so_to_everyone_and_keeps_what_was_finished(build, alone):
    engine = build(max_num_seqs=2)
    gate = Gate(engine)
    done = engine.add(alone[0].prompt, 1)
    gate.step()
    streams = [engine.add(answer.prompt, 5) for answer in alone[1:4]]

    def broken(plan):
        raise MemoryError("no room")

    engine._loop.executor.execute = broken
    gate.open()
    outputs = [stream.result(60) for stream in streams]
    assert {output.finish_reason for output in outputs} == {"error"}
    assert {output.error for output in outputs} == {"the engine failed: no room"}
    assert done.result().token_ids == alone[0].continuation[:1]
    for call in (lambda: engine.add(alone[0].prompt, 1), engine.stop):
        with pytest.raises(RuntimeError, match="the engine failed: no room"):
            call()


def test_a_request_whose_text_cannot_be_decoded_fails_alone(build, tiny, alone):
    poison = alone[2].continuation[3]

    def decode(token_ids):
        if poison in token_ids:
            raise UnicodeError("poison")
        return tiny.decode(token_ids)

    engine = build(loaded=replace(tiny, decode=decode))
    watched = SamplingParams(stop=("no such text",))
    streams = [engine.add(alone[n].prompt, 8, watched) for n in (2, 3)]
    assert streams[1].result(60).token_ids == alone[3].continuation[:8]
    streams[0]._record.result(60)
    sick = engine.trace().requests[0]
    assert sick.finish_reason == "error"
    assert "its text could not be decoded: UnicodeError: poison" in sick.error
    assert sick.tokens == alone[2].continuation[:3]
    assert_whole(engine)


@pytest.mark.parametrize("stop", [(), ("no such text",)])
def test_a_decoder_that_panics_fails_one_answer(stop, build, tiny, alone):
    tokenizer = Tokenizer(BPE({" ": 0}, []))
    # It panics at a text that is shorter than what it strips.
    tokenizer.decoder = decoders.Strip(" ", 1, 1)
    poison = alone[2].continuation[3]
    loaded = replace(tiny, decode=lambda ids: tokenizer.decode([0]) if poison in ids else tiny.decode(ids))
    prompts = [alone[n].prompt for n in (2, 3)]
    sick, sound = build(loaded=loaded).generate(prompts, 8, SamplingParams(stop=stop))
    assert "its text could not be decoded: RuntimeError: PanicException" in sick.error
    assert (sound.error, sound.token_ids) == (None, alone[3].continuation[:8])


def test_a_reader_that_leaves_aborts_its_request(build, alone):
    engine = build()
    with engine.add(alone[5].prompt, 24) as stream:
        next(stream)
    assert stream.result(60).finish_reason in ("abort", "length")
    with engine.add(alone[5].prompt, 24) as stream:
        tokens = [token.token_id for token in stream]
    assert (tuple(tokens), stream.result().finish_reason) == (alone[5].continuation, "length")

    async def cancelled():
        async with engine.add(alone[5].prompt, 24) as stream:
            await anext(stream)
        return await stream

    assert asyncio.run(cancelled()).finish_reason in ("abort", "length")
    engine.stop(drain=True)
    assert_whole(engine)


def test_an_event_loop_that_is_closed_while_its_reader_waits_costs_nobody_else_anything(build, alone):
    engine = build(max_num_seqs=1)
    gate = Gate(engine)
    stream = engine.add(alone[5].prompt, 3)

    async def impatient():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(stream), 0.01)

    asyncio.run(impatient())
    gate.open()
    assert [token.token_id for token in stream] == list(alone[5].continuation[:3])


def test_waiting_for_a_result_can_time_out_and_the_request_goes_on(build, alone):
    engine = build()
    gate = Gate(engine)
    stream = engine.add(alone[5].prompt, 3)
    with pytest.raises(TimeoutError, match="is not finished after 0 seconds; it goes on"):
        stream.result(timeout=0)
    gate.open()
    assert stream.result(60).token_ids == alone[5].continuation[:3]


@pytest.mark.parametrize("policy", ["fcfs", "static"])
def test_an_engine_without_a_trace_forgets_who_is_finished(policy, build, tiny, alone):
    engine = Engine(tiny, policy, cache=CacheConfig(50), keep_trace=False)
    for _ in range(3):
        answers = engine.generate([answer.prompt for answer in alone[:4]], [1, 2, 3, 4])
        assert [answer.token_ids for answer in answers] == [
            answer.continuation[: n + 1] for n, answer in enumerate(alone[:4])
        ]
    engine.stop(drain=True)
    assert len(engine.scheduler._states) <= 1
    assert not engine._records
    assert not engine._steps
    with pytest.raises(ValueError, match="keeps no trace"):
        engine.trace()


def test_an_id_is_taken_as_long_as_its_padding_row_is_computed(tiny, alone):
    engine = Engine(tiny, "static:wait=60", scheduler=SchedulerConfig(2), keep_trace=False)
    gate = Gate(engine)
    long, short = engine.add(alone[0].prompt, 9, id="long"), engine.add(alone[1].prompt, 1, id="short")
    gate.step()
    assert short.result(60).record.is_complete
    with pytest.raises(ValueError, match="request 'short': the id is taken"):
        engine.add(alone[1].prompt, 1, id="short")
    gate.open()
    assert long.result(60).token_ids == alone[0].continuation[:9]
    again = [engine.add(alone[1].prompt, 2, id=name) for name in ("short", "long")]
    assert [stream.result(60).token_ids for stream in again] == [alone[1].continuation[:2]] * 2
    engine.stop()


class Recruiting(policies.Policy):
    """Send a request while the first step is planned."""

    def propose(self, view):
        if self.engine.scheduler.step == 0:
            self.engine.add(self.prompt, 3, id="second")
        yield from super().propose(view)


def test_replan_repeats_the_plans_of_an_engine_that_takes_in_requests_while_it_plans(build, tiny, alone):
    policy = Recruiting()
    policy.engine, policy.prompt = build(policy), alone[1].prompt
    policy.engine.add(alone[0].prompt, 8, id="first").result(60)
    policy.engine.stop(drain=True)
    trace = policy.engine.trace()
    assert trace.origin == Origin(model="tiny")
    first, second = trace.requests
    assert second.arrival < trace.steps[0].start and trace.steps[0].end <= second.queued
    assert first.arrival <= first.queued <= trace.steps[0].start
    assert replan(trace, "fcfs") == (len(trace.steps), len(trace.steps), None)


def test_a_static_batch_that_waits_for_company_sleeps_until_its_time(build, alone):
    engine = build("static:wait=0.2")
    output = engine.add(alone[2].prompt, 2).result(60)
    assert output.token_ids == alone[2].continuation[:2]
    assert output.record.first_scheduled - output.record.arrival > 0.15


def test_the_default_pool_is_no_larger_than_full_seats_can_fill(tiny):
    from cbresearch.engine.executor import default_cache
    from cbresearch.formulas import kv_bytes_per_token

    few = default_cache(tiny.shape, SchedulerConfig(2))
    assert few.num_tokens == 2 * 2048
    many = default_cache(tiny.shape, SchedulerConfig(10_000))
    assert 0.99 * 2**30 < many.num_tokens * kv_bytes_per_token(tiny.shape) <= 2**30


def test_host_and_device_time_are_kept_apart(build, alone):
    engine = build()
    engine.generate([answer.prompt for answer in alone[:4]], 4)
    trace = engine.trace()
    for step, seconds in zip(trace.steps, trace.step_columns["device_duration_s"], strict=True):
        assert 0 < step.device_duration < step.duration
        assert step.device_duration == seconds
