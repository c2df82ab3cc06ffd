"""An engine that is left, forked, dropped or looked at in the middle of a step does no harm."""

import asyncio
import contextlib
import gc
import os
import subprocess
import sys
import threading
import time
import weakref

import pytest

from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.engine import Engine

# Each way of ending, in a child that ends as a script does.
SCRIPT = """
import os, sys, threading
from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.engine import Engine
code = None
for code in sys.argv[1:]:
    sys.stdout.flush()
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        continue
    engine = Engine("tiny", scheduler=SchedulerConfig(4), cache=CacheConfig(300))
    streams = [engine.add([5, 6, 7], 1000) for _ in range(4)]
    next(streams[0])
    exec(code)
    break
"""
ENDS = {
    "threading.Thread(target=lambda: [next(streams[1]) for _ in range(5)]).start()": 0,
    "other = Engine(engine.loaded, cache=CacheConfig(300)); next(other.add([5, 6], 1000)); sys.exit(3)": 3,
    "with engine: raise KeyError('of the user')": 1,
}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_script_that_ends_without_a_stop_ends_as_python_does():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *ENDS], capture_output=True, text=True, timeout=100, check=False
    )
    assert list(map(int, done.stdout.split())) == list(ENDS.values()), done.stderr
    last = [line for line in done.stderr.splitlines() if not line.startswith((" ", "Traceback"))]
    assert last == ["KeyError: 'of the user'"]


DAEMON = """
import threading
from cbresearch import models, serve
from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.engine import ModelExecutor
from cbresearch.policies import get
from cbresearch.request import Request
from cbresearch.scheduler import Scheduler
limits, cache, began = SchedulerConfig(), CacheConfig(300), threading.Event()
executor = ModelExecutor(models.load("tiny"), limits, cache)
def loop():
    while True:
        requests = [Request(str(n), (5, 6, 7), 100) for n in range(8)]
        serve.serve(requests, Scheduler(get("fcfs"), limits, cache), executor, on_step=lambda _: began.set())
threading.Thread(target=loop, daemon=True).start()
began.wait()
"""


def test_a_script_ends_while_a_daemon_thread_of_its_own_serves():
    done = subprocess.run([sys.executable, "-c", DAEMON], capture_output=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.fixture
def engine(tiny):
    with Engine(tiny, scheduler=SchedulerConfig(2), cache=CacheConfig(300, 4)) as engine:
        yield engine


def in_a_fork(check):
    """Run a function in a forked child, and return what went wrong in it, within 20 seconds."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        problem = "the child was killed"
        try:
            check()
            problem = ""
        except BaseException as error:
            problem = f"{type(error).__name__}: {error}"
        finally:
            os.write(writer, problem.encode() + b".")
            os._exit(0)
    os.set_blocking(reader, False)
    for _ in range(200):
        time.sleep(0.1)
        if os.waitpid(child, os.WNOHANG)[0]:
            return os.read(reader, 10_000).decode()[:-1]
    os.kill(child, 9)
    os.waitpid(child, 0)
    return "it waits for ever"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_forked_child_is_refused_by_its_parents_engine_and_can_build_one(engine, tiny):
    done = engine.add([5, 6, 7], 2)
    done.result(60)
    stream = engine.add([5, 6, 7], 1000)
    next(stream)
    lock = engine._condition

    def check():
        calls = {
            "add": lambda: engine.add([5], 2),
            "generate": lambda: engine.generate([[5], [6]], 2),
            "result": stream.result,
            "next": lambda: [token for token in stream],
            "await": lambda: asyncio.run(anext(stream)),
            "trace": engine.trace,
        }
        for name, call in calls.items():
            with pytest.raises(RuntimeError, match=r"a fork of it has no copy .* build another engine"):
                call()
                raise AssertionError(name)
        # Nothing is there to be ended, so that nothing is waited for.
        with stream:
            stream.abort()
        engine.stop()
        assert len(done.result().token_ids) == 2
        with Engine(tiny, cache=CacheConfig(20, 4)) as own:
            assert own.generate([[5, 6, 7]], 2)[0].token_ids == done.result().token_ids

    assert in_a_fork(check) == ""
    with lock:
        # As when the engine's thread has it at the moment of the fork.
        assert in_a_fork(check) == ""
    stream.abort()
    assert stream.result(60).finish_reason == "abort"


FORK = """
import os, torch
torch.set_num_threads(2)
torch.randn(600, 600) @ torch.randn(600, 600)
from cbresearch.config import CacheConfig
from cbresearch.engine import Engine
first = Engine("tiny", cache=CacheConfig(20, 4))
first.generate([[5, 6, 7]], 2)
child = os.fork()
if not child:
    Engine(first.loaded, cache=CacheConfig(20, 4), backend="torch").generate([list(range(40))], 2)
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_an_engine_in_a_fork_does_not_wait_for_the_threads_of_its_parent():
    with subprocess.Popen(
        [sys.executable, "-c", FORK], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as script:
        try:
            assert script.communicate(timeout=60)[0] == "7\n"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(script.pid, 9)


def test_an_engine_has_a_thread_only_while_there_is_work_and_is_freed_when_it_is_dropped(tiny):
    engine = Engine(tiny, cache=CacheConfig(100, 4))
    for _ in range(3):
        engine.add([5, 6], 3).result(60)
        for _ in range(100):
            if engine._thread is None:
                break
            time.sleep(0.01)
        assert engine._thread is None
    pool = weakref.ref(engine._loop.executor.cache)
    unread = engine.add([5, 6], 50)
    del engine, unread
    for _ in range(200):
        gc.collect()
        if pool() is None:
            return
        time.sleep(0.05)
    raise AssertionError("the pool of an engine that was dropped is still there")


def assert_whole(trace, engine):
    """Every token of a trace comes from one of its steps, and so does all else."""
    sampled = [
        (entry.request_id, step.end) for step in trace.steps for entry in step.plan.scheduled if entry.samples
    ]
    preempted = [name for step in trace.steps for name in step.plan.preempted]
    for record in trace.requests:
        times = [end for name, end in sampled if name == record.id]
        assert list(record.token_times) == times
        assert len(record.tokens) == len(times)
        assert record.num_preemptions == preempted.count(record.id)
        firsts = [step.start for step in trace.steps for a in step.plan.admitted if a.request.id == record.id]
        assert (record.first_scheduled is None) == (not firsts)


def test_a_trace_of_a_running_engine_ends_with_its_last_step(tiny):
    engine = Engine(tiny, scheduler=SchedulerConfig(3, 16), cache=CacheConfig(16, 4))
    scheduler, looked = engine.scheduler, []

    def between(call):
        def called(*arguments):
            result = call(*arguments)
            # A trace that is taken here, in the middle of a step, is as one that another thread takes.
            looked.append(engine.trace())
            return result

        return called

    scheduler.schedule, scheduler.commit = between(scheduler.schedule), between(scheduler.commit)
    # All of them are there for the first step, so that the pool is short of blocks.
    with engine._condition:
        streams = [engine.add([5 + n, 6, 7], 20, id=f"r{n}") for n in range(5)]
    while not all(stream.is_finished for stream in streams):
        looked.append(engine.trace())
        time.sleep(0.002)
    engine.stop()
    assert sum(record.num_preemptions for record in engine.trace().requests) > 0
    for trace in [*looked, engine.trace()]:
        assert_whole(trace, engine)
    assert any(0 < len(trace.requests[0].tokens) < 20 for trace in looked)


def test_an_interrupted_generate_aborts_its_requests_and_the_engine_goes_on(engine, monkeypatch):
    class Interrupting:
        def __init__(self, items, **_):
            self.items = items

        def __iter__(self):
            yield self.items[0]
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("cbresearch.engine.online.tqdm", Interrupting)
        with pytest.raises(KeyboardInterrupt):
            engine.generate([[5, 6]] * 3, [3, 300, 300])
    assert len(engine.generate([[5, 6]], 3)[0].token_ids) == 3
    assert [record.finish_reason for record in engine.trace().requests] == [
        "length",
        "abort",
        "abort",
        "length",
    ]


def test_a_failure_reaches_every_caller_that_waits_and_not_the_error_inside_the_block(tiny):
    found = []

    def wait(call):
        try:
            found.append(call())
        except RuntimeError as error:
            found.append(str(error))

    with pytest.raises(KeyError, match="of the user"), Engine(tiny, cache=CacheConfig(100, 4)) as engine:
        going = threading.Event()

        def broken(plan):
            going.wait(60)
            raise MemoryError("no room")

        engine._loop.executor.execute = broken
        stream = engine.add([5, 6], 20)

        async def anext_of():
            return await stream

        calls = [
            lambda: stream.result().error,
            lambda: list(stream),
            lambda: asyncio.run(anext_of()).error,
            lambda: engine.generate([[5]], 2)[0].error,
        ]
        threads = [threading.Thread(target=wait, args=(call,)) for call in calls]
        for thread in threads:
            thread.start()
        going.set()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        raise KeyError("of the user")
    assert sorted(map(str, found)) == ["[]", *["the engine failed: no room"] * 3]


def test_a_reader_that_is_cancelled_or_leaves_half_way_takes_nothing_from_the_others(engine):
    async def read():
        stream = engine.add([5, 6], 30)
        reader = asyncio.ensure_future(anext_all(stream))
        await anext(stream)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(engine.add([5, 6], 1000, id="long"), 0.01)
        async with engine.add([5, 7], 1000, id="left"):
            pass
        return await stream

    async def anext_all(stream):
        return [token async for token in stream]

    assert len(asyncio.run(read()).token_ids) == 30
    # The loop that read it is closed by now.
    engine.abort("long")
    assert len(engine.generate([[5, 6]], 30)[0].token_ids) == 30
    reasons = {record.id: record.finish_reason for record in engine.trace().requests}
    assert reasons["long"] == reasons["left"] == "abort"


def test_a_stopped_engine_stays_stopped_and_keeps_its_answers(engine):
    stream = engine.add([5, 6], 3)
    engine.stop(drain=True)
    for drain in (True, False):
        engine.stop(drain)
    assert len(stream.result(0).token_ids) == len(list(stream)) == 3
    for call in (lambda: engine.add([5], 1), lambda: engine.generate([[5]], 1)):
        with pytest.raises(RuntimeError, match="the engine has stopped"):
            call()
    stream.abort()
    engine.abort("unknown")
    assert len(engine.trace().requests) == 1
