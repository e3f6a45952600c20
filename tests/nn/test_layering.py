"""Which models list layers, and which forward no stage would run."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.errors import UserError
from echelon.models import ModelConfig, build
from echelon.nn.layering import called_layers, how_to_list, listed_layers, name_layers, outside_layers
from echelon.nn.wrapping import Wrapper, Wrapping
from echelon.parallel.pipeline import even_boundaries
from tests.parallel.tensor.models import SEQUENCE, VOCAB
from tests.unlisted_models import CNN, Lightning, NanoGPT


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


# Layers that the model's own forward calls.


def test_layers_are_those_that_the_user_names() -> None:
    model: Any = NanoGPT()
    assert called_layers(model) is None
    name_layers(model, "transformer.h")
    called = called_layers(model)
    assert called is not None
    assert called.layers == list(model.transformer.h)
    assert called.describe() == "transformer.h (4 × Block)"
    name_layers(model, None)
    assert called_layers(model) is None


def test_several_lists_run_in_their_order() -> None:
    model: Any = CNN()
    name_layers(model, ["layer2", "layer1"])
    called = called_layers(model)
    assert called is not None
    assert called.layers == [*model.layer2, *model.layer1]
    assert called.describe() == "layer2, layer1 (1 × Conv2d, 3 × Residual)"


def test_a_named_list_stands_for_the_model_s_own() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    assert len(listed_layers(model)) == 2
    name_layers(model, "1")
    assert listed_layers(model) == []


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        (
            "transformer.g",
            r"has no module of this name; did you mean transformer.h\? the lists of NanoGPT are tr",
        ),
        (
            "lm_head",
            r"is a Linear, and must be an nn.ModuleList or nn.Sequential.*lists of NanoGPT are transf",
        ),
        ("transformer", "is a ModuleDict, and must be"),
        ("", "is a NanoGPT, and must be"),
        ("acts", "none of its 2 children has parameters"),
        (["transformer.h", "transformer.h"], "names a layer twice"),
        (["transformer.h", "transformer.h.0.mlp"], "one list is inside of a layer of another"),
    ],
)
def test_names_that_are_no_layers_are_refused(paths: str | list[str], words: str) -> None:
    model = NanoGPT()
    model.acts = nn.ModuleList([nn.ReLU(), nn.ReLU()])
    with pytest.raises(UserError, match=words):
        name_layers(model, paths)
    assert called_layers(model) is None


def test_the_list_of_the_model_inside_a_wrapper_is_found() -> None:
    """Twice wrapped: the outer model of both is meant."""
    model: Any = nn.ModuleDict({"module": Lightning()})
    called = called_layers(model)
    assert called is not None
    assert called.describe() == "module.model.transformer.h (2 × GPT2Block)"
    assert called.layers == list(model.module.model.transformer.h)
    wrapped: Any = nn.ModuleDict({"net": gpt()})
    called = called_layers(wrapped)
    assert called is not None
    assert called.paths == ("net.layers()",)
    assert called.layers == wrapped.net.layers()


def test_two_models_in_a_wrapper_are_no_list() -> None:
    assert called_layers(nn.ModuleDict({"policy": Lightning(), "reference": Lightning()})) is None
    assert called_layers(nn.ModuleDict({"body": nn.Sequential(nn.Linear(2, 2))})) is None


def test_a_model_of_transformers_that_cannot_run_by_layers_calls_its_blocks() -> None:
    model: Any = Lightning().model
    model.config.output_hidden_states = True
    assert listed_layers(model) == []
    called = called_layers(model)
    assert called is not None
    assert called.paths == ("transformer.h",)


def test_a_refusal_names_the_list_to_give() -> None:
    assert how_to_list(NanoGPT()).startswith('give parallelize layers="transformer.h", if its forward calls')
