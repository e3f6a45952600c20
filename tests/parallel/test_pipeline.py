"""Models cut into stages: where, what each holds, what ties them, what is refused."""

import pytest
import torch
from torch import Tensor, nn

from echelon.errors import UserError
from echelon.parallel.pipeline import even_boundaries, keep_only, split_model
from tests.parallel.pipeline.models import deep, perceptron


@pytest.mark.parametrize(
    ("layers", "stages", "boundaries"),
    [(4, 2, [2]), (5, 2, [3]), (7, 3, [3, 5]), (4, 4, [1, 2, 3]), (12, 5, [3, 6, 8, 10]), (3, 1, [])],
)
def test_stages_have_as_many_layers_and_the_first_one_more(
    layers: int, stages: int, boundaries: list[int]
) -> None:
    assert even_boundaries(perceptron(layers), stages) == boundaries


def test_stages_in_a_row_are_the_model() -> None:
    model = perceptron(5)
    stages, ties = split_model(model, [1, 4])
    x = torch.randn(3, 6)
    assert torch.equal(stages[2](stages[1](stages[0](x))), model(x))
    assert [len(stage.layers()) for stage in stages] == [1, 3, 1]
    assert ties == []


def test_parameters_and_buffers_keep_the_names_of_the_model() -> None:
    model = nn.Sequential(perceptron(2), nn.BatchNorm1d(5), nn.Linear(5, 5))
    stages = split_model(model, [1, 2]).stages
    assert [name for name, _ in stages[0].named_parameters()] == [
        "0.0.linear.weight",
        "0.0.linear.bias",
        "0.1.weight",
        "0.1.bias",
    ]
    assert [name for name, _ in stages[1].named_buffers()] == [
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    ]
    assert [name for name, _ in stages[2].named_parameters()] == ["2.weight", "2.bias"]
    assert all(
        p is q for p, q in zip(model.parameters(), (p for s in stages for p in s.parameters()), strict=True)
    )


def test_a_weight_in_several_stages_is_a_tie() -> None:
    model = deep()
    stages, ties = split_model(model, [4, 8])
    assert [(tie.name, tie.stages) for tie in ties] == [("embedding.tokens.weight", (0, 2))]
    assert ties[0].parameter is model.head.projection.weight
    assert "embedding.tokens.weight" in dict(stages[2].named_parameters())


def test_a_weight_twice_in_one_stage_is_no_tie() -> None:
    assert split_model(deep(), []).ties == []
    layer = nn.Linear(6, 6)
    stages, ties = split_model(nn.Sequential(layer, layer, nn.Linear(6, 6), layer), [2, 3])
    assert [tie.stages for tie in ties] == [(0, 2), (0, 2)]
    assert len(list(stages[0].parameters())) == 2


def test_what_no_kept_stage_holds_is_dropped() -> None:
    model = nn.Sequential(perceptron(2), nn.BatchNorm1d(5), nn.Linear(5, 5))
    stages = split_model(model, [1, 2]).stages
    names = set(model.state_dict())
    keep_only(model, stages, [stages[1]])
    assert set(model.state_dict()) == {name for name in names if name.startswith("1.")}
    assert next(iter(stages[1].parameters())) is model[1].weight
    assert list(stages[0].parameters()) == []


def test_a_tied_weight_stays_where_any_stage_holds_it() -> None:
    model = deep()
    stages = split_model(model, [4, 8]).stages
    keep_only(model, stages, [stages[2]])
    assert model.head.projection.weight is model.embedding.tokens.weight
    assert model.embedding.positions.weight is None


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.linear(x)
        return output


class Outside(Bare):
    """Has a parameter that is in none of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5))

    def layers(self) -> list[nn.Module]:
        return [nn.Identity(), self.linear]


class Foreign(Bare):
    """Lists a layer that it does not hold itself."""

    def layers(self) -> list[nn.Module]:
        return [nn.Linear(6, 6), self.linear]


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(UserError, match=r"Bare lists no layers to cut between; make it an nn.Sequential, or"):
        even_boundaries(Bare(), 2)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(UserError, match=r"3 layers of Sequential cannot make 4 stages.* chunks ≤ 3"):
        even_boundaries(perceptron(3), 4)


def test_parameters_outside_of_layers_are_refused() -> None:
    with pytest.raises(UserError, match=r"scale, shift of Outside belong to no layer.*; move them into"):
        split_model(Outside(), [1])


def test_layers_that_the_model_does_not_hold_are_refused() -> None:
    with pytest.raises(UserError, match=r"layers\(\) of Foreign returns Linear, with .*; assign these"):
        split_model(Foreign(), [1])


class WithBuffer(nn.Module):
    """Has a buffer of its own beside its layers, which its own forward could use and no layer does."""

    def __init__(self) -> None:
        super().__init__()
        self.body = perceptron(2)
        self.register_buffer("mean", torch.zeros(3))

    def layers(self) -> list[nn.Module]:
        return list(self.body)


def test_a_buffer_in_no_layer_stays_on_every_rank() -> None:
    model = WithBuffer()
    stages = split_model(model, [1]).stages
    keep_only(model, stages, [stages[1]])
    assert set(model.state_dict()) == {"mean", "body.1.weight", "body.1.bias"}
