"""The rarer words of a table: grouped heads, parts that are whole, norms over split features, and more."""

import copy

import pytest
import torch
from torch import nn

from echelon.collectives import RecordingGroup
from echelon.errors import UserError
from echelon.models import cross_entropy
from echelon.nn.wrapping import Wrapping
from echelon.parallel.tensor.split import Sharded, TakeHeads, split_over
from echelon.parallel.tensor.styles import Table
from echelon.verify import Case, assert_equal
from tests.cases import adamw
from tests.parallel.tensor.words import TABLE, Model, batch


def split(model: nn.Module, table: Table, wrapping: Wrapping | None = None, ranks: int = 2) -> Sharded:
    group = RecordingGroup("tensor", 1, ranks)
    wrapping = wrapping or Wrapping()
    return split_over(model, group, table, wrapping, sequence=False, whole_sequence=[], join_logits=True)


def refused(model: nn.Module, table: Table, ranks: int = 2) -> list[str]:
    with pytest.raises(UserError) as caught:
        split(model, table, ranks=ranks)
    return list(caught.value.errors)


@pytest.mark.usefixtures("warm_contract")
def test_every_word_trains_as_one_device_does() -> None:
    case = Case(Model, batch, cross_entropy, adamw, steps=4, options={"tensor_table": TABLE})
    assert_equal(case, "tensor=2")


def test_a_config_is_divided_for_the_modules_that_read_it_alone() -> None:
    """Its number of heads is also what is written beside the weights."""
    model, wrapping = Model(), Wrapping()
    split(model, TABLE, wrapping)
    assert (model.config.heads, model.grouped.config.heads, model.grouped.config.groups) == (4, 2, 2)
    assert copy.deepcopy(model.grouped).config.heads == 2
    wrapping.remove()
    assert model.grouped.config is model.config


def test_ranks_have_whole_heads() -> None:
    errors = refused(Model(), TABLE | {"grouped.fused": "column:heads,3,1"})
    assert [error.split(" of ")[0] for error in errors[:2]] == [
        "grouped.fused: 3 heads",
        "grouped.fused: 1 heads",
    ]
    assert "are not divisible by 2 ranks; use tensor=1, or '3 whole', if every rank uses all" in errors[0]
    (error,) = refused(Model(), TABLE | {"grouped.fused": "column:4,2,4"})
    assert "'column:4,2,4' in the table is 10 heads, and its 24 outputs are not divisible by 10" in error


def test_words_that_do_not_fit_are_refused() -> None:
    assert refused(nn.Sequential(nn.GroupNorm(2, 4)), {"0": "norm"})[0].startswith("0 (GroupNorm): cannot be")
    (error,) = refused(nn.Sequential(nn.Linear(4, 4)), {"0": "tied"})
    assert "cannot be 'tied', which is for weights that modules inside it share" in error
    (error,) = refused(nn.Sequential(nn.Embedding(4, 4, max_norm=1.0)), {"0": "column"})
    assert "since max_norm needs all features of a row" in error


@pytest.mark.parametrize(
    ("shape", "taken"), [((2, 4, 3, 3), (2, 2, 3, 3)), ((8, 1, 3), (4, 1, 3)), ((2, 1, 3, 3), (2, 1, 3, 3))]
)
def test_an_argument_has_the_part_of_this_ranks_heads(shape: tuple[int, ...], taken: tuple[int, ...]) -> None:
    module = Model().grouped
    take, value = TakeHeads(module, "bias", 4, rank=1, ranks=2), torch.rand(shape)
    _, kwargs = take(module, ("x",), {"bias": value})
    args, _ = take(module, ("x", value), {})
    assert kwargs["bias"].shape == args[1].shape == taken
    assert torch.equal(kwargs["bias"].flatten()[-3:], value.flatten()[-3:])
    assert take(module, ("x",), {}) == (("x",), {})


def test_an_argument_with_another_number_of_heads_is_refused() -> None:
    take = TakeHeads(Model().grouped, "bias", 4, rank=1, ranks=2)
    with pytest.raises(UserError, match=r"bias of shape \[2, 3, 1, 1\] must have a part for each of 4 heads"):
        take(nn.Identity(), ("x", torch.rand(2, 3, 1, 1)), {})
