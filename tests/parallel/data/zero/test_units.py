"""How a model's parameters are divided into units."""

import torch
from torch import Tensor, nn

from echelon.parallel.data.zero.units import divide_units, merge_units
from echelon.parallel.pipeline import split_model


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


def test_small_neighbours_are_merged_and_large_units_stay() -> None:
    units = divide_units(Model(), smallest=8 * 8 * 4)
    assert [(unit.name, len(unit.parameters), unit.needs) for unit in merge_units(units, 2 * 256)] == [
        ("blocks.0", 2, [0]),
        ("", 3, [1]),
    ]
    assert [len(unit.parameters) for unit in merge_units(units, 1)] == [1, 1, 3]
    (whole,) = merge_units(units)
    assert [p for _, p in whole.parameters] == [p for unit in units for _, p in unit.parameters]
    assert merge_units([]) == []


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


class Small(nn.Module):
    """A trunk, of which the model uses the norm and the first weight itself, and lists a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Module()
        self.trunk.wide, self.trunk.norm = nn.Linear(8, 8), nn.LayerNorm(2)
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.trunk.wide.weight
        self.norm, self.other = self.trunk.norm, nn.Linear(2, 2)
        self.listed = nn.ParameterList([self.trunk.wide.bias])


def test_what_is_used_outside_of_its_unit_needs_that_unit() -> None:
    """Small modules once were left to the model, which gathers only its own."""
    assert described(Small(), smallest=300) == [
        ("trunk", ["trunk.wide.weight", "trunk.wide.bias", "trunk.norm.weight", "trunk.norm.bias"], [0]),
        ("head", [], [0]),
        ("trunk.norm", [], [0]),
        ("", ["other.weight", "other.bias"], [0, 3]),
    ]


def test_a_stage_needs_no_unit_beside_its_layers() -> None:
    """It names the parameters of its layers as its own, and would keep all of them gathered."""
    (stage,), _ = split_model(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [])
    assert [needs for _, _, needs in described(stage)] == [[0], [1]]


class Block(nn.Module):
    def __init__(self, *inside: nn.Module) -> None:
        super().__init__()
        self.inside = nn.ModuleList(inside)
        self.mlp = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


class Encoder(nn.Module):
    """As BERT is: a trunk with a list of blocks in it, one of which has experts, and stages with blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Module()
        self.trunk.embeddings, self.trunk.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(2))
        self.trunk.encoder = nn.Module()
        self.trunk.encoder.layer = nn.ModuleList([Block(), Block(Block(), Block())])
        self.stages = nn.ModuleList([nn.Module()])
        self.stages[0].blocks = nn.Sequential(Block(), Block())


def test_a_trunk_is_divided_at_its_blocks_and_these_stay_whole() -> None:
    """A model as large as BERT once was two units, one of them nearly all of it."""
    assert [(name, len(parameters)) for name, parameters, _ in described(Encoder(), smallest=16)] == [
        ("trunk.embeddings", 2),
        ("trunk.encoder.layer.0", 4),
        ("trunk.encoder.layer.1", 12),
        ("stages.0.blocks.0", 4),
        ("stages.0.blocks.1", 4),
        ("", 1),
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


def linear(num_bytes: int) -> nn.Linear:
    """Of the meta device, where it takes no memory."""
    return nn.Linear(num_bytes // 4, 1, bias=False, device="meta")


def test_a_child_of_16_kib_is_a_unit() -> None:
    model = nn.ModuleDict({"small": linear(2**14 - 4), "unit": linear(2**14)})
    assert [unit.name for unit in divide_units(model)] == ["unit", ""]


def test_a_child_of_more_than_512_mib_is_divided() -> None:
    def names(num_bytes: int) -> list[str]:
        model = nn.Module()
        model.child = nn.Module()
        model.child.first, model.child.second = linear(num_bytes - 2**15), linear(2**15)
        return [unit.name for unit in divide_units(model)]

    assert names(2**29) == ["child"]
    assert names(2**29 + 4) == ["child.first", "child.second"]
