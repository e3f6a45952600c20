"""The stack of what replaces a module's forward."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.nn.wrapping import Wrapper, Wrapping, find_wrapper, is_wrapped, replaced_forward


class Doubled(Wrapper):
    entry = "tensor"

    def __call__(self, x: Tensor) -> Any:
        return 2 * self.inner(x)


class PlusOne(Wrapper):
    entry = "compile"

    def __call__(self, x: Tensor) -> Any:
        return self.inner(x) + 1


def test_entries_find_their_place_whatever_the_order() -> None:
    x = torch.ones(1)
    for order in ([Doubled, PlusOne], [PlusOne, Doubled]):
        module, wrapping = nn.Identity(), Wrapping()
        for kind in order:
            wrapping.wrap(kind(module))
        assert module(x).item() == 3  # 2 · x inside, + 1 outside


def test_removal_brings_back_what_was_there() -> None:
    module, first, second = nn.Identity(), Wrapping(), Wrapping()
    first.wrap(PlusOne(module))
    second.wrap(Doubled(module))
    first.remove()
    assert module(torch.ones(1)).item() == 2
    second.remove()
    assert "forward" not in vars(module)
    assert not is_wrapped(module)


def test_an_inner_entry_can_be_removed_first() -> None:
    module, inner, outer = nn.Identity(), Wrapping(), Wrapping()
    inner.wrap(Doubled(module))
    outer.wrap(PlusOne(module))
    inner.remove()
    assert module(torch.ones(1)).item() == 2  # 1 + 1
    outer.remove()
    assert not is_wrapped(module)


def test_a_forward_that_the_user_has_replaced_is_called_and_comes_back() -> None:
    module, wrapping = nn.Identity(), Wrapping()
    module.forward = lambda x: 10 * x  # type: ignore[method-assign,assignment,misc]
    own = module.forward
    wrapping.wrap(Doubled(module))
    assert module(torch.ones(1)).item() == 20
    assert replaced_forward(module) is own
    wrapping.remove()
    assert module.forward is own


def test_entries_can_be_found_and_are_listed_by_name() -> None:
    module, wrapping = nn.Sequential(nn.Identity(), nn.Identity()), Wrapping()
    wrapper = Doubled(module[0])
    wrapping.wrap(wrapper)
    wrapping.before("gather", module[1], lambda *_: None)
    assert find_wrapper(module[0], Doubled) is wrapper
    assert find_wrapper(module[0], PlusOne) is None
    assert replaced_forward(module[0]) is None
    assert wrapping.entries(module.modules()) == {"tensor": 1, "gather": 1}


def test_hooks_end_with_their_wrapping() -> None:
    module, wrapping, calls = nn.Identity(), Wrapping(), []
    wrapping.before("gather", module, lambda *_: calls.append("before"))
    wrapping.after("gather", module, lambda *_: calls.append("after"))
    module(torch.ones(1))
    wrapping.remove()
    module(torch.ones(1))
    assert calls == ["before", "after"]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_has_a_stack_of_its_own(copied: Any) -> None:
    module = nn.Identity()
    Wrapping().wrap(Doubled(module))
    other = copied(module)
    found = find_wrapper(other, Doubled)
    assert found is not None
    assert found.module is other
    assert other(torch.ones(1)).item() == 2


def test_an_entry_stands_once_and_the_last_one_counts() -> None:
    """An engine that was not closed, or a copied model, may have left one."""
    module, first, second = nn.Identity(), Wrapping(), Wrapping()
    first.wrap(Doubled(module))
    second.wrap(Doubled(module))
    assert module(torch.ones(1)).item() == 2
    first.remove()
    assert module(torch.ones(1)).item() == 2
    second.remove()
    assert not is_wrapped(module)


def test_attributes_come_back_in_the_reverse_order() -> None:
    module, wrapping = nn.Identity(), Wrapping()
    module.view = "own"  # type: ignore[assignment]
    wrapping.assign(module, "view", "first")
    wrapping.assign(module, "view", "second")
    wrapping.remove()
    assert module.view == "own"
