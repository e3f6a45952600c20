"""Checkpoints of DeepSpeed: universal ones, those of ZeRO 1 to 3 (zero.py), and those without ZeRO.

zero/NAME/fp32.pt, exp_avg.pt, …      universal: each parameter whole; of ZeRO 3 as one row of values
zero/optimizer_state.pt               options of the optimizer's groups
*_optim_states.pt                     ZeRO: rows of values
*mp_rank_00_model_states.pt           names and shapes; buffers and frozen parameters (zero.py)
"""

import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from echelon.errors import UserError
from echelon.state.weight_files.foreign.restricted_pickle import load_torch
from echelon.state.weight_files.foreign.tensors import (
    STEP,
    ForeignOptimizer,
    ForeignTensors,
    as_step,
    describe,
)
from echelon.state.weight_files.foreign.zero import OPTIMIZER_FILES, ModelStates, first_state, open_zero

LATEST, _UNIVERSAL = "latest", "zero"
_MASTER, _COMMON = "fp32.pt", "optimizer_state.pt"
_MODEL_FILES = "*mp_rank_*_model_states.pt"


def find_deepspeed(folder: Path) -> Path | None:
    """The folder of the checkpoint that is meant: itself, or that which `latest` names; None: it is none."""
    for each in (folder, *_latest(folder)):
        if (each / _UNIVERSAL).is_dir() or any(each.glob(OPTIMIZER_FILES)) or any(each.glob(_MODEL_FILES)):
            return each
    return None


def _latest(folder: Path) -> list[Path]:
    for name in (f"{LATEST}_universal", LATEST):
        if (folder / name).is_file():
            tag = (folder / name).read_text(encoding="utf-8").strip()
            return [folder / tag] if Path(tag).name == tag else []
    return []


def open_deepspeed(folder: Path) -> ForeignTensors:
    if (folder / _UNIVERSAL).is_dir():
        return _open_universal(folder)
    return open_zero(folder) if any(folder.glob(OPTIMIZER_FILES)) else _open_plain(folder)


def _open_plain(folder: Path) -> ForeignTensors:
    states = ModelStates.read(folder)
    tensors = {name: each.detach() for name, each in states.module.items()}
    if not tensors:
        raise UserError(f"{folder}: its *_model_states.pt hold no tensors of a module")
    return ForeignTensors(
        "DeepSpeed without ZeRO",
        {name: describe(each) for name, each in tensors.items()},
        tensors.__getitem__,
        steps=states.steps,
    )


def _open_universal(folder: Path) -> ForeignTensors:
    files = {path.parent.name: path.parent for path in sorted((folder / _UNIVERSAL).glob(f"*/{_MASTER}"))}
    if not files:
        raise UserError(f"{folder / _UNIVERSAL}: has no parameter with a {_MASTER}")
    states = ModelStates.read(folder) if any(folder.glob(_MODEL_FILES)) else ModelStates.none()
    shapes = states.shape_of

    def read(name: str, part: str = _MASTER) -> Tensor:
        return _in_shape(_read_universal(files[name] / part), shapes.get(name))

    about = {name: describe(read(name)) for name in files}
    return states.complete(
        "DeepSpeed universal", about, read, lambda: _universal_optimizer(folder, files, states)
    )


def _in_shape(tensor: Tensor, shape: tuple[int, ...] | None) -> Tensor:
    """A row of values, as those of ZeRO 3 are, in the parameter's shape."""
    is_row = shape is not None and tensor.dim() == 1 and len(tensor) == math.prod(shape)
    return tensor.view(shape) if is_row and shape is not None else tensor


def _read_universal(path: Path) -> Tensor:
    loaded = load_torch(path)
    tensor = loaded.get("param") if isinstance(loaded, dict) else loaded
    if path.stem == STEP and isinstance(tensor, int | float | Tensor):
        return as_step(tensor)
    if not isinstance(tensor, Tensor):
        raise UserError(f"{path}: holds no tensor under 'param'")
    return tensor.detach()


def _universal_optimizer(folder: Path, files: Mapping[str, Path], states: ModelStates) -> ForeignOptimizer:
    path = folder / _UNIVERSAL / _COMMON
    common: Any = load_torch(path) if path.is_file() else {}
    common_step = as_step(first_state(common).get(STEP, states.steps))

    @cache
    def has_step(name: str) -> bool:
        return (files[name] / f"{STEP}.pt").is_file()

    def read(name: str, part: str) -> Tensor:
        if part == STEP and not has_step(name):
            return common_step
        return _in_shape(_read_universal(files[name] / f"{part}.pt"), states.shape_of.get(name))

    parts = [
        (name, each.stem)
        for name, place in files.items()
        for each in sorted(place.glob("*.pt"))
        if each.name != _MASTER
    ]
    parts += [(name, STEP) for name in {name for name, _ in parts} if not has_step(name)]
    shapes = {key: describe(read(*key)) for key in parts}
    return ForeignOptimizer(shapes, read, states.groups(common.get("param_groups")))
