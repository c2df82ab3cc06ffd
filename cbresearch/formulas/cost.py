"""What tokens cost on a machine that is paid for by the hour."""

from cbresearch.formulas.checks import non_negative, positive

__all__ = ["cost_per_million_tokens"]


def cost_per_million_tokens(price_per_hour: float, tokens_per_second: float) -> float:
    """Return the price of a million tokens, 10⁶·p/(3600·R), in the currency of p.

    The machine is paid for whether it is busy or not. R counts what is sold: output tokens, or prompt and
    output tokens together.

    Args:
        price_per_hour: Price p of an hour of all machines that serve, in any currency.
        tokens_per_second: Tokens R that they give per second, on average over the time paid for.
    """
    non_negative(price_per_hour=price_per_hour)
    positive(tokens_per_second=tokens_per_second)
    return price_per_hour * 1e6 / (3600 * tokens_per_second)
