"""Models that list no layers: named lists, lists inside of wrappers, and the units that zero=3 finds."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon.errors import UserError
from echelon.verify import assert_equal
from tests.cases import adamw
from tests.contract_models import LSTM, Encoder
from tests.unlisted_models import CNN, VAE, Diffusion, Lightning, NanoGPT, case, images, token_loss, tokens

MODELS = (NanoGPT, Lightning, LSTM, VAE, CNN, Encoder, Diffusion)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("model", MODELS)
def test_any_model_recomputes_its_units(model: Any) -> None:
    assert_equal(case(model), "recompute=full")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("model", MODELS)
def test_units_run_again_under_zero_3(model: Any) -> None:
    assert_equal(case(model), "data=2 zero=3 recompute=full")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "plan", ["data=2 recompute=sqrt", "data=2 recompute=full offload=activations", "offload=parameters"]
)
def test_units_compose(model: Any, plan: str) -> None:
    assert_equal(case(model), plan)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "plan", ["data=2 recompute=full", "data=2 zero=3 recompute=sqrt", "recompute=budget:160000"]
)
def test_named_layers_run_again(plan: str) -> None:
    assert_equal(case(NanoGPT, layers="transformer.h"), plan)


class Trained:
    """One step on one rank, and what it kept."""

    def __init__(self, plan: str, model: nn.Module, **options: Any) -> None:
        with echelon.parallelize(model, plan, optimizer=adamw, loss=token_loss, **options) as engine:
            engine.step(tokens(0))
            self.peak = engine.memory().peak["activations"]
            self.text = repr(engine)
            self.state = engine.full_state_dict()


@pytest.mark.parametrize("layers", [None, "transformer.h"])
def test_layers_that_run_again_keep_less(layers: str | None) -> None:
    torch.manual_seed(0)
    model = NanoGPT(dropout=0.1)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected = Trained("", model)
    model.load_state_dict(start)
    found = Trained("recompute=full", model, layers=layers)
    assert found.peak < 0.6 * expected.peak
    for name, tensor in expected.state.items():
        assert torch.equal(found.state[name], tensor), name


def test_an_engine_says_which_layers_it_found() -> None:
    assert "layers: model.transformer.h (2 × GPT2Block)" in Trained("", Lightning()).text
    assert "layers: transformer.h (4 × Block)" in Trained("", NanoGPT(), layers="transformer.h").text
    assert "layers:" not in Trained("", NanoGPT()).text


class Clock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.time = nn.Linear(16, 16), 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.time += 1
        return torch.tanh(self.linear(x)).exp() * self.time


def test_a_unit_that_cannot_run_twice_is_refused_by_name() -> None:
    model: Any = NanoGPT()
    model.transformer.h[1] = Clock()
    with pytest.raises(UserError, match=r"transformer\.h\.1 \(Clock\)"):
        Trained("recompute=full", model)


def test_a_budget_is_for_layers_that_are_called_in_order() -> None:
    model: Any = CNN()
    options: Any = {"optimizer": adamw, "loss": nn.functional.cross_entropy, "layers": ["layer2", "layer1"]}
    with (
        echelon.parallelize(model, "recompute=budget:9000000", **options) as engine,
        pytest.raises(UserError, match="does not call each of the layers once and in their order"),
    ):
        engine.step(images(0))


def test_what_is_no_name_of_a_list_is_refused() -> None:
    for layers in (3, [], [nn.Linear(2, 2)]):
        with pytest.raises(UserError, match=r"layers=.*: must be the name of a list in the model"):
            echelon.parallelize(NanoGPT(), "", optimizer=adamw, loss=token_loss, layers=layers)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"layers='h': NanoGPT has no module of this name"):
        echelon.parallelize(NanoGPT(), "", optimizer=adamw, loss=token_loss, layers="h")
