"""A split model is put together again: the same parameters, tied ones together."""

import pytest
import torch
from torch import nn

from echelon.engine.saving.restore import check_whole, is_split, mark_split, restore_weights
from echelon.errors import UserError
from echelon.plan import Plan
from echelon.state.ownership import StateNames


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.kept = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.last = nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.first.weight.decays = False  # type: ignore[assignment] # of the user
        self.register_buffer("counter", torch.zeros(()))
        self.register_buffer("here", torch.zeros(()))
        self.register_buffer("rates", torch.ones(2), persistent=False)


def split(model: Model) -> None:
    """As ranks do: a part of one weight, nothing of another, and one whole in other memory; no buffer but
    one."""
    rates = model._buffers["rates"]
    assert rates is not None
    mark_split(model, Plan(tensor=2), {"rates": rates})
    model._buffers |= {"counter": None, "rates": None}
    model.first.weight = nn.Parameter(model.first.weight[:2].detach().clone())
    model.last._parameters["weight"] = None
    model._parameters["frozen"] = nn.Parameter(torch.ones(2), requires_grad=False)
    model.kept.weight.data = torch.zeros(4, 4)


def test_weights_come_back_to_their_places() -> None:
    model = Model()
    names, whole = StateNames.of(model), {n: v.clone() for n, v in model.state_dict().items()}
    kept, here = model.kept.weight, model.here
    split(model)
    whole["counter"] = torch.tensor(7.0)
    restore_weights(model, whole, names)
    assert {name: value.tolist() for name, value in model.state_dict().items()} == {
        name: value.tolist() for name, value in whole.items()
    }
    assert model.last.weight is model.first.weight, "tied as before"
    assert model.kept.weight is kept, "a parameter that was whole keeps its identity"
    assert model.here is here, "and so does a buffer that was not dropped"
    assert model.rates.tolist() == [1, 1], "which no state dict has"
    assert model.first.weight.decays is False  # type: ignore[union-attr]
    assert model.first.weight.requires_grad
    assert not model.frozen.requires_grad
    assert [name for name, _ in model.named_parameters()] == ["frozen", "first.weight", "kept.weight"]


def test_recurrent_layers_use_the_weights_that_came_back() -> None:
    """They keep a list of their weights: on ranks that had dropped them, those of before the training."""
    model = nn.Sequential(nn.LSTM(2, 2))
    names, whole = StateNames.of(model), {n: v.clone() + 1 for n, v in model.state_dict().items()}
    mark_split(model, Plan(tensor=2), {})
    model[0]._parameters |= dict.fromkeys(model[0]._parameters)
    restore_weights(model, whole, names)
    assert all(kept is now for kept, now in zip(model[0]._flat_weights, model.parameters(), strict=True))


def test_a_model_in_parts_is_refused_until_it_is_whole_again() -> None:
    model = Model()
    names, whole = StateNames.of(model), model.state_dict()
    check_whole(model)
    split(model)
    with pytest.raises(UserError, match=r"split over ranks by another engine \(plan '.*tensor=2.*'\)"):
        check_whole(model)
    restore_weights(model, whole, names)
    check_whole(model)


@pytest.mark.parametrize(
    ("plan", "expected"),
    [("data=2 zero=3", True), ("tensor=2", True), ("pipeline=2", True), ("data=2 zero=2", False)],
)
def test_which_plans_leave_parts(plan: str, expected: bool) -> None:
    model = Model()
    mark_split(model, Plan.parse(plan), {})
    assert is_split(model) == expected
