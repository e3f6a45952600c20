"""The log of an asynchronous training as a tensor: what ranks send each other of it."""

from collections.abc import Iterable

import torch
from torch import Tensor

from echelon.runtime import Push


def pack_log(log: Iterable[Push]) -> Tensor:
    """A row of four integers for each entry."""
    return torch.tensor(list(log), dtype=torch.int64).view(-1, len(Push._fields))


def unpack_log(rows: Tensor) -> list[Push]:
    return [Push(*row) for row in rows.tolist()]
