"""Any number of users of one loaded model, in any number of threads: each as if alone."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.utils.prune as prune
from conftest import generate_alone
from transformers import LlamaConfig, LlamaForCausalLM

from cbresearch import models
from cbresearch.attention import shared_copy
from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.cpu.forward import can_build, native_threads
from cbresearch.engine import Engine, ModelExecutor
from cbresearch.experiments import compare
from cbresearch.policies import get
from cbresearch.request import Request
from cbresearch.scheduler import Scheduler
from cbresearch.serve import serve

LENGTH = 6
BACKENDS = ["torch", pytest.param("native", marks=pytest.mark.skipif(not can_build(), reason="C++"))]


@pytest.fixture
def small():
    """A model of its own for each test, so that what is done to it stays here."""
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
        eos_token_id=None,
    )
    return models.wrap("small", LlamaForCausalLM(config))


PROMPTS = [tuple(range(3 + n, 8 + 3 * n)) for n in range(4)]


def state(model):
    """Return all that an engine could leave behind in a model."""
    modules = {
        name: (type(module), module.training, set(vars(module))) for name, module in model.named_modules()
    }
    return (
        modules,
        model.config.to_dict(),
        model.config._attn_implementation,
        dict(model.generation_config.to_dict()),
    )


def engine_tokens(loaded, **how):
    with Engine(loaded, scheduler=SchedulerConfig(3, 16), cache=CacheConfig(12, 4), **how) as engine:
        return [answer.token_ids for answer in engine.generate(PROMPTS, LENGTH)]


def served_tokens(loaded, **how):
    limits, cache = SchedulerConfig(2), CacheConfig(20, 4)
    requests = [Request(str(n), prompt, LENGTH) for n, prompt in enumerate(PROMPTS)]
    executor = ModelExecutor(loaded, limits, cache, **how)
    executor.warm_up()
    return list(serve(requests, Scheduler(get("fcfs"), limits, cache), executor).outputs.values())


def generated_tokens(loaded):
    return [generate_alone(loaded.model, prompt, LENGTH) for prompt in PROMPTS]


def compared_tokens(loaded):
    requests = [Request(str(n), prompt, LENGTH) for n, prompt in enumerate(PROMPTS)]
    return list(compare(requests, ["sjf"], model=loaded).traces["sjf"].outputs.values())


@pytest.mark.parametrize("backend", BACKENDS)
def test_engines_executors_comparisons_and_generate_share_a_model_in_threads(backend, small):
    want = generated_tokens(small)
    before = state(small.model)
    users = [
        lambda: engine_tokens(small, backend=backend),
        lambda: engine_tokens(small, backend="torch"),
        lambda: served_tokens(small, backend=backend),
        lambda: compared_tokens(small),
        lambda: generated_tokens(small),
    ]
    with ThreadPoolExecutor(len(users)) as threads:
        found = [future.result() for future in [threads.submit(user) for user in users * 2]]
    assert found == [want] * len(found)
    assert state(small.model) == before
    assert generated_tokens(small) == want


def test_the_interpreter_of_triton_serves_several_threads(small):
    prompts = PROMPTS[0][:3], PROMPTS[1][:2]

    def tokens(prompt, graphs):
        limits, cache = SchedulerConfig(1), CacheConfig(2, 4)
        executor = ModelExecutor(small, limits, cache, backend="triton", graphs=graphs)
        trace = serve([Request("a", prompt, 3)], Scheduler(get("fcfs"), limits, cache), executor)
        return trace.outputs["a"]

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(tokens, prompts, (False, True)))
    assert found == [generate_alone(small.model, prompt, 3) for prompt in prompts]


def test_engines_on_one_model_end_in_any_order(small):
    want = generated_tokens(small)
    before = state(small.model)
    first, second, third = (Engine(small, cache=CacheConfig(40, 4)) for _ in range(3))
    first.add(PROMPTS[0], 100)
    stream = third.add(PROMPTS[1], LENGTH)
    first.stop()
    assert [answer.token_ids for answer in second.generate(PROMPTS, LENGTH)] == want
    assert stream.result(60).token_ids == want[1]
    third.stop()
    assert [answer.token_ids for answer in second.generate(PROMPTS, LENGTH)] == want
    second.stop()
    assert state(small.model) == before


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_model_in_training_mode_is_served_without_dropout_and_stays_in_it(backend, small):
    want = generated_tokens(small)
    for layer in small.model.model.layers:
        layer.self_attn.attention_dropout = 0.9
    small.model.train()
    assert served_tokens(small, backend=backend) == want
    with Engine(small, backend=backend) as engine:
        small.model.eval()
        small.model.train()
        assert engine.generate([PROMPTS[2]], LENGTH)[0].token_ids == want[2]
    assert small.model.training


def test_a_model_that_keeps_activations_for_training_is_served(small):
    want = generated_tokens(small)
    small.model.gradient_checkpointing_enable()
    assert engine_tokens(small) == want


@pytest.mark.parametrize("place", ["model", "layer"])
def test_what_a_model_keeps_that_cannot_be_copied_is_shared(place, small):
    want = generated_tokens(small)
    kept = small.model if place == "model" else small.model.model.layers[1]
    kept.lock, kept.generator, kept.file = threading.Lock(), (n for n in range(3)), open(__file__)  # noqa: SIM115
    kept.activations = {"h": torch.ones(2, requires_grad=True) * 2}
    kept.seen, kept.whole = [threading.Lock()], [small.model, small.model.model.layers[0]]
    assert served_tokens(small) == want
    copied = shared_copy(small.model)
    whole = (copied if place == "model" else copied.model.layers[1]).whole
    assert whole[0] is copied and whole[1] is copied.model.layers[0]
    kept.file.close()
    small.model.config.lock = threading.Lock()
    with pytest.raises(ValueError, match="the model's 'config' holds what cannot be copied"):
        served_tokens(small)


def test_a_vocabulary_of_one_token_is_served():
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    one = models.wrap("one", LlamaForCausalLM(LlamaConfig(vocab_size=1, eos_token_id=None, **sizes)))
    with Engine(one, cache=CacheConfig(4, 4)) as engine:
        assert engine.generate([[0]], 3)[0].token_ids == (0, 0, 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_that_are_trained_in_place_are_those_that_are_served(backend, small):
    with Engine(small, backend=backend) as engine:
        before = engine.generate(PROMPTS, LENGTH)
        optimizer = torch.optim.SGD(small.model.parameters(), lr=1.0)
        loss = small.model(torch.tensor([PROMPTS[0]]), labels=torch.tensor([PROMPTS[0]])).loss
        loss.backward()
        optimizer.step()
        after = [answer.token_ids for answer in engine.generate(PROMPTS, LENGTH)]
    assert after == generated_tokens(small)
    assert after != [answer.token_ids for answer in before]
    assert all(weight.requires_grad for weight in small.model.parameters())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_model_that_is_moved_to_another_type_is_refused_by_its_engines_and_served_by_new_ones(
    backend, small
):
    engine = Engine(small, backend=backend)
    assert engine.generate([PROMPTS[0]], 2)[0].error is None
    small.model.double()
    assert "load it twice" in engine.generate([PROMPTS[0]], 2)[0].error
    with pytest.raises(RuntimeError, match=r"'small' was moved to cpu and torch\.float64"):
        engine.stop()
    assert served_tokens(small, backend="torch") == generated_tokens(small)


def halved(model):
    return {name: weight / 2 for name, weight in model.state_dict().items()}


CHANGES = {
    "weight": lambda model: setattr(model.lm_head, "weight", torch.nn.Parameter(torch.ones(96, 32))),
    "state": lambda model: model.load_state_dict(halved(model), assign=True),
    "module": lambda model: setattr(model.model.layers[1], "mlp", torch.nn.Identity()),
    "activation": lambda model: setattr(model.model.layers[1].mlp, "act_fn", torch.nn.ReLU()),
    "buffer": lambda model: setattr(model.model.rotary_emb, "inv_freq", torch.ones(4)),
    "hook": lambda model: model.model.norm.register_forward_hook(lambda _, given, out: -out),
    "pre-hook": lambda model: model.lm_head.register_forward_pre_hook(lambda _, given: (-given[0],)),
    "order": lambda model: setattr(model.model, "layers", torch.nn.ModuleList([*model.model.layers][::-1])),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_model_that_is_given_other_parts_is_refused_by_its_engines_and_served_by_new_ones(
    backend, change, small
):
    engine = Engine(small, backend=backend)
    assert engine.generate([PROMPTS[0]], 2)[0].error is None
    change(small.model)
    assert "'small' was given other weights, modules or hooks" in engine.generate([PROMPTS[0]], 2)[0].error
    with pytest.raises(RuntimeError, match="build a new one"):
        engine.stop()
    assert served_tokens(small, backend=backend) == generated_tokens(small)


def test_what_leaves_the_answers_as_they_are_ends_no_engine(small):
    want = generated_tokens(small)
    with Engine(small) as engine:
        small.model(torch.tensor([PROMPTS[0]]), output_hidden_states=True, output_attentions=True)
        small.model.load_state_dict(small.model.state_dict())
        small.model.tie_weights()
        assert [answer.token_ids for answer in engine.generate(PROMPTS, LENGTH)] == want


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_that_a_hook_makes_anew_are_those_that_are_served(backend, small):
    for layer in small.model.model.layers:
        prune.random_unstructured(layer.mlp.up_proj, "weight", 0.5)
    with Engine(small, backend=backend) as engine:
        assert [answer.token_ids for answer in engine.generate(PROMPTS, LENGTH)] == generated_tokens(small)
        with torch.no_grad():
            small.model.model.layers[0].mlp.up_proj.weight_orig.mul_(-3)
        assert [answer.token_ids for answer in engine.generate(PROMPTS, LENGTH)] == generated_tokens(small)


def test_a_model_takes_no_harm_from_an_executor_that_fails(small):
    before = state(small.model)
    executor = ModelExecutor(small, SchedulerConfig(1), CacheConfig(4, 4), backend="torch")
    executor._run_model._model.model.layers[1].mlp = None
    with pytest.raises(ValueError, match="TypeError"):
        executor.warm_up()
    assert state(small.model) == before
    assert len(generated_tokens(small)) == len(PROMPTS)


def test_an_engine_costs_no_second_set_of_weights(small):
    engines = [Engine(small, backend=backend, cache=CacheConfig(4, 4)) for backend in ("torch", "triton")]
    own = {tensor.data_ptr() for tensor in (*small.model.parameters(), *small.model.buffers())}
    for engine in engines:
        model = engine._loop.executor._run_model._model
        assert {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())} == own
        engine.stop()


@pytest.mark.skipif(not can_build(), reason="no C++ compiler")
def test_threads_that_are_handed_over_come_back_whichever_forward_ends_last():
    number = torch.get_num_threads()
    torch.set_num_threads(3)
    entered, leave, counts = threading.Barrier(3), [threading.Event(), threading.Event()], []

    def forward(place):
        with native_threads():
            entered.wait(10)
            leave[place].wait(10)
        counts.append(torch.get_num_threads())

    try:
        threads = []
        for place in range(2):
            threads.append(threading.Thread(target=forward, args=(place,)))
            threads[-1].start()
        entered.wait(10)
        for event, thread in zip(leave, threads, strict=True):
            event.set()
            thread.join()
        fresh = threading.Thread(target=lambda: counts.append(torch.get_num_threads()))
        fresh.start()
        fresh.join()
        assert counts == [3, 3, 3]
    finally:
        torch.set_num_threads(number)
