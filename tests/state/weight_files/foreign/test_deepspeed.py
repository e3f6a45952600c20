"""Checkpoints in the layouts of DeepSpeed: cut over ranks as its ZeRO does, and put together again."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from echelon.errors import UserError
from echelon.state.weight_files.foreign.deepspeed import find_deepspeed, open_deepspeed

SHAPES = {"a.weight": (3, 5), "a.bias": (3,), "b.weight": (2, 3), "c": (1,)}


class LossScaler:
    """DeepSpeed puts objects of its own classes into the same files."""

    scale = 2.0


def weights() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


def groups(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Two groups of parameters, as with weight decay on matrices alone."""
    matrices = {name: tensor for name, tensor in tensors.items() if tensor.dim() > 1}
    return [matrices, {name: tensor for name, tensor in tensors.items() if name not in matrices}]


def padded(row: Tensor, multiple: int) -> Tensor:
    return torch.cat([row, torch.full((-len(row) % multiple,), 99.0)])


def save_zero(folder: Path, level: int, ranks: int, **about: Any) -> Path:
    """Write what DeepSpeed's save_checkpoint does: ZeRO 1 and 2 cut rows of groups, ZeRO 3 each parameter."""
    tensors = weights()
    tag = folder / "global_step3"
    tag.mkdir(parents=True)
    (folder / "latest").write_text("global_step3")
    flat = [padded(torch.cat([t.flatten() for t in group.values()]), 2 * ranks) for group in groups(tensors)]
    for rank in range(ranks):
        if level < 3:
            own = [row.chunk(ranks)[rank].clone() for row in flat]
            key = "single_partition_of_fp32_groups"
        else:
            own = [
                torch.cat([padded(t.flatten(), ranks).chunk(ranks)[rank] for t in group.values()])
                for group in groups(tensors)
            ]
            key = "fp32_flat_groups"
        state = {"zero_stage": level, "partition_count": [ranks] * 2, key: own, "loss_scaler": LossScaler()}
        name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": state, "ds_version": "0.19.8"}, tag / name)
        model_states = {
            "module": {"running": torch.arange(3.0)} if level < 3 else {},
            "buffer_names": ["running"] if level < 3 else [],
            "param_shapes": [{n: t.shape for n, t in group.items()} for group in groups(tensors)],
            "shared_params": {"tied": "a.weight"},
            **about,
        }
        prefix = f"zero_pp_rank_{rank}_" if level == 3 else ""
        torch.save(model_states, tag / f"{prefix}mp_rank_00_model_states.pt")
    return folder


def read_all(folder: Path) -> dict[str, Tensor]:
    found = find_deepspeed(folder)
    assert found is not None
    foreign = open_deepspeed(found)
    return {name: foreign.read(name) for name in foreign.shapes}


@pytest.mark.parametrize(("level", "ranks"), [(1, 1), (2, 2), (2, 3), (3, 1), (3, 2), (3, 4)])
def test_zero_is_put_together(tmp_path: Path, level: int, ranks: int) -> None:
    read, expected = read_all(save_zero(tmp_path, level, ranks)), weights()
    buffers = {"running"} if level < 3 else set()
    assert read.keys() == {*expected, "tied"} | buffers
    for name, tensor in (expected | {"tied": expected["a.weight"]}).items():
        assert torch.equal(read[name], tensor), name


def test_a_universal_checkpoint_has_a_folder_for_each_parameter(tmp_path: Path) -> None:
    for name, tensor in weights().items():
        folder = tmp_path / "global_step3_universal" / "zero" / name
        folder.mkdir(parents=True)
        torch.save({"param": tensor, "cat_dim": 0}, folder / "fp32.pt")
        torch.save({"param": torch.zeros_like(tensor)}, folder / "exp_avg.pt")
    (tmp_path / "latest_universal").write_text("global_step3_universal")
    read = read_all(tmp_path)
    assert read.keys() == SHAPES.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in weights().items())


def test_a_rank_that_is_missing_is_noticed(tmp_path: Path) -> None:
    folder = save_zero(tmp_path, 2, 2)
    next((folder / "global_step3").glob("*rank_1_mp_rank_00_optim_states.pt")).unlink()
    with pytest.raises(UserError, match=r"was saved by 2 ranks, and has the .* of 1"):
        read_all(folder)


@pytest.mark.parametrize(
    ("about", "says"),
    [
        ({"param_shapes": None}, "have no param_shapes"),
        ({"frozen_param_shapes": {"a": (2,)}}, "the frozen parameter a has 2 values, and the files hold 0"),
        ({"param_shapes": [{"a": torch.Size((1000,))}, {}]}, "values up to a, and the files hold"),
    ],
)
@pytest.mark.parametrize("level", [2, 3])
def test_what_does_not_fit_is_refused(tmp_path: Path, about: dict[str, Any], says: str, level: int) -> None:
    with pytest.raises(UserError, match=says):
        read_all(save_zero(tmp_path, level, 2, **about))


def test_a_model_in_tensor_parallel_parts_must_be_universal(tmp_path: Path) -> None:
    folder = save_zero(tmp_path, 2, 1)
    torch.save({}, folder / "global_step3" / "mp_rank_01_model_states.pt")
    with pytest.raises(UserError, match="make it universal first"):
        read_all(folder)


def test_other_folders_are_none_of_deepspeed(tmp_path: Path) -> None:
    assert find_deepspeed(tmp_path) is None
    (tmp_path / "latest").write_text("../elsewhere")
    assert find_deepspeed(tmp_path) is None


def test_the_test_cuts_what_it_should() -> None:
    """The parts of three ranks have padding, so that the test above could fail."""
    assert all(sum(math.prod(shape) for shape in SHAPES.values()) % each for each in (2, 3, 4))
