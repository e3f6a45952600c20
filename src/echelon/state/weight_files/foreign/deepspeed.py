"""Checkpoints of DeepSpeed: universal ones, and those of ZeRO 1 to 3. Weights are the float32 masters.

universal    zero/NAME/fp32.pt              one whole tensor for each parameter
ZeRO 1, 2    *_optim_states.pt              one row of values for each group of parameters, of which rank r
                                            has the r-th of equal parts
ZeRO 3       *_optim_states.pt              one row of values, where each parameter is cut over all ranks, and
                                            padded to be divisible
ZeRO         *mp_rank_00_model_states.pt    names and shapes of parameters, in their order; buffers

    ZeRO 1, 2, two ranks    rank 0  a a a a b b     rank 1  b b c c c .     (.: padding)
    ZeRO 3, two ranks       rank 0  a a b b c c     rank 1  a a b b c .
"""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from echelon.errors import UserError
from echelon.state.weight_files.foreign.restricted_pickle import load_torch
from echelon.state.weight_files.foreign.tensors import ForeignTensors

LATEST, _UNIVERSAL = "latest", "zero"
_MASTER = "fp32.pt"
_Shape = tuple[int, ...]
_Shapes = list[dict[str, _Shape]]  # of each group of parameters


def find_deepspeed(folder: Path) -> Path | None:
    """The folder of the checkpoint that is meant: itself, or that which `latest` names; None: it is none."""
    for each in (folder, _latest(folder)):
        if each is not None and ((each / _UNIVERSAL).is_dir() or any(each.glob("*_optim_states.pt"))):
            return each
    return None


def _latest(folder: Path) -> Path | None:
    for name in (f"{LATEST}_universal", LATEST):
        if (folder / name).is_file():
            tag = (folder / name).read_text(encoding="utf-8").strip()
            return folder / tag if Path(tag).name == tag else None
    return None


def open_deepspeed(folder: Path) -> ForeignTensors:
    return _open_universal(folder) if (folder / _UNIVERSAL).is_dir() else _open_zero(folder)


def _open_universal(folder: Path) -> ForeignTensors:
    files = {path.parent.name: path for path in sorted((folder / _UNIVERSAL).glob(f"*/{_MASTER}"))}
    if not files:
        raise UserError(f"{folder / _UNIVERSAL}: has no parameter with a {_MASTER}")
    shapes = {name: _about(_universal_tensor(path)) for name, path in files.items()}
    return ForeignTensors("DeepSpeed universal", shapes, lambda name: _universal_tensor(files[name]))


def _universal_tensor(path: Path) -> Tensor:
    loaded = load_torch(path)
    tensor = loaded.get("param") if isinstance(loaded, dict) else loaded
    if not isinstance(tensor, Tensor):
        raise UserError(f"{path}: holds no tensor under 'param'")
    return tensor.detach()


def _about(tensor: Tensor) -> tuple[_Shape, torch.dtype]:
    return tuple(tensor.shape), tensor.dtype


def _open_zero(folder: Path) -> ForeignTensors:
    of_ranks = [_optimizer_of(path) for path in _in_order(folder.glob("*_optim_states.pt"))]
    level, ranks = _number(of_ranks[0], "zero_stage", folder), len(of_ranks)
    about = _model_states(folder)
    shapes = _shapes_of(about, folder)
    rows = [_rows_of(each, level, folder) for each in of_ranks]
    wanted = _number(of_ranks[0], "partition_count", folder)
    if wanted != ranks:
        raise UserError(
            f"{folder}: was saved by {wanted} ranks, and has the *_optim_states.pt of {ranks}; put all of "
            "them there"
        )
    tensors = _whole_groups(shapes, rows, folder) if level < 3 else _cut_parameters(shapes, rows, folder)
    module, aliases = about.get("module"), about.get("shared_params")
    for name in about.get("buffer_names") or ():
        if isinstance(module, dict) and isinstance(module.get(name), Tensor):
            tensors[str(name)] = module[name].detach()
    for alias, original in aliases.items() if isinstance(aliases, dict) else ():
        if original in tensors:
            tensors[str(alias)] = tensors[original]
    return ForeignTensors(
        f"DeepSpeed ZeRO-{level}", {n: _about(t) for n, t in tensors.items()}, tensors.__getitem__
    )


def _in_order(paths: Any) -> list[Path]:
    """Files by the numbers in their names: rank 10 after rank 9."""
    return sorted(paths, key=lambda path: [int(each) for each in re.findall(r"\d+", path.name)])


def _optimizer_of(path: Path) -> dict[str, Any]:
    loaded = load_torch(path)
    state = loaded.get("optimizer_state_dict") if isinstance(loaded, dict) else None
    if not isinstance(state, dict):
        raise UserError(f"{path}: holds no optimizer_state_dict of DeepSpeed's ZeRO")
    return state


def _number(state: dict[str, Any], key: str, folder: Path) -> int:
    value = state.get(key)
    value = max(value) if isinstance(value, list) and value else value
    if not isinstance(value, int):
        raise UserError(f"{folder}: its optimizer states have no {key}")
    return value


def _model_states(folder: Path) -> dict[str, Any]:
    paths = _in_order(folder.glob("*mp_rank_*_model_states.pt"))
    if any("mp_rank_00" not in path.name for path in paths):
        raise UserError(
            f"{folder}: its model was split by tensor parallelism; make it universal first "
            "(deepspeed/checkpoint/ds_to_universal.py)"
        )
    if not paths:
        raise UserError(f"{folder}: has no *mp_rank_00_model_states.pt, which names the parameters")
    loaded = load_torch(paths[0])
    return loaded if isinstance(loaded, dict) else {}


def _shapes_of(about: dict[str, Any], folder: Path) -> _Shapes:
    groups = about.get("param_shapes")
    groups = [groups] if isinstance(groups, dict) else groups
    frozen = about.get("frozen_param_shapes")
    if frozen:
        raise UserError(f"{folder}: has frozen parameters ({len(frozen)}): make it universal first")
    if not isinstance(groups, list) or not all(isinstance(each, dict) for each in groups):
        raise UserError(f"{folder}: its model states have no param_shapes")
    return [{str(name): tuple(int(n) for n in shape) for name, shape in each.items()} for each in groups]


def _rows_of(state: dict[str, Any], level: int, folder: Path) -> list[Tensor]:
    key = "fp32_flat_groups" if level == 3 else "single_partition_of_fp32_groups"
    rows = state.get(key)
    if not isinstance(rows, list) or not rows or not all(isinstance(each, Tensor) for each in rows):
        raise UserError(f"{folder}: its optimizer states have no {key}, the float32 weights")
    flat = [each.detach().flatten() for each in rows]
    return [torch.cat(flat)] if level == 3 and len(flat) > 1 else flat


def _whole_groups(shapes: _Shapes, rows: Sequence[Sequence[Tensor]], folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for number, group in enumerate(shapes):
        parts = [of_rank[number] for of_rank in rows if number < len(of_rank)]
        row, begin = torch.cat(parts) if parts else torch.empty(0), 0
        _check_length(sum(map(math.prod, group.values())), len(row), folder)
        for name, shape in group.items():
            tensors[name] = row[begin : begin + math.prod(shape)].view(shape)
            begin += math.prod(shape)
    return tensors


def _cut_parameters(shapes: _Shapes, rows: Sequence[Sequence[Tensor]], folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    begin, flat = 0, [of_rank[0] for of_rank in rows]
    every = {name: shape for group in shapes for name, shape in group.items()}
    parts = {name: -(-math.prod(shape) // len(rows)) for name, shape in every.items()}
    _check_length(sum(parts.values()), min(map(len, flat)), folder)
    for name, shape in every.items():
        row = torch.cat([each[begin : begin + parts[name]] for each in flat])
        tensors[name] = row[: math.prod(shape)].view(shape)
        begin += parts[name]
    return tensors


def _check_length(needed: int, given: int, folder: Path) -> None:
    if given < needed:
        raise UserError(f"{folder}: param_shapes name {needed} values, and the files hold {given}")
