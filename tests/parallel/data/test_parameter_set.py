"""What a parameter set knows of its parameters beyond their replicas."""

import torch
from torch import nn

from echelon.collectives import RecordingGroup
from echelon.parallel.data import ParameterSet, ShardGroups, SharedGradient, named_subset

GROUP = RecordingGroup("tied")


def make_set() -> tuple[ParameterSet, nn.ParameterDict]:
    module = nn.ParameterDict({name: nn.Parameter(torch.ones(2)) for name in "abcd"})
    module["frozen"] = nn.Parameter(torch.ones(3), requires_grad=False)
    shared = [
        SharedGradient(module["a"], GROUP, tie=0, counts_norm=False),
        SharedGradient(module["b"], GROUP, tie=1),
        SharedGradient(module["c"], GROUP, counts_norm=False),
    ]
    norm_elsewhere = frozenset({module["d"]})
    return ParameterSet("dense", named_subset(module), GROUP, (), shared, norm_elsewhere), module


def test_trained_parameters_are_those_that_get_gradients() -> None:
    parameter_set, _ = make_set()
    assert [name for name, _ in parameter_set.trained] == ["a", "b", "c", "d"]
    assert parameter_set.numel == 11


def test_the_norm_leaves_out_what_other_stages_or_ranks_count() -> None:
    parameter_set, module = make_set()
    assert parameter_set.uncounted == {module["a"], module["c"], module["d"]}


def test_by_default_all_ranks_of_the_set_shard_one_copy() -> None:
    parameter_set, _ = make_set()
    shard, copies = parameter_set.shard_groups
    assert shard is GROUP
    assert copies.size == 1
    assert copies.ledger is GROUP.ledger
    assert parameter_set.shard_groups.copies is copies


def test_a_set_says_over_how_many_ranks_each_copy_is_sharded() -> None:
    module, data = nn.Linear(2, 3), RecordingGroup("data", 5, 8)
    groups = ShardGroups(RecordingGroup("shard", 1, 4), RecordingGroup("copies", 1, 2))
    whole = ParameterSet("dense", named_subset(module), data)
    assert whole.describe() == "dense 9 parameters over data (8)"
    hybrid = ParameterSet("dense", named_subset(module), data, shards=groups)
    assert hybrid.shard_groups is groups
    assert hybrid.describe() == "dense 9 parameters over data (8), sharded over 4"


def test_a_subset_has_the_first_names() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].weight = module[0].weight
    assert list(named_subset(module)) == ["0.weight", "0.bias", "1.bias"]
    assert list(named_subset(module, {module[1].weight})) == ["0.weight"]
