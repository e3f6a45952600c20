"""A model without memory (echelon.deferred) becomes this rank's part of it, and is never whole anywhere.

deferred        parameters are on the meta device: shapes and types, no memory
split           tensor and pipeline parallelism cut what has no memory
take_memory     for what this rank holds; at zero=3 for one unit after the other, each cut at once
fill            one tensor after the other is computed or read, and the rank keeps its boxes of it
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils import swap_tensors

from echelon.collectives.agreement import check_on_every_rank
from echelon.collectives.mesh import Mesh
from echelon.engine.saving.restore import mark_filled
from echelon.errors import UserError
from echelon.nn.initialization import WeightSource, is_deferred, named_tensors
from echelon.parallel.data import Sharing
from echelon.parallel.expert import experts_of
from echelon.plan import AUTO, Plan
from echelon.state.ownership import OwnedSlice, whole_slice

InWhole = Callable[[OwnedSlice], list[OwnedSlice]]  # a box of this rank's part as boxes of the whole tensor


def weight_source(
    model: nn.Module, plan: Plan, weights: str | Path | None, device: torch.device
) -> WeightSource | None:
    """What the model starts with, if it is deferred or its weights are in a folder."""
    if weights is None and not is_deferred(model):
        return None
    if plan.pipeline == AUTO:
        raise UserError(
            "pipeline=auto measures the layers of a model, and this one has no weights yet; say the stages, "
            "like pipeline=2, or build the model whole"
        )
    if weights is None:
        return WeightSource(model, None, device)  # refused on all ranks alike, if at all
    made: list[WeightSource] = []
    check_on_every_rank(lambda: made.append(WeightSource(model, weights, device)))
    return made[0]


def forget_values(model: nn.Module) -> None:
    """Bring the parameters that have values, among those that have none, to the meta device too."""
    with _without_weak_references([model]):
        for parameter in [p for p in model.parameters() if not p.is_meta]:
            _become(parameter, torch.empty_like(parameter, device="meta"))


def give_buffers(model: nn.Module, source: WeightSource, device: torch.device) -> None:
    """Give buffers, and tensors that are plain attributes, their values, all of them: they are small."""
    given: dict[str, Tensor] = {}  # by first names: what modules share stays shared
    for name, tensor in list(named_tensors(model)):
        if tensor.is_meta and not isinstance(tensor, nn.Parameter):
            path, _, attribute = name.rpartition(".")
            first = source.first_name(name)
            if first not in given:
                (value,) = source.read(name, [whole_slice(name, tensor)])
                given[first] = value.to(device, tensor.dtype, copy=True)
            setattr(model.get_submodule(path), attribute, given[first])


def take_memory(modules: Iterable[nn.Module], mesh: Mesh) -> None:
    """Bring the parameters that are on the meta device to that of this rank. They stay the same objects.

    Where ZeRO shards them it gives them memory, unit by unit; until then they take none.
    """
    modules = list(modules)
    experts = {p for module in modules for p in experts_of(module)}
    with _without_weak_references(modules):
        for parameter in {p: None for module in modules for p in module.parameters() if p.is_meta}:
            is_sharded = _is_sharded(mesh, "expert_shard" if parameter in experts else "shard")
            memory = _stand_in(parameter, mesh.device) if is_sharded else None
            _become(parameter, torch.empty_like(parameter, device=mesh.device) if memory is None else memory)


def _is_sharded(mesh: Mesh, axis: str) -> bool:
    """Whether ZeRO gives parameters memory that the ranks along `axis` share out."""
    by_ranks = mesh.plan.zero == 3 and mesh.group(axis).size > 1
    return by_ranks or "parameters" in mesh.plan.offload


def _become(parameter: nn.Parameter, memory: Tensor) -> None:
    """Another tensor, also of another device, in the same object."""
    hooks = list((parameter._backward_hooks or {}).values())
    late_hooks = list((parameter._post_accumulate_grad_hooks or {}).values())
    replacement = nn.Parameter(memory, requires_grad=parameter.requires_grad)
    replacement.__dict__.update(parameter.__dict__)
    swap_tensors(parameter, replacement)
    parameter._backward_hooks = parameter._post_accumulate_grad_hooks = None  # type: ignore[assignment]
    for hook in hooks:
        parameter.register_hook(hook)
    for late_hook in late_hooks:
        parameter.register_post_accumulate_grad_hook(late_hook)


@contextmanager
def _without_weak_references(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Recurrent layers keep weak references to their weights, which torch does not swap then."""
    recurrent = [each for module in modules for each in module.modules() if isinstance(each, nn.RNNBase)]
    for layer in recurrent:
        layer._flat_weight_refs = []
    yield
    for layer in recurrent:
        layer._flat_weight_refs = [None if w is None else weakref.ref(w) for w in layer._flat_weights]


@torch.no_grad()
def fill(
    model: nn.Module,
    plan: Plan,
    sharings: Iterable[Sharing],
    in_whole: InWhole,
    source: WeightSource | None,
) -> None:
    """Give the weights that this rank holds their values, if they come from a source; at most one whole
    tensor is there at a time."""
    if source is None:
        return
    for sharing in dict.fromkeys(sharings):
        held = sharing.first_weights()
        for each in held:
            each.tensor.zero_()  # padding belongs to no tensor, and is zeros
        for name, pieces in _by_name(box for each in held for box in in_whole(each)):
            _copy(source, name, pieces)
        sharing.share_first_weights()
    mark_filled(model, plan)


def _copy(source: WeightSource, name: str, pieces: list[OwnedSlice]) -> None:
    values = source.read(name, [piece.slice for piece in pieces])
    for piece, value in zip(pieces, values, strict=True):
        piece.tensor.copy_(value)


def _by_name(boxes: Iterable[OwnedSlice]) -> Iterator[tuple[str, list[OwnedSlice]]]:
    for name, pieces in groupby(sorted(boxes, key=_name), key=_name):
        yield name, list(pieces)


def _name(owned: OwnedSlice) -> str:
    return owned.slice.name


def _stand_in(parameter: Tensor, device: torch.device) -> Tensor:
    """A tensor of the same shape that takes no memory; whoever reads it finds not-a-number."""
    number = float("nan") if parameter.dtype.is_floating_point or parameter.dtype.is_complex else 0
    return torch.full((), number, dtype=parameter.dtype, device=device).expand(parameter.shape)
