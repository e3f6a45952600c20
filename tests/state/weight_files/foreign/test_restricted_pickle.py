"""Pickle files give tensors and plain values, and run nothing."""

import io
import os
import pickle
from collections import OrderedDict
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest
import torch

from echelon.errors import UserError
from echelon.state.weight_files.foreign.restricted_pickle import Inert, load_pickle, load_torch, plain


class Evil:
    """Would make a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


class Settings:
    """A class of a system that is not installed."""

    def __init__(self) -> None:
        self.rate = 0.5


class Stage(IntEnum):
    """An enumeration of such a system."""

    WEIGHTS = 3


class Rebuilt:
    """Would have torch's function for tensors with attributes call another one."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return torch._tensor._rebuild_from_type_v2, (os.mkdir, torch.Tensor, (str(self.path),), {})


class Listed(list[int]):
    """A list of such a system."""


def test_tensors_and_plain_values_are_as_they_were(tmp_path: Path) -> None:
    state = OrderedDict(a=torch.arange(4.0), b=torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)))
    saved = {"module": state, "shape": state["a"].shape, "type": torch.float16, "names": {"x"}, "step": 3}
    torch.save(saved, tmp_path / "a.pt")
    loaded = load_torch(tmp_path / "a.pt")
    assert torch.equal(loaded["module"]["a"], state["a"])
    assert torch.equal(loaded["module"]["b"], state["b"])
    assert (loaded["shape"], loaded["type"], loaded["names"], loaded["step"]) == (
        (4,),
        torch.float16,
        {"x"},
        3,
    )


def test_nothing_of_a_file_runs(tmp_path: Path) -> None:
    evil = tmp_path / "evil"
    torch.save({"a": torch.ones(2), "b": Evil(evil)}, tmp_path / "a.pt")
    assert torch.equal(load_torch(tmp_path / "a.pt")["a"], torch.ones(2))
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(Evil(evil)))
    assert isinstance(load_pickle(tmp_path / "a.pkl"), Inert)
    assert not evil.exists()


def test_objects_of_other_classes_keep_their_state(tmp_path: Path) -> None:
    (tmp_path / "a.pkl").write_bytes(pickle.dumps([Settings(), Listed([1, 2])]))
    settings, listed = load_pickle(tmp_path / "a.pkl")
    assert settings.rate == 0.5
    assert type(settings).name.endswith("Settings")
    assert isinstance(listed, Inert)


def test_tensors_with_attributes_and_members_of_enumerations_keep_their_values(tmp_path: Path) -> None:
    tensor = torch.nn.Parameter(torch.arange(3.0))
    tensor.ds_id = "0_7"  # type: ignore[attr-defined]
    marked = torch.arange(4.0)
    marked.ds_id = "0_8"  # type: ignore[attr-defined]
    torch.save({"a": tensor, "b": marked, "stage": Stage.WEIGHTS, "step": 2}, tmp_path / "a.pt")
    loaded = load_torch(tmp_path / "a.pt")
    assert torch.equal(loaded["b"], marked)
    assert (plain(loaded["stage"]), plain(loaded["step"])) == (3, 2)


def test_a_tensor_with_attributes_is_made_by_functions_for_tensors_alone(tmp_path: Path) -> None:
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(Rebuilt(tmp_path / "evil")))
    with pytest.raises(UserError, match="makes no tensor"):
        load_pickle(tmp_path / "a.pkl")
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("data", [b"", b"no pickle", b"\x80\x04."])
def test_damaged_files_are_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.pkl").write_bytes(data)
    with pytest.raises(UserError, match="is damaged, or is no pickle file"):
        load_pickle(tmp_path / "a.pkl")
    with pytest.raises(UserError, match="is damaged, or was saved by a torch before"):
        load_torch(tmp_path / "a.pkl")
    with pytest.raises(UserError, match="a chunk: is damaged"):
        load_torch(io.BytesIO(data), "a chunk")
    with pytest.raises(UserError, match="cannot be read"):
        load_pickle(tmp_path / "nothing")
