"""How a model's parameters are divided into units."""

import torch
from torch import Tensor, nn

from echelon.data_parallel.units import divide_units


class Tied(nn.Module):
    """The last child has no parameter of its own, and one parameter belongs to no child."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
        self.last = nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.second(self.first(x))) * self.scale
        return output


def described(model: nn.Module, **options: int) -> list[tuple[str, list[str], list[int]]]:
    return [
        (unit.name, [name for name, _ in unit.parameters], unit.needs)
        for unit in divide_units(model, **options)
    ]


def test_a_tied_parameter_is_of_the_first_unit_and_the_others_need_that() -> None:
    assert described(Tied(), smallest=0) == [
        ("first", ["first.weight"], [0]),
        ("second", ["second.weight", "second.bias"], [1]),
        ("last", [], [0]),
        ("", ["scale"], [3]),
    ]


def test_a_listed_layer_is_a_unit_whatever_its_size() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(100, 100))
    assert [name for name, _, _ in described(model)] == ["0", "2"]


def test_what_is_small_stays_with_the_model_and_what_is_large_is_divided() -> None:
    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small = nn.Linear(2, 2)  # 24 bytes
            self.middle = nn.Linear(4, 4)  # 80
            self.large = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
            self.attention = nn.MultiheadAttention(4, 2)  # 320, but it is never called by its children

    units = described(Sized(), smallest=80, largest=100)
    assert [name for name, _, _ in units] == ["middle", "large.a", "large.b", "attention", ""]
    assert units[-1] == ("", ["small.weight", "small.bias"], [4])


def test_only_some_parameters_are_divided_and_units_of_nothing_are_left_out() -> None:
    model = Tied()
    units = divide_units(model, smallest=0, only={model.second.bias, model.scale})
    assert [(unit.name, [name for name, _ in unit.parameters], unit.needs) for unit in units] == [
        ("second", ["second.bias"], [0]),
        ("", ["scale"], [1]),
    ]
