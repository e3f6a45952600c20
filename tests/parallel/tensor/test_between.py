"""Modules between a column and a row, and layers of torch, are equal to one device."""

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.collectives import RecordingGroup
from echelon.models import cross_entropy
from echelon.nn.layering import listed_layers
from echelon.nn.sequence import WHOLE
from echelon.nn.wrapping import Wrapping
from echelon.parallel.tensor.split import split_over
from echelon.verify import Case, assert_equal
from tests.cases import adamw, stop
from tests.parallel.tensor.models import gpt, language_case

pytestmark = pytest.mark.usefixtures("warm_contract")

WIDTH, INSIDE, SEQUENCE, VOCAB = 8, 6, 4, 12  # a rank of two has 3 of 6 features, and hashes decide for 2


class Block(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.view = WHOLE  # it mixes no positions
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INSIDE), nn.Linear(INSIDE, WIDTH)
        self.bend, self.drop, self.after = nn.PReLU(), nn.Dropout(p), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.after(self.down(self.drop(self.bend(self.up(self.norm(x))))))


BLOCK = {"norm": "replicated", "up": "column", "down": "row", "bend": "inner", "drop": "inner"}
TABLE = {f"*.{name}": style for name, style in {**BLOCK, "after": "replicated"}.items()}


def blocks(p: float) -> nn.Module:
    """The first layer has split modules of its own."""
    return nn.Sequential(Block(p), Block(p), nn.Linear(WIDTH, VOCAB))


def hidden(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(5, SEQUENCE, WIDTH, generator=generator), torch.randint(
        VOCAB, (5, SEQUENCE), generator=generator
    )


def case(p: float) -> Case:
    options = {"tensor_table": TABLE | {"2": "vocabulary"}}
    return Case(partial(blocks, p), hidden, cross_entropy, adamw, steps=3, options=options)


@pytest.mark.slow_cases("tensor=2 context=2")
@pytest.mark.parametrize("plan", ["tensor=2", "tensor=2 context=2", "tensor=2 sequence=true"])
def test_dropout_and_weights_between_a_column_and_a_row(plan: str) -> None:
    """'replicated' gave all ranks' features one mask, and PReLU the gradient of a rank's own features."""
    assert_equal(case(0.3), plan)


def test_with_split_sequences_the_first_layer_may_be_split_too() -> None:
    """It sees whole sequences, which its columns gathered once more: gradients were twice what they are."""
    assert_equal(case(0.0), "tensor=2 sequence=true")


class Encoder(nn.Module):
    """Its attention drops nothing: those masks would be torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * INSIDE, dropout=0.2, batch_first=True)
        self.layer.self_attn.dropout = 0.0
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x))


ENCODER = {
    "layer.linear1": "column",
    "layer.dropout": "inner",
    "layer.linear2": "row",
    "layer.*": "replicated",
    "head": "vocabulary",
}


def test_torchs_encoder_layer_is_equal_in_evaluation_too() -> None:
    """There it gave its weights, of which a rank has a part, to one kernel for the whole layer."""
    assert_equal(
        Case(Encoder, hidden, cross_entropy, adamw, steps=2, options={"tensor_table": ENCODER}), "tensor=2"
    )


@pytest.mark.parametrize(("head", "splits"), [("vocabulary", True), ("replicated", False)])
def test_a_split_model_says_whether_its_logits_are_split(head: str, splits: bool) -> None:
    model = nn.Sequential(nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB))
    group = RecordingGroup("tensor", 0, 2)
    sharded = split_over(
        model,
        group,
        {"0": "vocabulary", "1": head},
        Wrapping(),
        sequence=False,
        whole_sequence=[],
        join_logits=True,
    )
    assert (sharded.vocabulary is not None) is splits


def test_what_is_whole_on_every_rank_is_listed_once() -> None:
    """A gradient that is summed twice would be wrong."""
    norm = nn.LayerNorm(WIDTH)
    again = nn.LayerNorm(WIDTH)
    again.weight = norm.weight
    group = RecordingGroup("tensor", 0, 2)
    for style, names in (("heads", "partial"), ("replicated", "replicated")):
        sharded = split_over(
            nn.Sequential(norm, again),
            group,
            {"*": style},
            Wrapping(),
            sequence=False,
            whole_sequence=[],
            join_logits=True,
        )
        listed = getattr(sharded, names)
        assert list(map(id, listed)) == list(map(id, (norm.weight, norm.bias, again.bias)))


class Stopping(Block):
    """Lets no gradient through to the layers before it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(stop(x))


def stopped() -> nn.Module:
    return nn.Sequential(Block(0.0), Stopping(0.0), nn.Linear(WIDTH, VOCAB))


@pytest.mark.slow_cases("tensor=2 pipeline=2 microbatches=2")
@pytest.mark.parametrize("plan", ["tensor=2", "tensor=2 sequence=true", "tensor=2 pipeline=2 microbatches=2"])
def test_layers_without_a_gradient_are_left_alone(plan: str) -> None:
    assert_equal(dataclasses.replace(case(0.0), make_model=stopped), plan)


def stop_before(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return stop(args[0]), *args[1:]


def stopped_gpt() -> nn.Module:
    model = gpt()
    listed_layers(model)[2].register_forward_pre_hook(stop_before)
    return model


@pytest.mark.slow_cases("tensor=2 context=2", "tensor=2 sequence=true")
@pytest.mark.parametrize("plan", ["context=2", "tensor=2 sequence=true", "tensor=2 context=2"])
def test_attention_without_a_gradient_is_left_alone(plan: str) -> None:
    """The ring made zeros of it, and weights were decayed."""
    assert_equal(dataclasses.replace(language_case("gpt", steps=3), make_model=stopped_gpt), plan)
