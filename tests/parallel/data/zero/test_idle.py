"""Parameters between two steps: writes through `.data` are seen, and lost gradients say so."""

import copy

import pytest
import torch
from torch import nn

from echelon.errors import UserError
from echelon.parallel.data.zero.idle import (
    Idle,
    IdleParameter,
    LostGradient,
    end_idle,
    gradient_between_steps,
    idle_kind,
    is_idle,
)


def watched(lost: str | None = None) -> tuple[Idle, nn.Parameter]:
    idle, parameter = Idle(lost), nn.Parameter(torch.ones(2, 3))
    idle.watch("w", parameter)
    return idle, parameter


def test_a_write_through_data_is_seen_between_steps_and_not_during_one() -> None:
    idle, parameter = watched()
    assert not idle.is_idle
    assert not is_idle(parameter)
    parameter.data.clamp_(max=0.5)
    before = parameter._version
    idle.begin()
    assert is_idle(parameter)
    assert type(parameter) is IdleParameter
    parameter.data.clamp_(max=0.25)
    assert parameter._version > before
    parameter.data = torch.zeros(2, 3)
    assert torch.equal(parameter, torch.zeros(2, 3))
    idle.end()
    assert not is_idle(parameter)
    assert type(parameter) is nn.Parameter


def test_gradients_that_a_rank_has_whole_can_be_read_and_set() -> None:
    idle, parameter = watched()
    idle.begin()
    assert parameter.grad is None
    gradient = torch.ones(2, 3)
    parameter.grad = gradient
    assert parameter.grad is gradient
    idle.end()
    assert parameter.grad is gradient


def test_a_gradient_of_which_ranks_have_parts_may_be_dropped_and_not_used() -> None:
    idle, parameter = watched("use engine.clip")
    assert parameter.grad is None, "during a step it is what it is"
    idle.begin()
    lost = parameter.grad
    assert type(lost) is LostGradient
    assert (lost.shape, lost.dim(), lost.numel(), lost.dtype) == ((2, 3), 2, 6, torch.float32)
    with pytest.raises(UserError, match=r"the gradient of w: use engine\.clip"):
        lost.norm()
    with pytest.raises(UserError, match="the gradient of w"):
        torch.add(torch.ones(2, 3), other=lost)
    parameter.grad = None
    idle.end()
    assert parameter.grad is None


def test_a_frozen_parameter_has_no_gradient_to_lose() -> None:
    idle, parameter = watched("use engine.clip")
    parameter.requires_grad_(False)
    idle.begin()
    assert parameter.grad is None
    assert gradient_between_steps(nn.Parameter(torch.ones(1))) is None, "nobody watches it"


def test_a_copy_is_a_parameter_of_the_user_s() -> None:
    idle, parameter = watched()
    parameter.requires_grad_(False)
    idle.begin()
    model = nn.ParameterList([parameter, parameter])
    copied = copy.deepcopy(model)
    assert type(copied[0]) is nn.Parameter
    assert copied[0] is copied[1]
    assert not copied[0].requires_grad
    assert copied[0].data_ptr() != parameter.data_ptr()
    channels = nn.Parameter(torch.ones(1, 2, 2, 2).contiguous(memory_format=torch.channels_last))
    idle.watch("c", channels)
    idle.begin()
    assert copy.deepcopy(channels).stride() == channels.stride()


def test_parameters_of_other_kinds_stay_what_they_are() -> None:
    class Own(nn.Parameter):
        pass

    idle, own = Idle(), Own(torch.ones(1))
    idle.watch("own", own)
    idle.begin()
    assert type(own) is Own
    assert not is_idle(own)
    assert idle_kind(own, Own) is Own
    _, parameter = watched()
    assert idle_kind(parameter, nn.Parameter) is nn.Parameter


def test_what_is_shown_between_steps_is_idle() -> None:
    idle, parameter = watched()
    idle.begin()
    assert idle_kind(parameter, nn.Parameter) is IdleParameter
    assert idle_kind(parameter, IdleParameter) is IdleParameter
    end_idle([parameter, nn.Parameter(torch.ones(1))])
    assert type(parameter) is nn.Parameter


def test_an_engine_that_is_gone_is_not_idle() -> None:
    idle, parameter = watched("lost")
    idle.begin()
    del idle
    assert not is_idle(parameter)
    assert parameter.grad is None
