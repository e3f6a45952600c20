"""Random numbers that depend on a sample, and not on the process that loads it; and batches of no sample."""

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from echelon.nn.hashing import WEYL, mix


@contextmanager
def seeded(*numbers: int) -> Iterator[Callable[..., None]]:
    """Seed torch, numpy and Python inside; gives a function that seeds again. Then all go on as before."""
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
        mixed = mix((mixed ^ number) + WEYL)
    torch.default_generator.manual_seed(mixed)
    np.random.seed(mixed % 2**32)
    random.seed(mixed)


def without_samples(batch: Any) -> Any:
    """Return a batch of the same form with no sample in it."""
    if isinstance(batch, torch.Tensor):
        return batch[:0]
    if isinstance(batch, Mapping):
        return {name: without_samples(value) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(without_samples, batch))
    return type(batch)(map(without_samples, batch)) if isinstance(batch, tuple | list) else batch
