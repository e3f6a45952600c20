"""What a rank sees of layers that others share: seen from any rank, in one process."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from echelon.collectives.mesh import Mesh
from echelon.errors import UserError
from echelon.models import ModelConfig, build, cross_entropy
from echelon.nn.sequence import View
from echelon.nn.wrapping import Wrapping
from echelon.parallel.context import AllToAllView, RingView
from echelon.parallel.layer_sharding import LayerSharding
from echelon.parallel.tensor.styles import Table
from echelon.plan import Plan
from echelon.program import build as program
from echelon.verify import Case, assert_equal
from tests.cases import adamw
from tests.contract_models import token_loss
from tests.parallel.tensor.models import SEQUENCE, VOCAB, language_case, tokens


def sharding_of(
    plan: str,
    rank: int,
    loss: Any = cross_entropy,
    *,
    model: nn.Module | None = None,
    tensor_table: Table | None = None,
) -> LayerSharding:
    model = language_case("gpt", steps=1).build() if model is None else model
    return LayerSharding(model, Mesh.pretend(Plan.parse(plan), rank), loss, tensor_table, Wrapping())


@pytest.mark.parametrize(("rank", "expected"), [(0, [0, 1]), (1, [2, 3])])
def test_heads_are_those_of_the_whole_layer(rank: int, expected: list[int]) -> None:
    assert sharding_of("tensor=2", rank)._heads(2).tolist() == expected


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ("tensor=2 sequence=true", [[0, 1], [2, 3]]),
        ("context=2 tensor=2 sequence=true", [[0, 1], [6, 7], [2, 3], [4, 5]]),
    ],
)
def test_positions_of_a_part_along_tensor_are_those_of_the_sequence(
    plan: str, expected: list[list[int]]
) -> None:
    assert [sharding_of(plan, rank)._stream(2).tolist() for rank in range(len(expected))] == expected


def test_a_rank_takes_its_positions_of_a_batch() -> None:
    tokens, labels = torch.arange(16).view(2, 8), torch.arange(2)
    taken = sharding_of("context=2", 1).take_part(({"tokens": tokens, "labels": labels}, tokens))
    assert taken.inputs["tokens"].tolist() == [[2, 3, 4, 5], [10, 11, 12, 13]]
    assert taken.inputs["labels"] is labels
    assert taken.targets.values.tolist() == taken.inputs["tokens"].tolist()
    assert sharding_of("tensor=2", 1).take_part((tokens, labels)).inputs is tokens


def test_layers_know_the_true_length_and_what_they_share_while_they_run() -> None:
    sharding = sharding_of("context=2", 0)
    with sharding.around(6, {"attention_mask": 1}, nullcontext)():
        assert sharding.view.whole_length(4) == 6
        assert sharding.view.shared == {"attention_mask": 1}
    assert sharding.view.whole_length(4) == 8
    assert not sharding.view.shared


@pytest.mark.parametrize(("attention", "view"), [("ring", RingView), ("all-to-all", AllToAllView)])
def test_the_plan_says_how_ranks_attend(attention: str, view: type[View]) -> None:
    assert type(sharding_of(f"context=2 attention={attention}", 0).view) is view
    assert type(sharding_of("tensor=2", 0).view) is View


def test_the_first_tensor_rank_counts_losses_and_norms_of_what_all_have_whole() -> None:
    first, second = (sharding_of("tensor=2", rank) for rank in range(2))
    assert (first.counts_loss, second.counts_loss) == (True, False)
    assert first.norm_elsewhere == frozenset()
    assert second.sharded is not None
    assert second.norm_elsewhere == frozenset(second.sharded.replicated) != frozenset()
    assert sharding_of("data=2", 1).norm_elsewhere == frozenset()


# Logits that are not split.

WHOLE_LOGITS = {"head.projection": "replicated"}


def untied() -> nn.Module:
    return build(ModelConfig("gpt", 2, 16, 4, vocab=VOCAB, sequence=SEQUENCE))


@pytest.mark.slow_cases("token_loss")
@pytest.mark.usefixtures("warm_contract")
@pytest.mark.parametrize("loss", [cross_entropy, token_loss])
def test_logits_that_are_whole_have_the_loss_of_one_device(loss: Any) -> None:
    """Their parts on two ranks were taken for parts of the vocabulary: the loss was off by log 2."""
    case = Case(untied, tokens, loss, adamw, steps=3, options={"tensor_table": WHOLE_LOGITS})
    assert_equal(case, "tensor=2")


def test_only_split_logits_have_a_loss_over_parts() -> None:
    assert sharding_of("tensor=2", 0, model=untied(), tensor_table=WHOLE_LOGITS).loss is cross_entropy
    assert sharding_of("tensor=2", 0, model=untied()).loss is not cross_entropy
    assert sharding_of("tensor=2", 0, token_loss, model=untied()).loss is token_loss


# What one rank has only a part of.


def test_gradients_of_which_each_tensor_rank_has_a_part_are_summed_and_counted_once() -> None:
    for rank in range(2):
        model = untied()
        sharding = sharding_of("tensor=2 sequence=true", rank, model=model)
        shared = sharding.shared_gradients(model)
        assert sharding.sharded is not None
        assert {each.parameter for each in shared} == set(sharding.sharded.partial) != set()
        assert {(each.group.axis, each.tie) for each in shared} == {("tensor", None)}
        assert {each.counts_norm for each in shared} == {rank == 0}
        assert sharding.shared_gradients(nn.Linear(2, 2)) == [], "of another stage"
    assert sharding_of("data=2", 0).shared_gradients(model) == []


def test_frozen_parameters_have_no_gradient_to_sum() -> None:
    model = untied()
    sharding = sharding_of("tensor=2 sequence=true", 0, model=model)
    model.requires_grad_(False)
    assert sharding.shared_gradients(model) == []


@pytest.mark.parametrize(
    ("plan", "expected"),
    [("tensor=2 compile=true", False), ("tensor=2", True), ("tensor=2 data=2 zero=3", True)],
)
def test_sums_of_gradients_overlap_where_one_backward_pass_computes_both(plan: str, expected: bool) -> None:
    model = untied()
    sharding = sharding_of(plan, 0, model=model)
    sharding.overlap(model, program("1f1b", (1,), 1))
    assert sharding.sharded is not None
    assert sharding.sharded.region.overlaps == expected
    sharding.overlap(model, program("zero-bubble", (1,), 1))
    assert not sharding.sharded.region.overlaps, "its backward passes are in two"


def test_a_model_without_layers_has_no_place_to_split_sequences() -> None:
    for plan in ("context=2", "tensor=2 sequence=true"):
        with pytest.raises(UserError, match="Linear lists no layers, between which sequences are split"):
            sharding_of(plan, 0, model=nn.Linear(2, 2))
