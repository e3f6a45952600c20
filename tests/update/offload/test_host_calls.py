"""The user's optimizer, called for some of its parameters: by a copy with the options of now, or itself."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from echelon.update.offload.host_optimizer import DirectCall, HostCall, runs_beside, talks
from echelon.update.optim import SM3, CombinedOptimizer


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Two of ones, with gradients 2 and 4."""
    made = [nn.Parameter(torch.ones(3, dtype=dtype)) for _ in range(2)]
    for number, each in enumerate(made):
        each.grad = torch.full_like(each, 2.0 * (number + 1))
    return made


@pytest.mark.parametrize("kind", [HostCall, DirectCall])
@pytest.mark.parametrize("factor", [1.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"momentum": 0.5}])
def test_the_chosen_are_updated_by_scaled_gradients(
    kind: Any, factor: float, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    chosen, other = parameters(dtype)
    optimizer = torch.optim.SGD([chosen, other], lr=0.25, **options)
    kind(optimizer, [chosen])(factor)
    assert chosen.tolist() == [1 - 0.25 * 2.0 * factor] * 3
    assert other.tolist() == [1.0] * 3
    assert [len(group["params"]) for group in optimizer.param_groups] == [2]
    kind(optimizer, [other])(factor)
    assert other.tolist() == [1 - 0.25 * 4.0 * factor] * 3
    if "momentum" in options:
        momenta = [optimizer.state[each]["momentum_buffer"].tolist() for each in (chosen, other)]
        assert momenta == [[2.0 * factor] * 3, [4.0 * factor] * 3]


def test_options_are_those_of_when_it_was_prepared() -> None:
    rate = torch.tensor(0.25)
    chosen, other = parameters()
    optimizer = torch.optim.SGD([{"params": [chosen]}, {"params": [other], "lr": 0.5}], lr=rate)
    call = HostCall(optimizer, [chosen, other])
    rate.fill_(9.0)
    optimizer.param_groups[1]["lr"] = 9.0
    call(1.0)
    assert (chosen.tolist(), other.tolist()) == ([0.5] * 3, [-1.0] * 3)
    assert optimizer.param_groups[1].get("fused") is None, "those of the user are left as they are"


def test_a_scheduler_s_step_is_not_called() -> None:
    chosen, _ = parameters()
    optimizer = torch.optim.Adam([chosen])
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    called: list[int] = []
    vars(optimizer)["step"] = lambda: called.append(1)
    HostCall(optimizer, [chosen])(1.0)
    assert called == []
    assert optimizer.state[chosen]["step"] == 1, "the state is that of the optimizer"


def test_each_of_several_optimizers_is_called() -> None:
    first, second = parameters()
    combined = CombinedOptimizer([torch.optim.SGD([first], lr=0.25), torch.optim.SGD([second], lr=0.5)])
    HostCall(combined, [first, second])(0.5)
    assert (first.tolist(), second.tolist()) == ([0.75] * 3, [0.0] * 3)


def test_a_call_without_gradients_changes_nothing() -> None:
    chosen, _ = parameters()
    chosen.grad = None
    HostCall(torch.optim.SGD([chosen], lr=0.25), [chosen])(0.5)
    HostCall(torch.optim.SGD([chosen], lr=0.25), [])(0.5)
    assert chosen.tolist() == [1.0] * 3


def test_which_optimizers_may_be_called_by_another_thread() -> None:
    chosen, _ = parameters()
    matrix = nn.Parameter(torch.ones(2, 2))
    assert runs_beside(torch.optim.SGD([chosen]))
    assert not runs_beside(torch.optim.LBFGS([chosen]))
    hooked = torch.optim.SGD([chosen])
    hooked.register_step_post_hook(lambda *_: None)
    assert not runs_beside(hooked)
    sums = SM3([matrix])
    assert not talks(sums)
    for rounds, is_talking in ((["a group"], True), ([], False)):
        sums._work = [SimpleNamespace(exchange=SimpleNamespace(rounds=rounds))]  # type: ignore[list-item]
        assert (talks(sums), runs_beside(sums)) == (is_talking, not is_talking)
        assert talks(CombinedOptimizer([torch.optim.SGD([chosen]), sums])) is is_talking
