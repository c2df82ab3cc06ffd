"""What a run cost, from the price of its machine."""

from cbresearch.checks import real
from cbresearch.metrics.basic import fraction, output_throughput, total_throughput
from cbresearch.trace import Trace

__all__ = ["cost_per_million_tokens", "cost_per_million_total_tokens"]


def cost_per_million_tokens(trace: Trace, price_per_hour: float) -> float | None:
    """Return what a million output tokens cost, in the currency of the price.

    The machine is paid for from the first arrival to the last token, idle times included. None if nothing was
    generated, or in no time, or if no float is as large.

    Args:
        trace: The run.
        price_per_hour: Price of an hour of all machines that served it, in any currency.

    Raises:
        ValueError: The price is not a finite number of 0 or more.
    """
    return _cost(price_per_hour, output_throughput(trace))


def cost_per_million_total_tokens(trace: Trace, price_per_hour: float) -> float | None:
    """Return what a million tokens cost, prompts and outputs together, in the currency of the price.

    A prompt counts once its answer begins. None if nothing was generated, or in no time, or if no
    float is as large.

    Args:
        trace: The run.
        price_per_hour: Price of an hour of all machines that served it, in any currency.

    Raises:
        ValueError: The price is not a finite number of 0 or more.
    """
    return _cost(price_per_hour, total_throughput(trace))


def _cost(price_per_hour: float, tokens_per_second: float | None) -> float | None:
    price = real("price_per_hour", price_per_hour)
    return fraction(price * 1e6, tokens_per_second and 3600 * tokens_per_second)
