"""What a checkpoint has, compared with what an engine needs: names, shapes, types, the optimizer's state."""

import difflib
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import nn

from echelon.engine.saving.checkpoints import EXTRA_STATE
from echelon.engine.saving.temporary_buffers import TEMPORARY
from echelon.state.checkpoint import SavedState
from echelon.state.ownership import MASTER, VALUE, OwnedSlice, StateNames
from echelon.update.optim.state_forms import inner_optimizers, state_forms
from echelon.update.update import Update

_MOST = 20  # names in one list


def name_errors(saved: SavedState, names: StateNames) -> list[str]:
    """Tensors that the checkpoint lacks, and those that the model lacks."""
    needed = {*names.parameters.values(), *names.state.values()}
    stored = {
        name
        for name, parts in saved.manifest.tensors.items()
        if parts.keys() - {TEMPORARY} and not name.startswith("(")
    }
    missing, unexpected = sorted(needed - stored), sorted(stored - needed)
    return [
        *_listed(f"{name} is missing in the checkpoint{_hint(name, unexpected)}" for name in missing),
        *_listed(f"{name} is in the checkpoint, and not in the model" for name in unexpected),
    ]


def _hint(name: str, others: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, others, n=1, cutoff=0.6)
    return f", which has {close[0]}" if close else ""


def _listed(errors: Iterable[str]) -> list[str]:
    found = list(errors)
    more = [f"… and {len(found) - _MOST} more like this"] if len(found) > _MOST else []
    return [*found[:_MOST], *more]


def value_errors(saved: SavedState, held: Iterable[OwnedSlice]) -> list[str]:
    """Weights and buffers of other shapes or kinds of numbers than those that were saved."""
    errors = {}
    for box, dtype in {each.slice: each.tensor.dtype for each in held}.items():
        name, shape = box.name, box.shape
        record = saved.parts(name).get(box.part)
        if record is None or name.endswith(EXTRA_STATE):  # named already, or of any shape
            continue
        if record.shape != shape:
            errors[name] = f"{name} has shape {record.shape} in the checkpoint, and {shape} in the model"
        elif _kind(record.dtype) != _kind(dtype):
            errors[name] = (
                f"{name} is {_text(record.dtype)} in the checkpoint, and {_text(dtype)} in the model"
            )
    return _listed(errors.values())


def _kind(dtype: torch.dtype) -> tuple[bool, bool]:
    return dtype.is_floating_point, dtype.is_complex


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def optimizer_errors(saved: SavedState, update: Update) -> list[str]:
    """State of another optimizer than the one that is here."""
    by_keys: dict[tuple[tuple[str, ...], tuple[str, ...], str], list[str]] = {}
    forms: dict[object, set[str] | None] = {}
    for name, tensor in update.updated_tensors():
        stored = _state_keys(saved, name)
        if not stored:  # never updated
            continue
        # Statistics have the dims of the whole parameter, of which a flat part may be here.
        kind, group = _group_of(update.optimizer, tensor)
        place = (group, tensor.dim(), len(saved.parts(name)[VALUE].shape), tensor.dtype, tensor.device)
        if place not in forms:
            made = state_forms(update.optimizer, tensor)
            forms[place] = None if made is None else set(made)
        here = forms[place]
        if here is not None and here != stored:
            by_keys.setdefault((tuple(sorted(stored)), tuple(sorted(here)), kind), []).append(name)
    return [
        f"the checkpoint has {_and(stored)} of {names[0]}{_more(names)}, and the optimizer here, {kind}, "
        f"keeps {_and(here)}; use the optimizer that saved it, or let this one begin: "
        "load(path, optimizer=False)"
        for (stored, here, kind), names in by_keys.items()
    ]


def _group_of(optimizer: torch.optim.Optimizer, tensor: nn.Parameter) -> tuple[str, int]:
    """The name of the optimizer that updates a tensor, and which group it is in."""
    for each in inner_optimizers(optimizer):
        for group in each.param_groups:
            if any(parameter is tensor for parameter in group["params"]):
                return type(each).__name__, id(group)
    return type(optimizer).__name__, 0


def _state_keys(saved: SavedState, name: str) -> set[str]:
    parts = saved.manifest.tensors.get(name, {}).keys() - {VALUE, MASTER}
    return {*parts, *saved.manifest.state_numbers.get(name, {})}


def _and(keys: Collection[str]) -> str:
    return ", ".join(keys) or "nothing"


def _more(names: Sequence[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
