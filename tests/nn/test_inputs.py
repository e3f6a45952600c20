"""Arguments of a forward as a structure of tensors."""

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from echelon.nn.inputs import Inputs, call, call_stage, shared_inputs


class Recorder(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs


def test_inputs_are_a_structure_of_their_values() -> None:
    inputs = Inputs(1, [2], mask=3).for_layers({"positions": 4})
    assert tree_leaves(inputs) == [1, 2, 3, 4]
    doubled = tree_map(lambda leaf: 2 * leaf, inputs)
    assert (doubled.args, doubled.kwargs, doubled.shared) == ((2, [4]), {"mask": 6}, {"positions": 8})
    assert tree_map(lambda leaf: leaf, Inputs(1, 2).for_layers({}, as_one=True)).as_one
    assert repr(Inputs(1, mask=torch.Size([2]))) == "Inputs(1, mask=torch.Size([2]))"


def test_a_layer_takes_the_arguments_and_a_model_what_layers_share_too() -> None:
    inputs = Inputs(1, mask=3).for_layers({"positions": 4})
    assert call_stage(Recorder(), inputs) == ((1,), {"mask": 3})
    assert call(Recorder(), inputs) == ((1,), {"mask": 3, "positions": 4})
    assert call_stage(Recorder(), 5) == call(Recorder(), 5) == ((5,), {})
    assert (shared_inputs(inputs), shared_inputs(5)) == ({"positions": 4}, {})


def test_a_layer_that_takes_one_value_gets_a_tuple() -> None:
    inputs = Inputs(1, 2).for_layers({}, as_one=True)
    assert call_stage(Recorder(), inputs) == (((1, 2),), {})
    assert call(Recorder(), inputs) == ((1, 2), {})
