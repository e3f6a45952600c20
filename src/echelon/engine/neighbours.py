"""Samples of other replicas, for an audit where each has only one."""

import zlib
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from echelon.audit.agreement import RankAgreement
from echelon.collectives import Group
from echelon.mesh import Mesh


def first_samples_of_replicas(batch: Any, mesh: Mesh, agreement: RankAgreement) -> Any | None:
    """The first samples of two replicas, as a batch; None where they have different forms."""
    group = mesh.group("data")
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    form = zlib.crc32(" ".join(f"{tuple(t.shape[1:])}{t.dtype}" for t in tensors).encode())
    least, negative = agreement.least(form, -form)
    if least != -negative or group.size < 2:
        return None
    with group.ledger.about("checks"):
        return tree_map(lambda leaf: _first_two(leaf, group, mesh.device), batch)


def _first_two(leaf: Any, group: Group, device: torch.device) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    # As types that every backend sends.
    first = leaf[:1].detach().to(device, torch.float64 if leaf.is_floating_point() else torch.int64)
    gathered = first.new_empty(group.size, *first.shape[1:])
    group.all_gather(gathered, first.contiguous())
    places = [0, group.size - 1]  # a stage may have several ranks of each replica, one after the other
    return gathered[places].to(leaf.device, leaf.dtype)
