"""Which models list layers, and which forward no stage would run."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.errors import UserError
from echelon.models import ModelConfig, build
from echelon.nn.layering import how_to_list, listed_layers, outside_layers
from echelon.nn.wrapping import Wrapper, Wrapping
from echelon.parallel.pipeline import even_boundaries
from tests.parallel.tensor.models import SEQUENCE, VOCAB


def gpt(**changes: Any) -> nn.Module:
    return build(ModelConfig("gpt", 2, 16, 4, vocab=VOCAB, sequence=SEQUENCE, **changes))


class Doubling(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Listed(Doubling):
    def layers(self) -> list[nn.Module]:
        return list(self)


class Later(type(gpt())):  # type: ignore[misc]
    def forward(self, tokens: Tensor) -> Tensor:
        return 2 * super().forward(tokens)


class Listing:
    """A mixin."""

    def layers(self) -> list[nn.Module]:
        return list(self.children())  # type: ignore[attr-defined]


class Mixed(Listing, nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))  # type: ignore[no-any-return]


def test_layers_may_be_listed_by_a_class_that_has_no_forward() -> None:
    assert len(listed_layers(Mixed())) == 2


def test_a_sequential_with_a_forward_of_its_own_is_no_list_of_layers() -> None:
    """It was run as one: the factor of its forward was lost."""
    assert len(listed_layers(nn.Sequential(nn.Linear(2, 2)))) == 1
    assert len(listed_layers(Listed(nn.Linear(2, 2)))) == 1
    assert listed_layers(Doubling(nn.Linear(2, 2))) == []
    with pytest.raises(UserError, match=r"Doubling has a forward of its own.*give Doubling layers\(\)"):
        even_boundaries(Doubling(nn.Linear(2, 2)), 2)


def test_a_forward_that_came_after_the_layers_is_not_theirs() -> None:
    with pytest.raises(UserError, match="Later has a forward of its own"):
        even_boundaries(Later(gpt().config), 2)
    model = nn.Sequential(nn.Linear(2, 2))
    model.forward = torch.tanh  # type: ignore[method-assign]
    with pytest.raises(UserError, match="its forward was replaced"):
        even_boundaries(model, 2)


def test_a_model_that_lists_no_layers_is_refused_with_how_to_list_them() -> None:
    assert listed_layers(nn.Linear(2, 2)) == []
    assert "make it an nn.Sequential, or give it layers()" in how_to_list(nn.Linear(2, 2))
    assert "LlamaForCausalLM" in how_to_list(nn.Linear(2, 2))


def test_what_wraps_a_model_is_no_forward_of_its_own() -> None:
    class Entry(Wrapper):
        entry = "compile"

        def __call__(self, x: Tensor) -> Any:
            return self.inner(x)

    model = nn.Sequential(nn.Linear(2, 2))
    Wrapping().wrap(Entry(model))
    assert len(listed_layers(model)) == 1
    assert how_to_list(model) == ""


def test_modules_that_no_layer_calls_are_named() -> None:
    model = Mixed()
    model.third = nn.Linear(2, 2)
    model.layers = lambda: [model.first, nn.Sequential(model.second)]  # type: ignore[assignment]
    assert list(outside_layers(model)) == ["", "third"]


class Numbered(nn.Module):
    """Its layers() is a method for something else."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)

    def layers(self, count: int) -> int:
        return count

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x))  # type: ignore[no-any-return]


def test_layers_that_need_arguments_are_no_list() -> None:
    """Every plan called it, and ended in a TypeError."""
    assert listed_layers(Numbered()) == []
    with pytest.raises(UserError, match=r"its layers\(\) needs count, and is called without arguments"):
        even_boundaries(Numbered(), 2)


def test_layers_must_be_modules() -> None:
    class Names(Numbered):
        def layers(self, count: int = 2) -> list[str]:  # type: ignore[override]
            return ["one", "two"][:count]

    with pytest.raises(UserError, match=r"layers\(\) of Names returns a str: must be the modules"):
        listed_layers(Names())
