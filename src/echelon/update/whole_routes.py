"""Which rank updates which whole parameter, where ranks hold parts of them.

The ranks of a stage tell each other which boxes they hold. Of those that hold a parameter, the one with the
least to update so far updates it, the largest parameters first: all ranks find the same.
"""

from collections.abc import Mapping, Sequence
from functools import reduce
from math import prod

import torch

from echelon.collectives.mesh import Mesh
from echelon.parallel.layer_sharding import LayerSharding
from echelon.parallel.stage import LocalStages
from echelon.state.assembly import exchange_slices
from echelon.state.ownership import OwnedSlice, Slice
from echelon.update.parameter_parts import LocalBoxes, local_boxes
from echelon.update.precision.whole_stepper import PartRoute, Routes, WholeRoute

_Held = Mapping[str, list[Slice]]  # what a rank holds: the boxes of each copy of a parameter


def make_routes(stages: LocalStages, layers: LayerSharding, mesh: Mesh) -> Routes:
    """How parts of parameters go to the rank that updates them, and back."""
    group = mesh.group("stage")
    boxes = {_key(each, layers, mesh): each for each in local_boxes(stages, layers)}
    held = _exchange(boxes, mesh)
    rank_of = assign(held)
    parts = [PartRoute(each.local, rank_of[key], each.views) for key, each in boxes.items() if key in rank_of]
    wholes = [
        WholeRoute(boxes[key].local, rank, slices)
        for rank, of_rank in enumerate(held)
        for key, slices in of_rank.items()
        if rank_of[key] == group.rank
    ]
    dtypes = (parameter.dtype for parameter in stages.trained())
    dtype = reduce(torch.promote_types, dtypes, torch.float32)
    return Routes(group, sorted(parts, key=lambda route: route.rank), wholes, dtype, mesh.device)


def assign(held: Sequence[_Held]) -> dict[str, int]:
    """The rank that updates each parameter, given what each rank holds.

    >>> box = Slice("P", "value", (4,), (0,), (2,))
    >>> assign([{"P": [box], "Q": [box]}, {"P": [box], "Q": [box]}])
    {'P': 0, 'Q': 1}
    """
    holders: dict[str, list[int]] = {}
    sizes: dict[str, int] = {}
    for rank, of_rank in enumerate(held):
        for key, slices in of_rank.items():
            holders.setdefault(key, []).append(rank)
            sizes[key] = prod(slices[0].shape)
    loads = [0] * len(held)
    rank_of = {}
    for key in sorted(holders, key=lambda key: (-sizes[key], key)):
        rank_of[key] = min(holders[key], key=lambda rank: (loads[rank], rank))
        loads[rank_of[key]] += sizes[key]
    return rank_of


def _key(boxes: LocalBoxes, layers: LayerSharding, mesh: Mesh) -> str:
    """The same on the ranks that hold parts of one copy of a parameter, and on no others."""
    position, name = mesh.position, boxes.local.name
    copy: object = (position.copy,) if mesh.plan.zero else (position.data, position.context)
    if layers.experts_of(name) is not None:  # ranks with different experts have parts of one copy
        copy = mesh.group("expert_copies" if mesh.plan.zero else "experts").rank
    tensor = position.tensor if layers.shard_of(name) is None else None
    return f"{copy} {tensor} {boxes.sharing} {name}"


def _exchange(boxes: Mapping[str, LocalBoxes], mesh: Mesh) -> list[_Held]:
    """What each rank of the stage holds."""
    owned = [
        OwnedSlice(box._replace(name=key), each.local.tensor)
        for key, each in boxes.items()
        for box in each.held()
    ]
    held: list[_Held] = []
    for of_rank in exchange_slices(owned, mesh.group("stage"), mesh.device):
        by_key: dict[str, list[Slice]] = {}
        for each in of_rank:
            by_key.setdefault(each.slice.name, []).append(each.slice)
        held.append(by_key)
    return held
