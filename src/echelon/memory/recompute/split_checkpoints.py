"""checkpoints=split (ZeRO-R's Pa): of a layer's input that all tensor ranks hold alike, each keeps its part.

    forward     rank 0 keeps | x₀ x₁ |   rank 1 keeps | x₂ 0 |      parts of equal size, padded
    backward    all-gather over `tensor`, before the layers run again

Only what is the same on all ranks may be split: the hidden state between whole layers is. Ranks compare every
argument when a layer is first called; one that differs (the hidden state between a column and a row of a
matrix) stays whole on each. So does what has no gradient: masks and tokens, of which there is one for all.
A tensor of equal elements (zeros, at the start of a training) says nothing about the values of later calls:
it stays whole, and ranks compare again in the next call.
"""

import zlib
from typing import final

import torch
from torch import Tensor

from echelon.collectives import Group
from echelon.collectives.fingerprint import device_fingerprint
from echelon.memory.recompute.checkpoints import ArgumentName, Checkpoints, Kept
from echelon.memory.recompute.dense import is_dense, memory_order
from echelon.nn.autograd.saved_tensors import Hooks


@final
class SplitCheckpoints:
    """Keeps parts over a group of ranks; what cannot be split, and the parts, are kept by `inner`."""

    def __init__(self, group: Group, inner: Checkpoints) -> None:
        self._group, self._inner = group, inner
        self._is_same: dict[ArgumentName, bool] = {}

    def keep(self, tensor: Tensor, hooks: Hooks | None, argument: ArgumentName) -> Kept:
        if not self._is_split(tensor, argument):
            return self._inner.keep(tensor, hooks, argument)
        part = _part(tensor.detach(), self._group).requires_grad_()
        return _SplitTensor(self._inner.keep(part, hooks, argument), tensor, self._group)

    def keeps_memory(self, tensor: Tensor, argument: ArgumentName) -> bool:
        return not self._is_split(tensor, argument) and self._inner.keeps_memory(tensor, argument)

    def kept_bytes(self, tensor: Tensor, argument: ArgumentName) -> int:
        if self._is_split(tensor, argument):
            return _part_size(tensor, self._group) * tensor.element_size()
        return self._inner.kept_bytes(tensor, argument)

    def _is_split(self, tensor: Tensor, argument: ArgumentName) -> bool:
        if tensor.layout != torch.strided or not tensor.requires_grad:
            return False
        if argument not in self._is_same:
            is_same, is_constant = _compare(tensor, self._group)
            if is_same and is_constant:
                return False
            self._is_same[argument] = is_same
        return self._is_same[argument] and is_dense(tensor)


@final
class _SplitTensor:
    """This rank's part of a tensor, and what the whole looks like."""

    def __init__(self, part: Kept, tensor: Tensor, group: Group) -> None:
        self._part, self._group = part, group
        self._shape, self._strides = tensor.shape, tensor.stride()

    def take(self) -> Tensor:
        part = self._part.take()
        whole = part.new_empty(len(part) * self._group.size)
        with self._group.ledger.about("checkpoints"):
            self._group.all_gather(whole, part)
        return whole.as_strided(self._shape, self._strides)


def _part_size(tensor: Tensor, group: Group) -> int:
    return -(-tensor.numel() // group.size)


def _part(tensor: Tensor, group: Group) -> Tensor:
    """A copy of this rank's elements, in the order of memory."""
    flat = memory_order(tensor)
    size = _part_size(flat, group)
    own = flat[size * group.rank : size * (group.rank + 1)]
    part = flat.new_zeros(size) if len(own) < size else flat.new_empty(size)
    part[: len(own)] = own
    return part


def _compare(tensor: Tensor, group: Group) -> tuple[bool, bool]:
    """Whether all ranks have the same tensor, and whether all its elements are equal; reads the device. Ranks
    must ask together."""
    form = zlib.crc32(f"{tuple(tensor.shape)}{tensor.stride()}{tensor.dtype}".encode())
    own = torch.cat([device_fingerprint(tensor), torch.tensor([form], device=tensor.device)])
    gathered = own.new_empty(group.size * len(own))
    with group.ledger.about("checks"):
        group.all_gather(gathered, own)
    is_same = (gathered.view(group.size, -1) == own).all()
    flat = tensor.detach().flatten()
    is_same, is_constant = torch.stack([is_same, (flat == flat[:1]).all()]).tolist()
    return is_same, is_constant
