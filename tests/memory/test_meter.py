"""Memory is measured from storages that are alive."""

import pytest
import torch
from torch import nn

import echelon
from echelon.memory import CATEGORIES, Memory, Meter
from tests.cases import adamw, mean_loss, vectors


def trained(model: nn.Module, microbatches: int = 1, steps: int = 1) -> Memory:
    engine = echelon.parallelize(
        model, f"microbatches={microbatches}", optimizer=adamw, loss=mean_loss, audit="off"
    )
    for step in range(steps):
        engine.step(vectors(step))
    return engine.memory()


def test_model_state_is_four_times_the_weights() -> None:
    model = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 5))
    model.register_buffer("table", torch.zeros(100))
    weights = 4 * sum(p.numel() for p in model.parameters())
    memory = trained(model)
    assert tuple(memory.now) == CATEGORIES
    assert memory.now["parameters"] == memory.now["gradients"] == weights
    assert memory.now["optimizer"] == 2 * weights + 4 * 4  # two moments, and one step count a parameter
    assert memory.now["buffers"] == 2 * 400  # and the copy for a step that is refused
    assert memory.now["activations"] == 0, "the backward pass has let them go"
    assert memory.total == sum(memory.now.values())


def test_peak_activations_are_what_autograd_saves() -> None:
    width, samples = 512, 12
    model = nn.Sequential(
        nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 5)
    )
    one = 4 * samples * width  # each tanh keeps its output, which is also the next layer's input
    peak = trained(model).peak["activations"]
    assert 2 * one <= peak <= 2 * one + 4 * samples * (6 + 5 + 5 + 4)


def test_microbatches_hold_less_at_once() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 512), nn.Tanh(), nn.Linear(512, 5))

    whole, quarter = trained(model()), trained(model(), microbatches=4)
    assert quarter.peak["activations"] < whole.peak["activations"] / 3


def metered(model: nn.Module) -> Meter:
    storages = {"parameters": list(model.parameters()), "gradients": [], "optimizer": [], "buffers": []}
    return Meter(model, lambda: storages)


def test_shared_storages_count_once() -> None:
    layer = nn.Linear(10, 10, bias=False)
    meter = metered(nn.Sequential(layer, layer))
    assert meter.read().now["parameters"] == 400


def test_a_kept_graph_is_memory_now() -> None:
    model = nn.Sequential(nn.Linear(6, 100), nn.Tanh())
    meter = metered(model)
    with meter.activations():
        output = model(torch.ones(3, 6)).sum()
    assert meter.read().now["activations"] >= 4 * 3 * 100
    del output
    assert meter.read().now["activations"] == 0


def test_a_sparse_buffer_has_no_storage_and_is_no_error() -> None:
    model = nn.Linear(6, 5)
    model.register_buffer("table", torch.eye(3).to_sparse())
    meter = metered(model)
    with meter.activations():
        torch.sparse.mm(model.table, model(torch.ones(3, 6)))  # type: ignore[arg-type]
    assert meter.read().now["parameters"] >= 4 * 35


class InPlace(nn.Module):
    """Changes a tensor that its backward pass needs: an error, also while memory is measured."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x).exp()
        y += 1
        return y  # type: ignore[no-any-return]


def test_measuring_does_not_hide_in_place_mistakes() -> None:
    with pytest.raises(RuntimeError, match="in place"):
        trained(InPlace())


def test_the_peak_of_all_is_of_one_moment() -> None:
    memory = trained(nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 5)), steps=2)
    assert max(memory.peak.values()) <= memory.peak_total <= sum(memory.peak.values())


def test_memory_of_the_host_is_counted_apart() -> None:
    model, state, gradient = nn.Linear(10, 10, bias=False), torch.zeros(50), torch.zeros(30)
    storages = {"parameters": list(model.parameters()), "gradients": [gradient], "optimizer": [state]}
    host = {"optimizer": [state[:20], state[20:]]}
    meter = Meter(model, lambda: storages | {"buffers": []}, lambda: host)
    memory = meter.read()
    assert memory.now["optimizer"] == 0
    assert (memory.now["parameters"], memory.now["gradients"]) == (400, 120)
    assert memory.host == {"parameters": 0, "gradients": 0, "optimizer": 200, "activations": 0}
    host.clear()
    later = meter.read()
    assert later.host["optimizer"] == 0
    assert later.host_peak == memory.host
    assert later.now["optimizer"] == 200


def test_an_engine_without_offload_asks_for_no_boundary() -> None:
    with echelon.parallelize(nn.Linear(6, 5), "data=1", optimizer=adamw, loss=mean_loss) as engine:
        engine.step(vectors(0))
        assert set(engine.memory().host.values()) == {0}
        assert engine.mesh._boundary is None
