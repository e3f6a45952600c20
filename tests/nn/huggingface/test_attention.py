"""Attention over a sequence that several ranks share goes by the view of the layer."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.errors import UserError
from echelon.nn.layering import listed_layers
from echelon.nn.sequence import View, assign
from echelon.nn.wrapping import Wrapping
from tests.nn.huggingface.models import SEQUENCE, double, tokens


class Spread(View):
    """As if there were two ranks, of which this one has all positions, in another order."""

    parts = 2

    def __init__(self) -> None:
        self.calls = 0
        self.order = torch.arange(SEQUENCE).flip(0)

    def positions(self, length: int, device: torch.device) -> Tensor:  # noqa: ARG002
        assert length == SEQUENCE
        return self.order

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        self.calls += 1
        back = self.order.argsort()
        straight = [x[:, :, back] for x in (query, key, value)]
        return super().attend(*straight, scale)[:, :, self.order]


def spread_over(model: nn.Module, view: View, value: Any) -> Any:
    for layer in listed_layers(model):
        assign(layer, view, Wrapping())
        value = layer(value)
    return value


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mixtral", "gpt2"])
def test_attention_and_positions_go_by_the_view(kind: str, attention: str) -> None:
    model, inputs, view = double(kind, attention), tokens(0)[0], Spread()
    found = spread_over(model, view, inputs[:, view.order]).logits[:, view.order.argsort()]
    assert view.calls == model.config.num_hidden_layers
    assert model.config._attn_implementation == attention
    tolerance = 1e-12 if attention == "sdpa" else 1e-5  # there it makes its softmax in float32
    torch.testing.assert_close(found, model(inputs).logits, rtol=0, atol=tolerance)


def test_the_choice_of_attention_is_put_back_after_a_failure() -> None:
    class Failing(Spread):
        def attend(self, *_: Any) -> Tensor:
            raise RuntimeError("lost")

    model = double("llama")
    with pytest.raises(RuntimeError, match="lost"):
        spread_over(model, Failing(), tokens(0)[0])
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("mistral", {}, "sliding_window=3 with sequences of 16 tokens"),
        ("llama", {"attention_dropout": 0.1}, "dropout of 0.1 on attention's weights"),
        ("gpt2", {"attn_pdrop": 0.1}, "dropout of 0.1 on attention's weights"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type=dynamic"),
    ],
)
def test_what_several_ranks_cannot_do_is_refused(kind: str, changes: dict[str, Any], message: str) -> None:
    model = double(kind, **changes).train()
    with pytest.raises(UserError, match=message):
        spread_over(model, Spread(), tokens(0)[0])


def test_a_window_as_long_as_the_sequence_is_none() -> None:
    model, inputs, view = double("mistral", sliding_window=2 * SEQUENCE), tokens(0)[0], Spread()
    found = spread_over(model, view, inputs[:, view.order]).logits[:, view.order.argsort()]
    torch.testing.assert_close(found, model(inputs).logits, rtol=0, atol=1e-12)
