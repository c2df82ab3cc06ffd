"""What tables and reports hold a run against: the promise to its clients, and the price of its machines."""

from dataclasses import dataclass

from cbresearch.checks import real
from cbresearch.metrics.slo import Slo

__all__ = ["Reporting"]


@dataclass(frozen=True, slots=True)
class Reporting:
    """Declare promise and price where tables are made; a run itself needs neither.

    Attributes:
        slo: What was promised; without it tables have no goodput.
        price_per_hour: Price of an hour of all machines that served a run; without it tables have no costs.
        currency: Currency of the price.

    Raises:
        TypeError: The SLO is something else.
        ValueError: The price is not a finite number of 0 or more.
    """

    slo: Slo | None = None
    price_per_hour: float | None = None
    currency: str = "USD"

    def __post_init__(self) -> None:
        if not isinstance(self.slo, Slo | None):
            raise TypeError(f"slo is {self.slo!r}; give an Slo, such as Slo(ttft=1.0), or leave it out")
        if self.price_per_hour is not None:
            real("price_per_hour", self.price_per_hour)
