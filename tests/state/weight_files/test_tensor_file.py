import json
import math
import os
import re
import warnings
from io import FileIO
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from echelon.errors import UserError
from echelon.state.weight_files import tensor_file
from echelon.state.weight_files.tensor_file import DTYPES, LENGTH, read_box, read_header

MEBI = 2**20


def saved(folder: Path, **tensors: Tensor) -> Path:
    save_file(tensors, folder / "model.safetensors")
    return folder / "model.safetensors"


def write_raw(path: Path, header: object, data: bytes = b"") -> None:
    text = json.dumps(header).encode()
    path.write_bytes(LENGTH.pack(len(text)) + text + data)


def counter(file: str, key: str) -> int:
    """A number of /proc/self, in bytes."""
    line = re.search(rf"^{key}:\s+(\d+)( kB)?$", Path(f"/proc/self/{file}").read_text(), re.MULTILINE)
    assert line is not None
    return int(line[1]) * (1024 if line[2] else 1)


def test_header_is_that_of_safetensors(tmp_path: Path) -> None:
    path = saved(tmp_path, matrix=torch.rand(3, 4, dtype=torch.bfloat16), scalar=torch.tensor(7))
    header = read_header(path)
    assert {name: (t.shape, t.dtype) for name, t in header.items()} == {
        "matrix": ((3, 4), torch.bfloat16),
        "scalar": ((), torch.int64),
    }


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_type_keeps_its_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    bits = torch.randint(2 if dtype == torch.bool else 256, (6, 5 * dtype.itemsize), dtype=torch.uint8)
    tensor = bits.view(dtype)
    header = read_header(saved(tmp_path, tensor=tensor))["tensor"]
    out = torch.empty(5, 2, dtype=dtype)
    read_box(header, (slice(2, 4), slice(0, 5)), out.T)
    assert torch.equal(out.T.contiguous().view(torch.uint8), tensor[2:4].view(torch.uint8))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_box_into_any_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: st.DataObject
) -> None:
    """With blocks from one element to more than the tensor: whole rows, blocks of rows, single rows."""
    shape = data.draw(st.lists(st.integers(0, 5), max_size=4))
    box = tuple(slice(*sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n))))) for n in shape)
    is_strided = data.draw(st.booleans())
    monkeypatch.setattr(tensor_file, "_BLOCK_BYTES", data.draw(st.sampled_from([4, 12, 40, 4000])))
    tensor = torch.rand(shape)
    header = read_header(saved(tmp_path, other=torch.rand(3), tensor=tensor))["tensor"]
    expected = tensor[box]
    dims = tuple(reversed(range(len(shape))))
    out = torch.full(expected.shape, -1.0)
    if is_strided:
        out = out.permute(dims).contiguous().permute(dims)
    read_box(header, box, out)
    assert torch.equal(out, expected)


def test_one_element_may_have_any_stride(tmp_path: Path) -> None:
    header = read_header(saved(tmp_path, tensor=torch.tensor([[3.0]])))["tensor"]
    out = torch.zeros(8).as_strided((1, 1), (4, 4))
    read_box(header, (slice(0, 1), slice(0, 1)), out)
    assert out.item() == 3.0


def test_rows_read_their_own_bytes_and_columns_whole_rows(tmp_path: Path) -> None:
    header = read_header(saved(tmp_path, tensor=torch.rand(1024, 1024)))["tensor"]  # 4 MiB

    def bytes_read(*box: slice) -> int:
        out = torch.empty(*(each.stop - each.start for each in box))
        before = counter("io", "rchar")
        own = counter("io", "rchar") - before  # what asking takes
        read_box(header, box, out)
        return counter("io", "rchar") - before - 2 * own

    whole = slice(0, 1024)
    assert 40 * 4096 <= bytes_read(slice(100, 140), whole) < 40 * 4096 + 1000
    assert 40 * 4096 <= bytes_read(slice(100, 140), slice(5, 7)) < 40 * 4096 + 1000
    assert 4 * MEBI <= bytes_read(whole, slice(5, 7)) < 4 * MEBI + 1000


def test_long_rows_are_not_read_whole(tmp_path: Path) -> None:
    header = read_header(saved(tmp_path, tensor=torch.rand(2, 512 * 1024)))["tensor"]  # rows of 2 MiB
    before = counter("io", "rchar")
    out = torch.empty(2, 100)
    read_box(header, (slice(0, 2), slice(1000, 1100)), out)
    assert counter("io", "rchar") - before < 10_000


def test_what_was_read_does_not_stay_in_the_memory_of_the_process(tmp_path: Path) -> None:
    header = read_header(saved(tmp_path, tensor=torch.rand(16 * 1024, 1024)))["tensor"]  # 64 MiB
    before = counter("status", "VmRSS")
    for start in range(0, 16 * 1024, 512):
        rows = torch.empty(512, 1024)
        read_box(header, (slice(start, start + 512), slice(0, 1024)), rows)
        columns = torch.empty(512, 4)
        read_box(header, (slice(start, start + 512), slice(0, 4)), columns)
    assert counter("status", "VmRSS") - before < 16 * MEBI


@pytest.mark.parametrize("keep", [0, 4, 60, -1])
def test_a_file_cut_short(tmp_path: Path, keep: int) -> None:
    path = saved(tmp_path, tensor=torch.rand(10))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError, match=r"cannot be read as safetensors \(cut short, or damaged\?\)"):
        read_header(path)


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ([1], "the header is a list"),
        ({"a": {"dtype": "F32", "shape": [2]}}, "data_offsets"),
        ({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}, r"a has shape \[-2\]"),
        ({"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}, "a has shape"),
        ({"a": {"dtype": "F32", "shape": [2**63], "data_offsets": [0, 4]}}, "a has shape"),
        ({"a": {"dtype": "F32", "shape": [2] * 65, "data_offsets": [0, 4]}}, "a has 65 dims"),
        ({"a": [[]] * (2 + (1 << 22))}, "it has 8388614 values; 4194304 are allowed"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [4, 8]}}, "the bytes of a are not where"),
        ({"\ud800": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, r"name '.ud800' has half a"),
        ({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, "the bytes of a are not where"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, "the bytes of a are not where"),
        (
            {n: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for n in "ab"},
            "the bytes of b are not where",
        ),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, "end at byte .* and the file at"),
        ({"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 8]}}, "a is of type F4; must be one of F64"),
    ],
)
def test_headers_that_do_not_fit_their_file(tmp_path: Path, header: object, said: str) -> None:
    path = tmp_path / "model.safetensors"
    write_raw(path, header, b"8 bytes.")
    with pytest.raises(UserError, match=said):
        read_header(path)


def test_a_length_that_is_no_length(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(LENGTH.pack(2**60) + b"{}")
    with pytest.raises(UserError, match="a header of 1152921504606846976 bytes in a file of 10"):
        read_header(tmp_path / "file")


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path, tensor=torch.rand(10))
    header = read_header(path)["tensor"]
    path.write_bytes(path.read_bytes()[:-4])
    for share in (tensor_file._SHARE_BYTES, 12):
        monkeypatch.setattr(tensor_file, "_SHARE_BYTES", share)
        with pytest.raises(UserError, match="became shorter while it was read"):
            read_box(header, (slice(0, 10),), torch.empty(10))


def test_threads_read_parts_of_a_large_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a process that was forked, where the threads of before are not."""
    monkeypatch.setattr(tensor_file, "_SHARE_BYTES", 1000)
    monkeypatch.setattr(tensor_file, "usable_cores", lambda: 2)
    weight = torch.arange(20_001.0)
    save_file({"a": weight}, tmp_path / "file")
    stored = read_header(tmp_path / "file")["a"]

    def is_read() -> bool:
        out = torch.zeros(20_000)
        read_box(stored, (slice(1, 20_001),), out)
        return torch.equal(out, weight[1:])

    assert is_read()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are threads
        child = os.fork()
    if child == 0:
        os._exit(0 if is_read() else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize(("shape", "larger"), [((1,) * 64, (1,) * 65), ((0, 2**63 - 1), (0, 2**63))])
def test_the_largest_shapes(tmp_path: Path, shape: tuple[int, ...], larger: tuple[int, ...]) -> None:
    end = 4 * math.prod(shape)
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, end]}
    write_raw(tmp_path / "file", {"a": entry}, bytes(end))
    assert read_header(tmp_path / "file")["a"].shape == shape
    write_raw(tmp_path / "file", {"a": entry | {"shape": larger}}, bytes(end))
    with pytest.raises(UserError, match=r"a has (65 dims|shape)"):
        read_header(tmp_path / "file")


def test_a_header_has_100_megabytes_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In files without content, which take no room."""
    monkeypatch.setattr(tensor_file, "parse_json", lambda data, **_: len(data))
    with (tmp_path / "file").open("wb") as file:
        file.truncate(100_000_010)
        file.write(LENGTH.pack(100_000_001))
    with pytest.raises(UserError, match="a header of 100000001 bytes in a file of 100000010"):
        read_header(tmp_path / "file")
    with (tmp_path / "file").open("r+b") as file:
        file.write(LENGTH.pack(100_000_000))
    with pytest.raises(UserError, match="the header is a int"):
        read_header(tmp_path / "file")


def test_a_header_may_be_the_whole_file(tmp_path: Path) -> None:
    write_raw(tmp_path / "file", {"__metadata__": {"format": "pt"}})
    assert read_header(tmp_path / "file") == {}
    content = (tmp_path / "file").read_bytes()
    (tmp_path / "file").write_bytes(LENGTH.pack(len(content) - LENGTH.size + 1) + content[LENGTH.size :])
    with pytest.raises(UserError, match="a header of"):
        read_header(tmp_path / "file")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="it is not a regular file"):
        read_header(tmp_path / "pipe")


def test_files_are_opened_as_the_caller_says(tmp_path: Path) -> None:
    path = saved(tmp_path, tensor=torch.rand(3))
    opened: list[str] = []

    def opener(name: str, flags: int) -> int:
        opened.append(str(name))
        return os.open(name, flags)

    read_box(read_header(path, opener)["tensor"], (slice(0, 3),), torch.empty(3), opener)
    read_box(read_header(path)["tensor"], (slice(1, 1),), torch.empty(0), opener)
    assert opened == [str(path)] * 2, "of the last there is nothing to read"


def shares(
    monkeypatch: pytest.MonkeyPatch, path: Path, num_elements: int, cores: int
) -> list[tuple[int, int]]:
    """Where the reads of a vector begin, and how many bytes they have."""
    reads: list[tuple[int, int]] = []
    read_share = tensor_file._read_share

    def read(file: FileIO, begin: int, memory: memoryview) -> None:
        reads.append((begin, len(memory)))
        read_share(file, begin, memory)

    stored = tensor_file.StoredTensor(path, 8, (num_elements,), torch.uint8)
    with monkeypatch.context() as patch:
        patch.setattr(tensor_file, "_read_share", read)
        patch.setattr(tensor_file, "usable_cores", lambda: cores)
        read_box(stored, (slice(0, num_elements),), torch.empty(num_elements, dtype=torch.uint8))
    return sorted(reads)


def test_a_thread_reads_four_megabytes_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "file").open("wb") as file:
        file.truncate(9 * MEBI)
    path, large = tmp_path / "file", 4 * MEBI + 1
    assert shares(monkeypatch, path, 4 * MEBI, cores=2) == [(8, 4 * MEBI)]
    assert shares(monkeypatch, path, large, cores=2) == [(8, 4 * MEBI), (8 + 4 * MEBI, 1)]
    assert shares(monkeypatch, path, large, cores=1) == [(8, large)]


@pytest.mark.parametrize(("cores", "threads"), [(2, 2), (64, 4)])
def test_as_many_threads_as_help(cores: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file, "usable_cores", lambda: cores)
    with tensor_file._threads.__wrapped__() as executor:
        assert executor._max_workers == threads


@pytest.mark.parametrize(("row", "num_reads"), [(MEBI, 2), (MEBI // 2 + 8, 2), (MEBI // 2, 1), (MEBI + 8, 4)])
def test_blocks_of_rows_have_a_megabyte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: int, num_reads: int
) -> None:
    """Half of each of two rows; of rows that are longer than a block, single elements."""
    tensor = torch.rand(2, 2, row // 8)
    path = saved(tmp_path, tensor=tensor)
    reads, read_exactly = list[int](), tensor_file._read_exactly

    def read(file: FileIO, begin: int, out: Tensor) -> None:
        reads.append(begin)
        read_exactly(file, begin, out)

    monkeypatch.setattr(tensor_file, "_read_exactly", read)
    out = torch.empty(2, 2, 1)
    read_box(read_header(path)["tensor"], (slice(0, 2), slice(0, 2), slice(0, 1)), out)
    assert len(reads) == num_reads
    assert torch.equal(out, tensor[..., :1])
