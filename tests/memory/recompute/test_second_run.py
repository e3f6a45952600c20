"""What is around a call is restored for its second run, and is afterwards as it was."""

import pytest
import torch
from torch import nn

from echelon.memory.recompute.second_run import _autocast_as, _autocast_states, _Modes


def test_modes_of_the_first_run_and_back() -> None:
    modules = [nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)]
    modules[0].eval()
    first = _Modes.of(modules)
    assert first.training == [False, True, True]
    modules[0].train()
    modules[1].eval()
    with first.restored(modules):
        assert [module.training for module in modules] == [False, True, True]
    assert [module.training for module in modules] == [True, False, True]
    with pytest.raises(KeyError), first.restored(modules):
        raise KeyError
    assert [module.training for module in modules] == [True, False, True]


def test_iterations_of_spectral_norms() -> None:
    module = nn.utils.spectral_norm(nn.Linear(2, 2))
    (hook,) = module._forward_pre_hooks.values()
    first = _Modes.of([module])
    assert first.iterations == {hook: 1}
    hook.n_power_iterations = 0  # type: ignore[attr-defined]
    with first.restored([module]):
        assert hook.n_power_iterations == 1  # type: ignore[attr-defined]
    assert hook.n_power_iterations == 0  # type: ignore[attr-defined]


def test_autocast_of_the_first_run_and_back() -> None:
    with torch.autocast("cpu", torch.float16, cache_enabled=False):
        first = _autocast_states()
    assert first[0] == ("cpu", True, torch.float16, False)
    plain = _autocast_states()
    with _autocast_as(first):
        assert _autocast_states() == first
    assert _autocast_states() == plain
    with _autocast_as(plain):
        assert _autocast_states() == plain
    with torch.autocast("cpu", torch.bfloat16), _autocast_as(plain):
        assert not torch.is_autocast_enabled("cpu")
