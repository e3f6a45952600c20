"""The view of layers on a sequence that the ranks of a ring share."""

from typing import final

import torch
from torch import Tensor

from echelon.collectives import Group
from echelon.context_parallel.parts import positions
from echelon.context_parallel.ring import ring_attention
from echelon.sequence import View


@final
class RingView(View):
    """This rank's part of a sequence that the ranks of `group`, along `context`, share.

    sequence.assign(model, RingView(mesh.group("context")), wrapping)
    logits = model(take(tokens, group.rank, group.size))
    """

    def __init__(self, group: Group) -> None:
        self.parts = group.size
        self._group = group

    def positions(self, length: int, device: torch.device) -> Tensor:
        return positions(length, self._group.rank, self._group.size, device)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        return ring_attention(query, key, value, self._group, scale)
