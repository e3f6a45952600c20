"""Which modules are compared: layers, and not the columns and rows inside them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.audit.skeleton import make_skeleton
from echelon.audit.units import find_units
from echelon.collectives import RecordingGroup
from echelon.pipeline_parallel import split_model
from echelon.tensor_parallel import Region
from echelon.tensor_parallel.modules import Column, EnterFirst
from echelon.wrapping import Wrapping


class Tree(nn.Module):
    """A trunk with a list of blocks beside a head, and experts in a list inside of each block."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Module()
        self.trunk.tokens, self.trunk.norm = nn.Linear(2, 2), nn.LayerNorm(2)
        self.trunk.blocks = nn.ModuleList([self._block(), self._block()])
        self.head = nn.Linear(2, 2)

    def _block(self) -> nn.Module:
        block = nn.Module()
        block.experts = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        return block


def split_matrices(model: nn.Module) -> None:
    region = Region(RecordingGroup("tensor", 0, 2), sequence=False)
    wrapping = Wrapping()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            wrapping.wrap(Column(module, region))


@pytest.fixture
def tree() -> tuple[nn.Module, nn.Module]:
    model = Tree()
    skeleton = make_skeleton(model)
    assert isinstance(skeleton, nn.Module)
    split_matrices(model)
    return model, skeleton


class Elsewhere(Tensor):
    """Cannot be brought to the meta device."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.to:
            raise NotImplementedError("to")
        return super().__torch_function__(function, types, args, kwargs or {})


def test_a_model_with_tensors_of_another_kind_has_no_skeleton_but_a_reason() -> None:
    # The error itself came out of parallelize.
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.zeros(2, 2).as_subclass(Elsewhere))
    assert make_skeleton(model) == "Linear cannot be copied: NotImplementedError: to"


def test_members_of_lists_are_units_and_lists_in_them_are_not(tree: tuple[nn.Module, nn.Module]) -> None:
    units, whole = find_units(*tree, first_layer=0)
    assert [unit.name for unit in units] == ["trunk.tokens", "trunk.blocks.0", "trunk.blocks.1", "head"]
    assert units[1].module is tree[0].trunk.blocks[0]
    assert list(units[1].originals) == [tree[1].trunk.blocks[0]]
    assert (whole.module, list(whole.originals)) == (tree[0], [tree[1]])


def test_inside_of_a_region_gradients_of_inputs_are_parts(tree: tuple[nn.Module, nn.Module]) -> None:
    model, skeleton = tree
    region = Region(RecordingGroup("tensor", 0, 2), sequence=False)
    model.trunk.register_forward_pre_hook(EnterFirst(region), with_kwargs=True)
    units, _ = find_units(model, skeleton, first_layer=0)
    assert [unit.name for unit in units] == ["trunk", "head"]


def test_the_layers_of_a_stage_are_units() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.Tanh())
    skeleton = make_skeleton(model)
    assert isinstance(skeleton, nn.Module)
    stage = split_model(model, [1]).stages[1]
    units, whole = find_units(stage, skeleton, first_layer=1)
    assert [unit.name for unit in units] == ["layer 1 (1)", "layer 2 (2)", "layer 3 (3)"]
    assert [unit.is_first for unit in units] == [False] * 3
    assert whole.name == "layers 1 to 3"
    assert list(whole.originals) == list(skeleton)[1:]
    assert len(whole.original_parameters) == 2
    assert all(parameter.device == torch.device("meta") for parameter in whole.original_parameters)
