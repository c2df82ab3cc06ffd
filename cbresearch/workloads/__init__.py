"""Whom to serve: presets, public traces, files, and seeded arrivals, lengths, prefixes and sessions."""

from cbresearch.workloads.applications import (
    agents,
    agents_sessions,
    batch,
    chat,
    code,
    multi_turn,
    multi_turn_sessions,
    rag,
    summarization,
)
from cbresearch.workloads.arrivals import AtOnce, Gamma, OnOff, Poisson, Recorded, merge, scale_rate
from cbresearch.workloads.draws import lognormal_lengths, poisson_arrivals, spread_arrivals, uniform_lengths
from cbresearch.workloads.files import TraceFile, find, load, load_mooncake, read_trace
from cbresearch.workloads.lengths import (
    Coupled,
    Empirical,
    Fixed,
    Geometric,
    Joint,
    Lengths,
    Lognormal,
    Quantiles,
    Uniform,
    Zipf,
)
from cbresearch.workloads.lines import EXAMPLE
from cbresearch.workloads.mix import Prefixes, make_requests
from cbresearch.workloads.named import PRESETS, chat24, classic60, lognormal128, poisson64, presets
from cbresearch.workloads.predictors import PREDICTORS, Predictor, predict
from cbresearch.workloads.prompts import MAX_DRAWN_TOKENS, Encode, resolve_prompts
from cbresearch.workloads.public import TRACES, fetch
from cbresearch.workloads.sessions import Exponential, Session, Sessions, Turn, closed_loop, conversations

__all__ = [
    "EXAMPLE",
    "MAX_DRAWN_TOKENS",
    "PREDICTORS",
    "PRESETS",
    "TRACES",
    "AtOnce",
    "Coupled",
    "Empirical",
    "Encode",
    "Exponential",
    "Fixed",
    "Gamma",
    "Geometric",
    "Joint",
    "Lengths",
    "Lognormal",
    "OnOff",
    "Poisson",
    "Predictor",
    "Prefixes",
    "Quantiles",
    "Recorded",
    "Session",
    "Sessions",
    "TraceFile",
    "Turn",
    "Uniform",
    "Zipf",
    "agents",
    "agents_sessions",
    "batch",
    "chat",
    "chat24",
    "classic60",
    "closed_loop",
    "code",
    "conversations",
    "fetch",
    "find",
    "load",
    "load_mooncake",
    "lognormal128",
    "lognormal_lengths",
    "make_requests",
    "merge",
    "multi_turn",
    "multi_turn_sessions",
    "poisson64",
    "poisson_arrivals",
    "predict",
    "presets",
    "rag",
    "read_trace",
    "resolve_prompts",
    "scale_rate",
    "spread_arrivals",
    "summarization",
    "uniform_lengths",
]
