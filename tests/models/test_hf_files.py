import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from echelon.errors import UserError
from echelon.models.hf_files import read_json, read_tensors, write_tensors

TENSORS = {f"t{i}": torch.full((10,), float(i)) for i in range(5)}  # 40 bytes each


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def errors_of(folder):
    with pytest.raises(UserError) as caught:
        read_tensors(folder)
    return caught.value.errors or (caught.value.title,)


def assert_reads_back(folder):
    read = read_tensors(folder)
    assert read.keys() == TENSORS.keys()
    assert all(torch.equal(read[name], TENSORS[name]) for name in TENSORS)


def test_one_file(tmp_path):
    write_tensors(tmp_path, TENSORS, shard_bytes=200)
    assert names(tmp_path) == ["model.safetensors"]
    assert_reads_back(tmp_path)


def test_shards(tmp_path):
    write_tensors(tmp_path, TENSORS, shard_bytes=100)
    shards = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert names(tmp_path) == [*shards, "model.safetensors.index.json"]
    assert [sorted(load_file(tmp_path / shard)) for shard in shards] == [["t0", "t1"], ["t2", "t3"], ["t4"]]
    assert read_json(tmp_path / "model.safetensors.index.json")["metadata"] == {"total_size": 200}
    assert_reads_back(tmp_path)


def test_a_tensor_larger_than_a_shard_stands_alone(tmp_path):
    write_tensors(tmp_path, TENSORS, shard_bytes=1)
    assert len(names(tmp_path)) == 6
    assert_reads_back(tmp_path)


@pytest.mark.parametrize(("first", "second"), [(1000, 100), (100, 1000), (40, 100)])
def test_weights_of_an_earlier_save_do_not_stay(tmp_path, first, second):
    """An old model.safetensors beside new shards would win when the folder is read."""
    write_tensors(tmp_path, {name: tensor + 100 for name, tensor in TENSORS.items()}, shard_bytes=first)
    (tmp_path / "tokenizer.json").write_text("{}")
    write_tensors(tmp_path, TENSORS, shard_bytes=second)
    assert_reads_back(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    assert len(names(tmp_path)) == {100: 4, 1000: 1}[second]


def test_a_failed_write_leaves_neither_the_name_nor_a_part(tmp_path, monkeypatch):
    seen = []

    def fail_halfway(_, path, **__):
        path.write_bytes(b"half")
        seen.extend(names(tmp_path))
        raise OSError("no space left")

    monkeypatch.setattr("echelon.models.hf_files.save_file", fail_halfway)
    with pytest.raises(OSError, match="no space left"):
        write_tensors(tmp_path, TENSORS, shard_bytes=1000)
    assert seen == [".model.safetensors.part"]
    assert names(tmp_path) == []


def test_errors_of_json(tmp_path):
    path = tmp_path / "config.json"
    for content, said in ((b"{", "is damaged"), (b"\xff\xfe", "is damaged"), (b"[1]", "holds a list")):
        path.write_bytes(content)
        with pytest.raises(UserError, match=said):
            read_json(path)
    with pytest.raises(UserError, match="No such file"):
        read_json(tmp_path / "other.json")


def test_no_weights(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert "holds neither model.safetensors nor" in errors_of(tmp_path)[0]


@pytest.mark.parametrize("keep", [0, 4, 60, -1])
def test_a_file_cut_short(tmp_path, keep):
    write_tensors(tmp_path, TENSORS, shard_bytes=1000)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert "cannot be read as safetensors (cut short, or damaged?)" in errors_of(tmp_path)[0]


def test_all_errors_of_shards_at_once(tmp_path):
    write_tensors(tmp_path, TENSORS, shard_bytes=100)
    first, second, third = (f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3))
    (tmp_path / first).unlink()
    save_file({"t2": TENSORS["t2"], "stranger": TENSORS["t3"]}, tmp_path / second)
    (tmp_path / third).write_bytes(b"no tensors")
    errors = errors_of(tmp_path)
    assert len(errors) == 4
    assert first in errors[0]
    assert errors[1] == f"{second}: does not hold t3, which model.safetensors.index.json lists"
    assert errors[2] == f"{second}: holds stranger, which model.safetensors.index.json does not list"
    assert third in errors[3]


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": ["t0"]}])
def test_an_index_without_a_map(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "must hold a 'weight_map'" in errors_of(tmp_path)[0]


def test_an_index_does_not_lead_out_of_its_folder(tmp_path):
    inside = tmp_path / "inside"
    inside.mkdir()
    save_file(TENSORS, tmp_path / "secret.safetensors")
    weight_map = {"t0": "../secret.safetensors", "t1": 7, "t2": str(tmp_path / "secret.safetensors")}
    (inside / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    errors = errors_of(inside)
    assert len(errors) == 3
    assert "'../secret.safetensors' is not the name of a file beside it" in errors[0]
