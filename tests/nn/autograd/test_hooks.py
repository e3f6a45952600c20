"""Hooks of a user and of an engine are told apart, and a twin of a weight has the user's."""

from functools import partial

import torch
from torch import nn

from echelon.nn.autograd.hooks import is_own_hook, late_hooks, twin


def test_a_twin_has_the_hooks_of_the_weight_and_a_gradient_of_its_own() -> None:
    weight, calls = nn.Parameter(torch.ones(2, dtype=torch.bfloat16)), []
    weight.register_hook(lambda gradient: calls.append("hook") or gradient * 3)  # type: ignore[func-returns-value]
    weight.register_post_accumulate_grad_hook(lambda _: calls.append("late"))
    wide = twin(weight, weight.detach().float())
    (wide * 2).sum().backward()
    assert calls == ["hook", "late"]
    assert weight.grad is None
    assert wide.grad is not None
    assert wide.grad.tolist() == [6.0, 6.0]
    assert not twin(nn.Parameter(torch.ones(1), requires_grad=False), torch.zeros(1)).requires_grad


def test_hooks_of_an_engine_are_none_of_the_user_s() -> None:
    def own(*_: object) -> None: ...

    def other(*_: object) -> None: ...

    own.__module__ = "echelon.parallel.data.reducer"
    assert is_own_hook(own)
    assert is_own_hook(partial(partial(own, 1), 2))
    assert not is_own_hook(other)
    assert not is_own_hook(partial(other, 1))
    assert not is_own_hook(object.__new__(type("Callable", (), {"__module__": None})))
    parameter = nn.Parameter(torch.ones(1))
    assert late_hooks(parameter) == []
    parameter.register_post_accumulate_grad_hook(own)
    parameter.register_post_accumulate_grad_hook(other)
    assert late_hooks(parameter) == [other]
