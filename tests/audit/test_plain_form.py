"""A model as it was before a plan changed it, in the same objects."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from echelon.audit.plain_form import PlainForm
from echelon.ownership import StateNames
from echelon.wrapping import Wrapper, Wrapping

CPU = torch.device("cpu")


class Keeping(nn.Module):
    """Assigns an attribute and changes a buffer in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("calls", torch.zeros(()))
        self.last: Tensor | None = None
        self.factor = 1.0
        self.config = SimpleNamespace(scale=2.0)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = self.layer(x)
        return self.last * self.factor * self.config.scale


class Doubling(Wrapper):
    entry = "tensor"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * self.inner(*args, **kwargs)


def changed() -> tuple[Keeping, PlainForm, Wrapping]:
    torch.manual_seed(0)
    model, wrapping = Keeping(), Wrapping()
    form = PlainForm(model, StateNames.of(model), wrapping)
    wrapping.wrap(Doubling(model.layer))
    wrapping.after("tensor", model, lambda *_: torch.zeros(()))
    wrapping.assign(model, "factor", 7.0)
    wrapping.assign(model.config, "scale", 5.0)
    wrapping.assign(model.config, "scale", 6.0)
    form.settle()
    return model, form, wrapping


def test_what_a_plan_has_changed_is_as_before_and_then_again_as_the_plan_has_it() -> None:
    model, form, _ = changed()
    x = torch.ones(1, 3)
    plain = nn.functional.linear(x, model.layer.weight, model.layer.bias)
    with form.installed({}, CPU) as parameters:
        assert torch.equal(model(x), 2 * plain)
        assert parameters["layer.weight"] is model.layer.weight
        assert model.last is not None
    assert float(model(x)) == 0
    assert (model.factor, model.config.scale) == (7.0, 6.0)
    assert torch.equal(model.layer(x), 2 * plain)


def test_what_a_forward_assigns_or_writes_to_a_buffer_is_forgotten() -> None:
    model, form, _ = changed()
    entries = model.__dict__
    with form.installed({}, CPU):
        model(torch.ones(1, 3))
        assert model.calls == 1
    assert model.last is None
    assert model.calls == 0
    assert model.__dict__ is entries


def test_what_the_user_has_set_since_stays() -> None:
    model, form, _ = changed()
    model.note = "mine"
    model.eval()
    with form.installed({}, CPU):
        assert model.note == "mine"
        assert not model.training


def test_weights_that_are_elsewhere_are_given() -> None:
    model, form, _ = changed()
    weight, bias = model.layer.weight.detach().clone(), model.layer.bias
    model.layer._parameters["weight"] = None
    model._buffers["calls"] = None
    assert form.missing(CPU) == ["calls", "layer.weight"]
    with form.installed({"layer.weight": weight, "calls": torch.ones(())}, CPU) as parameters:
        assert torch.equal(model.layer.weight, weight)
        assert model.layer.bias is bias
        assert model.calls == 1
        assert list(parameters) == ["layer.weight", "layer.bias"]
    assert model.layer.weight is None


def test_fresh_parameters_leave_gradients_and_engine_hooks_alone() -> None:
    model, form, _ = changed()
    seen: list[Tensor] = []
    model.layer.weight.register_hook(lambda gradient: seen.append(gradient))
    with form.installed({}, CPU, fresh=True) as parameters:
        model(torch.ones(1, 3)).sum().backward()
        assert parameters["layer.weight"].grad is not None
        assert parameters["layer.weight"].data_ptr() == model.layer.weight.data_ptr()
    assert model.layer.weight.grad is None
    assert len(seen) == 1


def test_tied_weights_stay_tied_and_recurrent_ones_are_listed() -> None:
    model = nn.ModuleDict({"one": nn.LSTM(2, 2), "other": nn.Linear(2, 2), "tied": nn.Linear(2, 2)})
    model["tied"].weight = model["other"].weight
    form = PlainForm(model, StateNames.of(model), Wrapping())
    form.settle()
    whole = {"other.weight": torch.ones(2, 2), "one.weight_hh_l0": torch.zeros(8, 2)}
    model["other"]._parameters["weight"] = model["tied"]._parameters["weight"] = None
    with form.installed(whole, CPU):
        assert model["tied"].weight is model["other"].weight
        assert model["one"]._flat_weights[1] is model["one"].weight_hh_l0
        model["one"](torch.ones(1, 1, 2))
