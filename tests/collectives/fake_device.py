"""A device without a GPU: streams that know when they will have done what they were given so far."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from echelon.collectives.work import CudaDevice, Work


class FakeStream:
    def __init__(self) -> None:
        self.end = 0.0  # in milliseconds, of the last thing that it was given


class FakeEvent:
    def __init__(self, device: "FakeDevice") -> None:
        self._device = device
        self.at = 0.0

    def query(self) -> bool:
        return self.at <= self._device.now

    def synchronize(self) -> None:
        self._device.synchronized += 1
        self._device.now = max(self._device.now, self.at)

    def elapsed_time(self, end_event: "FakeEvent") -> float:
        assert self.query(), "CUDA refuses to read an event that is not complete"
        assert end_event.query(), "CUDA refuses to read an event that is not complete"
        return torch.tensor(end_event.at - self.at, dtype=torch.float32).item()  # as precise as CUDA


class FakeDevice(CudaDevice):
    """`now` is how far the device has come, in milliseconds; the host gives work to its streams before."""

    def __init__(self) -> None:
        self.now = 0.0
        self.stream = FakeStream()  # the current one
        self.num_events = 0
        self.synchronized = 0

    def new_event(self) -> FakeEvent:
        self.num_events += 1
        return FakeEvent(self)

    def record(self, event: FakeEvent) -> None:
        event.at = self.stream.end

    @contextmanager
    def on_stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def compute(self, milliseconds: float) -> None:
        """Give work to the current stream."""
        self.stream.end += milliseconds


class FakeWork(Work):
    """An operation on the device that ends at a known time: to wait for it makes the current stream wait."""

    def __init__(self, device: FakeDevice, end: float, tensor: torch.Tensor | None = None) -> None:
        self._device, self._end, self._tensor = device, end, tensor

    def wait(self) -> None:
        self._device.stream.end = max(self._device.stream.end, self._end)
