"""How a model's parameters are divided into units."""

import torch
from torch import Tensor, nn

from echelon.data_parallel.units import divide_units


def described(model: nn.Module, **options: int) -> list[tuple[str, list[str], list[int]]]:
    """Name, parameters and needs of each unit."""
    return [
        (unit.name, [name for name, _ in unit.parameters], unit.needs)
        for unit in divide_units(model, **options)
    ]


class Model(nn.Module):
    """Children in lists, a small one, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.blocks = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))
        self.small = nn.Linear(2, 2, bias=False)
        self.extra = nn.ParameterList([torch.ones(64)])


def test_children_of_lists_are_units_and_the_rest_stays_with_the_model() -> None:
    assert described(Model(), smallest=8 * 8 * 4) == [
        ("blocks.0", ["blocks.0.weight"], [0]),
        ("blocks.1", ["blocks.1.weight"], [1]),
        ("", ["scale", "small.weight", "extra.0"], [2]),
    ]


def test_a_module_of_the_smallest_size_is_a_unit_and_one_byte_less_is_not() -> None:
    model = nn.Module()
    model.child = nn.Linear(4, 4, bias=False)
    assert [name for name, _, _ in described(model, smallest=64)] == ["child"]
    assert [name for name, _, _ in described(model, smallest=65)] == [""]


class Layered(Model):
    def layers(self) -> list[nn.Module]:
        return [self.blocks[0], self.small, self.blocks[0]]


def test_the_layers_that_a_model_lists_are_its_units_whatever_their_size() -> None:
    assert [name for name, _, _ in described(Layered(), smallest=10**9)] == ["blocks.0", "small", ""]


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.first, self.inner.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.attention = nn.MultiheadAttention(4, 2)


def test_what_is_too_large_is_divided_unless_it_uses_its_children_s_weights_itself() -> None:
    names = [name for name, _, _ in described(Nested(), smallest=0, largest=100)]
    assert names == ["inner.first", "inner.second", "attention"]
    assert [name for name, _, _ in described(Nested(), smallest=0)] == ["inner", "attention"]


class Tied(nn.Module):
    """The second layer owns nothing: it needs the first one's unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.activation = nn.Tanh()
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x)))  # type: ignore[no-any-return]


def test_a_tied_weight_belongs_to_the_first_unit_and_others_need_that() -> None:
    assert described(Tied(), smallest=0) == [
        ("first", ["first.weight", "first.bias"], [0]),
        ("second", [], [0]),
        ("last", ["last.weight", "last.bias"], [2]),
    ]


def test_needs_are_places_among_the_units_that_are_left() -> None:
    """A unit that owns and needs nothing is left out, and the numbers behind it move up."""
    model = nn.Sequential(nn.Tanh(), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    assert [(name, needs) for name, _, needs in described(model)] == [("1", [0]), ("3", [1])]


def test_only_some_parameters_are_divided_and_the_others_are_left_to_other_sets() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    units = divide_units(model, only={model[0].bias})
    assert [(unit.name, [name for name, _ in unit.parameters]) for unit in units] == [("0", ["0.bias"])]


def test_every_parameter_is_in_exactly_one_unit() -> None:
    for model in (Model(), Tied(), Nested(), nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2))):
        owned = [parameter for unit in divide_units(model, smallest=0) for _, parameter in unit.parameters]
        assert len(owned) == len(set(owned))
        assert set(owned) == set(model.parameters())
