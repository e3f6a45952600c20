"""What real files of DeepSpeed's ZeRO have beside rows: enumerations, paddings, the optimizer's state."""

from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest
import torch

from echelon.errors import UserError
from echelon.state.weight_files.foreign.zero import ModelStates, open_zero


class Stage(IntEnum):
    """As DeepSpeed's ZeroStageEnum."""

    GRADIENTS = 2


# a a a . b b | b b c . . .     two ranks; each parameter is padded to 4 values, and c to the end
SHAPES = {"a": (3,), "b": (2, 2), "c": (1,)}
ROW = torch.tensor([1.0, 2.0, 3.0, -1.0, 4.0, 5.0, 6.0, 7.0, 8.0, -1.0, -1.0, -1.0])
PADDINGS = [[1, 0, 0]]


def save(folder: Path, **changes: Any) -> Path:
    for rank, part in enumerate(ROW.chunk(2)):
        kept = {"exp_avg": part.clone() / 2, "exp_avg_sq": part**2, "step": torch.tensor(3.0)}
        options = {"lr": 0.1, "betas": (0.9, 0.999), "params": [0], "hook": Stage}
        state = {
            "zero_stage": Stage.GRADIENTS,
            "partition_count": [2],
            "param_alignment_paddings": PADDINGS,
            "single_partition_of_fp32_groups": [part[: len(part) - 3 * rank].clone()],
            "base_optimizer_state": {"state": {0: kept}, "param_groups": [options]},
            **changes,
        }
        name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": state}, folder / name)
    model = {"module": {}, "param_shapes": [SHAPES], "global_steps": 4}
    torch.save(model, folder / "mp_rank_00_model_states.pt")
    return folder


def test_paddings_behind_parameters_are_left_out(tmp_path: Path) -> None:
    foreign = open_zero(save(tmp_path))
    assert (foreign.kind, foreign.steps) == ("DeepSpeed ZeRO-2", 4)
    assert {name: foreign.read(name).tolist() for name in foreign.shapes} == {
        "a": [1.0, 2.0, 3.0],
        "b": [[4.0, 5.0], [6.0, 7.0]],
        "c": [8.0],
    }


def test_the_state_of_the_optimizer_is_cut_as_the_weights(tmp_path: Path) -> None:
    foreign = open_zero(save(tmp_path))
    assert foreign.optimizer is not None
    optimizer = foreign.optimizer()
    assert optimizer.read("b", "exp_avg").tolist() == [[2.0, 2.5], [3.0, 3.5]]
    assert optimizer.read("c", "exp_avg_sq").tolist() == [64.0]
    assert optimizer.read("a", "step") == torch.tensor(3.0)
    assert optimizer.groups == [{"lr": 0.1, "betas": (0.9, 0.999), "parameters": ["a", "b", "c"]}]
    assert optimizer.shapes.keys() == {
        (name, part) for name in SHAPES for part in ("exp_avg", "exp_avg_sq", "step")
    }


def test_an_elastic_checkpoint_has_states_without_options(tmp_path: Path) -> None:
    kept = {"exp_avg": torch.arange(6.0), "step": 5}
    foreign = open_zero(save(tmp_path, base_optimizer_state=[kept]))
    assert foreign.optimizer is not None
    optimizer = foreign.optimizer()
    assert (optimizer.groups, optimizer.steps) == ([], 5)
    assert optimizer.read("a", "exp_avg").tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"zero_stage": "two"}, "have no zero_stage"),
        ({"partition_count": [2, 1]}, "experts differ between ranks"),
        ({"partition_count": None}, "have no partition_count"),
        ({"param_alignment_paddings": [[1, 0]]}, "are not of the groups of its param_shapes"),
        ({"single_partition_of_fp32_groups": None}, "the float32 weights"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        open_zero(save(tmp_path, **changes))


def test_a_state_that_a_group_lacks_is_refused(tmp_path: Path) -> None:
    model = {"module": {}, "param_shapes": [{"a": (3,)}, {"b": (2, 2)}]}
    rows = {"single_partition_of_fp32_groups": [torch.ones(2), torch.ones(2)], "partition_count": [2, 2]}
    save(tmp_path, **rows, param_alignment_paddings=None)
    torch.save(model, tmp_path / "mp_rank_00_model_states.pt")
    foreign = open_zero(tmp_path)
    assert foreign.optimizer is not None
    with pytest.raises(UserError, match="not every rank has exp_avg of every group"):
        foreign.optimizer()


def test_frozen_parameters_that_zero_3_has_cut_are_put_together(tmp_path: Path) -> None:
    for rank, part in enumerate(([1.0, 2.0], [3.0, 99.0])):
        states = {
            "module": {"a": torch.empty(0), "frozen": torch.empty(0), "buffer": torch.ones(2)},
            "param_shapes": [{"a": (4,)}],
            "frozen_param_shapes": {"frozen": (3, 1)},
            "frozen_param_fragments": {"frozen": torch.tensor(part)},
        }
        torch.save(states, tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    states = ModelStates.read(tmp_path)
    assert states.shape_of == {"a": (4,)}
    assert {name: each.tolist() for name, each in states.others.items()} == {
        "buffer": [1.0, 1.0],
        "frozen": [[1.0], [2.0], [3.0]],
    }


def test_what_zero_1_does_not_list_is_in_its_module(tmp_path: Path) -> None:
    module = {"a": torch.ones(2), "tied": torch.ones(2), "frozen": torch.tensor([5.0])}
    saved = {"module": module, "param_shapes": [{"a": (2,)}], "shared_params": {"tied": "a"}}
    torch.save(saved | {"global_steps": 7}, tmp_path / "mp_rank_00_model_states.pt")
    states = ModelStates.read(tmp_path)
    assert (list(states.others), states.aliases, states.steps) == (["frozen"], {"tied": "a"}, 7)
    groups = states.groups([{"lr": 0.5, "params": [0, 1]}, "nothing"])
    assert groups == [{"lr": 0.5, "parameters": ["a"]}]


def test_a_folder_without_such_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="which names the parameters"):
        ModelStates.read(tmp_path)
    torch.save([1], tmp_path / "mp_rank_00_model_states.pt")
    with pytest.raises(UserError, match="hold no states of DeepSpeed"):
        ModelStates.read(tmp_path)
