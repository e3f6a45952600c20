"""The log of an asynchronous training: which gradient was taken at which version, and what it made."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor


class Push(NamedTuple):
    """Worker `worker` took its step number `step` at version `pulled`, and it went into version `pushed`.

    Version 0 is the start; every update makes the next one. Entries that share `pushed` were averaged.
    """

    worker: int
    step: int
    pulled: int
    pushed: int


def pack_log(log: Iterable[Push]) -> Tensor:
    """A row of four whole numbers for each entry."""
    return torch.tensor(list(log), dtype=torch.int64).view(-1, len(Push._fields))


def unpack_log(rows: Tensor) -> list[Push]:
    return [Push(*row) for row in rows.tolist()]
