"""What the state of a tensor looks like, before there is any."""

import pytest
import torch
from torch import nn

from echelon.update.optim import SM3, Adafactor, CombinedOptimizer
from echelon.update.optim.state_forms import has_no_state, inner_optimizers, state_forms


def parameter(*shape: int, dtype: torch.dtype = torch.float64) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape, dtype=dtype))


def dims(forms: object) -> dict[str, tuple[int, ...]]:
    assert isinstance(forms, dict)
    return {key: tuple(value.shape) for key, value in forms.items()}


def test_those_of_torch_are_asked() -> None:
    tensor = parameter(4, 6)
    optimizer = torch.optim.AdamW([tensor], lr=0.1)
    forms = state_forms(optimizer, tensor)
    assert dims(forms) == {"step": (), "exp_avg": (1, 1), "exp_avg_sq": (1, 1)}
    assert forms is not None
    assert {forms[key].dtype for key in ("exp_avg", "exp_avg_sq")} == {torch.float64}
    assert (dict(optimizer.state), torch.equal(tensor, torch.ones(4, 6))) == ({}, True)
    assert state_forms(torch.optim.SGD([tensor]), tensor) == {}, "what is None is no state"
    assert dims(state_forms(torch.optim.SGD([tensor], momentum=0.9), tensor)) == {"momentum_buffer": (1, 1)}


def test_the_kernel_of_each_update() -> None:
    tensor = parameter(3, dtype=torch.float32)
    for optimizer in (torch.optim.Adam([tensor]), torch.optim.Adam([tensor], fused=True)):
        forms = state_forms(optimizer, tensor, fused=True)
        assert forms is not None
        assert forms["step"].dtype == torch.float32
        assert optimizer.param_groups[0]["fused"] in (None, True), "that of the user stays"


def test_hooks_and_schedulers_of_the_user_hear_nothing() -> None:
    tensor = parameter(3)
    optimizer = torch.optim.Adam([tensor])
    calls: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert dims(state_forms(optimizer, tensor))["exp_avg"] == (1,)
    assert (calls, scheduler.last_epoch) == ([], 0)


def test_those_of_ours_say_it() -> None:
    matrix = parameter(4, 6)
    assert dims(state_forms(Adafactor([matrix]), matrix)) == {
        "step": (),
        "row_var": (1, 1),
        "col_var": (1, 1),
    }
    assert dims(state_forms(SM3([matrix], momentum=0.9), matrix)) == {
        "accumulator_0": (1, 1),
        "accumulator_1": (1, 1),
        "momentum": (1, 1),
    }


def test_of_several_the_one_that_updates_it() -> None:
    first, second, other = parameter(4, 6), parameter(3), parameter(2)
    combined = CombinedOptimizer([torch.optim.Muon([first]), torch.optim.Adam([second])])
    assert dims(state_forms(combined, first)) == {"momentum_buffer": (1, 1)}
    assert set(dims(state_forms(combined, second))) == {"step", "exp_avg", "exp_avg_sq"}
    assert state_forms(combined, other) is None
    assert inner_optimizers(combined) == combined.optimizers
    assert list(inner_optimizers(combined.optimizers[0])) == [combined.optimizers[0]]


def test_nobody_knows_that_of_others() -> None:
    tensor = parameter(3)
    assert state_forms(type("Mine", (torch.optim.Adam,), {})([tensor]), tensor) is None
    assert not has_no_state(torch.optim.Adam([tensor]), tensor)
    assert not has_no_state(SM3([tensor]), tensor)
    assert not has_no_state(SM3([tensor]), parameter(3)), "nor of another tensor"


@pytest.mark.parametrize("kind", [Adafactor, SM3])
def test_an_empty_tensor_has_none(kind: type) -> None:
    empty = parameter(0, 3)
    assert has_no_state(kind([empty]), empty)
