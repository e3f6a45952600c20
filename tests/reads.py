"""Proves that code reads no value out of a tensor: what would wait for a CUDA device, without one."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from torch import Tensor

_READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__")


class HasReadError(AssertionError):
    """A value was read."""


@contextmanager
def no_reads() -> Iterator[None]:
    """Reading any tensor inside raises `HasReadError`, also from the CPU."""

    def refuse(name: str) -> object:
        def read(*_: object) -> None:
            raise HasReadError(f"Tensor.{name} inside")

        return read

    with mock.patch.multiple(Tensor, **{name: refuse(name) for name in _READS}):
        yield
