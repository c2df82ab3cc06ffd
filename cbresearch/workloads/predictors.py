"""Predicted output lengths: what a size-based policy is told in the place of the truth."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from types import MappingProxyType

import numpy as np

from cbresearch import names
from cbresearch.checks import count, real
from cbresearch.request import Rejected, Request, listed
from cbresearch.workloads.common import Requests, Rng, require
from cbresearch.workloads.lengths import true_length

Predictor = Callable[[Sequence[Request], Rng], Sequence[int | None]]
"""Predicts the output lengths of requests; None where it has nothing to go by."""


def oracle() -> Predictor:
    """Predict the truth."""
    return lambda requests, rng: [true_length(request) for request in requests]


def noisy(sigma: float) -> Predictor:
    """Predict the truth times a lognormal factor of median 1, rounded, at least 1.

    The same generator gives the same draws for every sigma, so that two of them differ by it alone. A
    prediction may exceed `max_tokens`: clipped, it would be right half the time where that is the truth.

    Args:
        sigma: Standard deviation of the factor's logarithm; 0 is the oracle.
    """
    sigma = real("sigma", sigma)

    def predict(requests: Sequence[Request], rng: Rng) -> Sequence[int | None]:
        factors = np.exp(sigma * rng.standard_normal(len(requests))).tolist()
        pairs = zip(requests, factors, strict=True)
        # No request is predicted longer than a float counts by one.
        return [max(1, round(min(2.0**53, true_length(request) * factor))) for request, factor in pairs]

    return predict


def buckets(width: int) -> Predictor:
    """Predict the upper end of the bucket of lengths that the truth lies in (as S³, NeurIPS'23, reserves).

    Args:
        width: Tokens of a bucket: 1 to `width` are the first.
    """
    width = count("width", width)
    return lambda requests, rng: [-(-true_length(request) // width) * width for request in requests]


def constant(tokens: int) -> Predictor:
    """Predict the same length for every request.

    Args:
        tokens: The predicted length.
    """
    tokens = count("tokens", tokens)
    return lambda requests, rng: [tokens] * len(requests)


def history(token_seconds: float = 0.05) -> Predictor:
    """Predict the mean length of the client's answers that were finished when the request arrived.

    No run has happened yet, so an answer of n tokens counts as finished n · `token_seconds` after its
    request's arrival, as if that had not waited. A client without finished answers is predicted nothing.

    Args:
        token_seconds: Seconds that a token of output takes.
    """
    token_seconds = real("token_seconds", token_seconds)

    def predict(requests: Sequence[Request], rng: Rng) -> Sequence[int | None]:
        predicted: list[int | None] = [None] * len(requests)
        known: defaultdict[str, list[int]] = defaultdict(list)
        under_way: list[tuple[float, int]] = []
        for place in sorted(range(len(requests)), key=lambda place: requests[place].arrival):
            request = requests[place]
            while under_way and under_way[0][0] <= request.arrival:
                earlier = requests[heappop(under_way)[1]]
                known[earlier.client].append(true_length(earlier))
            lengths = known[request.client]
            predicted[place] = round(sum(lengths) / len(lengths)) if lengths else None
            heappush(under_way, (request.arrival + true_length(request) * token_seconds, place))
        return predicted

    return predict


PREDICTORS: Mapping[str, Callable[..., Predictor]] = MappingProxyType(
    {factory.__name__: factory for factory in (oracle, noisy, buckets, history, constant)}
)
"""The predictors that are known by name."""


def predict(requests: Requests, predictor: str | Predictor, rng: Rng) -> list[Request | Rejected]:
    """Return the requests with `predicted_output` set, in the given order.

    Args:
        requests: The workload; a `Rejected` is passed on.
        predictor: A predictor, or its name with options after a colon: "oracle", "noisy:sigma=0.5",
            "buckets:width=64", "history" or "history:token_seconds=0.02", "constant:tokens=100".
        rng: The random generator.

    Raises:
        TypeError: An entry is no request, or the workload no list of them.
        ValueError: The name or an option is unknown, missing or out of range.
    """
    chosen = names.build("predictor", predictor, PREDICTORS) if isinstance(predictor, str) else predictor
    require(callable(chosen), "predictor", chosen, "give a function, or a name such as 'oracle'")
    requests = listed(requests)
    known = [request for request in requests if isinstance(request, Request)]
    predicted = list(chosen(known, rng))
    if len(predicted) != len(known):
        raise ValueError(f"{len(predicted)} predictions for {len(known)} requests; give each request one")
    pairs = zip(known, predicted, strict=True)
    told = (replace(request, predicted_output=length) for request, length in pairs)
    return [next(told) if isinstance(request, Request) else request for request in requests]
