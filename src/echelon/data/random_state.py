"""Random numbers that depend on a sample, and not on who loads it, or after what."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

_BITS = 2**64 - 1


@contextmanager
def seeded(*numbers: int) -> Iterator[Callable[..., None]]:
    """Inside, torch, numpy and Python draw what these numbers say; afterwards they go on as before.

    Gives a function that seeds them again.
    """
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        _seed(*numbers)
        yield _seed
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


def _seed(*numbers: int) -> None:
    mixed = 0
    for number in numbers:
        mixed = _mix(mixed ^ number)
    torch.default_generator.manual_seed(mixed)
    np.random.seed(mixed % 2**32)
    random.seed(mixed)


def _mix(value: int) -> int:
    """splitmix64: every bit of the value changes about half of the bits of the result."""
    value = (value + 0x9E3779B97F4A7C15) & _BITS
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _BITS
    return value ^ (value >> 31)
