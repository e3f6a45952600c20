"""The view of layers on a sequence that the ranks along `context` share."""

from abc import abstractmethod
from typing import final

import torch
from torch import Tensor

from echelon.collectives import Group
from echelon.nn.sequence import View
from echelon.parallel.context.all_to_all import all_to_all_attention
from echelon.parallel.context.parts import positions
from echelon.parallel.context.ring import ring_attention


class SharedView(View):
    """This rank's part of a sequence that the ranks of `group`, along `context`, share.

    sequence.assign(model, RingView(mesh.group("context")), wrapping)
    logits = model(take(tokens, group.rank, group.size))
    """

    def __init__(self, group: Group) -> None:
        self.parts = group.size
        self._group = group

    def positions(self, length: int, device: torch.device) -> Tensor:
        return self._in_sequence(positions(length, self._group.rank, self._group.size, device))

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor: ...


@final
class RingView(SharedView):
    """Keys and values travel around the ring of ranks."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        return ring_attention(query, key, value, self._group, scale)


@final
class AllToAllView(SharedView):
    """Each rank attends with a part of the heads, over the whole sequence."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        return all_to_all_attention(query, key, value, self._group, scale)
