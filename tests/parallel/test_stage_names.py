"""Names from before a model is split."""

from torch import nn

from echelon.parallel.stage_names import Names


def test_names_are_those_of_the_whole_model() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.append(nn.Linear(2, 2))
    model[2].weight = model[0].weight
    names = Names.of(model)
    assert names.parameters[model[2].weight] == "0.weight"
    assert names.modules[model[1]] == "1"
    assert names.buffer(model[1], "running_mean") == "1.running_mean"
    assert names.buffer(model, "count") == "count"
    assert names.buffer(nn.Linear(2, 2), "mask") == "mask"
