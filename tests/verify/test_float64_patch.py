"""In the contract transformers computes in float64, where it would cast down to float32."""

import copy
import pickle
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from echelon.nn.wrapping import is_wrapped  # noqa: E402
from echelon.verify.case import Float64, patch_float64  # noqa: E402
from tests.nn.huggingface.models import make, tokens  # noqa: E402


def first_gradient(model: Any, scale: float) -> torch.Tensor:
    """The gradient of a loss times `scale`, divided by it again: the same, up to rounding."""
    model.zero_grad()
    (model(tokens(0)[0]).logits.square().sum() * scale).backward()
    gradient: torch.Tensor = next(model.parameters()).grad / scale
    return gradient


def scaling_error(model: Any) -> float:
    """How much a gradient changes when the loss is scaled, relative to its largest element."""
    plain, scaled = first_gradient(model, 1.0), first_gradient(model, 1 / 3)
    return float((plain - scaled).abs().max() / plain.abs().max())


@pytest.mark.parametrize(("kind", "attention"), [("llama", "sdpa"), ("qwen3", "eager"), ("mixtral", "sdpa")])
def test_only_with_the_patch_does_a_scaled_loss_have_the_same_gradient(kind: str, attention: str) -> None:
    torch.manual_seed(0)
    model = make(kind, attention).double()
    patched = copy.deepcopy(model)
    patch_float64(patched)
    assert scaling_error(model) > 1e-9
    assert scaling_error(patched) < 1e-13
    torch.testing.assert_close(patched(tokens(0)[0]).logits, model(tokens(0)[0]).logits, rtol=0, atol=1e-4)


def test_other_types_and_other_models_stay_as_they_are() -> None:
    model = make("llama")
    patch_float64(model)
    assert model(tokens(0)[0]).logits.dtype == torch.float32
    linear = torch.nn.Linear(2, 2)
    patch_float64(linear)
    assert not is_wrapped(linear)


def test_a_patched_model_can_be_sent() -> None:
    model = make("llama").double()
    patch_float64(model)
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(again(tokens(0)[0]).logits, model(tokens(0)[0]).logits)
    assert again.model.norm.forward.__self__.module is again.model.norm


def test_positions_are_multiplied_with_frequencies_of_float64() -> None:
    positions, frequencies = torch.arange(3), torch.ones(3, dtype=torch.float64)
    with Float64():
        assert positions.float().dtype == positions.to(torch.float32).dtype == torch.float64
        assert torch.equal(frequencies.to(torch.float32) @ positions.float(), torch.tensor(3.0).double())
        assert torch.ones(3).to(torch.float32).dtype == torch.float32, "float32 stays what it is"
