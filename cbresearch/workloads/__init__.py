"""Whom to serve: presets, workload and trace files, and seeded arrivals and lengths."""

from cbresearch.workloads.draws import lognormal_lengths, poisson_arrivals, spread_arrivals, uniform_lengths
from cbresearch.workloads.files import find, load, load_mooncake
from cbresearch.workloads.lines import EXAMPLE
from cbresearch.workloads.named import PRESETS, chat24, classic60, lognormal128, poisson64, presets
from cbresearch.workloads.predictors import PREDICTORS, Predictor, predict
from cbresearch.workloads.prompts import MAX_DRAWN_TOKENS, Encode, resolve_prompts

__all__ = [
    "EXAMPLE",
    "MAX_DRAWN_TOKENS",
    "PREDICTORS",
    "PRESETS",
    "Encode",
    "Predictor",
    "chat24",
    "classic60",
    "find",
    "load",
    "load_mooncake",
    "lognormal128",
    "lognormal_lengths",
    "poisson64",
    "poisson_arrivals",
    "predict",
    "presets",
    "resolve_prompts",
    "spread_arrivals",
    "uniform_lengths",
]
