"""The files of DeepSpeed with names, shapes, and what no optimizer has."""

from pathlib import Path

import pytest
import torch

from echelon.errors import UserError
from echelon.state.weight_files.foreign.model_states import ModelStates


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
