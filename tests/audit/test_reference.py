"""Whole weights in a skeleton: lent, tied as in the model, and none of them zero."""

import torch
from torch import nn

from echelon.audit.reference import Place, Replaced, WholeWeights, in_a_row, with_weights
from echelon.audit.skeleton import make_skeleton
from echelon.collectives import RecordingGroup
from echelon.ownership import OwnedSlice, whole_slice


def weights_of(model: nn.Module, skeleton: nn.Module) -> WholeWeights:
    owned = [OwnedSlice(whole_slice(name, p), p) for name, p in model.named_parameters()]
    return WholeWeights(skeleton, owned, RecordingGroup("all"), torch.device("cpu"))


def tied_model() -> tuple[nn.Module, nn.Module]:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    skeleton = make_skeleton(model)
    assert isinstance(skeleton, nn.Module)
    return model, skeleton


def test_weights_are_lent_to_all_modules_that_share_them() -> None:
    model, skeleton = tied_model()
    weights = weights_of(model, skeleton).assemble(list(skeleton.parameters()))
    x = torch.randn(2, 3)
    with with_weights(list(skeleton), weights):
        assert torch.equal(in_a_row(list(skeleton))(x), model(x))
        assert skeleton[0].weight is skeleton[2].weight
    assert skeleton[0].weight is skeleton[2].weight
    assert skeleton[0].weight.is_meta


def test_weights_of_another_stage_are_not_there() -> None:
    model, skeleton = tied_model()
    whole = weights_of(model[:1], skeleton)
    assert whole.has(list(skeleton[0].parameters()))
    assert not whole.has(list(skeleton[2].parameters()))
    assert not whole.has([nn.Parameter(torch.zeros(1))])


def test_zeros_have_other_values_for_a_while() -> None:
    """A bias of zeros, added by each of two ranks, would not be seen."""
    model, skeleton = tied_model()
    nn.init.zeros_(model[2].bias)
    before = {name: p.clone() for name, p in model.named_parameters()}
    parameters = list(skeleton.parameters())
    weights = weights_of(model, skeleton).assemble(parameters)
    places = dict(zip(parameters, (Place(p, lambda whole: whole) for p in model.parameters()), strict=True))
    with Replaced(weights, places):
        assert bool(model[2].bias.all())
        assert torch.equal(weights[skeleton[2].bias], model[2].bias)
        assert torch.equal(model[0].bias, before["0.bias"])
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_a_weight_whose_memory_was_given_back_has_no_place() -> None:
    parameter = nn.Parameter(torch.ones(4))
    place = Place(parameter, lambda whole: whole)
    assert place.has_memory
    parameter.untyped_storage().resize_(0)
    assert not place.has_memory
