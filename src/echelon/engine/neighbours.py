"""Samples of other replicas, for an audit: where each has only one, or all must compute the same."""

import math
import zlib
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

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
    own = leaf[:1].detach().to(device).contiguous().view(-1).view(torch.uint8)
    gathered = own.new_empty(group.size, len(own))
    group.all_gather(gathered, own)
    places = [0, group.size - 1]  # a stage may have several ranks of each replica, one after the other
    return gathered[places].view(-1).view(leaf.dtype).view(2, *leaf.shape[1:]).to(leaf.device)


def share_samples(batch: Any, mesh: Mesh, agreement: RankAgreement, *, always: bool = False) -> Any:
    """The samples of replica 0, on every one, where replicas gather weights together (zero=3), or `always`: a
    model that runs other modules for other samples would make them gather, or compare, different ones."""
    if mesh.plan.data == 1 or mesh.plan.sync == "async" or not (always or mesh.plan.zero == 3):
        return batch
    leaves, tree = tree_flatten(batch)
    forms = agreement.gather(
        [[list(t.shape), str(t.dtype).removeprefix("torch.")] for t in leaves if isinstance(t, Tensor)]
    )
    remaining = iter(forms[mesh.layout.group("data", mesh.rank)[0]])
    group = mesh.group("data")

    def receive(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        shape, name = next(remaining)
        dtype = getattr(torch, name)
        data = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8, device=mesh.device)
        if group.rank == 0:
            data.copy_(leaf.detach().to(mesh.device).contiguous().view(-1).view(torch.uint8))
        group.broadcast(data)
        return data.view(dtype).view(shape)

    with group.ledger.about("checks"):
        return tree_unflatten([receive(leaf) for leaf in leaves], tree)
