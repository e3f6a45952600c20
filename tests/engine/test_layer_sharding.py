"""What a rank sees of layers that others share: seen from any rank, in one process."""

import pytest
import torch

from echelon.engine.layer_sharding import LayerSharding
from echelon.mesh import Mesh
from echelon.models import cross_entropy
from echelon.plan import Plan
from echelon.wrapping import Wrapping
from tests.tensor_parallel.models import language_case


def sharding_of(plan: str, rank: int) -> LayerSharding:
    model = language_case("gpt", steps=1).build()
    return LayerSharding(model, Mesh.pretend(Plan.parse(plan), rank), cross_entropy, None, Wrapping())


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
    taken = sharding_of("context=2", 1).take_part({"tokens": tokens, "labels": labels})
    assert taken["tokens"].tolist() == [[2, 3, 4, 5], [10, 11, 12, 13]]
    assert taken["labels"] is labels
    assert sharding_of("tensor=2", 1).take_part(tokens) is tokens


def test_the_first_tensor_rank_counts_losses_and_norms_of_what_all_have_whole() -> None:
    first, second = (sharding_of("tensor=2", rank) for rank in range(2))
    assert (first.counts_loss, second.counts_loss) == (True, False)
    assert first.norm_elsewhere == frozenset()
    assert second.sharded is not None
    assert second.norm_elsewhere == frozenset(second.sharded.replicated) != frozenset()
    assert sharding_of("data=2", 1).norm_elsewhere == frozenset()
