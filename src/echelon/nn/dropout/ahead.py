"""What keyed dropouts need inside a compiled layer, drawn before it is called.

torch.compile records a layer once and replays it: a look at the open scope would be recorded as a constant.
So the scope is read outside, and the recorded code finds it in tensors.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from echelon.nn.dropout.operators import DROPOUTS
from echelon.nn.dropout.training_position import TrainingPosition, count_uses, current
from echelon.nn.hashing import hash_of, signed

if TYPE_CHECKING:
    from echelon.nn.dropout.modules import KeyedDropout


class DrawsAhead:
    """The draws of one dropout in one call of compiled code. `num_drawn` counts them."""

    def __init__(self, position: TrainingPosition, dropout: "KeyedDropout") -> None:
        layer = dropout.layer
        start = hash_of(position.seed, position.step, layer)
        self.dropout = torch.tensor(id(dropout))  # its number in `DROPOUTS`
        first = position.first_sample
        self.key = torch.tensor([signed(start), position.uses.get(layer, 0)])  # in host memory
        self.first_sample = first if isinstance(first, Tensor) else torch.tensor(first)
        self.num_drawn = 0


@contextmanager
def draw_ahead(dropouts: Iterable["KeyedDropout"]) -> Iterator[None]:
    """Around a call of compiled code with these dropouts inside. Outside every scope it does nothing."""
    position = current()
    dropping = [each for each in dropouts if each.drops] if position is not None else []
    for each in dropping:
        assert position is not None
        each.ahead = DrawsAhead(position, each)
        DROPOUTS[id(each)] = each
    try:
        yield
    finally:
        for each in dropping:
            assert each.ahead is not None
            count_uses(each.layer, each.ahead.num_drawn)
            each.ahead = None
