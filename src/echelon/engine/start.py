"""The start of a training: the model on its device, in its type, and the same on every rank.

A model without memory is split first, and filled part by part.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils import swap_tensors

from echelon.collectives import Group
from echelon.collectives.agreement import Difference, check_on_every_rank, check_same_text, fingerprint
from echelon.collectives.mesh import Mesh, this_device
from echelon.engine.saving.restore import mark_empty, mark_filled
from echelon.engine.watch.aliases import check_aliases
from echelon.errors import UserError
from echelon.hardware import ignore_torch_warnings
from echelon.launching import join
from echelon.nn.autograd.leaves import hooks_of, set_hooks
from echelon.nn.batch import DTYPES
from echelon.nn.float8 import check_float8
from echelon.nn.huggingface.adapters import scales
from echelon.nn.huggingface.families import frequencies
from echelon.nn.initialization.initial_values import WeightSource, is_deferred, named_tensors
from echelon.parallel.data.buffers import broadcast_packed
from echelon.parallel.data.sharing import Sharing
from echelon.parallel.data.zero.residency import describe
from echelon.parallel.data.zero.weight_access import end_idle
from echelon.parallel.expert.modules import experts_of
from echelon.plan import AUTO, Plan
from echelon.state.ownership import OwnedSlice, whole_slice


def prepare(
    model: nn.Module, plan: Plan, weights: str | Path | None
) -> tuple[nn.Module, WeightSource | None]:
    """The model on this rank's device, in the plan's type; or without memory, and where its weights are.
    The ranks have joined then."""
    ignore_torch_warnings()
    join()
    device = this_device()
    check_float8(plan, device)
    source = weight_source(model, plan, weights, device)
    end_idle(model.parameters())
    check_aliases(model, plan, device if source is None else None, DTYPES[plan.precision])
    if source is not None:
        mark_empty(model, plan)
    return convert(model, device, DTYPES[plan.precision], has_values=source is None), source


def convert(
    model: nn.Module, device: torch.device, dtype: torch.dtype, *, has_values: bool = True
) -> nn.Module:
    """The model on the device, its real numbers in `dtype`; integers and complex numbers stay what they are,
    and so do frequencies of rotary positions: in bf16 they would be off by turns at the 1,000th token. A
    model that gets its values later loses those that it has; it gets the types alone."""
    kept = {id(buffer) for buffer in frequencies(model)}
    target = device if has_values else torch.device("meta")
    if not has_values:  # nor do the parameters that have some among those that have none
        with _without_weak_references([model]):
            for parameter in [p for p in model.parameters() if not p.is_meta]:
                _become(parameter, torch.empty_like(parameter, device="meta"))

    def convert_tensor(t: Tensor) -> Tensor:
        return t.to(target, dtype) if t.is_floating_point() and id(t) not in kept else t.to(target)

    converted: nn.Module = model._apply(convert_tensor)
    return converted


def start_equal(
    model: nn.Module, group: Group, device: torch.device, source: WeightSource | None = None
) -> None:
    """Rank 0's parameters and buffers into everyone's: the only place where ranks are made equal. Of a
    deferred model: the seed of the parameters, which are filled later, and the buffers."""
    _check_same_model(model, group, device, source)
    if source is None:
        _broadcast([*model.parameters(), *model.buffers()], group)
        return
    seed = torch.tensor(source.seed % 2**63, device=device)
    if group.size > 1:
        group.broadcast(seed)
    source.seed = int(seed)
    for tensor in source.constants() if group.size > 1 else []:
        values = tensor.to(device, copy=True)
        _broadcast([values], group)
        tensor.copy_(values)
    give_buffers(model, source, device)
    _broadcast(list(model.buffers()), group)


def _broadcast(tensors: list[Tensor], group: Group) -> None:
    if group.size > 1:
        with group.ledger.about("parameters"):
            broadcast_packed(tensors, group)


def _check_same_model(
    model: nn.Module, group: Group, device: torch.device, source: WeightSource | None
) -> None:
    """Raise, on every rank, unless all have the same tensors, trained and frozen, with or without values."""
    if group.size == 1:
        return
    parameters = list(model.named_parameters())
    lines = [describe(name, p) + ("" if p.requires_grad else ", frozen") for name, p in parameters]
    lines += [describe(name, buffer) for name, buffer in model.named_buffers()]
    # Scales of quantised weights are in no list of tensors, and nothing could make them equal.
    lines += [
        f"{name} with scales of bits {[fingerprint(each) for each in scales(p)]}"
        for name, p in parameters
        if scales(p)
    ]
    lines += ["a model with values"] if source is None else ["a model without values", *source.describe()]
    check_same_text(lines, group, device, _difference_of_models)


def _difference_of_models(difference: Difference) -> str:
    rank, first, other = difference
    return (
        f"ranks 0 and {rank} have different models: rank 0 has {first}, and rank {rank} has {other}; give "
        "parallelize the same model on every rank"
    )


# A model without memory (echelon.deferred) becomes this rank's part of it, and is never whole anywhere.

InWhole = Callable[[OwnedSlice], list[OwnedSlice]]  # a box of this rank's part as boxes of the whole tensor


def weight_source(
    model: nn.Module, plan: Plan, weights: str | Path | None, device: torch.device
) -> WeightSource | None:
    """Return what the model starts with, if it is deferred or its weights are in a folder."""
    if weights is None and not is_deferred(model):
        return None
    if plan.pipeline == AUTO:
        raise UserError(
            "pipeline=auto measures the layers of a model, and this one has no weights yet; say the stages, "
            "like pipeline=2, or build the model whole"
        )
    if weights is None:
        return WeightSource.open(model, None, device)  # refused on all ranks alike, if at all
    made: list[WeightSource] = []
    check_on_every_rank(lambda: made.append(WeightSource.open(model, weights, device)))
    return made[0]


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
    Where ZeRO shards them it gives them memory, unit by unit; until then they take none."""
    modules = list(modules)
    experts = {p for module in modules for p in experts_of(module)}
    with _without_weak_references(modules):
        for parameter in {p: None for module in modules for p in module.parameters() if p.is_meta}:
            shards = mesh.group("expert_shard" if parameter in experts else "shard")
            if "parameters" in mesh.plan.offload or (mesh.plan.zero == 3 and shards.size > 1):
                _become(parameter, _stand_in(parameter, mesh.device))
            else:
                _become(parameter, torch.empty_like(parameter, device=mesh.device))


def _become(parameter: nn.Parameter, memory: Tensor) -> None:
    """Another tensor, also of another device, in the same object."""
    hooks, late_hooks = hooks_of(parameter), list((parameter._post_accumulate_grad_hooks or {}).values())
    replacement = nn.Parameter(memory, requires_grad=parameter.requires_grad)
    replacement.__dict__.update(parameter.__dict__)
    swap_tensors(parameter, replacement)
    parameter._backward_hooks = parameter._post_accumulate_grad_hooks = None  # type: ignore[assignment]
    set_hooks(parameter, hooks, late_hooks)


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
    model: nn.Module, plan: Plan, sharings: Iterable[Sharing], in_whole: InWhole, source: WeightSource | None
) -> None:
    """Give the weights that this rank holds their values, if they come from a source; at most one whole
    tensor is there at a time."""
    if source is None:
        return
    for sharing in dict.fromkeys(sharings):
        held = sharing.first_weights()
        for each in held:
            each.tensor.zero_()  # padding belongs to no tensor, and is zeros
        pieces: dict[str, list[OwnedSlice]] = {}
        for box in (box for each in held for box in in_whole(each)):
            pieces.setdefault(box.slice.name, []).append(box)
        for name, of_name in sorted(pieces.items()):
            values = source.read(name, [piece.slice for piece in of_name])
            for piece, value in zip(of_name, values, strict=True):
                piece.tensor.copy_(value)
        sharing.share_first_weights()
    mark_filled(model, plan)


def _stand_in(parameter: Tensor, device: torch.device) -> Tensor:
    """A tensor of the same shape that takes no memory and reads as not-a-number."""
    number = float("nan") if parameter.dtype.is_floating_point or parameter.dtype.is_complex else 0
    return torch.full((), number, dtype=parameter.dtype, device=device).expand(parameter.shape)
