"""How fairly clients were served."""

from collections import defaultdict
from collections.abc import Iterable

from cbresearch.metrics.basic import sample_of
from cbresearch.trace import Trace


def jain_index(shares: Iterable[float]) -> float | None:
    """Return Jain's fairness index (Σx)²/(n·Σx²): 1 if all shares are equal, 1/n if one has everything.

    Source: Jain, Chiu and Hawe, DEC TR-301, 1984.

    Args:
        shares: One a client, none negative.

    Returns:
        None without clients, or if nobody has anything.

    Raises:
        ValueError: A share is negative or not finite.
    """
    sample = sample_of(shares)
    if sample.size and sample.min() < 0:
        raise ValueError(f"a share is {float(sample.min())!r}; none may be negative")
    squares = float((sample**2).sum())
    return float(sample.sum()) ** 2 / (sample.size * squares) if squares else None


def service_by_client(
    trace: Trace, prompt_weight: float = 1.0, output_weight: float = 2.0
) -> dict[str, float]:
    """Return the weighted tokens that each client was served, w_p · prompt + w_q · output.

    Source: the weights of VTC, Sheng et al., OSDI 2024, 3.1; prompts count once their answer has begun.

    Args:
        trace: The run.
        prompt_weight: w_p of a prompt token.
        output_weight: w_q of an output token.
    """
    service: dict[str, float] = defaultdict(float)
    for record in trace.requests:
        prompt = record.num_prompt_tokens or 0 if record.tokens else 0
        service[record.client] += prompt_weight * prompt + output_weight * len(record.tokens)
    return dict(service)
