import functools
import gc
import linecache
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from echelon.launching import packing
from echelon.launching.packing import hidden_main_file, is_main_importable, pack, unpack

TENSORS = {
    "float64": torch.randn(3, 4, dtype=torch.float64),
    "bfloat16": torch.randn(5).bfloat16(),
    "float8": torch.randn(4).to(torch.float8_e4m3fn),
    "bool": torch.tensor([True, False, True]),
    "int64": torch.arange(7),
    "complex": torch.randn(3, dtype=torch.complex64),
    "conjugated": torch.randn(3, dtype=torch.complex64).conj(),
    "0-dim": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "strided": torch.arange(20.0)[1::3],
    "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_arrives_as_it_was(name: str) -> None:
    sent = TENSORS[name]
    received = unpack(pack({"inside": [sent]}))["inside"][0]
    assert type(received) is torch.Tensor
    assert (received.dtype, received.shape) == (sent.dtype, sent.shape)
    assert torch.equal(received.to(torch.complex128), sent.to(torch.complex128))


def test_a_tensor_that_arrived_can_be_written() -> None:
    received = unpack(pack(torch.zeros(4)))
    received += 1  # pytest turns a warning about read-only memory into an error
    assert received.sum() == 4


@pytest.mark.parametrize("requires_grad", [True, False])
def test_gradients_stay_required(requires_grad: bool) -> None:
    tensor = torch.ones(2, requires_grad=requires_grad)
    parameter = nn.Parameter(torch.ones(2), requires_grad=requires_grad)
    assert unpack(pack(tensor)).requires_grad is requires_grad
    received = unpack(pack(parameter))
    assert type(received) is nn.Parameter
    assert received.requires_grad is requires_grad


def test_a_result_of_autograd_arrives_as_a_leaf() -> None:
    received = unpack(pack(torch.ones(2, requires_grad=True) * 3))
    assert received.is_leaf
    assert received.tolist() == [3.0, 3.0]


def test_a_whole_module_arrives() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    received = unpack(pack(model))
    inputs = torch.randn(4, 3)
    assert torch.equal(received.eval()(inputs), model.eval()(inputs))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch 2.11 warns when it rebuilds one
def test_a_sparse_tensor_arrives() -> None:
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(unpack(pack(sparse)).to_dense(), torch.eye(3))


def test_a_meta_tensor_stays_meta() -> None:
    assert unpack(pack(torch.empty(2, device="meta"))).is_meta


def test_no_file_descriptor_is_sent() -> None:
    """Garbage of earlier tests may close descriptors meanwhile, so only new ones count."""
    folder = Path("/proc/self/fd") if Path("/proc/self/fd").exists() else Path("/dev/fd")
    gc.collect()
    before = set(os.listdir(folder))
    tensors = [unpack(pack(torch.ones(3))) for _ in range(200)]
    assert set(os.listdir(folder)) - before == set()
    assert len(tensors) == 200


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_tensor_comes_to_the_cpu() -> None:
    received = unpack(pack(torch.ones(2, device="cuda")))
    assert received.device.type == "cpu"


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Any]]:
    """Run a cell, as if the main module of this process were a notebook; return its names."""
    monkeypatch.setattr(packing, "is_main_importable", lambda: False)
    names: dict[str, Any] = {"__name__": "__main__", "torch": torch, "functools": functools}

    def run(cell: str) -> dict[str, Any]:
        name = f"<cell {len(names)}>"
        monkeypatch.setitem(linecache.cache, name, (len(cell), None, cell.splitlines(keepends=True), name))
        exec(compile(cell, name, "exec"), names)
        return names

    return run


Notebook = Callable[[str], dict[str, Any]]


def test_a_function_of_a_cell_is_sent_with_the_names_that_it_uses(notebook: Notebook) -> None:
    names = notebook("scale = 3\ndef double(x): return 2 * x\ndef work(x): return scale * double(x)")
    packed = pack((names["work"], (torch.ones(2),)))
    notebook("scale = 4")
    work, (x,) = unpack(packed)
    assert work(x).tolist() == [6.0, 6.0]
    assert work is not names["work"]


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        ("def make(n):\n  def work(): return n\n  return work\nwork = make(7)", 7),
        ("work = functools.partial(lambda n: n + 1, 6)", 7),
        ("@functools.lru_cache(maxsize=3)\ndef work(): return 7", 7),
        ("@torch.no_grad()\ndef work(): return torch.is_grad_enabled()", False),
        ("class Work:\n  def __call__(self): return 7\nwork = Work()", 7),
        ("class Work:\n  def start(self): return super().__hash__() and 7\nwork = Work().start", 7),
    ],
    ids=["closure", "lambda", "cache", "decorator", "object", "method"],
)
def test_every_kind_of_function_of_a_cell_is_sent(notebook: Notebook, cell: str, expected: object) -> None:
    assert unpack(pack(notebook(cell)["work"]))() == expected


def test_a_model_of_a_cell_is_sent_with_plain_tensors(notebook: Notebook) -> None:
    """By value as by name: torch would share the memory of its parameters."""
    names = notebook("class Model(torch.nn.Linear):\n  def forward(self, x): return -super().forward(x)")
    model = names["Model"](3, 2)
    received = unpack(pack(model))
    inputs = torch.randn(4, 3)
    assert torch.equal(received(inputs), model(inputs))
    assert received.weight.data_ptr() != model.weight.data_ptr()
    assert not received.weight.is_shared()
    assert type(received.weight) is nn.Parameter


def test_what_can_be_imported_needs_no_cloudpickle(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "_make_value_pickler", None)
    names = notebook("x = [torch.ones(2), print]")
    assert unpack(pack(names["x"]))[1] is print


def test_a_script_of_a_file_finds_its_functions_by_name(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "is_main_importable", lambda: True)
    monkeypatch.setattr(packing, "_make_value_pickler", None)
    work = notebook("def work(): pass")["work"]
    monkeypatch.setattr(sys.modules["__main__"], "work", work, raising=False)
    assert unpack(pack(work)) is work


def test_a_definition_goes_back_to_its_process_as_itself(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The methods of the parent's class became copies, which saw no later cell."""
    names = notebook("n = 1\nclass Model:\n  def forward(self): return n\ndef relu(x): return x * n")
    forward = names["Model"].forward
    sent = pack([names["Model"](), names["relu"]])
    monkeypatch.setattr(packing, "_parent_pid", os.getpid)  # now this process is a rank
    returned = pack([names["Model"](), names["relu"]])
    assert len(returned) < len(sent) / 2
    model, relu = unpack(returned)
    assert type(model) is names["Model"]
    assert relu is names["relu"]
    assert names["Model"].forward is forward
    notebook("n = 5")
    assert model.forward() == relu(1) == 5


def test_a_definition_that_is_gone_is_named(notebook: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    names = notebook("def relu(x): return x")
    pack(names["relu"])
    with monkeypatch.context() as rank:
        rank.setattr(packing, "_parent_pid", os.getpid)
        returned = pack(names["relu"])
    del names["relu"]
    gc.collect()
    with pytest.raises(LookupError, match="relu of an earlier cell was replaced by a later one"):
        unpack(returned)


def test_the_lines_of_a_cell_are_sent_once(notebook: Notebook) -> None:
    names = notebook("a = lambda: 1  # a remark\nb = lambda: 2\n")
    file = names["a"].__code__.co_filename
    packed = pack([names["a"], names["b"]])
    assert packed.count(b"# a remark") == 1
    del linecache.cache[file]
    unpack(packed)
    assert linecache.getline(file, 1) == "a = lambda: 1  # a remark\n"


def test_without_cloudpickle_one_sentence_names_the_extra() -> None:
    program = """
import sys
sys.modules["cloudpickle"] = None
from echelon.launching import launch
def train(): pass
launch(train, 2)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == (
        "echelon.errors.UserError: train is defined in a notebook or an interactive session, which no rank "
        "can import: install what sends it by value (pip install 'echelon[notebook]'), or define it at the "
        "top level of a module (a .py file)"
    )


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({"__file__": __file__}, True),  # python script.py
        ({"__spec__": SimpleNamespace(name="package.module")}, True),  # python -m
        ({}, False),  # python -c, and the REPL
        ({"__file__": "<stdin>"}, False),  # python - < script.py
        ({"__file__": __file__, "__spec__": SimpleNamespace(name="_pyrepl.__main__")}, False),  # of 3.13
    ],
)
def test_ranks_import_a_main_module_that_is_a_file(
    attributes: dict[str, Any], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_main(attributes, monkeypatch)
    assert is_main_importable() is expected


def test_a_notebook_is_not_imported_even_if_an_editor_gives_it_a_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replace_main({"__file__": __file__, "get_ipython": print}, monkeypatch)
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    assert is_main_importable()  # ipython script.py
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    assert not is_main_importable()


@pytest.mark.parametrize(("file", "expected"), [("<stdin>", None), (__file__, __file__)])
def test_a_file_that_is_none_is_hidden_while_ranks_start(
    file: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = replace_main({"__file__": file}, monkeypatch)
    with hidden_main_file():
        assert getattr(main, "__file__", None) == expected
    assert main.__file__ == file


def replace_main(attributes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    main = ModuleType("__main__")
    vars(main).update(attributes)
    monkeypatch.setitem(sys.modules, "__main__", main)
    return main
