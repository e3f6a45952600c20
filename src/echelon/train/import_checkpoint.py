"""Another system's checkpoint as one of echelon's: weights and the state of the optimizer, by names.

`engine.load` goes on from it under any plan. Options of groups (lr, …) and the number of steps come along
where the other checkpoint has them.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from echelon.errors import UserError
from echelon.state.checkpoint.manifest import Manifest
from echelon.state.checkpoint.part_writer import lay_out
from echelon.state.checkpoint.rank_save import SaveOptions, save_alone
from echelon.state.ownership import VALUE, Slice
from echelon.state.weight_files.foreign.tensors import (
    PARAMETERS,
    Described,
    ForeignOptimizer,
    ForeignTensors,
)
from echelon.state.weight_files.layout import whole
from echelon.version import VERSION


class Written(NamedTuple):
    tensors: int
    num_bytes: int
    names: frozenset[str]  # of the other system, that were read


def write_checkpoint(out: Path, foreign: ForeignTensors, prefix: str, names: Sequence[str]) -> Written:
    """Write the weights `names`, without `prefix`, and all that the optimizer keeps of them."""
    optimizer = _optimizer(foreign, prefix, names)
    stored = {name.removeprefix(prefix): name for name in names}
    for alias in [*foreign.aliases, *_tied(foreign, stored, optimizer)]:
        stored.pop(alias.removeprefix(prefix), None)
    described: dict[Slice, torch.dtype] = {}
    for name, origin in stored.items():
        described |= _place(name, VALUE, foreign.shapes[origin])
    for (name, part), each in optimizer.shapes.items():
        described |= _place(name, part, each)

    def read(box: Slice) -> Tensor:
        is_weight = box.part == VALUE
        tensor = foreign.read(stored[box.name]) if is_weight else optimizer.read(box.name, box.part)
        return tensor.to(described[box]).contiguous()

    layouts = lay_out(0, list(described.items()))
    steps = optimizer.steps if foreign.steps is None else foreign.steps
    about = Manifest(
        step=steps,
        plan="data=1",
        ranks=1,
        saved=datetime.now(UTC).isoformat(timespec="seconds"),
        versions={"echelon": VERSION, "torch": torch.__version__},
        groups=optimizer.groups,
        extra={"imported from": foreign.kind},
    )
    numbers = {"steps": steps, "begun steps": steps, "skipped steps": 0}
    save_alone(out, about, numbers, [(layout, read) for layout in layouts], SaveOptions())
    num_bytes = sum(box.numel * dtype.itemsize for box, dtype in described.items())
    return Written(len(described), num_bytes, frozenset(stored.values()))


def _place(name: str, part: str, described: Described) -> dict[Slice, torch.dtype]:
    shape, dtype = described
    return {Slice(name, part, shape, *whole(shape)): dtype}


def _optimizer(foreign: ForeignTensors, prefix: str, names: Sequence[str]) -> ForeignOptimizer:
    """The optimizer's state by the names of weights without their prefix, with which some systems list it."""
    found = None if foreign.optimizer is None else foreign.optimizer()
    if found is None or not found.shapes:
        raise UserError(
            f"{foreign.kind}: has no state of an optimizer by names of parameters; import the weights alone: "
            "leave out --to checkpoint"
        )
    short = {name.removeprefix(prefix) for name in names}
    owners = {name for name, _ in found.shapes}
    origins = {name: name if owners <= short else f"{prefix}{name}" for name in short}
    unknown = sorted(owners - set(origins.values()))
    if unknown:
        raise UserError(f"the optimizer has state of what is no weight here: {', '.join(unknown[:5])}")
    renamed = {origin: name for name, origin in origins.items()}
    groups = [
        {**group, PARAMETERS: sorted(renamed[name] for name in group[PARAMETERS] if name in renamed)}
        for group in found.groups
    ]
    return ForeignOptimizer(
        {(renamed[name], part): each for (name, part), each in found.shapes.items()},
        lambda name, part: found.read(origins[name], part),
        groups,
    )


def _tied(foreign: ForeignTensors, stored: dict[str, str], optimizer: ForeignOptimizer) -> list[str]:
    """Further names of tied weights: equal to a weight that the optimizer has, and not in the optimizer."""
    trained = {name for name, _ in optimizer.shapes}
    by_shape: dict[Described, list[str]] = {}
    for name in trained:
        by_shape.setdefault(foreign.shapes[stored[name]], []).append(name)
    return [
        name
        for name, origin in stored.items()
        if name not in trained
        and any(
            torch.equal(foreign.read(origin), foreign.read(stored[each]))
            for each in by_shape.get(foreign.shapes[origin], ())
        )
    ]
