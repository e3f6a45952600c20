"""recompute=full and sqrt in training: the weights of recompute=none to the last bit, for fewer bytes."""

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon.errors import UserError
from echelon.models import ModelConfig, build, cross_entropy
from tests.cases import adamw
from tests.contract_models import LSTM, VOCAB, class_loss, images, tokens
from tests.engine.test_compiling import backend as other_backend
from tests.nn.huggingface.models import make as make_transformer

Make = Callable[[], nn.Module]


def gpt(layers: int = 4, dropout: float = 0.2) -> nn.Module:
    return build(ModelConfig("gpt", layers, 16, 2, vocab=VOCAB, sequence=8, tied=True, dropout=dropout))


def llama() -> nn.Module:
    return build(ModelConfig("llama", 4, 16, 4, vocab=VOCAB, sequence=8, kv_heads=2, ffn=24))


class Residual(nn.Module):
    """As in a ResNet, with statistics of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.second, self.relu = nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(x + self.second(self.relu(self.norm(self.first(x)))))


def resnet() -> nn.Module:
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))
    stem = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)]
    return nn.Sequential(*stem, *(Residual() for _ in range(4)), head)


class Trained:
    """Weights, buffers, losses and peak bytes of activations after three steps in float64."""

    def __init__(self, make: Make, plan: str, seed: int | None = 0) -> None:
        torch.manual_seed(0)
        model = make().double()
        is_image = isinstance(model, nn.Sequential)
        loss: Any = class_loss if is_image else cross_entropy
        batches = images if is_image else tokens
        with echelon.parallelize(
            model, f"precision=fp64 {plan}", optimizer=adamw, loss=loss, seed=seed
        ) as engine:
            torch.manual_seed(1)
            self.losses = [engine.step(batches(step)).loss for step in range(3)]
            self.state = engine.full_state_dict()
            self.evaluation = engine.evaluate(batches(3)).loss
            self.peak = engine.memory().peak["activations"]


CASES: dict[str, tuple[Make, str, int | None]] = {
    "gpt": (gpt, "microbatches=3", 0),
    "gpt, masks by torch": (gpt, "", None),
    "llama": (llama, "microbatches=3", 0),
    "resnet": (resnet, "", 0),
    "transformers' llama": (partial(make_transformer, "llama"), "microbatches=2", 0),
    "transformers' gpt2": (
        partial(make_transformer, "gpt2", resid_pdrop=0.1, attn_pdrop=0.1),
        "microbatches=2",
        None,
    ),
}


@pytest.mark.quick_cases(1)
@pytest.mark.slow_cases("llama", "transformers' gpt2", "transformers' llama")
@pytest.mark.parametrize("name", CASES)
def test_training_is_the_same_to_the_last_bit(name: str) -> None:
    make, plan, seed = CASES[name]
    expected = Trained(make, plan, seed)
    for recompute in ("full", "sqrt"):
        found = Trained(make, f"{plan} recompute={recompute}", seed)
        assert found.losses == expected.losses
        assert found.evaluation == expected.evaluation
        assert found.state.keys() == expected.state.keys()
        for key, tensor in expected.state.items():
            assert torch.equal(found.state[key], tensor), key
        assert found.peak < expected.peak * 0.85


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def peak_activations(plan: str, layers: int) -> int:
    model = nn.Sequential(*(Block() for _ in range(layers)))
    with echelon.parallelize(model, plan, optimizer=adamw, loss=class_loss, audit="off") as engine:
        engine.step((torch.randn(13, 8), torch.randint(8, (13,))))
        return engine.memory().peak["activations"]


def test_full_keeps_one_input_per_layer() -> None:
    hidden = 13 * 8 * 4
    assert peak_activations("recompute=full", 24) - peak_activations("recompute=full", 16) == 8 * hidden
    few = peak_activations("recompute=full", 16)
    one_layer = (peak_activations("recompute=none", 24) - peak_activations("recompute=none", 16)) / 8
    assert few < 17 * hidden + 2 * one_layer, "one input per layer, and what one layer needs in its backward"


def test_activations_under_sqrt_grow_with_the_square_root_of_layers() -> None:
    peaks = {layers: peak_activations("recompute=sqrt", layers) for layers in (16, 64, 256)}
    assert math.log(peaks[64] / peaks[16], 4) <= 0.6
    assert math.log(peaks[256] / peaks[64], 4) <= 0.6
    assert math.log(peak_activations("", 64) / peak_activations("", 16), 4) > 0.9


@pytest.mark.slow_cases("aot_eager")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("default")  # the compiler hides those of its own
def test_compiled_layers_run_again_as_compiled_code(backend: str) -> None:
    make = partial(gpt, layers=2)
    with other_backend(backend):
        expected = Trained(make, "compile=true")
        num_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        found = Trained(make, "compile=true recompute=full")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == num_graphs, "nothing is compiled again"
    for key, tensor in expected.state.items():
        assert torch.equal(found.state[key], tensor), key
    assert found.peak < expected.peak * 0.8


def test_gradient_checkpointing_of_transformers_stays_possible() -> None:
    def checkpointed() -> nn.Module:
        model: Any = make_transformer("llama")
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    expected = Trained(partial(make_transformer, "llama"), "")
    for recompute in ("none", "full"):
        found = Trained(checkpointed, f"recompute={recompute}")
        assert all(torch.equal(found.state[key], tensor) for key, tensor in expected.state.items())


def test_a_model_without_layers_has_no_budget() -> None:
    with pytest.raises(UserError, match=r"LSTM lists no layers, and a budget is .* recompute=full"):
        echelon.parallelize(LSTM(), "recompute=budget:1000", optimizer=adamw, loss=cross_entropy)


class Clock(nn.Module):
    """Draws from what nobody can replay."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.time = nn.Linear(6, 6), 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.time += 1
        return torch.tanh(self.linear(x)).exp() * self.time


def test_layers_that_return_something_else_are_refused_before_the_update() -> None:
    model = nn.Sequential(nn.Linear(6, 6), Clock(), nn.Linear(6, 5))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine = echelon.parallelize(model, "recompute=full", optimizer=adamw, loss=class_loss, audit="off")
    batch = torch.randn(4, 6), torch.randint(5, (4,))
    with pytest.raises(UserError, match=r"recompute: layer 1 \(Clock\) returned something else"):
        engine.step(batch)
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.full_state_dict().items())


def test_a_copy_of_a_model_is_called_without_segments() -> None:
    """An average of the weights, for example. Segments belong to the engine, of which there is no copy."""
    with echelon.parallelize(
        gpt(), "recompute=full", optimizer=adamw, loss=cross_entropy, audit="off"
    ) as engine:
        engine.step(tokens(0))
        copied = copy.deepcopy(engine.module).eval()
        output = copied(tokens(0)[0])
        output.sum().backward()
        engine.module.eval()
        assert torch.equal(output, engine.module(tokens(0)[0]))


def test_what_the_engine_wraps() -> None:
    with echelon.parallelize(llama(), "recompute=full", optimizer=adamw, loss=cross_entropy) as engine:
        assert "recompute ×5" in str(engine), "all but the last, whose backward pass follows at once"
    with echelon.parallelize(llama(), "recompute=full", optimizer=adamw, loss=cross_entropy) as engine:
        model = engine.module
    assert all("forward" not in vars(layer) for layer in model.layers())  # type: ignore[operator, union-attr]
