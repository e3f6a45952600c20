import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from echelon.errors import UserError
from echelon.state.weight_files.folder_writer import SHARD_BYTES, split_shards, write_folder
from echelon.state.weight_files.tensor_file import TensorEntry
from echelon.state.weight_files.weight_folder import read_headers

TENSORS = {f"t{i}": torch.full((10,), float(i)) for i in range(5)}  # 40 bytes each
ENTRIES = [TensorEntry(name, (10,), torch.float32) for name in TENSORS]
CONFIG = {"model_type": "none"}


def write(folder: Path, shard_bytes: int, add: float = 0.0) -> None:
    write_folder(folder, ENTRIES, (tensor + add for tensor in TENSORS.values()), CONFIG, shard_bytes)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def assert_reads_back(folder: Path) -> None:
    headers = read_headers(folder)
    assert (headers.errors, headers.names) == ([], set(TENSORS))
    loaded: dict[str, Tensor] = {}
    for file in {tensor.path for tensor in headers.tensors.values()}:
        loaded |= load_file(file)
    assert all(torch.equal(loaded[name], TENSORS[name]) for name in TENSORS)


def test_one_file(tmp_path: Path) -> None:
    write(tmp_path / "made" / "here", shard_bytes=200)
    assert names(tmp_path / "made" / "here") == ["config.json", "model.safetensors"]
    assert json.loads((tmp_path / "made" / "here" / "config.json").read_text()) == CONFIG
    assert_reads_back(tmp_path / "made" / "here")


def test_shards(tmp_path: Path) -> None:
    write(tmp_path, shard_bytes=100)
    shards = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert names(tmp_path) == ["config.json", *shards, "model.safetensors.index.json"]
    assert [sorted(load_file(tmp_path / shard)) for shard in shards] == [["t0", "t1"], ["t2", "t3"], ["t4"]]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 200}
    assert_reads_back(tmp_path)


def test_a_tensor_larger_than_a_shard_stands_alone(tmp_path: Path) -> None:
    write(tmp_path, shard_bytes=1)
    assert len(names(tmp_path)) == 7
    assert_reads_back(tmp_path)


@pytest.mark.parametrize(("first", "second"), [(1000, 100), (100, 1000), (40, 100)])
def test_weights_of_an_earlier_save_do_not_stay(tmp_path: Path, first: int, second: int) -> None:
    """An old model.safetensors beside new shards would win when the folder is read."""
    write(tmp_path, shard_bytes=first, add=100)
    (tmp_path / "tokenizer.json").write_text("{}")
    write(tmp_path, shard_bytes=second)
    assert_reads_back(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    assert len(names(tmp_path)) == {100: 5, 1000: 2}[second]


def test_an_interrupted_save_leaves_no_mixture_of_shards(tmp_path: Path) -> None:
    """The old index names the same files: it would lead to one new shard and two old ones."""
    write(tmp_path, shard_bytes=100, add=100)

    def stop_in_the_second_shard() -> Iterator[Tensor]:
        yield from (TENSORS["t0"], TENSORS["t1"], TENSORS["t2"])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_folder(tmp_path, ENTRIES, stop_in_the_second_shard(), CONFIG, 100)
    assert names(tmp_path) == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert "holds neither model.safetensors nor" in read_headers(tmp_path).errors[0]


def test_more_tensors_than_were_announced(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"more tensors .* than the 1 "):
        write_folder(tmp_path, ENTRIES[:1], TENSORS.values(), CONFIG)
    assert not (tmp_path / "config.json").exists()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        write(tmp_path / "file", shard_bytes=100)


def test_json_is_for_people_too(tmp_path: Path) -> None:
    write_folder(tmp_path, ENTRIES[:1], [TENSORS["t0"]], {"b": 1, "a": [2]})
    assert (tmp_path / "config.json").read_text() == '{\n  "a": [\n    2\n  ],\n  "b": 1\n}\n'


def test_a_shard_is_filled_to_the_last_byte() -> None:
    entries = [TensorEntry("a", (5 * 10**9 - 1,), torch.uint8), TensorEntry("b", (1,), torch.uint8)]
    assert split_shards(entries, SHARD_BYTES) == {"model.safetensors": entries}
    entries[1] = TensorEntry("b", (2,), torch.uint8)
    assert list(split_shards(entries, SHARD_BYTES).values()) == [entries[:1], entries[1:]]
    assert split_shards([], SHARD_BYTES) == {"model.safetensors": []}


def test_a_file_of_others_with_a_similar_name_stays(tmp_path: Path) -> None:
    kept = ("model-1-of-2.safetensors.bak", "other.safetensors", "model.safetensors.md5")
    for name in (*kept, "model-7-of-9.safetensors"):
        (tmp_path / name).write_text("")
    write(tmp_path, shard_bytes=200)
    assert names(tmp_path) == sorted(("config.json", "model.safetensors", *kept))
