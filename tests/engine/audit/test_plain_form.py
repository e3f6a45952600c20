"""A model as it was before a plan changed it, in the same objects."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.engine.audit.plain_form import PlainForm
from echelon.nn.wrapping import Wrapper, Wrapping, stack_of
from echelon.parallel.data.zero.weight_access import FreedParameter
from echelon.state.ownership import StateNames

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
    model.note, model.last = "mine", torch.ones(1)
    model.eval()
    model.register_forward_pre_hook(lambda *_: None)
    with form.installed({}, CPU):
        assert model.note == "mine"
        assert torch.equal(model.last, torch.ones(1)), "the plan has not changed it"
        assert len(model._forward_pre_hooks) == 1
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


def form_of(model: nn.Module, wrapping: Wrapping | None = None) -> PlainForm:
    form = PlainForm(model, StateNames.of(model), wrapping or Wrapping())
    form.settle()
    return form


class Buffers(nn.Module):
    """Buffers of every kind, at the root and below it, one of them shared."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.BatchNorm1d(2)
        self.register_buffer("kept", torch.ones(1))
        self.register_buffer("temporary", torch.ones(1), persistent=False)
        self.register_buffer("nothing", None)
        self.inner.register_buffer("temporary", torch.ones(1), persistent=False)
        self.inner.register_buffer("shared", self.kept)


def test_what_is_not_whole_or_not_on_the_device_is_missing() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(2, 3), nn.Linear(2, 3))
    form = form_of(model)
    names = [name for name, _ in model.named_parameters()]
    assert form.order == names
    assert form.missing(CPU) == []
    assert form.missing(torch.device("meta")) == names
    model[0].weight.data = torch.ones(3)  # a part
    model[1].bias.__class__ = FreedParameter
    model[2]._parameters["bias"] = None
    assert form.missing(CPU) == ["0.weight", "1.bias", "2.bias"]
    with form.installed(
        {"0.weight": torch.ones(3, 2), "1.bias": torch.ones(3), "2.bias": torch.ones(3)}, CPU
    ):
        assert [type(p) for p in model.parameters()] == [nn.Parameter] * 6
        assert model[0].weight.shape == (3, 2)
    assert model[0].weight.shape == (3,)


def test_buffers_in_no_state_dict_are_never_missing_and_come_back() -> None:
    model = Buffers()
    form = form_of(model)
    temporary = model.temporary
    for owner, key in (
        (model, "temporary"),
        (model.inner, "temporary"),
        (model, "kept"),
        (model.inner, "running_var"),
    ):
        owner._buffers[key] = None
    assert form.missing(CPU) == ["kept", "inner.running_var"]
    with form.installed({"kept": torch.full((1,), 5.0), "inner.running_var": torch.zeros(2)}, CPU):
        assert torch.equal(model.temporary, temporary)
        assert model.temporary is not temporary, "a forward may change it"
        assert torch.equal(model.inner.temporary, torch.ones(1))
        assert model.kept == 5
        assert model.nothing is None
        assert torch.equal(model.inner.running_var, torch.zeros(2))
        model.temporary.add_(1)
    assert temporary == 1
    with form.installed({}, CPU):
        assert model.kept is None, "nobody gives it"


def test_a_buffer_that_modules_share_is_one_copy() -> None:
    model = Buffers()
    with form_of(model).installed({}, CPU):
        assert model.kept is model.inner.shared
        model.kept.add_(1)
    assert model.kept == 1


def test_bytes_are_those_of_what_is_gathered_and_of_all_gradients() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4, bias=False))
    model[0].bias.requires_grad_(False)
    form = form_of(model)
    assert form.num_bytes([], torch.float32) == (6 + 12) * 4
    assert form.num_bytes(["0.bias", "1.weight", "a buffer"], torch.bfloat16) == (3 + 12 + 6 + 12) * 2


@pytest.mark.parametrize(
    ("dtype", "real", "of_complex"),
    [
        (torch.bfloat16, torch.float32, torch.complex64),
        (torch.float32, torch.float32, torch.complex64),
        (torch.float64, torch.float64, torch.complex128),
    ],
)
def test_gradients_are_float32_at_least(
    dtype: torch.dtype, real: torch.dtype, of_complex: torch.dtype
) -> None:
    model = nn.ParameterDict(
        {"b": nn.Parameter(torch.ones(2, 3)), "a": nn.Parameter(torch.ones(4, dtype=torch.complex64))}
    )
    model["frozen"] = nn.Parameter(torch.ones(1), requires_grad=False)
    gradients = form_of(model).gradients_like(dtype)
    assert [(name, tuple(g.shape), g.dtype, g.is_meta) for name, g in gradients.items()] == [
        ("a", (4,), of_complex, True),
        ("b", (2, 3), real, True),
    ]


def test_attributes_that_a_plan_adds_are_absent_and_dicts_are_copies() -> None:
    model, wrapping = Keeping(), Wrapping()
    wrapping.assign(model, "factor", 3.0)  # before: part of what the user gave
    wrapping.assign(model.config, "scale", 4.0)
    table = {"a": 1}
    model.table = table
    form = PlainForm(model, StateNames.of(model), wrapping)
    model.added, model.other = "by the plan", {}
    table["b"] = 2
    form.settle()
    with form.installed({}, CPU):
        assert (model.factor, model.config.scale) == (3.0, 4.0)
        assert not hasattr(model, "added")
        assert not hasattr(model, "other")
        assert model.table == {"a": 1}
        model.table["c"] = 3
    with form.installed({}, CPU):
        assert model.table == {"a": 1}
    assert (model.added, model.table) == ("by the plan", {"a": 1, "b": 2})


class Watching(Keeping):
    """What a plan makes of a module that it watches."""


def test_a_module_is_of_its_first_class_inside() -> None:
    model = Keeping()
    form = PlainForm(model, StateNames.of(model), Wrapping())
    model.__class__ = Watching
    form.settle()
    with form.installed({}, CPU):
        assert type(model) is Keeping
    assert type(model) is Watching


def test_wrappers_of_before_stay_and_what_they_learn_is_forgotten() -> None:
    model, wrapping = Keeping(), Wrapping()
    wrapping.wrap(Doubling(model.layer))
    (wrapper,) = stack_of(model.layer)
    form = PlainForm(model, StateNames.of(model), wrapping)
    vars(wrapper)["since"] = 1
    form.settle()
    with form.installed({}, CPU):
        assert list(stack_of(model.layer)) == [wrapper]
        assert "since" not in vars(wrapper)
        vars(wrapper)["inside"] = 1
    assert "inside" not in vars(wrapper)
    assert vars(wrapper)["since"] == 1


def test_gradients_are_enabled_inside_and_the_mode_is_as_before_outside() -> None:
    model = Keeping()
    with torch.no_grad():
        with form_of(model).installed({}, CPU):
            assert torch.is_grad_enabled()
        assert not torch.is_grad_enabled()


def test_after_an_error_inside_the_model_is_as_the_plan_has_it() -> None:
    model, form, _ = changed()
    with pytest.raises(RuntimeError, match="in a forward"), form.installed({}, CPU):
        raise RuntimeError("in a forward")
    assert (model.factor, model.config.scale) == (7.0, 6.0)
    assert len(list(stack_of(model.layer))) == 1


# Parameters.


def test_only_trained_parameters_are_given_and_whole_ones_learn_as_they_did() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    form = form_of(model)
    whole = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model[0]._parameters["bias"] = None
    model[1]._parameters["bias"] = None
    model[1].weight.requires_grad_(False)  # since: what a parameter is now counts
    with form.installed(whole, CPU) as parameters:
        assert list(parameters) == ["1.bias"]
        assert [p.requires_grad for p in model.parameters()] == [False, False, False, True]
    with form.installed(
        {"0.bias": whole["0.bias"], "1.bias": whole["1.bias"]}, CPU, fresh=True
    ) as parameters:
        assert list(parameters) == ["1.bias"]
        assert model[0].weight.data_ptr() != whole["0.weight"].data_ptr()
        assert not model[0].weight.requires_grad


def test_a_user_s_hooks_are_called_wherever_the_weight_comes_from() -> None:
    for gone in (False, True):
        for fresh in (False, True):
            model, calls = Keeping(), []
            model.layer.weight.register_hook(lambda _, calls=calls: calls.append("hook"))
            model.layer.weight.register_post_accumulate_grad_hook(lambda _, calls=calls: calls.append("late"))
            form = form_of(model)
            whole = {"layer.weight": model.layer.weight.detach().clone()} if gone else {}
            with form.installed(whole, CPU, fresh=fresh) as parameters:
                assert (parameters["layer.weight"] is model.layer.weight) is True
                model(torch.ones(1, 3)).sum().backward()
            assert calls == ["hook", "late"], (gone, fresh)
