import os
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from echelon.errors import UserError
from echelon.state.weight_files.tensor_file import (
    DTYPES,
    LENGTH,
    TensorEntry,
    check_types,
    read_header,
    write_tensor_file,
)

MIXED = {
    "small": torch.rand(3).bfloat16(),  # 6 bytes: a wider type behind it would not be aligned
    "flags": torch.tensor([True, False, True]),
    "wide": torch.rand(2, 3, dtype=torch.float64),
    "scalar": torch.tensor(1.5),
    "empty": torch.zeros(0, 4),
    "ünïcode": torch.rand(5, 2).T,  # not contiguous
}


def entries_of(tensors: dict[str, Tensor]) -> list[TensorEntry]:
    return [TensorEntry(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]


def test_safetensors_reads_mixed_types(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_tensor_file(path, entries_of(MIXED), iter(MIXED.values()))
    loaded = load_file(path)
    assert loaded.keys() == MIXED.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in MIXED.items())
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_every_tensor_is_aligned_to_its_type(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_tensor_file(path, entries_of(MIXED), iter(MIXED.values()))
    assert all(tensor.begin % tensor.dtype.itemsize == 0 for tensor in read_header(path).values())


def test_every_type_is_written(tmp_path: Path) -> None:
    tensors = {str(dtype): torch.zeros(3).to(dtype) for dtype in DTYPES.values()}
    write_tensor_file(tmp_path / "a", entries_of(tensors), iter(tensors.values()))
    assert {name: tensor.dtype for name, tensor in load_file(tmp_path / "a").items()} == {
        str(dtype): dtype for dtype in DTYPES.values()
    }


def test_a_type_that_safetensors_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a: is torch.complex128, which safetensors does not have"):
        write_tensor_file(tmp_path / "f", [TensorEntry("a", (1,), torch.complex128)], iter(()))


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path) -> None:
    made: list[weakref.ref[Tensor]] = []

    def make() -> Iterator[Tensor]:
        for _ in range(4):
            assert all(reference() is None for reference in made)
            tensor = torch.rand(10)
            made.append(weakref.ref(tensor))
            yield tensor
            del tensor

    entries = [TensorEntry(f"t{i}", (10,), torch.float32) for i in range(4)]
    write_tensor_file(tmp_path / "model.safetensors", entries, make())
    assert len(made) == 4


def test_a_failed_write_leaves_neither_the_name_nor_a_part(tmp_path: Path) -> None:
    seen = []

    def fail_halfway() -> Iterator[Tensor]:
        yield torch.rand(10)
        seen.extend(path.name for path in tmp_path.iterdir())
        raise ConnectionError("a peer has gone")

    entries = [TensorEntry(f"t{i}", (10,), torch.float32) for i in range(2)]
    with pytest.raises(ConnectionError):  # of what makes the tensors: not an error of the folder
        write_tensor_file(tmp_path / "model.safetensors", entries, fail_halfway())
    assert seen == [".model.safetensors.part"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("tensors", "received"),
    [
        ([torch.rand(3)], r"\[3\] of torch.float32"),
        ([torch.rand(2).double()], r"\[2\] of torch.float64"),
        ([], "nothing"),
    ],
)
def test_tensors_must_be_those_that_the_header_has(
    tmp_path: Path, tensors: list[Tensor], received: str
) -> None:
    said = rf"a must be \[2\] of torch.float32, received {received}; give the tensors in the order"
    with pytest.raises(UserError, match=said):
        write_tensor_file(tmp_path / "f", [TensorEntry("a", (2,), torch.float32)], iter(tensors))
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot be written: .*No such file or directory"):
        write_tensor_file(tmp_path / "nowhere" / "f", [], iter(()))


def test_names_are_written_as_text(tmp_path: Path) -> None:
    write_tensor_file(tmp_path / "f", entries_of(MIXED), iter(MIXED.values()))
    content = (tmp_path / "f").read_bytes()
    (length,) = LENGTH.unpack(content[: LENGTH.size])
    header = content[LENGTH.size : LENGTH.size + length]
    assert length % 8 == 0
    assert header.startswith(b'{"__metadata__":{"format":"pt"},"wide":{"dtype":"F64","shape":[2,3],')
    assert '"ünïcode":{"dtype":"F32","shape":[2,5],"data_offsets":[52,92]}'.encode() in header
    assert len(header.rstrip()) > length - 8, "no more room than the alignment needs"


def test_a_file_is_on_the_disk_when_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: seen.append((os.fstat(descriptor).st_size, (tmp_path / "f").exists()))
    )
    write_tensor_file(tmp_path / "f", entries_of(MIXED), iter(MIXED.values()))
    assert seen == [((tmp_path / "f").stat().st_size, False)]


def test_a_weight_is_written_without_its_graph(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.rand(3))
    write_tensor_file(tmp_path / "f", [TensorEntry("a", (3,), torch.float32)], iter([weight]))
    assert torch.equal(load_file(tmp_path / "f")["a"], weight)


def test_all_types_that_cannot_be_written_are_named() -> None:
    types = {"a": torch.complex128, "b": torch.int8, "c": torch.qint8}
    with pytest.raises(UserError) as refusal:
        check_types("a folder", [TensorEntry(name, (1,), dtype) for name, dtype in types.items()])
    named = [error.split(",")[0] for error in refusal.value.errors]
    assert named == ["a: is torch.complex128", "c: is torch.qint8"]
