"""Loading: weights that are not there, files that are not what they seem, and prompts that would vanish."""

import contextlib
import json
import shutil
import time

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from cbresearch import models
from cbresearch.config import CacheConfig, SchedulerConfig
from cbresearch.engine import Engine
from cbresearch.request import SamplingParams

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
TYPED = (
    "{% for message in messages %}<|start|>{{ message.role }} {% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}<|end|>{% endfor %}<|start|>bot "
)
PLAIN = "{% for message in messages %}<|start|>{{ message.role }} {{ message.content }}<|end|>{% endfor %}"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "model")


def change(folder, changed):
    """Write a checkpoint's weights anew, by a function of them."""
    file = folder / "model.safetensors"
    save_file(changed(load_file(file)), file, metadata={"format": "pt"})


def tokenizer(template=None):
    words = {
        word: place
        for place, word in enumerate(("<|start|>", "<|end|>", "<unk>", "user", "bot", "hi", "there"))
    }
    words |= {f"w{place}": place for place in range(len(words), 64)}
    made = Tokenizer(WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")
    wrapped.add_special_tokens({"additional_special_tokens": ["<|start|>", "<|end|>"]})
    wrapped.chat_template = template
    return wrapped


def loaded(template=None):
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, initializer_range=0.3, bos_token_id=None, eos_token_id=None)
    return models.wrap("chatty", LlamaForCausalLM(config), tokenizer(template))


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        (
            lambda all: {k: v for k, v in all.items() if ".layers.1." not in k},
            "lacks weights.*layers.1.*9 in all",
        ),
        (
            lambda all: {k: v for k, v in all.items() if k != "lm_head.weight"},
            "lacks weights.*lm_head.weight",
        ),
        (lambda all: all | {"model.norm.weight": torch.ones(48)}, "of other sizes.*model.norm.weight"),
        (
            lambda all: all | {k.replace("s.1.", "s.2."): v.clone() for k, v in all.items() if "s.1." in k},
            "has weights for which its config has no place: model.layers.2.",
        ),
        (
            lambda all: all | {"model.layers.0.self_attn.q_proj.bias": torch.ones(32)},
            "has weights for which its config has no place: model.layers.0.self_attn.q_proj.bias",
        ),
        *(
            (
                lambda all, extra=extra: all | {f"model.layers.1.{extra}": torch.ones(8)},
                f"has weights for which its config has no place: model.layers.1.{extra.rpartition('.')[0]}",
            )
            for extra in (
                "self_attn.q_norm.weight",
                "post_feedforward_layernorm.weight",
                "mlp.experts.3.up_proj.weight",
                "self_attn.q_proj.lora_A.weight",
                "self_attn.q_proj.lora_A.default.weight",
                "mlp.up_proj.weight_g",
                "self_attn.sinks",
            )
        ),
        (
            lambda all: {
                key: value.to(torch.int8) if key.endswith("1.self_attn.q_proj.weight") else value
                for key, value in all.items()
            },
            r"has integer weights \(model.layers.1.self_attn.q_proj.weight\) and no quantization_config",
        ),
    ],
)
def test_a_checkpoint_and_a_config_that_do_not_fit_are_rejected_with_the_names(
    folder, changed, problem, capfd
):
    change(folder, changed)
    with pytest.raises(ValueError, match=problem) as caught:
        models.load(str(folder))
    assert "\n" not in str(caught.value)
    assert "LOAD REPORT" not in capfd.readouterr().err


def test_weights_that_are_tied_or_of_another_part_need_no_place(tmp_path):
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)).save_pretrained(tmp_path)
    change(
        tmp_path,
        lambda all: (
            all
            | {"vision.patch.weight": torch.ones(3), "vision.layers.0.patch.weight": torch.ones(3)}
            | {"model.layers.0.rotary.inv_freq": torch.ones(4), "model.layers.0.attn.bias": torch.ones(4)}
        ),
    )
    assert models.load(str(tmp_path)).shape.num_layers == 2


def test_an_adapter_beside_whole_weights_is_not_left_out_in_silence(folder):
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"has an adapter .*, which is not applied; merge it"):
        models.load(str(folder))


def test_old_buffers_of_a_gpt2_checkpoint_need_no_place(tmp_path):
    GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2)).save_pretrained(tmp_path)
    masks = {f"h.0.attn.{name}": torch.ones(4) for name in ("bias", "masked_bias")}
    # As the model without its head names them.
    change(tmp_path, lambda all: {key.removeprefix("transformer."): all[key] for key in all} | masks)
    assert models.load(str(tmp_path)).shape.num_layers == 1
    change(tmp_path, lambda all: all | {"h.0.attn.q_norm.weight": torch.ones(4)})
    with pytest.raises(ValueError, match=r"has no place: .*q_norm"):
        models.load(str(tmp_path))


def lfs(whole):
    return b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
@pytest.mark.parametrize(
    ("broken", "problem"),
    [
        (lfs, "is a Git LFS pointer instead of the file; run: git lfs pull"),
        (lambda whole: b"", "is empty"),
        (lambda whole: b"\n<!DOCTYPE html><html>Not found</html>", "is a web page"),
    ],
)
def test_a_file_that_is_not_what_its_name_says_is_named(folder, name, broken, problem):
    tokenizer().save_pretrained(folder)
    file = folder / name
    file.write_bytes(broken(file.read_bytes()))
    with pytest.raises(ValueError, match=f"{name}.*{problem}"):
        models.load(str(folder))


@pytest.mark.parametrize(
    ("broken", "problem"),
    [
        (lambda whole: whole[:-4], r"is cut or no safetensors file \([\d,]+ bytes; .* not fully covered"),
        (lambda whole: whole[:200], r"is cut or no safetensors file \([\d,]+ bytes"),
        (lambda whole: b"\xff" * 100, r"is cut or no safetensors file \([\d,]+ bytes"),
        (lambda whole: b"\x02" + bytes(7) + b"[]", r"is cut or no safetensors file \([\d,]+ bytes"),
    ],
)
def test_a_cut_file_of_weights_is_rejected_in_one_line(folder, broken, problem):
    file = folder / "model.safetensors"
    file.write_bytes(broken(file.read_bytes()))
    with pytest.raises(ValueError, match=problem) as caught:
        models.load(str(folder))
    assert "\n" not in str(caught.value)


def test_one_of_several_gguf_files_is_not_taken_by_its_name(tmp_path):
    for name in ("model-Q4.gguf", "model-Q8.gguf", "mmproj-model.gguf"):
        (tmp_path / name).write_bytes(lfs(b""))
    with pytest.raises(ValueError, match=r"several GGUF files; .*model-Q4.gguf, model-Q8.gguf$"):
        models.load(str(tmp_path))
    # A file is chosen by its path, and is what is read then.
    with pytest.raises(ValueError, match=r"model-Q8.gguf' is a Git LFS pointer"):
        models.load(str(tmp_path / "model-Q8.gguf"))
    (tmp_path / "model-Q4.gguf").unlink()
    with pytest.raises(ValueError, match=r"model-Q8.gguf' is a Git LFS pointer"):
        models.load(str(tmp_path))
    (tmp_path / "model-Q8.gguf").unlink()
    with pytest.raises(ValueError, match=r"no .safetensors or .gguf weights"):
        models.load(str(tmp_path))


INDEX = '{"metadata": {}, "weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}'


@pytest.mark.parametrize(
    "name", ["model (1).safetensors", "adapter_model.safetensors", "model-00001-of-00009.safetensors"]
)
@pytest.mark.parametrize("index", ["", INDEX])
def test_weights_of_another_name_are_told_with_what_there_must_be(folder, name, index):
    (folder / "model.safetensors").rename(folder / name)
    if index:
        (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError, match=r"there must be model.safetensors, or each shard") as caught:
        models.load(str(folder))
    assert f"The folder has {name}, " in str(caught.value)
    assert "Check the name" not in str(caught.value)


def test_of_one_file_of_a_model_the_folder_is_asked_for(folder):
    with pytest.raises(ValueError, match=f"is one file of a model; give its folder, '{folder}'"):
        models.load(str(folder / "model.safetensors"))


def test_a_vocabulary_and_merges_are_a_tokenizer(tmp_path):
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2)).save_pretrained(tmp_path)
    vocabulary = {"<|endoftext|>": 0, "h": 1, "i": 2, "hi": 3}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh i\n")
    assert list(models.load(str(tmp_path)).encode("hih")) == [3, 1]


@pytest.mark.parametrize("name", ["org/model", "/nowhere/model", "~/no-such-model", "a/b/c"])
def test_an_unknown_model_is_rejected_in_a_second(name, monkeypatch):
    monkeypatch.setattr(models, "_hub_answers", lambda: False)
    began = time.perf_counter()
    with pytest.raises(ValueError, match=name) as caught:
        models.load(name)
    assert time.perf_counter() - began < 1
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "template", [PLAIN, TYPED, *("call {'type': 'text', 'text': 'x'} " + how for how in (PLAIN, TYPED))]
)
def test_two_messages_never_make_one_prompt(template):
    encode = loaded(template).encode
    prompts = [tuple(encode(text)) for text in ("hi", "there", "hi there", "user", "bot")]
    assert len(set(prompts)) == len(prompts)
    assert all(5 in prompts[place] for place in (0, 2))


@pytest.mark.parametrize(
    "template",
    [
        "{% for message in messages %}<|start|>{{ message.role }}<|end|>{% endfor %}",
        "{% for message in messages %}{{ message.content[:2] }}{% endfor %}",
        "{{ raise_exception('a system message is needed') }}",
        "{% for message in messages %}{{ message.content.nothing.there }}{% endfor %}",
    ],
)
def test_a_template_that_leaves_the_message_out_is_rejected(template):
    with pytest.raises(ValueError, match="the chat template of 'chatty' does not take this message"):
        loaded(template).encode("there hi user")


def build(template=None):
    return Engine(loaded(template), scheduler=SchedulerConfig(4), cache=CacheConfig(60, 4))


def test_a_single_prompt_is_one_prompt():
    with build() as engine:
        wanted = engine.generate([[5, 6]], max_tokens=4)[0].token_ids
        assert [answer.token_ids for answer in engine.generate("hi there", max_tokens=4)] == [wanted]
        tensor = torch.tensor([5, 6])
        for single in ([5, 6], (5, 6), np.array([5, 6]), tensor, [*tensor], tensor[None], [tensor]):
            assert [answer.token_ids for answer in engine.generate(single, max_tokens=4)] == [wanted]
        two = engine.generate((prompt for prompt in ("hi there", [5, 6])), max_tokens=4)
        assert [answer.token_ids for answer in two] == [wanted, wanted]


@pytest.mark.parametrize("prompts", [None, 5, torch.tensor(5), np.array(5), {"hi", "there"}, {5, 6}])
def test_what_is_no_prompts_in_an_order_is_refused_with_what_to_give(prompts):
    with (
        build() as engine,
        pytest.raises(ValueError, match=r"the prompts are .*; give a text, token"),
    ):
        engine.generate(prompts)


@pytest.mark.parametrize("sampling", [{}, [], 0, ""])
def test_an_empty_value_is_no_sampling(sampling):
    with build() as engine:
        with pytest.raises(ValueError, match="sampling is"):
            engine.add([5, 6], 2, sampling)
        with contextlib.suppress(ValueError):
            assert "sampling is" in engine.generate([[5, 6]], 2, sampling)[0].error


BYTES = [b"hi", bytearray(b"hi"), memoryview(b"hi")]


@pytest.mark.parametrize("prompt", [*BYTES, {"role": "user", "content": "hi"}, None, 7.5, ["hi", "there"]])
def test_a_prompt_of_another_kind_is_refused_and_the_others_go_on(prompt):
    with build() as engine:
        odd, good = engine.generate([prompt, "hi"], max_tokens=2)
        assert odd.error is not None and "prompt" in odd.error
        assert good.error is None and len(good.token_ids) == 2
        if prompt in BYTES or isinstance(prompt, dict):
            (odd,) = engine.generate(prompt, max_tokens=2)
            assert odd.error is not None


@pytest.mark.parametrize("stop", ["<|end|>", "<|end|> w9", "w8 <|end|>"])
def test_a_stop_text_with_a_special_token_stops(stop):
    model = loaded()
    answer = [20, 8, 1, 9, 21]
    decode = model.decode_for([stop])
    assert stop in decode(answer)
    assert "<|start|>" not in decode([0, *answer])
    assert "<|" not in model.decode(answer)
    assert model.decode_for(["w9"])(answer) == model.decode(answer)


def test_an_answer_ends_at_a_special_token_that_is_a_stop_text():
    with build() as engine:
        free = engine.generate(["w7"], 40, SamplingParams(temperature=1.5, seed=3))[0]
        special = engine.loaded.decode.special_tokens
        place = next(place for place, token in enumerate(free.token_ids) if token in special)
        stop = special[free.token_ids[place]]
        (answer,) = engine.generate(["w7"], 40, SamplingParams(temperature=1.5, seed=3, stop=(stop,)))
        output = answer.outputs[0]
        assert output.token_ids == free.token_ids[: place + 1]
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)
        assert stop not in output.text
        stream = engine.add("w7", 40, SamplingParams(temperature=1.5, seed=3, stop=(stop,)))
        assert "".join(token.text for token in stream) == output.text
