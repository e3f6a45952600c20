"""engine.save: what an engine tells a checkpoint beside the slices that it owns.

groups           options of the optimizer's groups, with the names of their parameters
state_numbers    state of the optimizer that is no tensor
(random)         where nothing is seeded: the random state of each rank
extra state      what modules return from get_extra_state: a tensor, or plain data as JSON
temporary        buffers that are not persistent, if training has changed them
"""

import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor, nn

from echelon.collectives.agreement import check_on_every_rank, gather_values
from echelon.collectives.mesh import Mesh
from echelon.engine.saving.learned import LEARNED, learned
from echelon.errors import UserError, raise_errors
from echelon.parallel.stage import LocalStages
from echelon.state.bounded_json import parse_json
from echelon.state.checkpoint import Manifest
from echelon.state.checkpoint.manifest import Number
from echelon.state.ownership import ENGINE, OwnedSlice, Slice
from echelon.state.weight_files.tensor_file import DTYPES
from echelon.update.update import Update
from echelon.version import VERSION

RANDOM = "(random)"  # the name of random states; no parameter can have it
JSON = "json"  # the part of a module's extra state that is plain data
EXTRA_STATE = "_extra_state"  # torch's name for it, behind that of the module
PARAMETERS = "parameters"  # the names of a group's parameters, among its options

_PLAIN = (bool, int, float, str, type(None), tuple, list, Tensor)


def describe(mesh: Mesh, step: int, update: Update, extra: Mapping[str, Any]) -> Manifest:
    """What a manifest says beside tensors and files; all ranks must call this."""
    numbers: dict[str, dict[str, Number]] = {}
    check_on_every_rank(lambda: numbers.update(_state_numbers(update)))
    rows = gather_values([_groups(update), numbers], mesh.group("all"), mesh.device)
    return Manifest(
        step=step,
        plan=str(mesh.plan),
        ranks=mesh.plan.ranks,
        saved=datetime.now(UTC).isoformat(timespec="seconds"),
        versions={"echelon": VERSION, "torch": torch.__version__},
        groups=_joined(group for groups, _ in rows for group in groups),
        state_numbers={name: of_name for _, by_name in rows for name, of_name in by_name.items()},
        extra=dict(extra),
    )


def _groups(update: Update) -> list[dict[str, Any]]:
    """The options of this rank's groups, with the names of their parameters."""
    names = {tensor: name for name, tensor in update.updated_tensors()}
    return [
        {**_options(group), PARAMETERS: sorted({names[p] for p in group["params"] if p in names})}
        for group in update.optimizer.param_groups
    ]


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a parameter group, as plain values."""
    plain = {name: value for name, value in group.items() if name not in ("params", "param_names")}
    return {
        name: value.item() if isinstance(value, Tensor) else value
        for name, value in plain.items()
        if isinstance(value, _PLAIN)
    }


def _joined(groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups of all ranks: those with the same options are one."""
    joined: dict[str, tuple[dict[str, Any], set[str]]] = {}
    for group in groups:
        options = {name: value for name, value in group.items() if name != PARAMETERS}
        joined.setdefault(json.dumps(options, sort_keys=True), (options, set()))[1].update(group[PARAMETERS])
    return [{**options, PARAMETERS: sorted(names)} for options, names in joined.values()]


def _state_numbers(update: Update) -> dict[str, dict[str, Number]]:
    """State that is no tensor: numbers. None is as good as nothing; anything else is refused."""
    numbers: dict[str, dict[str, Number]] = {}
    errors = []
    for name, tensor in update.updated_tensors():
        for key, value in update.optimizer.state.get(tensor, {}).items():
            if isinstance(value, bool | int | float):
                numbers.setdefault(name, {})[key] = value
            elif value is not None and not isinstance(value, Tensor):
                errors.append(f"{name}: its state {key!r} is a {type(value).__name__}")
    kind = type(update.optimizer).__name__
    raise_errors(f"the state of optimizer {kind}, which must be tensors or numbers to be saved", errors)
    return numbers


def check_storable(owned: Iterable[OwnedSlice]) -> None:
    """Refuse tensors of types that a safetensors file cannot hold."""
    known = set(DTYPES.values())
    raise_errors(
        "the state of this engine, which cannot be saved",
        [
            f"{each.slice.name} ({each.slice.part}) is of type {each.tensor.dtype}, which no safetensors "
            "file holds; use another type"
            for each in owned
            if each.tensor.dtype not in known
        ],
    )


def own_number(part: str, value: float | Tensor) -> OwnedSlice:
    """A number of the engine's own."""
    return OwnedSlice(Slice(ENGINE, part, (), (), ()), torch.as_tensor(value))


def own_learned(mesh: Mesh, local: LocalStages) -> OwnedSlice:
    """What this rank has learned in its first step."""
    data = bytearray(json.dumps(learned(local)).encode())
    return _bytes(LEARNED, f"rank {mesh.rank}", torch.frombuffer(data, dtype=torch.uint8))


def owned_random(mesh: Mesh, seed: int | None) -> list[OwnedSlice]:
    """The random state of this rank, if dropout draws from it."""
    if seed is not None:
        return []
    return [_bytes(RANDOM, part, state) for part, state in _random_states(mesh).items()]


def _random_states(mesh: Mesh) -> dict[str, Tensor]:
    states = {f"cpu of rank {mesh.rank}": torch.get_rng_state()}
    if mesh.device.type == "cuda":
        states[f"cuda of rank {mesh.rank}"] = torch.cuda.get_rng_state(mesh.device)
    return states


def owned_extra_state(module: nn.Module) -> list[OwnedSlice]:
    """Extra state of modules that is plain data; tensors are among the buffers."""
    owned, errors = [], []
    for name, each in extra_state_modules(module).items():
        value = each.get_extra_state()
        if isinstance(value, Tensor):
            continue
        try:
            data = json.dumps(value).encode()
            parse_json(data)  # what is saved can be loaded
        except (TypeError, ValueError, RecursionError) as error:
            errors.append(
                f"{name}: get_extra_state() of {type(each).__name__} returns a {type(value).__name__}; it "
                f"must return a tensor, or lists, dicts, strings and numbers ({error})"
            )
            continue
        owned.append(_bytes(name, JSON, torch.frombuffer(bytearray(data), dtype=torch.uint8)))
    raise_errors("the extra state of modules, which cannot be saved", errors)
    return owned


def extra_state_modules(module: nn.Module) -> dict[str, nn.Module]:
    """The modules of this rank that have extra state, by its name in the state dict."""
    return {
        f"{path}.{EXTRA_STATE}".removeprefix("."): each
        for path, each in module.named_modules()
        if type(each).get_extra_state is not nn.Module.get_extra_state
    }


def _bytes(name: str, part: str, data: Tensor) -> OwnedSlice:
    shape = tuple(data.shape)
    return OwnedSlice(Slice(name, part, shape, (0,) * len(shape), shape), data)


def unfinished(path: str) -> UserError:
    """An engine of which some of the state is a checkpoint's."""
    return UserError(
        f"this engine has a part of its state from {path}, whose load has failed, and a part from before; "
        "load a whole checkpoint with engine.load, or start again"
    )
