"""Folders that torch.distributed.checkpoint writes, of one process and of two that share a model by FSDP2."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.state.weight_files.foreign.dcp import METADATA, open_dcp, write_dcp
from echelon.state.weight_files.foreign.restricted_pickle import load_pickle
from echelon.state.weight_files.tensor_file import TensorEntry


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3).bfloat16())


def save_sharded(folder: str) -> None:
    """Trains a step by FSDP2 and saves model and optimizer, as torch's tutorial does."""
    model = network().float()
    mesh = init_device_mesh("cpu", (2,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    model(torch.ones(4, 5)).sum().backward()
    optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state, "step": 3}, checkpoint_id=folder)


@pytest.mark.filterwarnings("ignore")  # of torch, about this process group
def test_a_checkpoint_of_fsdp2_is_read_whole(tmp_path: Path, warm_ranks: Callable[[int], Ranks]) -> None:
    warm_ranks(2).run(save_sharded, str(tmp_path / "dcp"))
    foreign = open_dcp(tmp_path / "dcp")
    expected = network().float().state_dict()
    prefix, names = foreign.weights(None)
    assert (prefix, len(list((tmp_path / "dcp").glob("*.distcp")))) == ("model.", 2)
    assert {name.removeprefix("model.") for name in names} == set(expected)
    for name, tensor in expected.items():
        if "running" not in name and "num_batches" not in name:  # the step has changed them
            assert torch.equal(foreign.read(f"model.{name}"), tensor)
    assert "optimizer.state.0.weight.exp_avg" in foreign.shapes
    assert "step" in foreign.skipped


def save(folder: Path, state: dict[str, Any]) -> Path:
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def read_all(folder: Path) -> dict[str, Tensor]:
    foreign = open_dcp(folder)
    return {name: foreign.read(name) for name in foreign.shapes}


@pytest.mark.filterwarnings("ignore")
def test_tensors_of_every_type_and_shape_are_equal(tmp_path: Path) -> None:
    state = network().state_dict() | {"scalar": torch.tensor(3), "empty": torch.empty(0, 4)}
    read = read_all(save(tmp_path / "dcp", dict(state)))
    assert read.keys() == state.keys()
    for name, tensor in state.items():
        assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(read[name], tensor)


@pytest.mark.filterwarnings("ignore")
def test_a_folder_that_is_damaged_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "dcp", dict(network().state_dict()))
    (file,) = folder.glob("*.distcp")
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="is damaged"):
        read_all(folder)
    file.unlink()
    with pytest.raises(UserError, match="is not in the folder"):
        open_dcp(folder)
    (folder / METADATA).write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(UserError, match="is not the metadata of torch"):
        open_dcp(folder)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda _, place: setattr(place, "relative_path", "../outside"), "is not in the folder"),
        (lambda _, place: setattr(place, "transform_descriptors", ["zstd"]), "are changed by"),
        (lambda about, _: about.chunks.clear(), "0 chunks have 0 of 35 values"),
        (lambda about, _: setattr(about, "size", (7, -5)), "are no sizes"),
        (lambda about, _: setattr(about.properties, "state", ("float32",)), "is no type of a tensor"),
    ],
)
def test_metadata_that_lies_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Any, Any], None], says: str
) -> None:
    folder = save(tmp_path / "dcp", {"0.weight": network()[0].weight.detach()})
    metadata = load_pickle(folder / METADATA)
    (place,) = metadata.storage_data.values()
    change(metadata.state_dict_metadata["0.weight"], place)
    monkeypatch.setattr("echelon.state.weight_files.foreign.dcp.load_pickle", lambda _: metadata)
    with pytest.raises(UserError, match=says):
        open_dcp(folder)


TENSORS = {"a.weight": torch.rand(3, 4, dtype=torch.float64), "b": torch.arange(5), "c": torch.tensor(2.5)}
ENTRIES = [TensorEntry(name, tuple(tensor.shape), tensor.dtype) for name, tensor in TENSORS.items()]


def test_torch_loads_what_was_fetched_tensor_by_tensor(tmp_path: Path) -> None:
    fetched: list[tuple[str, int]] = []

    def fetch(name: str) -> torch.Tensor:
        fetched.append((name, len(list(tmp_path.glob("*.distcp")))))
        return TENSORS[name]

    write_dcp(tmp_path, ENTRIES, fetch)
    # Each has a file of its own, which is begun when it is fetched: none waits for others in memory.
    assert sorted(name for name, _ in fetched) == sorted(TENSORS)
    assert sorted(number for _, number in fetched) == [1, 2, 3]
    loaded = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())
    assert set(dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata) == set(TENSORS)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        write_dcp(tmp_path / "file", ENTRIES, TENSORS.__getitem__)


def test_an_error_of_who_makes_the_tensors_is_not_one_of_the_folder(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match=r"a\.weight"):
        write_dcp(tmp_path, ENTRIES, {}.__getitem__)
