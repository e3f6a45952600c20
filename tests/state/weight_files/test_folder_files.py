import json
import os
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from echelon.errors import UserError
from echelon.state.weight_files import folder_files, read_headers, read_json

INDEX = "model.safetensors.index.json"
TENSORS = {f"t{i}": torch.rand(10) for i in range(5)}


def write_shards(folder: Path) -> None:
    weight_map = {name: f"shard-{int(name[1]) // 2}.safetensors" for name in TENSORS}
    for file in set(weight_map.values()):
        save_file({n: t for n, t in TENSORS.items() if weight_map[n] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def test_shards_by_their_index(tmp_path: Path) -> None:
    write_shards(tmp_path)
    headers = read_headers(tmp_path)
    assert headers.errors == []
    assert {name: tensor.path.name for name, tensor in headers.tensors.items()} == {
        name: f"shard-{int(name[1]) // 2}.safetensors" for name in TENSORS
    }


def test_the_single_file_wins_over_an_index(tmp_path: Path) -> None:
    write_shards(tmp_path)
    save_file({"t0": torch.rand(3)}, tmp_path / "model.safetensors")
    assert read_headers(tmp_path).names == {"t0"}


def test_errors_of_json(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for content, said in ((b"{", "is damaged"), (b"\xff\xfe", "is damaged"), (b"[1]", "holds a list")):
        path.write_bytes(content)
        with pytest.raises(UserError, match=said):
            read_json(path)
    with pytest.raises(UserError, match="No such file"):
        read_json(tmp_path / "other.json")


def test_no_weights(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    headers = read_headers(tmp_path)
    assert "holds neither model.safetensors nor" in headers.errors[0]
    assert not headers.is_listed
    assert read_headers(tmp_path / "nowhere").errors == [f"{tmp_path / 'nowhere'}: there is no such folder"]


def test_all_errors_of_shards_at_once(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / "shard-0.safetensors").unlink()
    save_file({"t2": TENSORS["t2"], "stranger": TENSORS["t3"]}, tmp_path / "shard-1.safetensors")
    (tmp_path / "shard-2.safetensors").write_bytes(b"no tensors")
    headers = read_headers(tmp_path)
    assert len(headers.errors) == 4
    assert "shard-0.safetensors: cannot be read" in headers.errors[0]
    assert headers.errors[1] == f"shard-1.safetensors: does not hold t3, which {INDEX} lists"
    assert headers.errors[2] == f"shard-1.safetensors: holds stranger, which {INDEX} does not list"
    assert "shard-2.safetensors: cannot be read" in headers.errors[3]
    assert (set(headers.tensors), headers.unreadable) == ({"t2"}, {"t0", "t1", "t3", "t4"})
    assert headers.is_listed


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": ["t0"]}])
def test_an_index_without_a_map(tmp_path: Path, index: object) -> None:
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert "must hold a 'weight_map'" in read_headers(tmp_path).errors[0]


def test_an_index_does_not_lead_out_of_its_folder(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    save_file(TENSORS, tmp_path / "secret.safetensors")
    weight_map = {"t0": "../secret.safetensors", "t1": 7, "t2": str(tmp_path / "secret.safetensors")}
    (inside / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    headers = read_headers(inside)
    assert len(headers.errors) == 3
    assert "'../secret.safetensors' is not the name of a file beside it" in headers.errors[0]
    assert headers.tensors == {}


def test_half_a_character_in_an_index_is_refused_in_words(tmp_path: Path) -> None:
    weight_map = {"t0": "a\ud800.safetensors", "t\udfff": "b.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    file, name = read_headers(tmp_path).errors
    assert r"weight_map: 'a\ud800.safetensors' is not the name of a file beside it" in file
    assert r"weight_map: the name 't\udfff' has half a character; must be Unicode text" in name


def test_an_index_of_many_files_is_read_in_time_that_grows_with_their_number(tmp_path: Path) -> None:
    weight_map = {f"t{number}": f"{number}.safetensors" for number in range(10_000)}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    begin = time.process_time()
    assert len(read_headers(tmp_path).errors) == 10_000
    assert time.process_time() - begin < 5, "each file is looked for in all names"
    weight_map["t"] = "t.safetensors"
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert "lists 10001 files; must list 10000 at most" in read_headers(tmp_path).errors[0]


def test_large_json_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_files, "MOST_BYTES", 8)
    path = tmp_path / "config.json"
    path.write_text('{"a": 1}')
    assert read_json(path) == {"a": 1}
    path.write_text('{"a": 1}\n')
    with pytest.raises(UserError, match="has 9 bytes; must have 8 at most"):
        read_json(path)


def test_json_is_not_read_from_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(UserError, match="is not a regular file"):
        read_json(tmp_path / "config.json")


def test_what_is_listed(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    headers = read_headers(tmp_path)
    assert (headers.is_listed, headers.names, headers.unreadable) == (True, set(TENSORS), set())
    (tmp_path / "model.safetensors").write_bytes(b"")
    headers = read_headers(tmp_path)
    assert (headers.is_listed, headers.names, len(headers.errors)) == (False, set(), 1)
