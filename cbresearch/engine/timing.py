"""Tell the device's time from the host's."""

from collections.abc import Callable

import torch


class DeviceTimer:
    """Measure the seconds from the first to the last thing that a device was given to do.

    A CPU does it at once, so the clock tells. A GPU does it later: events in its queue tell.

    Args:
        device: Where it is done.
        clock: Seconds, for a CPU.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = 0.0
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if device.type == "cuda":
            self._events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))

    def start(self) -> None:
        """Note that work is about to be given."""
        if self._events is None:
            self._began = self._clock()
        else:
            self._events[0].record()

    def stop(self) -> float:
        """Wait until the work is done and return the seconds that it took."""
        if self._events is None:
            return self._clock() - self._began
        first, last = self._events
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / 1e3
