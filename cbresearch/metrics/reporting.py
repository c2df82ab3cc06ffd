"""What tables of metrics are judged by: a promise and a price."""

import math
from dataclasses import dataclass

from cbresearch.metrics.slo import Slo


@dataclass(frozen=True, slots=True)
class Reporting:
    """The terms of a report, needed only where tables are made of runs.

    Attributes:
        slo: The promise to the clients, for goodput; None for no such row.
        price_per_hour: Price of an hour of the machine, for the cost of tokens; None for no such row.
        currency: Of the price.

    Raises:
        ValueError: The price is below 0 or not finite.
    """

    slo: Slo | None = None
    price_per_hour: float | None = None
    currency: str = "USD"

    def __post_init__(self) -> None:
        if self.price_per_hour is not None and not 0 <= self.price_per_hour < math.inf:
            raise ValueError(
                f"price_per_hour is {self.price_per_hour!r}; give a finite price of 0 or more"
            )
