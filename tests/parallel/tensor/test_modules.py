"""The forward passes of split modules: on all ranks together they are those of the whole module."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from echelon.collectives import Group, RecordingGroup
from echelon.collectives.mesh import Mesh
from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.nn.float8 import Float8Linear, check_parts
from echelon.nn.wrapping import Wrapping, find_wrapper, replaced_forward
from echelon.parallel.tensor.modules import (
    Column,
    EnterFirst,
    PartlyWhole,
    Row,
    SplitModule,
    VocabularyEmbedding,
    is_matrix,
    number_layers,
)
from echelon.parallel.tensor.regions import Region
from echelon.parallel.tensor.styles import Style
from echelon.plan import Plan

Warm = Callable[[int], Ranks]
DOUBLE = torch.float64


def region(rank: int = 0, ranks: int = 2, *, sequence: bool = False) -> Region:
    return Region(RecordingGroup("tensor", rank, ranks), sequence=sequence)


def wrapped(wrapper: SplitModule) -> nn.Module:
    Wrapping().wrap(wrapper)
    return wrapper.module


def linear(inputs: int, outputs: int) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, dtype=DOUBLE)


def embedding(**options: Any) -> nn.Embedding:
    torch.manual_seed(0)
    return nn.Embedding(6, 3, dtype=DOUBLE, **options)


def keep_part(module: Any, group: Group, dims: dict[str, int]) -> None:
    for name, dim in dims.items():
        part = getattr(module, name).data.chunk(group.size, dim)[group.rank].clone()
        setattr(module, name, nn.Parameter(part))


def pair(x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The output of a column and a row of this rank, and the gradients that it has of x and of the biases."""
    group = Mesh.join(Plan(tensor=2)).group("tensor")
    here = Region(group, sequence=False)
    up, down = linear(4, 6), linear(6, 4)
    keep_part(up, group, {"weight": 0, "bias": 0})
    keep_part(down, group, {"weight": 1})
    column, row = wrapped(Column(up, here)), wrapped(Row(down, here))
    x.requires_grad_()
    output = row(torch.tanh(column(x)))
    output.square().sum().backward()
    assert x.grad is not None
    return output.detach(), [x.grad, down.bias.grad]


def test_a_column_and_a_row_are_two_matrices(warm_ranks: Warm) -> None:
    x = torch.randn(2, 3, 4, dtype=DOUBLE, requires_grad=True)
    up, down = linear(4, 6), linear(6, 4)
    expected = down(torch.tanh(up(x)))
    expected.square().sum().backward()
    for output, gradients in warm_ranks(2).run(pair, x.detach()):
        torch.testing.assert_close(output, expected.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradients, [x.grad, down.bias.grad], rtol=1e-12, atol=1e-12)


def joined(x: Tensor) -> tuple[Tensor, Tensor | None]:
    """The output, and the gradient of the input for a loss that every rank computes."""
    group = Mesh.join(Plan(tensor=2)).group("tensor")
    matrix = linear(4, 6)
    keep_part(matrix, group, {"weight": 0, "bias": 0})
    x.requires_grad_()
    output = wrapped(Column(matrix, Region(group, sequence=False), joined=True))(x)
    (output * torch.arange(6)).sum().backward()
    return output.detach(), x.grad


def test_a_joined_column_returns_the_outputs_of_all_ranks(warm_ranks: Warm) -> None:
    x = torch.randn(2, 3, 4, dtype=DOUBLE, requires_grad=True)
    expected = linear(4, 6)(x)
    (expected * torch.arange(6)).sum().backward()
    for output, gradient in warm_ranks(2).run(joined, x.detach()):
        torch.testing.assert_close(output, expected.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradient, x.grad, rtol=1e-12, atol=1e-12)


def embedded(tokens: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    group = Mesh.join(Plan(tensor=3)).group("tensor")
    table = embedding(**options)
    wrapper = VocabularyEmbedding(table, Region(group, sequence=False))
    keep_part(table, group, {"weight": 0})
    output = wrapped(wrapper)(tokens)
    output.square().sum().backward()
    return output.detach(), table.weight.grad


@pytest.mark.parametrize("options", [{}, {"padding_idx": 3}])
def test_an_embedding_is_the_sum_of_its_rows(warm_ranks: Warm, options: dict[str, Any]) -> None:
    tokens = torch.tensor([[0, 5, 3], [2, 2, 1]])
    table = embedding(**options)
    expected = table(tokens)
    expected.square().sum().backward()
    outputs, gradients = zip(*warm_ranks(3).run(embedded, tokens, options), strict=True)
    for output in outputs:
        torch.testing.assert_close(output, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat(gradients), table.weight.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("tokens", [[[0, 6]], [[-1, 2]]])
def test_tokens_outside_the_vocabulary_are_an_error(tokens: list[list[int]]) -> None:
    module = wrapped(VocabularyEmbedding(embedding(), region()))
    with pytest.raises(IndexError, match=r"tokens -?\d … \d of a vocabulary of 6"):
        module(torch.tensor(tokens))


@pytest.mark.parametrize("options", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}])
def test_embeddings_that_cannot_be_split_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="cannot have max_norm, scale_grad_by_freq or sparse"):
        VocabularyEmbedding(embedding(**options), region())


def test_wrappers_are_no_forward_of_the_users_and_go_again() -> None:
    module, wrapping = linear(4, 4), Wrapping()
    wrapping.wrap(Column(module, region()))
    assert replaced_forward(module) is None
    assert wrapping.entries([module]) == {"tensor": 1}
    wrapping.remove()
    assert find_wrapper(module, SplitModule) is None
    x = torch.randn(2, 4, dtype=DOUBLE)
    assert torch.equal(module(x), F.linear(x, module.weight, module.bias))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_multiplies_by_its_own_weights(copied: Callable[[nn.Module], Any]) -> None:
    module = wrapped(Column(linear(4, 4), region()))
    other = copied(module)
    nn.init.zeros_(other.weight)
    x = torch.randn(2, 4, dtype=DOUBLE)
    with torch.no_grad():
        assert torch.equal(other(x), other.bias.expand(2, 4))
        assert not torch.equal(module(x), other(x))


def test_columns_know_their_layer() -> None:
    layers = [nn.Sequential(linear(4, 4), nn.Tanh()), nn.Sequential(linear(4, 4))]
    columns = [Column(layer[0], region()) for layer in layers]
    for column in columns:
        Wrapping().wrap(column)
    number_layers(layers)
    assert [column.layer for column in columns] == [0, 1]


def test_what_is_a_matrix() -> None:
    assert is_matrix(nn.Linear(1, 1))
    assert not is_matrix(nn.Embedding(1, 1))


class KeywordInput(nn.Module):
    def forward(self, states: Tensor, *, scale: float = 1.0) -> Tensor:
        return states * scale


@pytest.mark.parametrize("by_keyword", [False, True])
def test_the_first_argument_enters_before_the_module_sees_it(by_keyword: bool) -> None:
    here, module, wrapping = region(sequence=True), KeywordInput(), Wrapping()
    wrapping.before("tensor", module, EnterFirst(here), with_kwargs=True)
    x = torch.ones(2, 3, 4)
    output = module(states=x, scale=2.0) if by_keyword else module(x, scale=2.0)
    assert output.shape == (2, 6, 4)  # the sequences of two ranks
    assert [move.operation for move in here.group.ledger.moves] == ["all_gather"]


def test_where_columns_enter_together_the_module_around_them_does_not() -> None:
    here, module, wrapping = region(), KeywordInput(), Wrapping()
    here.overlaps = True
    wrapping.before("tensor", module, EnterFirst(here), with_kwargs=True)
    x = torch.ones(2, 3, 4, requires_grad=True)
    module(x).sum().backward()
    assert here.group.ledger.moves == []


def test_parts_that_some_ranks_use_whole_are_counted_in_products_of_8_bits() -> None:
    """4 heads of query, and one of key and value for all of them: 8 wide, and 24 rows for each of 4 ranks."""
    for ranks, refused in ((2, False), (4, True)):
        model = nn.Sequential(nn.Linear(32, 48))
        wrapping, group = Wrapping(), RecordingGroup("tensor", 0, ranks)
        wrapping.wrap(Float8Linear(model[0], None))  # type: ignore[arg-type]
        style = Style("column", (4, 1, 1), True, (1, 2))
        wrapping.wrap(PartlyWhole(model[0], Region(group, sequence=False), style))
        plan = Plan(tensor=ranks, precision="fp8")
        if refused:
            with pytest.raises(UserError, match="0: the part of a rank is 24 × 32, and products of 8 bits"):
                check_parts(model, plan)
        else:
            check_parts(model, plan)
