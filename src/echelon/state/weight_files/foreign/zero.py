"""The files of DeepSpeed's ZeRO. *_optim_states.pt: float32 masters and the optimizer's state, as rows of
values; *_model_states.pt: names and shapes in the order of these rows, and the tensors that are not cut.

ZeRO 1, 2    one row for each group of parameters, of which rank r has the r-th of equal parts
ZeRO 3       one row, where each parameter is cut over all ranks, and padded to be divisible

    ZeRO 1, 2, two ranks    rank 0  a a a a b b     rank 1  b b c c c .     (.: padding)
    ZeRO 3, two ranks       rank 0  a a b b c c     rank 1  a a b b c .

The files are mapped into memory, and a parameter is put together when it is asked for.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from echelon.errors import UserError
from echelon.state.weight_files.foreign.restricted_pickle import load_torch, plain
from echelon.state.weight_files.foreign.tensors import (
    PARAMETERS,
    STEP,
    Described,
    ForeignOptimizer,
    ForeignTensors,
    Shape,
    as_step,
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


OPTIMIZER_FILES = "*_optim_states.pt"
_FLAT = {3: "fp32_flat_groups"}
_PARTITIONS = "single_partition_of_fp32_groups"  # of ZeRO 1 and 2
_Rows = Sequence[Sequence[Tensor]]  # of each rank, of each group


def open_zero(folder: Path) -> ForeignTensors:
    of_ranks = [_optimizer_of(path) for path in in_order(folder.glob(OPTIMIZER_FILES))]
    level = _level(of_ranks[0], folder)
    _check_ranks(of_ranks, folder)
    states = ModelStates.read(folder)
    if not states.shapes:
        raise UserError(f"{folder}: its model states have no param_shapes")
    cut = _Cut(states.shapes, level, len(of_ranks), _paddings(of_ranks[0], states.shapes, folder))
    rows = [_masters(each, level, folder) for each in of_ranks]
    cut.check(rows, folder)
    shapes = {name: (shape, rows[0][0].dtype) for name, shape in states.shape_of.items()}
    return states.complete(
        f"DeepSpeed ZeRO-{level}",
        shapes,
        lambda name: cut.join(rows, name),
        lambda: _optimizer(of_ranks, cut, states, folder),
    )


class _Place(NamedTuple):
    """Where a parameter lies in the row of a group; with ZeRO 3, its part of each rank."""

    group: int
    begin: int
    length: int
    shape: Shape


@final
class _Cut:
    """How parameters are cut over ranks: the same for masters and the optimizer's state."""

    def __init__(
        self, shapes: list[dict[str, Shape]], level: int, ranks: int, paddings: list[list[int]]
    ) -> None:
        """`paddings`: what lies behind each parameter of a row, with `parameter_alignment`."""
        self._is_each_cut, self.places = level == 3, dict[str, _Place]()
        begin = 0
        for group, named in enumerate(shapes):
            begin = begin if level == 3 else 0
            for (name, shape), padding in zip(named.items(), paddings[group], strict=True):
                numel = math.prod(shape)
                length = -(-numel // ranks) if level == 3 else numel
                self.places[name] = _Place(group, begin, length, shape)
                begin += length + padding

    def join(self, rows: _Rows, name: str) -> Tensor:
        """Put a parameter together from the rows of all ranks."""
        group, begin, length, shape = self.places[name]
        if not self._is_each_cut:
            return _cut([of_rank[group] for of_rank in rows], begin, length).view(shape)
        parts = [_cut(of_rank, begin, length) for of_rank in rows]
        return torch.cat(parts)[: math.prod(shape)].view(shape)

    def check(self, rows: _Rows, folder: Path) -> None:
        for name, (group, begin, length, _) in self.places.items():
            parts = (
                rows if self._is_each_cut else [[of_rank[group] for of_rank in rows if group < len(of_rank)]]
            )
            held = min(sum(map(len, part)) for part in parts)
            if held < begin + length:
                raise UserError(
                    f"{folder}: param_shapes name {begin + length} values up to {name}, and the files hold "
                    f"{held}"
                )


def _cut(pieces: Sequence[Tensor], begin: int, length: int) -> Tensor:
    """A range of what the pieces are, one behind the other."""
    found, end = [], begin + length
    for piece in pieces:
        low, high = max(begin, 0), min(end, len(piece))
        if low < high:
            found.append(piece[low:high])
        begin, end = begin - len(piece), end - len(piece)
    return torch.cat(found) if found else torch.empty(0)


def _optimizer_of(path: Path) -> dict[str, Any]:
    loaded = load_torch(path)
    state = loaded.get("optimizer_state_dict") if isinstance(loaded, dict) else None
    if not isinstance(state, dict):
        raise UserError(f"{path}: holds no optimizer_state_dict of DeepSpeed's ZeRO")
    return state


def _level(state: dict[str, Any], folder: Path) -> int:
    level = plain(state.get("zero_stage", 1 if _PARTITIONS in state else None))  # none: its BF16_Optimizer
    if not isinstance(level, int):
        raise UserError(f"{folder}: its optimizer states have no zero_stage")
    return level


def _check_ranks(of_ranks: Sequence[dict[str, Any]], folder: Path) -> None:
    counts = of_ranks[0].get("partition_count")
    counts = counts if isinstance(counts, list) else [counts]
    if not counts or not all(isinstance(each, int) for each in counts):
        raise UserError(f"{folder}: its optimizer states have no partition_count")
    if len(set(counts)) > 1:
        raise UserError(
            f"{folder}: its groups of parameters are cut over {counts} ranks: experts differ between ranks; "
            "make it universal first (deepspeed/checkpoint/ds_to_universal.py)"
        )
    if counts[0] != len(of_ranks):
        raise UserError(
            f"{folder}: was saved by {counts[0]} ranks, and has the {OPTIMIZER_FILES} of {len(of_ranks)}; "
            "put all of them there"
        )


def _paddings(state: dict[str, Any], shapes: list[dict[str, Shape]], folder: Path) -> list[list[int]]:
    saved = state.get("param_alignment_paddings")
    if saved is None:
        return [[0] * len(group) for group in shapes]
    sizes = [len(each) for each in saved] if isinstance(saved, list) else []
    if sizes != [len(group) for group in shapes]:
        raise UserError(f"{folder}: its param_alignment_paddings are not of the groups of its param_shapes")
    return [list(each) for each in saved]


def _masters(state: dict[str, Any], level: int, folder: Path) -> list[Tensor]:
    key = _FLAT.get(level, _PARTITIONS)
    rows = state.get(key)
    if not isinstance(rows, list) or not rows or not all(isinstance(each, Tensor) for each in rows):
        raise UserError(f"{folder}: its optimizer states have no {key}, the float32 weights")
    return [each.detach().flatten() for each in rows]


# The state of the optimizer that ZeRO drives: one tensor for each row.


def _base(state: dict[str, Any]) -> dict[str, Any]:
    """{"state": {row: {"exp_avg": …}}, "param_groups": […]}; elastic checkpoints have the states alone."""
    base = state.get("base_optimizer_state", state.get("optimizer_state_dict"))
    if isinstance(base, list):
        return {"state": dict(enumerate(base))}
    return base if isinstance(base, dict) and isinstance(base.get("state"), dict) else {"state": {}}


def first_state(state: dict[str, Any]) -> dict[str, Any]:
    return next((each for each in _base(state)["state"].values() if isinstance(each, dict)), {})


def _optimizer(
    of_ranks: Sequence[dict[str, Any]], cut: _Cut, states: ModelStates, folder: Path
) -> ForeignOptimizer:
    bases = [_base(each) for each in of_ranks]
    groups = bases[0].get("param_groups")
    steps = {row: group.get(STEP) for group in groups or () for row in group.get("params", ())}

    def rows_of(part: str) -> list[list[Tensor]]:
        try:
            return [
                [base["state"][row][part].detach().flatten() for row in range(len(states.shapes))]
                for base in bases
            ]
        except (KeyError, AttributeError):
            raise UserError(
                f"{folder}: not every rank has {part} of every group of parameters; import the weights alone"
            ) from None

    kept = bases[0]["state"]
    parts = [key for key, each in first_state(of_ranks[0]).items() if isinstance(each, Tensor) and each.dim()]
    rows = {part: rows_of(part) for part in parts}
    for each in rows.values():
        cut.check(each, folder)
    counted = {row: each.get(STEP, steps.get(row)) for row, each in kept.items() if isinstance(each, dict)}

    def read(name: str, part: str) -> Tensor:
        return as_step(counted[cut.places[name].group] or 0) if part == STEP else cut.join(rows[part], name)

    shapes = {
        (name, part): (place.shape, rows[part][0][0].dtype)
        for name, place in cut.places.items()
        for part in parts
    }
    for name, place in cut.places.items():
        if counted.get(place.group) is not None:
            shapes[name, STEP] = describe(read(name, STEP))
    return ForeignOptimizer(shapes, read, states.groups(groups))
