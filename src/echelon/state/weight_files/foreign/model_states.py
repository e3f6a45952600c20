"""DeepSpeed's *_model_states.pt: names and shapes of the parameters that were trained, in the order of ZeRO's
rows, and the tensors that ZeRO does not cut: buffers, frozen parameters."""

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from echelon.errors import UserError
from echelon.state.weight_files.foreign.restricted_pickle import load_torch
from echelon.state.weight_files.foreign.tensors import (
    PARAMETERS,
    Described,
    ForeignOptimizer,
    ForeignTensors,
    Shape,
    describe,
    plain_options,
)


class ModelStates(NamedTuple):
    """`shapes`: of each group's parameters. `module`: what the files hold of the model, `others`: what of it
    no optimizer has. `aliases`: a further name of a tied parameter → its own."""

    shapes: list[dict[str, Shape]]
    module: dict[str, Tensor]
    others: dict[str, Tensor]
    aliases: dict[str, str]
    steps: int

    @classmethod
    def none(cls) -> "ModelStates":
        return cls([], {}, {}, {}, 0)

    @classmethod
    def read(cls, folder: Path) -> "ModelStates":
        """Read the file of all ranks, or with ZeRO 3 those of each."""
        paths = in_order(folder.glob("*mp_rank_*_model_states.pt"))
        if any("mp_rank_00" not in path.name for path in paths):
            raise UserError(
                f"{folder}: its model was split by tensor parallelism; make it universal first "
                "(deepspeed/checkpoint/ds_to_universal.py)"
            )
        if not paths:
            raise UserError(f"{folder}: has no *mp_rank_00_model_states.pt, which names the parameters")
        of_ranks: list[dict[str, Any]] = [load_torch(path) for path in paths]
        if not all(isinstance(each, dict) for each in of_ranks):
            raise UserError(f"{folder}: its *_model_states.pt hold no states of DeepSpeed")
        first = of_ranks[0]
        held = first.get("module")  # None: a pipeline has files of layers
        held = held if isinstance(held, dict) else {}
        module = {str(name): each for name, each in held.items() if isinstance(each, Tensor)}
        shared, steps = first.get("shared_params"), first.get("global_steps")
        aliases = {str(a): str(n) for a, n in shared.items()} if isinstance(shared, dict) else {}
        shapes = _groups_of(first.get("param_shapes") or [])
        trained = {name for group in shapes for name in group}
        # Buffers, and with ZeRO 1 frozen parameters, of which its files have no list; ZeRO 3 leaves empty
        # tensors in the place of parameters.
        others = {n: each.detach() for n, each in module.items() if n not in trained and n not in aliases}
        others |= _frozen(of_ranks, folder)
        return cls(shapes, module, others, aliases, steps if isinstance(steps, int) else 0)

    @property
    def shape_of(self) -> dict[str, Shape]:
        return {name: shape for group in self.shapes for name, shape in group.items()}

    def complete(
        self,
        kind: str,
        shapes: Mapping[str, Described],
        read: Callable[[str], Tensor],
        optimizer: Callable[[], ForeignOptimizer],
    ) -> ForeignTensors:
        """The parameters that `read` puts together, and what else belongs to the model."""
        every = {**shapes, **{name: describe(each) for name, each in self.others.items()}}
        aliases = {alias: name for alias, name in self.aliases.items() if name in every}

        def read_any(name: str) -> Tensor:
            name = aliases.get(name, name)
            return self.others[name] if name in self.others else read(name)

        every |= {alias: every[name] for alias, name in aliases.items()}
        return ForeignTensors(
            kind, every, read_any, optimizer=optimizer, aliases=frozenset(aliases), steps=self.steps
        )

    def groups(self, saved: Any) -> list[dict[str, Any]]:
        """The options of the optimizer's groups; each lists the rows that it has, by number."""
        return [
            {
                **dict(plain_options(group)),
                PARAMETERS: sorted(
                    name
                    for row in group.get("params", ())
                    if isinstance(row, int) and row < len(self.shapes)
                    for name in self.shapes[row]
                ),
            }
            for group in (saved if isinstance(saved, list) else ())
            if isinstance(group, dict)
        ]


def in_order(paths: Any) -> list[Path]:
    """Files by the numbers in their names: rank 10 after rank 9."""
    return sorted(paths, key=lambda path: [int(each) for each in re.findall(r"\d+", path.name)])


def _groups_of(groups: Any) -> list[dict[str, Shape]]:
    groups = [groups] if isinstance(groups, dict) else groups
    if not isinstance(groups, list) or not all(isinstance(each, dict) for each in groups):
        return []
    return [{str(name): tuple(int(n) for n in shape) for name, shape in each.items()} for each in groups]


def _frozen(of_ranks: list[dict[str, Any]], folder: Path) -> dict[str, Tensor]:
    """Frozen parameters: whole in the one file, or with ZeRO 3 cut over those of all ranks."""
    tensors = {}
    for name, shape in (of_ranks[0].get("frozen_param_shapes") or {}).items():
        parts = [(each.get("frozen_param_fragments") or {}).get(name) for each in of_ranks]
        row = [part.detach().flatten() for part in parts if isinstance(part, Tensor)]
        numel = math.prod(shape)
        if sum(map(len, row)) < numel:
            raise UserError(
                f"{folder}: the frozen parameter {name} has {numel} values, and the files hold "
                f"{sum(map(len, row))}; save without exclude_frozen_parameters"
            )
        tensors[str(name)] = torch.cat(row)[:numel].view(tuple(shape))
    return tensors
