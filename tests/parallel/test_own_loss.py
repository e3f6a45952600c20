"""loss=None: what a model returns as its loss."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon.errors import UserError
from echelon.parallel.own_loss import OwnLoss, choose_loss, find_loss, takes_next_labels
from echelon.plan import Plan

three = torch.tensor(3.0, requires_grad=True)


@pytest.mark.parametrize(
    "output",
    [
        SimpleNamespace(loss=three),
        {"loss": three},
        (three, torch.ones(2)),
        [three],
        three,
        {"loss": three, "x": 1},
    ],
)
def test_where_a_loss_is_found(output: Any) -> None:
    assert find_loss(output) is three


@pytest.mark.parametrize("output", [torch.ones(2), {"logits": three}, SimpleNamespace(loss=None), (), None])
def test_an_output_without_a_loss_is_refused(output: Any) -> None:
    with pytest.raises(UserError, match=f"the model returned a {type(output).__name__} without a loss"):
        find_loss(output)


def test_a_loss_that_is_given_stays() -> None:
    assert choose_loss(nn.Linear(2, 2), nn.functional.mse_loss, Plan()) is nn.functional.mse_loss
    assert isinstance(choose_loss(nn.Linear(2, 2), None, Plan()), OwnLoss)


def test_a_mean_over_labels_has_their_count() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    loss = OwnLoss(transformers.BertForMaskedLM(config))
    assert not takes_next_labels(loss)
    total, count = loss(SimpleNamespace(loss=three), torch.tensor([[1, -100, 2]]))
    assert (total.item(), count.item()) == (6.0, 2)
    assert loss(SimpleNamespace(loss=three), torch.ones(2)) is three, "a mean over samples"
    assert loss(SimpleNamespace(loss=three), None) is three


def test_a_microbatch_of_ignored_labels_has_no_gradient() -> None:
    """The mean of nothing is not a number: one such microbatch made all weights so."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    model = transformers.BertForMaskedLM(config)
    tokens, labels = torch.ones(1, 3, dtype=torch.long), torch.full((1, 3), -100)
    total, count = OwnLoss(model)(model(tokens, labels=labels), labels)
    total.backward()
    assert (total.item(), count.item()) == (0.0, 0)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert gradients
    assert all(bool((gradient == 0).all()) for gradient in gradients)


class WithLoss(nn.Module):
    """Its forward takes targets, and returns (loss, output)."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(2, 1)

    def forward(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        output = self.line(x)[:, 0]
        return nn.functional.mse_loss(output, targets), output


def test_a_model_that_returns_its_loss_is_trained() -> None:
    """Microbatches of 2 and 1 samples: the mean is over all three."""
    x, targets = torch.randn(3, 2), torch.randn(3)
    torch.manual_seed(1)
    model = WithLoss()
    torch.manual_seed(1)
    expected = WithLoss()
    expected(x, targets)[0].backward()
    with echelon.parallelize(
        model, "microbatches=2", optimizer=lambda p: torch.optim.SGD(p, lr=1.0)
    ) as engine:
        metrics = engine.step((x, targets))
        weights = engine.full_state_dict()
    assert metrics.loss == pytest.approx(float(expected(x, targets)[0].detach()))
    for name, parameter in expected.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(weights[name], parameter.detach() - parameter.grad)
