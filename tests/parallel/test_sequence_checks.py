"""Layers that are wrong with a part of the sequence, or with masks of their own. Each was accepted once."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from echelon.collectives.mesh import Mesh
from echelon.errors import UserError
from echelon.models import ModelConfig, build, cross_entropy
from echelon.nn.dropout.modules import key_dropout
from echelon.nn.experts import GShardGate
from echelon.nn.sequence import WHOLE
from echelon.nn.wrapping import Wrapping
from echelon.parallel.layer_sharding import LayerSharding
from echelon.parallel.tensor.styles import Table
from echelon.plan import Plan
from echelon.verify import Case, assert_equal
from tests.cases import adamw
from tests.contract_models import token_loss
from tests.nn.experts.models import EXPERTS, WIDTH, make_model
from tests.parallel.tensor.models import SEQUENCE, VOCAB, tokens


def layers_of(
    model: nn.Module, plan: str, loss: Any = cross_entropy, tensor_table: Table | None = None
) -> LayerSharding:
    return LayerSharding(model, Mesh.pretend(Plan.parse(plan), 0), loss, tensor_table, Wrapping())


def gpt(**changes: Any) -> nn.Module:
    return build(ModelConfig("gpt", 2, 16, 4, vocab=VOCAB, sequence=SEQUENCE, **changes))


WHOLE_LOGITS = {"head.projection": "replicated"}


# Heads that ranks must share.


def test_heads_are_checked_before_the_first_step() -> None:
    with pytest.raises(UserError, match=r"all-to-all context=3: 4 heads are not divisible by 3 ranks; use"):
        layers_of(gpt(), "context=3 attention=all-to-all")
    with pytest.raises(UserError, match="context=2 tensor=4: 4 heads are not divisible by 8 ranks"):
        layers_of(gpt(), "context=2 tensor=4 attention=all-to-all")
    llama = ModelConfig("llama", 1, 24, 12, vocab=VOCAB, sequence=SEQUENCE, kv_heads=4, ffn=8)
    with pytest.raises(UserError, match="4 key/value heads over 6 ranks are neither"):
        layers_of(build(llama), "context=6 attention=all-to-all")
    layers_of(build(llama), "context=12 attention=all-to-all tensor=1")
    layers_of(gpt(), "context=3")


# Masks that ranks must share.


def test_masks_of_attentions_weights_would_differ_with_padding() -> None:
    for plan in ("tensor=2 sequence=true", "tensor=2 context=2 sequence=true"):
        layers, dropout = layers_of(gpt(), plan), nn.Dropout(0.1)
        assert layers.sharded is not None
        layers.sharded.by_heads.append(dropout)
        pad_to_share(layers, 8)
        with pytest.raises(UserError, match="a sequence of 7 positions would be padded, and dropout of"):
            pad_to_share(layers, 7)
        dropout.eval()
        pad_to_share(layers, 7)


def pad_to_share(layers: LayerSharding, length: int) -> None:
    """A batch, or hidden states where these are padded."""
    if layers._hidden_padding is None:
        layers.take_part((torch.zeros(2, length, 16), torch.zeros(2, length)))
    else:
        layers._hidden_padding.pad(torch.zeros(2, length, 16))


class OwnDropout(nn.Dropout):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 0


def test_ranks_that_split_layers_must_drop_the_same() -> None:
    """With seed=None each rank drew its own masks for hidden states that must be equal."""
    with pytest.raises(UserError, match=r"embedding\.dropout, blocks\.0.*give parallelize a seed"):
        layers_of(gpt(dropout=0.1), "tensor=2")
    layers_of(gpt(dropout=0.1), "context=2")
    model = gpt(dropout=0.1)
    key_dropout(model, Wrapping())
    layers_of(model, "tensor=2")
    model.blocks[0].mlp_dropout = OwnDropout(0.1)
    with pytest.raises(UserError, match=r"dropout of blocks\.0\.mlp_dropout is drawn by torch"):
        layers_of(model, "tensor=2")


def test_ranks_that_split_layers_must_draw_the_same_noise() -> None:
    """With seed=None each rank drew its own noise, and routed the same tokens to other experts."""
    model = make_model(partial(GShardGate, WIDTH, EXPERTS))
    with pytest.raises(
        UserError, match=r"noise of blocks\.0\.mlp\.gate, blocks\.1\.mlp\.gate is drawn by torch"
    ):
        layers_of(model, "tensor=2")
    key_dropout(model, Wrapping())
    layers_of(model, "tensor=2")


def test_dropout_inside_torchs_own_modules() -> None:
    model = nn.Sequential(nn.Embedding(VOCAB, 16), nn.LSTM(16, 16, 2, dropout=0.1))
    with pytest.raises(UserError, match=r"1 draw at random inside.*set their rates to 0"):
        layers_of(model, "tensor=2", tensor_table={"*": "replicated"})


# Positions that are mixed within a part of the sequence.


class Attends(nn.Module):
    """Attention as everybody writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.projection(x)[:, None].chunk(3, -1)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)[:, 0]


class Asks(Attends):
    def __init__(self) -> None:
        super().__init__()
        self.view = WHOLE

    def forward(self, x: Tensor) -> Tensor:
        return self.view.attend(*self.projection(x)[:, None].chunk(3, -1))[:, 0]


def between(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCAB, 16), *layers, nn.Linear(16, VOCAB))


def test_attention_that_asks_no_view_is_refused_with_context() -> None:
    """Each rank attended within its own part."""
    with pytest.raises(UserError, match=r"no module .* asks a view, so if Attends .*docs/context.md"):
        layers_of(between(Attends()), "context=2", token_loss)
    layers_of(between(Attends()), "tensor=2", token_loss, {"*": "replicated"})
    layers_of(between(Asks()), "context=2", token_loss)


@pytest.mark.parametrize(
    "mixer",
    [
        nn.MultiheadAttention(16, 2),
        nn.TransformerEncoderLayer(16, 2, 16),
        nn.GRU(16, 16),
        nn.Conv1d(16, 16, 3),
        nn.LayerNorm((16, 16)),
    ],
)
def test_modules_that_mix_positions_by_themselves(mixer: nn.Module) -> None:
    kind = type(mixer).__name__
    with pytest.raises(UserError, match=rf"layer 2 \({kind}\) mixes positions, and with context=2"):
        layers_of(between(Asks(), mixer), "context=2", token_loss)


def by_position() -> nn.Module:
    return between(nn.Sequential(nn.LayerNorm(16), nn.Dropout(0.1), nn.Linear(16, 16)), nn.Tanh())


@pytest.mark.usefixtures("warm_contract")
@pytest.mark.parametrize("make", [by_position, partial(between, Asks())])
def test_models_that_mix_nothing_or_ask_are_equal_to_one_device(make: Callable[[], nn.Module]) -> None:
    assert_equal(Case(make, tokens, token_loss, adamw, steps=3), "context=2")


def test_a_sequence_that_would_stay_in_parts_is_refused() -> None:
    """The loss was given a part of the positions and all targets."""
    with pytest.raises(UserError, match="make that projection 'vocabulary'"):
        layers_of(gpt(), "tensor=2 sequence=true", tensor_table=WHOLE_LOGITS)
    whole = {"blocks.*.attention.*": "replicated"}
    with pytest.raises(UserError, match=r"blocks\.0\.attention \(Attention\) has matrices, of which none"):
        layers_of(gpt(), "tensor=2 sequence=true", tensor_table=whole)
    layers_of(gpt(), "tensor=2", tensor_table=whole)
    ends = {"0": "vocabulary", "3": "vocabulary", "*": "replicated"}
    layers_of(
        between(nn.Sequential(nn.Linear(16, 16)), nn.Tanh()), "tensor=2 sequence=true", token_loss, ends
    )
    with pytest.raises(UserError, match=r"1 \(Attends\) has matrices"):
        layers_of(between(Attends(), nn.Tanh()), "tensor=2 sequence=true", token_loss, ends)
