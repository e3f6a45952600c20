"""Batches in parts and microbatches, and the arguments of a forward as a part of one."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from echelon.errors import UserError
from echelon.nn.batch import Inputs, call, call_stage, microbatches, num_samples, shared_inputs, take_part


@given(samples=st.integers(0, 20), parts=st.integers(1, 8))
def test_parts_are_the_whole_in_order_and_differ_by_one(samples: int, parts: int) -> None:
    batch = (torch.arange(samples), {"x": torch.arange(samples) * 2, "name": "kept"})
    cut = [take_part(batch, index, parts) for index in range(parts)]
    assert torch.equal(torch.cat([part[0] for part in cut]), batch[0])
    assert torch.equal(torch.cat([part[1]["x"] for part in cut]), batch[1]["x"])
    assert {part[1]["name"] for part in cut} == {"kept"}
    sizes = [len(part[0]) for part in cut]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def test_microbatches_are_never_empty() -> None:
    batch = (torch.arange(3), torch.arange(3))
    assert [len(part[0]) for part, _ in microbatches(batch, 2, always=False)] == [2, 1]
    assert [len(part[0]) for part, _ in microbatches(batch, 5, always=False)] == [1, 1, 1]
    assert microbatches((torch.empty(0), torch.empty(0)), 2, always=False) == []


def test_where_ranks_keep_step_missing_microbatches_weigh_nothing() -> None:
    batch = (torch.arange(2), torch.arange(2))
    parts = microbatches(batch, 4, always=True)
    assert [(part[0].tolist(), weight) for part, weight in parts] == [([0], 1), ([1], 1), ([0], 0), ([0], 0)]
    with pytest.raises(UserError, match="give each replica at least one sample"):
        microbatches((torch.empty(0), torch.empty(0)), 2, always=True)


def test_a_batch_needs_one_number_of_samples() -> None:
    with pytest.raises(UserError, match=r"got \[2, 3\]"):
        num_samples((torch.ones(2), torch.ones(3)))
    with pytest.raises(UserError, match="no tensor at all"):
        num_samples(({"a": 1}, None))


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
