"""Hidden states that tensor ranks cannot share evenly: padded behind the first layer, by what it returns."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import echelon
from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.models import ModelConfig, build, cross_entropy
from echelon.nn.layering import listed_layers
from echelon.nn.losses import IGNORED_TARGET
from echelon.nn.sequence import WHOLE, View
from echelon.nn.wrapping import Wrapping
from echelon.parallel.padding import HiddenPadding, SplitOutput
from echelon.parallel.sequence_checks import classes_not_causal
from echelon.plan import Plan
from echelon.verify import Case, assert_equal
from tests.cases import adamw
from tests.nn.huggingface.models import KINDS, make
from tests.parallel.tensor.models import VOCAB, tokens

Warm = Callable[[int], Ranks]

PLAN = "tensor=2 sequence=true"
WIDTH = 16


def padding(view: View, *not_causal: str) -> HiddenPadding:
    return HiddenPadding(Plan.parse(PLAN), view, not_causal, [])


def test_what_the_first_layer_returns_is_padded_by_its_last_position() -> None:
    view = View()
    split = SplitOutput(lambda x: x, padding(view))
    hidden = torch.arange(3.0).view(1, 3, 1)
    assert split(nn.Identity(), None, hidden).flatten().tolist() == [0, 1, 2, 2]
    assert view.true_length == 3
    view.true_length = None
    assert split(nn.Identity(), None, hidden[:, :2]).shape[1] == 2
    assert view.true_length is None, "nothing is padded"


def test_losses_see_no_padding() -> None:
    view, output, targets = View(), torch.randn(2, 4, 5), torch.zeros(2, 20)
    assert padding(view).without_padding(output, targets, ignores=True) == (output, targets)
    view.true_length = 3
    cut, same = padding(view).without_padding(output, targets, ignores=False)
    assert torch.equal(cut, output[:, :3])
    assert same is targets, "nobody has padded them, whatever their dim 1 counts"
    whole, ignored = padding(view).without_padding(output, targets[:, :3], ignores=True)
    assert whole is output
    assert ignored.tolist() == [[0, 0, 0, IGNORED_TARGET]] * 2


def test_the_true_length_travels_between_stages() -> None:
    views, wrapping = [View() for _ in range(3)], Wrapping()
    stages = [nn.Identity() for _ in views]
    for number, (view, stage) in enumerate(zip(views, stages, strict=True)):
        padding(view).connect({number: stage}, len(stages), wrapping)
    views[0].true_length, value = 7, torch.zeros(2, 8)
    for stage in stages:
        value = stage(value)
    assert value.shape == (2, 8)
    assert [view.true_length for view in views] == [7, 7, 7]


# --- attention that is not causal ---------------------------------------------------------------------


class Encoder(nn.Module):
    """Every position attends to every other one. With padding, also to that."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        heads = [
            matrix(x).unflatten(-1, (-1, 4)).transpose(1, 2) for matrix in (self.query, self.key, self.value)
        ]
        mixed = F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        return x + self.output(mixed)  # type: ignore[no-any-return]


class Asks(nn.Linear):
    view = WHOLE


def encoder() -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCAB, WIDTH), Encoder(), nn.Linear(WIDTH, VOCAB))


TABLE = {
    "1.output": "row",
    "1.query": "column",
    "1.key": "column",
    "1.value": "column",
    "[02]": "vocabulary",
}


def errors_at(lengths: tuple[int, ...]) -> list[str]:
    """What is said of sequences of these lengths."""
    torch.manual_seed(0)
    engine = echelon.parallelize(encoder(), PLAN, optimizer=adamw, loss=cross_entropy, tensor_table=TABLE)
    errors = []
    for length in lengths:
        inputs, targets = tokens(0)
        try:
            engine.step((inputs[:, :length], targets[:, :length]))
        except UserError as error:
            errors.append(str(error))
        else:
            errors.append("")
    engine.close()
    return errors


def test_attention_that_may_not_be_causal_sees_no_padding(warm_ranks: Warm) -> None:
    """Every true position attended to the padding."""
    for odd, even in warm_ranks(2).run(errors_at, (15, 16)):
        assert "a sequence of 15 is not divisible by 2, and Encoder might attend to padding at its" in odd
        assert not even


def classes(*layers: nn.Module) -> list[str]:
    return classes_not_causal(nn.Sequential(*layers), layers)


def test_which_modules_are_causal() -> None:
    config = ModelConfig("llama", 2, WIDTH, 4, vocab=VOCAB, sequence=8, kv_heads=2, ffn=8)
    assert classes(*listed_layers(build(config))) == []
    assert classes(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), Asks(2, 2)) == []
    assert classes(nn.ModuleList([Encoder(), nn.GRU(2, 2), Encoder()])) == ["Encoder", "GRU"]
    replaced = listed_layers(build(config))
    replaced[1].forward = lambda x: x.flip(1)  # type: ignore[method-assign]
    assert classes(*replaced) == ["Block"]


@pytest.mark.slow_cases(
    "bloom",
    "deepseek_v2",
    "deepseek_v3",
    "falcon-groups",
    "falcon",
    "gemma2",
    "gemma",
    "gpt_neox",
    "mistral",
    "olmo2",
    "olmo",
    "phi3",
    "qwen2",
    "qwen3",
)
@pytest.mark.parametrize("kind", KINDS)
def test_known_families_of_transformers_are_causal(kind: str) -> None:
    model = make(kind)
    assert classes_not_causal(model, listed_layers(model)) == []
    (attention, *_) = [each for each in model.modules() if type(each).__name__.endswith("Attention")]
    attention.forward = lambda x, **_: (x.flip(1), None)  # type: ignore[method-assign]
    assert classes_not_causal(model, listed_layers(model)) == [type(attention).__name__]


# --- first layers that change the length --------------------------------------------------------------


class Prepends(nn.Module):
    """A learned token before all others."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.first = nn.Parameter(torch.randn(1, 1, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.cat([self.first.expand(len(tokens), -1, -1), self.tokens(tokens)], 1)


class Patches(nn.Module):
    """One position for each patch of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 2, 2)

    def forward(self, images: Tensor) -> Tensor:
        return self.patches(images).flatten(2).transpose(1, 2)  # type: ignore[no-any-return]


def model_behind(first: Callable[[], nn.Module]) -> nn.Module:
    config = ModelConfig("llama", 2, WIDTH, 4, vocab=VOCAB, sequence=16, kv_heads=2, ffn=8)
    _, *layers = listed_layers(build(config))
    return nn.Sequential(first(), *layers)


BEHIND = {
    "0*": "replicated",
    "*.attention.output": "row",
    "*.attention.*": "column",
    "*.mlp.down": "row",
    "*.mlp.*": "column",
    "*.projection": "vocabulary",
    "*": "replicated",
}


def loss_of_tokens(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    assert output.shape[1] == targets.shape[1] + 1, "as on one device"
    return cross_entropy(output[:, 1:], targets)


def some_tokens(length: int, step: int) -> tuple[Tensor, Tensor]:
    inputs, targets = tokens(step, samples=4)
    return inputs[:, :length], targets[:, :length]


def images(step: int) -> tuple[Tensor, Tensor]:
    """9 patches each."""
    generator = torch.Generator().manual_seed(step)
    pixels = torch.randn(4, 3, 6, 6, generator=generator, dtype=torch.float64)
    return pixels, torch.randint(VOCAB, (4, 9), generator=generator)


def case_behind(first: Callable[[], nn.Module], batch: Any, loss: Any) -> Case:
    options = {"tensor_table": BEHIND}
    return Case(partial(model_behind, first), batch, loss, adamw, steps=3, options=options)


@pytest.mark.slow_cases("tensor=2 sequence=true-8")
@pytest.mark.usefixtures("warm_contract")
@pytest.mark.parametrize(
    ("plan", "length"),
    [
        (PLAN, 7),  # 8 hidden states: they need no padding
        (PLAN, 8),
        *(
            pytest.param(f"{PLAN} pipeline=2 microbatches=2{schedule}", length, marks=pytest.mark.slow)
            for schedule, length in [("", 7), ("", 8), (" schedule=interleaved chunks=2", 8)]
        ),
    ],
)
def test_a_first_layer_may_return_more_positions(plan: str, length: int) -> None:
    """The length of the tokens decided, and the last true position was cut."""
    assert_equal(case_behind(Prepends, partial(some_tokens, length), loss_of_tokens), plan)


@pytest.mark.usefixtures("warm_contract")
def test_inputs_may_be_images() -> None:
    """Their channels were taken for positions."""
    assert_equal(case_behind(Patches, images, cross_entropy), PLAN)
