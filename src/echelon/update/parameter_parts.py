"""The place of this rank's parts in whole parameters: for optimizers that need more than single elements.

A local tensor is a run of the elements of a parameter (zero), which itself may be a part of the whole one
(tensor, expert). Either way it is a few boxes of the whole parameter.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from echelon.collectives.mesh import Mesh
from echelon.parallel.layer_sharding import LayerSharding
from echelon.parallel.stage import LocalStages
from echelon.plan import Plan
from echelon.state.assembly import exchange_slices
from echelon.state.ownership import LocalParameter, OwnedSlice, Slice, own_run
from echelon.update.optim.sum_optimizer import Exchange, Part, Round, whole_box
from echelon.update.precision.stepper import LocalStepper
from echelon.update.precision.whole_stepper import PartRoute, Routes, WholeRoute


def has_parts(plan: Plan) -> bool:
    """Return whether a rank may update a part of a parameter."""
    return plan.zero > 0 or plan.tensor > 1 or plan.expert > 1


class LocalBoxes(NamedTuple):
    """A local parameter as boxes of the whole one."""

    local: LocalParameter
    sharing: int  # the number of its sharing on this rank
    slices: list[Slice]  # of this rank's part of the parameter
    layers: LayerSharding

    def of(self, tensor: Tensor) -> list[OwnedSlice]:
        """The boxes that a tensor like the local one (its gradient, say) holds, and the memory of each."""
        if len(self.slices) == 1 and self.slices[0].is_whole:
            held = [OwnedSlice(self.slices[0], tensor.detach().view(self.slices[0].sizes))]
        else:
            held = own_run(tensor, self.slices)
        return [box for each in held for box in self.layers.in_whole(each)]

    def held(self) -> list[Slice]:
        """The boxes alone, whether or not the local parameter has memory now."""
        return [box.slice for box in self.of(torch.empty_like(self.local.tensor, device="meta"))]

    def views(self, tensor: Tensor) -> list[Tensor]:
        return [box.tensor for box in self.of(tensor)]


def local_boxes(stages: LocalStages, layers: LayerSharding) -> Iterator[LocalBoxes]:
    """Return the tensors that this rank updates, as boxes of whole parameters."""
    numbers = {sharing: number for number, sharing in enumerate(stages.sharings)}
    for sharing, local in stages.slices():
        yield LocalBoxes(local, numbers[sharing], sharing.slices(local), layers)


def make_exchange(
    stepper: LocalStepper, stages: LocalStages, layers: LayerSharding, mesh: Mesh, device: torch.device
) -> Exchange:
    """Return how an optimizer adds up its sums: over ranks with other parts of the same copy, then, of what
    layers split, over tensor ranks, and of experts over the ranks with the others.

        experts | experts in parts | matrices in parts | all other parameters
    """
    trained = [named for sharing in stages.sharings for named in sharing.parameter_set.trained]

    def kind(named: tuple[str, Tensor]) -> int:
        is_expert, is_split = (each(named[0]) is not None for each in (layers.experts_of, layers.shard_of))
        return int(is_split) if is_expert else 2 if is_split else 3

    ordered = sorted(trained, key=kind)
    ends = [sum(kind(named) < number for named in ordered) for number in (1, 2, 3)]
    index = {parameter: number for number, (_, parameter) in enumerate(ordered)}
    parts: dict[Tensor, Part] = {}
    for boxes in local_boxes(stages, layers):
        updated = stepper.updated(boxes.local)
        held = boxes.held()
        places = [whole_box(each.shape) if each.is_whole else each.box for each in held]
        parts[updated] = Part(index[boxes.local.parameter], places, boxes.views)
    rounds = [Round(mesh.group("shard"), len(ordered), skipped=ends[1])] if mesh.plan.zero else []
    if ends[1]:
        rounds += [Round(mesh.group("expert_shard"), ends[1])] if mesh.plan.zero else []
        rounds += [Round(mesh.group("expert"), ends[1])]
    rounds += [Round(mesh.group("tensor"), ends[2], skipped=ends[0])]
    return Exchange(
        [_whole_shape(name, parameter, layers) for name, parameter in ordered],
        parts,
        [each for each in rounds if each.group.size > 1],
        reduce(torch.promote_types, (p.dtype for _, p in ordered), torch.float32),
        device,
    )


def _whole_shape(name: str, parameter: Tensor, layers: LayerSharding) -> tuple[int, ...]:
    shape = tuple(parameter.shape)
    for shard in layers.shards_of(name):
        shape = shard.whole_shape(shape)
    return shape


_Held = Mapping[str, list[Slice]]  # what a rank holds: the boxes of each copy of a parameter


def make_routes(stages: LocalStages, layers: LayerSharding, mesh: Mesh) -> Routes:
    """Return the routes of parts of parameters to the rank that updates them, and back."""
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
