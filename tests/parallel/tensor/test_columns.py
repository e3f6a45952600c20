"""Columns of one input: one node of the graph, whose sum runs behind other work."""

import copy
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from echelon.collectives import Handle, Ledger, RecordingGroup
from echelon.nn.wrapping import Wrapping
from echelon.parallel.tensor.modules import Column
from echelon.parallel.tensor.regions import Region
from tests.memory.recompute.chains import recompute

Conv1D = pytest.importorskip("transformers.pytorch_utils").Conv1D


def region(*, sequence: bool = False) -> Region:
    here = Region(RecordingGroup("tensor", 0, 2, Ledger()), sequence=sequence)
    here.overlaps = True
    return here


def columns(region: Region, *, bias: bool = True) -> list[Column]:
    return [Column(nn.Linear(4, 4, bias=bias).double(), region) for _ in range(3)]


def hidden() -> Tensor:
    return torch.randn(2, 6, 4, dtype=torch.float64, requires_grad=True) * 2


def operations(region: Region) -> list[str]:
    return [move.operation for move in region.group.ledger.moves]


def train(columns: list[Column]) -> Tensor:
    """The gradient of the input; those of the weights are added up."""
    x = hidden()
    x.retain_grad()
    torch.stack([column(x) for column in columns]).prod(0).sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize(
    ("sequence", "talk"), [(False, ["all_reduce"]), (True, ["all_gather", "reduce_scatter"])]
)
def test_they_communicate_once_from_the_first_pass_on(*, sequence: bool, talk: list[str]) -> None:
    here = region(sequence=sequence)
    sharing = columns(here)
    for steps in (1, 2, 3):
        train(sharing)
        assert operations(here) == talk * steps


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [nn.Linear, Conv1D])
def test_gradients_are_those_of_autograd(kind: Any, *, bias: bool) -> None:
    modules = [kind(4, 4).double() for _ in range(3)]
    if not bias:
        for module in modules:
            module.bias = None
    here, apart = region(), region()
    apart.overlaps = False
    found = []
    for where in (here, apart):
        sharing = [Column(module, where) for module in modules]
        torch.manual_seed(0)
        train(sharing)
        for module in modules:
            module.zero_grad()
        inputs = train(sharing)
        found.append([inputs, *(p.grad for module in modules for p in module.parameters())])
        for module in modules:
            module.zero_grad()  # new gradients next time
    assert len(found[0]) == 1 + 3 * (1 + bias)
    for together, separate in zip(*found, strict=True):
        torch.testing.assert_close(together, separate, rtol=1e-12, atol=1e-12)


class ProductLog(TorchDispatchMode):
    """Logs every product of matrices."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self._log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm_.default):
            self._log.append("product")
        return func(*args, **(kwargs or {}))


@contextmanager
def watched(log: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    begin, wait = RecordingGroup.all_reduce, Handle.wait

    def all_reduce(self: Any, *args: Any, **named: Any) -> Handle:
        log.append("start")
        return begin(self, *args, **named)

    def note(self: Handle) -> None:
        log.append("wait")
        wait(self)

    with monkeypatch.context() as patch, ProductLog(log):
        patch.setattr(RecordingGroup, "all_reduce", all_reduce)
        patch.setattr(Handle, "wait", note)
        yield


def test_the_sum_goes_on_while_the_gradients_of_weights_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    here = region()
    sharing = columns(here, bias=False)
    train(sharing)
    x = hidden()
    output = torch.stack([column(x) for column in sharing]).prod(0).sum()
    log: list[str] = []
    with watched(log, monkeypatch):
        output.backward()
    assert log == ["product"] * 3 + ["start"] + ["product"] * 3 + ["wait"]


def test_columns_may_be_absent_in_a_pass_or_join_later() -> None:
    here = region()
    sharing = columns(here)
    for present in (sharing, sharing[:1], sharing, sharing[1:], sharing[::-1], sharing):
        for column in sharing:
            column.module.zero_grad()
        x = hidden()
        x.retain_grad()
        torch.stack([column(x) for column in present]).prod(0).sum().backward()
        found = [x.grad, *(p.grad for column in sharing for p in column.module.parameters())]
        for column in sharing:
            column.module.zero_grad()
        y = x.detach().requires_grad_()
        outputs = [F.linear(y, column.module.weight, column.module.bias) for column in present]
        torch.stack(outputs).prod(0).sum().backward()
        expected = [y.grad, *(p.grad for column in sharing for p in column.module.parameters())]
        for one, other in zip(found, expected, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_column_may_be_called_twice_and_an_unused_one_gets_no_gradient() -> None:
    here = region()
    first, second, third = columns(here)
    for _ in range(2):
        x = hidden()
        outputs = [first(x), second(x), third(x), first(x)]
    (outputs[0] + outputs[3]).sum().backward()
    twice = first.module.weight.grad
    assert isinstance(twice, Tensor)
    torch.testing.assert_close(twice, 2 * x.detach().flatten(0, 1).sum(0).expand(4, 4))
    assert second.module.weight.grad is None


def test_frozen_weights_get_no_gradient_and_inputs_do() -> None:
    here = region()
    sharing = columns(here)
    sharing[1].module.requires_grad_(requires_grad=False)
    train(sharing)
    train(sharing)
    assert sharing[1].module.weight.grad is None
    assert sharing[0].module.weight.grad is not None
    assert operations(here) == ["all_reduce"] * 2


def test_no_output_is_kept_alive_and_a_copy_starts_without_any() -> None:
    here = region()
    sharing = columns(here)
    train(sharing)
    x = hidden()
    outputs = [column(x) for column in sharing]
    kept = [weakref.ref(output) for output in outputs]
    copied = copy.deepcopy(sharing[0])
    assert copied.region.shared_input is not here.shared_input
    del outputs
    assert [output() for output in kept] == [None] * 3


class Normed(nn.Module):
    """A norm and columns behind it, as a layer that is computed again in the backward pass has them."""

    def __init__(self, region: Region) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4, dtype=torch.float64)
        self.matrices = nn.ModuleList(nn.Linear(4, 4, bias=False, dtype=torch.float64) for _ in range(2))
        for matrix in self.matrices:
            Wrapping().wrap(Column(matrix, region))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return torch.stack([matrix(x) for matrix in self.matrices]).prod(0)


@pytest.mark.parametrize("inner", [True, False])
def test_what_is_computed_again_is_computed_the_same_way(*, inner: bool) -> None:
    """Square matrices, and as many rows as features: torch would not notice that another was saved."""
    found = []
    for overlaps in (True, False):
        here = region()
        here.overlaps = overlaps
        torch.manual_seed(0)
        layer = Normed(here)
        for _ in range(3):
            x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True) * 2
            if inner:
                output = checkpoint(layer, x, use_reentrant=False)
            else:  # the input of the columns is the checkpoint's own argument
                given = layer.norm(x)
                output = checkpoint(layer.matrices[0], given, use_reentrant=False)
            output.square().sum().backward()
        found.append([p.grad for p in layer.parameters() if p.grad is not None])
    for together, separate in zip(*found, strict=True):
        torch.testing.assert_close(together, separate, rtol=1e-12, atol=1e-12)


def test_a_layer_that_recomputes_still_multiplies_together() -> None:
    """In the first pass each matrix is on its own, and so it is in its second run, where more is known."""
    found = []
    for sizes in ([], [1]):
        here = region()
        torch.manual_seed(0)
        layer = Normed(here)
        recompute([layer], sizes)
        for _ in range(3):
            x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True) * 2
            layer(x).square().sum().backward()
        assert [len(sharing) for sharing in here.shared_input.learned.values()] == [2]
        found.append([p.grad for p in layer.parameters() if p.grad is not None])
    for dropped, kept in zip(*found, strict=True):
        assert torch.equal(dropped, kept)


def test_complex_matrices_vectors_and_leaves_are_computed_separately() -> None:
    here = region()
    complex_one = Column(nn.Linear(4, 4, dtype=torch.complex128), here)
    (vectors,) = columns(here)[:1]
    kept = nn.Parameter(torch.randn(2, 4, dtype=torch.float64))
    for _ in range(3):
        turned = torch.randn(2, 3, 4, dtype=torch.complex128, requires_grad=True) * 2
        complex_one(turned).abs().sum().backward()
        vectors(torch.randn(4, dtype=torch.float64, requires_grad=True) * 2).sum().backward()
        vectors(kept).sum().backward()
    assert here.shared_input.learned == {}


def test_outputs_may_be_changed_in_place() -> None:
    here = region()
    (column,) = columns(here)[:1]
    for _ in range(3):
        torch.relu_(column(hidden())).sum().backward()


def test_layers_are_not_computed_together() -> None:
    """With zero=3 the weights of another layer are not there."""
    here = region()
    sharing = columns(here)
    sharing[2].layer = 1
    train(sharing)
    assert list(here.shared_input.learned.values()) == [sharing[:2]]
    train(sharing)
