"""Batches of tokenizers, for models of transformers that run layer by layer and others."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.nn.huggingface.inputs import layer_inputs

pytest.importorskip("transformers")

from tests.nn.huggingface import dict_batches

tokens = torch.arange(12).view(2, 6)
ones = torch.ones_like(tokens)
right = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
left = right.flip(1)
labels = tokens.masked_fill(right == 0, -100)


def test_a_mask_and_positions_are_for_every_layer() -> None:
    inputs = layer_inputs(
        {"input_ids": tokens, "attention_mask": right, "position_ids": tokens, "use_cache": False},
        labels,
        context=1,
    )
    assert inputs.args == (tokens,)
    assert inputs.shared == {"attention_mask": right, "position_ids": tokens, "use_cache": False}


def test_a_mask_without_padding_is_dropped() -> None:
    """A mask would keep attention from its fast kernels."""
    assert layer_inputs({"input_ids": tokens, "attention_mask": ones}, None, context=1).shared == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"token_type_ids": ones},
            "token_type_ids: the layers take input_ids, attention_mask and",
        ),
        ({"inputs_embeds": ones, "input_ids": None}, "input_ids: is missing"),
        ({"output_attentions": True}, "output_attentions: the layers take"),
        (
            {"attention_mask": ones[None, None] * 0},
            r"attention_mask is \[1, 1, 2, 6\] and",
        ),
        ({"position_ids": tokens[:1]}, r"position_ids is \[1, 6\] .*: they must have the same shape; expand"),
    ],
)
def test_what_no_layer_takes_is_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        layer_inputs({"input_ids": tokens, **arguments}, None, context=1)


def test_ranks_that_share_a_sequence_take_padding_that_nobody_sees() -> None:
    batch = {"input_ids": tokens, "attention_mask": right}
    assert layer_inputs(batch, labels, context=2).shared == {}
    with pytest.raises(UserError, match="some of it has labels that count; pad at the end"):
        layer_inputs(batch, tokens, context=2)
    with pytest.raises(UserError, match="some sequences have it before their tokens"):
        layer_inputs({**batch, "attention_mask": left}, labels, context=2)
    with pytest.raises(UserError, match="position_ids with context=2"):
        layer_inputs({**batch, "position_ids": tokens}, labels, context=2)


LAYERED = ["llama", "gpt2", "mixtral"]
UNLAYERED = ["bert", "classifier", "t5"]


def check(trained: dict[str, Any], padding: str) -> None:
    for kind, (weights, losses) in trained.items():
        expected_weights, expected_losses = dict_batches.train_plain(kind, padding)
        assert losses == pytest.approx(expected_losses, abs=1e-9), kind
        for name, value in expected_weights.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-9, msg=f"{kind} {name}")


@pytest.mark.quick_cases(1)
@pytest.mark.slow_cases("data=2 zero=3-right")
@pytest.mark.parametrize(
    ("plan", "padding"),
    [("pipeline=2 microbatches=2", "left"), ("tensor=2", "right"), ("data=2 zero=3", "right")],
)
def test_dict_batches_and_the_own_loss_train_as_on_one_device(
    plan: str, padding: str, warm_ranks: Callable[[int], Ranks]
) -> None:
    trained, _ = warm_ranks(2).run(dict_batches.train_all, ["llama"], plan, padding)
    check(trained, padding)


@pytest.mark.slow
@pytest.mark.parametrize("padding", ["right", "left", "positions"])
@pytest.mark.parametrize(
    "plan",
    [
        "data=2",
        "data=2 zero=1 microbatches=2",
        "data=2 zero=3",
        "pipeline=2 microbatches=2",
        "pipeline=2 schedule=zero-bubble microbatches=4",
        "tensor=2",
        "tensor=2 sequence=true",
    ],
)
def test_every_plan_takes_dict_batches(plan: str, padding: str, warm_ranks: Callable[[int], Ranks]) -> None:
    trained, _ = warm_ranks(2).run(dict_batches.train_all, LAYERED, plan, padding)
    check(trained, padding)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["ring", "all-to-all"])
def test_a_sequence_over_ranks_takes_padding(attention: str, warm_ranks: Callable[[int], Ranks]) -> None:
    plan = f"context=2 attention={attention}"
    trained, _ = warm_ranks(2).run(dict_batches.train_all, ["llama", "gpt2"], plan, "right")
    check(trained, "right")


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["data=2", "data=2 zero=2 microbatches=2"])
def test_losses_that_only_the_forward_knows(plan: str, warm_ranks: Callable[[int], Ranks]) -> None:
    trained, _ = warm_ranks(2).run(dict_batches.train_all, UNLAYERED, plan, "right")
    check(trained, "right")
