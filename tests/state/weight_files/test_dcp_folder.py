from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint as dcp

from echelon.errors import UserError
from echelon.state.weight_files.dcp_folder import write_dcp
from echelon.state.weight_files.tensor_file import TensorEntry

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
