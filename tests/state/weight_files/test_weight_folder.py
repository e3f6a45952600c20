import hashlib
import json
import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from echelon.errors import UserError
from echelon.state.ownership import run_slices, whole_slice
from echelon.state.weight_files import weight_folder
from echelon.state.weight_files.layout import WeightLayout, plain_layout, whole
from echelon.state.weight_files.tensor_file import StoredTensor, TensorEntry, read_box
from echelon.state.weight_files.weight_folder import (
    SHARD_BYTES,
    WeightFolder,
    read_headers,
    read_json,
    split_shards,
    write_folder,
)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.second = nn.Linear(6, 5, bias=False)
        self.second.weight = self.first.weight


def opened(folder: Path, model: nn.Module) -> WeightFolder:
    return WeightFolder(folder, partial(plain_layout, model))


def save(folder: Path, model: nn.Module, **changes: torch.Tensor) -> None:
    """Tied tensors twice, and with different memory."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(state | changes, folder / "model.safetensors")


def test_boxes_of_a_tensor_in_the_type_that_is_stored(tmp_path: Path) -> None:
    """The boxes that ZeRO and tensor parallelism cut, for a model that has no memory."""
    model = nn.Linear(6, 5).bfloat16()
    save(tmp_path, model)
    with torch.device("meta"):
        weights = opened(tmp_path, nn.Linear(6, 5))
    assert (weights.errors(), weights.names()) == ([], ["weight", "bias"])
    boxes = [*run_slices("weight", (5, 6), 8, 23), whole_slice("weight", model.weight)]
    parts = weights.read("weight", boxes)
    assert [part.shape for part in parts] == [box.sizes for box in boxes]
    assert all(torch.equal(p, model.weight[b.box]) for p, b in zip(parts, boxes, strict=True))
    assert {part.dtype for part in parts} == {torch.bfloat16}


def test_a_tied_tensor_has_all_its_names(tmp_path: Path) -> None:
    model = Tied()
    save(tmp_path, model)
    weights = opened(tmp_path, model)
    assert (weights.errors(), weights.names()) == ([], ["first.weight", "first.bias"])
    assert list(weights.ties) == ["second.weight"]
    (tensor,) = weights.read("second.weight", [whole((5, 6))])
    assert torch.equal(tensor, model.first.weight)


@pytest.mark.parametrize("place", [0, 13, 29])
def test_a_tied_tensor_that_is_stored_twice_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    monkeypatch.setattr(weight_folder, "_COMPARED_BYTES", 50)  # of 120
    model = Tied()
    other = model.second.weight.detach().clone()
    other.view(-1)[place] += 1
    save(tmp_path, model, **{"second.weight": other})
    assert opened(tmp_path, model).errors() == [
        "second.weight: differs from first.weight, but the model ties them"
    ]
    save(tmp_path, model, **{"second.weight": other.double()})
    assert "differs from" in opened(tmp_path, model).errors()[0]


def test_all_errors_at_once(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(5, 7), "extra": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError) as caught:
        opened(tmp_path, nn.Linear(6, 5)).check()
    assert caught.value.title == f"3 errors in Hugging Face folder '{tmp_path}':"
    assert caught.value.errors == (
        "bias: is missing",
        "extra: is not a tensor of this model",
        "weight: has shape [5, 7], must be [5, 6]",
    )


def test_errors_of_files_and_of_tensors_together(tmp_path: Path) -> None:
    """Only what is in files that cannot be read is not judged."""
    save_file({"weight": torch.zeros(5, 7)}, tmp_path / "a.safetensors")
    index = '{"weight_map": {"weight": "a.safetensors", "bias": "b.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(index)
    errors = opened(tmp_path, nn.Linear(6, 5)).errors()
    assert len(errors) == 2
    assert "b.safetensors: cannot be read" in errors[0]
    assert errors[1] == "weight: has shape [5, 7], must be [5, 6]"


def test_a_folder_whose_names_are_not_known_has_only_the_errors_of_its_files(tmp_path: Path) -> None:
    assert len(opened(tmp_path, nn.Linear(6, 5)).errors()) == 1
    save(tmp_path, nn.Linear(6, 5))
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert len(opened(tmp_path, nn.Linear(6, 5)).errors()) == 1


def test_names_that_are_not_of_the_model(tmp_path: Path) -> None:
    save(tmp_path, nn.Linear(6, 5))
    with pytest.raises(
        UserError, match=r"weights: is not a tensor of this model \(did you mean 'weight'\?\)"
    ):
        opened(tmp_path, nn.Linear(6, 5)).read("weights", [])


def test_a_line_tells_the_begin_and_the_end_of_a_tensor(tmp_path: Path) -> None:
    """A kilobyte of each, and nothing of what lies between."""

    def described(*places: int) -> str:
        weight = torch.zeros(3000, dtype=torch.uint8)
        weight[list(places)] = 1
        save_file({"weight": weight, "bias": torch.zeros(2)}, tmp_path / "model.safetensors")
        bias, line = WeightFolder(tmp_path, lambda _: WeightLayout({})).describe()
        assert bias.startswith("bias of shape (2,) and type torch.float32 with values ")
        return line

    plain = described()
    start, digest = plain.rsplit(" ", 1)
    assert start == "weight of shape (3000,) and type torch.uint8 with values"
    both = hashlib.blake2b(bytes(2048), digest_size=8)
    assert digest == both.hexdigest()
    assert described(1024, 1975) == plain
    assert len({plain, described(0), described(1023), described(1976), described(2999)}) == 5


def test_a_tied_tensor_is_compared_in_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Tied()
    save(tmp_path, model)
    sizes = []

    def read(tensor: StoredTensor, box: tuple[slice], out: torch.Tensor) -> None:
        sizes.append(out.nbytes)
        read_box(tensor, box, out)

    monkeypatch.setattr(weight_folder, "read_box", read)
    assert opened(tmp_path, model).errors() == []
    assert sizes == [120, 120]
    monkeypatch.setattr(weight_folder, "_COMPARED_BYTES", 50)
    assert opened(tmp_path, model).errors() == []
    assert sizes[2:] == [50, 50, 50, 50, 20, 20]


def test_the_config_is_judged_with_the_files(tmp_path: Path) -> None:
    save(tmp_path, nn.Linear(6, 5))
    for folder, others in ((tmp_path, 0), (tmp_path / "nowhere", 1)):
        errors = WeightFolder(folder, partial(plain_layout, nn.Linear(6, 5)), ["another model"]).errors()
        assert (errors[0], len(errors)) == ("another model", 1 + others)


INDEX = "model.safetensors.index.json"


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
    monkeypatch.setattr(weight_folder, "MOST_BYTES", 8)
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
