"""Compare the shape read off every causal model type of transformers with the cache that the model fills.

Each type's default config is built at full size on the meta device, where tensors have no memory, and five
tokens are sent through it. Not part of the tests: it takes minutes, and new releases bring new types.
With transformers 5.24: 138 types equal, 23 rejected, 32 whose default config does not run so, and 2 that
differ: CPM-Ant puts prompt vectors before the tokens, and the first GPT has no cache.

    python tests/survey_model_shapes.py [MODEL_TYPE ...]
"""

import sys
import warnings
from collections import Counter

import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, DynamicCache
from transformers.utils import logging

from cbresearch.config import ModelShape

Geometry = Counter[tuple[int, int | None]]  # elements of a token in one layer, and the layer's window

NUM_TOKENS = 5


def read(config) -> Geometry:
    shape = ModelShape.from_config(config, num_parameters=1, dtype_bytes=1)
    per_head = shape.head_dim + (shape.value_head_dim or shape.head_dim)
    elements = shape.latent_dim or shape.num_kv_heads * per_head
    geometry = Counter({(elements, shape.sliding_window): shape.num_sliding_layers})
    geometry[elements, None] += shape.num_layers - shape.num_sliding_layers
    return +geometry


def fill(config) -> Geometry:
    ids = torch.ones(1, NUM_TOKENS, dtype=torch.long, device="meta")
    with torch.device("meta"), torch.no_grad():
        try:
            # Which expert a token takes depends on data, and the meta device has none.
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation="eager", experts_implementation="batched_mm"
            )
        except (TypeError, ValueError):
            model = AutoModelForCausalLM.from_config(config)
        cache = DynamicCache(config=config.get_text_config(decoder=True))
        model.eval()(ids, past_key_values=cache, use_cache=True)
    held = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
    return Counter(
        ((layer.keys.numel() + layer.values.numel()) // NUM_TOKENS, getattr(layer, "sliding_window", None))
        for layer in held
    )


def survey(model_type: str) -> str:
    try:
        config = CONFIG_MAPPING[model_type]()
        decoder = config.get_text_config(decoder=True)
        # As the model classes that are only a decoder set it.
        decoder.is_encoder_decoder, decoder.is_decoder = False, True
        measured = fill(config)
    except Exception as error:  # Whatever keeps a default config from running is no news about its shape.
        return f"not run: {type(error).__name__}"
    try:
        predicted = read(config)
    except ValueError as error:
        return f"rejected: {error}"
    return "equal" if predicted == measured else f"DIFFERS: read {dict(predicted)}, filled {dict(measured)}"


def main() -> None:
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    names = sys.argv[1:] or sorted({config.model_type for config in MODEL_FOR_CAUSAL_LM_MAPPING})
    outcomes = Counter()
    for name in names:
        outcome = survey(name)
        outcomes[outcome.split(":")[0]] += 1
        print(f"{name}: {outcome}", flush=True)
    print(", ".join(f"{number} {outcome}" for outcome, number in outcomes.most_common()))


if __name__ == "__main__":
    main()
