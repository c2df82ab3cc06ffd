"""Costs by name: linear coefficients, or a public card that serves a public model."""

from collections.abc import Mapping
from types import MappingProxyType

from cbresearch import names
from cbresearch.config import Hardware
from cbresearch.costs.linear import CostModel, Linear
from cbresearch.costs.roofline import CARDS, Roofline
from cbresearch.model_shape import ModelShape

SHAPES: Mapping[str, ModelShape] = MappingProxyType(
    {
        "smollm2-135m": ModelShape(30, 9, 3, 64, 134_515_008, dtype_bytes=2),
        "llama-3-8b": ModelShape(32, 32, 8, 128, 8_030_261_248, dtype_bytes=2),
        "llama-3-70b": ModelShape(80, 64, 8, 128, 70_553_706_496, dtype_bytes=2),
    }
)
"""A few public models in bfloat16 by name."""


def parse(text: str) -> CostModel:
    """Build the cost that a text names: `linear:0.01,0.0001`, or a card such as `h100:model=llama-3-70b`.

    See `Linear.parse` for the first. A card's options are a name of `SHAPES` as the model, llama-3-8b by
    default, and those of `Roofline`; the part of its name before the dash will do, and `roofline:` may
    stand before it.

    Raises:
        ValueError: The text is something else.
    """
    name = text.strip()
    if name.lower().startswith("roofline:"):
        name = name.partition(":")[2].replace(",", ":", 1)
    card, colon, options = name.partition(":")
    if card == "linear":
        return Linear.parse(name)
    cards = {key.partition("-")[0]: one for key, one in CARDS.items()} | {**CARDS}
    if card.lower() not in cards:
        known = f"linear:T0,T_TOKEN,T_CONTEXT,T_BLOCK, in seconds, or a card, {', '.join(CARDS)}"
        raise ValueError(f"cost {text!r} is not known; write {known}, as in h100:model=llama-3-8b")
    hardware: Hardware = cards[card.lower()]

    def roofline(
        model: str = "llama-3-8b",
        overhead: float = 0.0,
        flops_efficiency: float = 1.0,
        bandwidth_efficiency: float = 1.0,
        block_size: int = 16,
    ) -> Roofline:
        if model not in SHAPES:
            raise ValueError(f"cost {text!r}: unknown model {model!r}; {names.suggestion(model, SHAPES)}")
        shape = SHAPES[model]
        return Roofline(shape, hardware, overhead, flops_efficiency, bandwidth_efficiency, block_size)

    return names.build("cost", card + colon + options, {card: roofline})
