"""In the contract transformers computes in float64, where it would cast down to float32."""

import copy
import pickle
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from echelon.verify.wide import widen  # noqa: E402
from tests.layering.models import make, tokens  # noqa: E402


def first_gradient(model: Any, scale: float) -> torch.Tensor:
    """The gradient of a loss times `scale`, divided by it again: the same, up to rounding."""
    model.zero_grad()
    (model(tokens(0)[0]).logits.square().sum() * scale).backward()
    gradient: torch.Tensor = next(model.parameters()).grad / scale
    return gradient


@pytest.mark.parametrize(("kind", "attention"), [("llama", "sdpa"), ("qwen3", "eager"), ("mixtral", "sdpa")])
def test_only_then_does_a_scaled_loss_have_the_same_gradient(kind: str, attention: str) -> None:
    torch.manual_seed(0)
    model = make(kind, attention).double()
    narrow, wide = model, copy.deepcopy(model)
    widen(wide)
    gaps = [
        float(
            (first_gradient(its, 1.0) - first_gradient(its, 1 / 3)).abs().max()
            / first_gradient(its, 1.0).abs().max()
        )
        for its in (narrow, wide)
    ]
    assert gaps[0] > 1e-9
    assert gaps[1] < 1e-13
    torch.testing.assert_close(wide(tokens(0)[0]).logits, narrow(tokens(0)[0]).logits, rtol=0, atol=1e-4)


def test_other_types_and_other_models_are_left_alone() -> None:
    model = make("llama")
    widen(model)
    assert model(tokens(0)[0]).logits.dtype == torch.float32
    linear = torch.nn.Linear(2, 2)
    widen(linear)
    assert "forward" not in vars(linear)


def test_a_widened_model_can_be_sent() -> None:
    model = make("llama").double()
    widen(model)
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(again(tokens(0)[0]).logits, model(tokens(0)[0]).logits)
    assert again.model.norm.forward.module is again.model.norm
