"""offload=parameters on one device: what is on it, what crosses the boundary, and what a model gets back."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import echelon
from echelon.engine import Engine
from echelon.errors import UserError
from echelon.models import ModelConfig, build, cross_entropy
from tests.instrumented import accept

WIDTH, LAYERS = 32, 6
UNIT = 4 * WIDTH * WIDTH  # bytes
_SMALL = 256  # bytes: what stands for weights that are not here


class Layers(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(LAYERS))
        super().__init__(*blocks)

    def layers(self) -> list[nn.Module]:
        return list(self)


def batch(step: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs, targets = torch.randn(2, 4, WIDTH, generator=generator)
    return inputs, targets


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def make(plan: str, model: nn.Module | None = None, **options: Any) -> Engine:
    given = {"optimizer": adamw, "loss": F.mse_loss} | options
    return echelon.parallelize(Layers() if model is None else model, plan, **given)


def device_bytes(engine: Engine) -> int:
    """Of weights, by the storages that have memory."""
    tensors = engine._update.storages()["parameters"]
    return sum({s.data_ptr(): s.nbytes() for s in map(Tensor.untyped_storage, tensors)}.values())


def watch(engine: Engine, look: Callable[[], object]) -> None:
    """Look during passes, and at every update."""
    for module in engine.module.modules():
        if isinstance(module, nn.Tanh):
            module.register_forward_hook(lambda *_: look())
            module.register_full_backward_hook(lambda *_: look())
    for sharing in engine._local.sharings:
        for _, parameter in sharing.parameter_set.trained:
            parameter.register_post_accumulate_grad_hook(lambda _: look())
    inner: Any = engine._update.stepper  # type: ignore[attr-defined]
    step = inner.step

    def watched(*arguments: Any, **named: Any) -> None:
        look()
        step(*arguments, **named)
        look()

    inner.step = watched


@pytest.mark.slow_cases(
    "offload=parameters microbatches=2 update=last-backward-0",
    "offload=parameters microbatches=2 update=last-backward-2",
    "offload=parameters recompute=full-0",
    "offload=parameters recompute=full-1",
    "offload=parameters update=backward-1",
    "offload=parameters-1",
    "offload=parameters-2",
)
@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize(
    "plan",
    [
        "offload=parameters",
        "offload=parameters update=backward",
        "offload=parameters recompute=full",
        "offload=parameters microbatches=2 update=last-backward",
    ],
)
def test_at_most_prefetch_and_one_units_are_on_the_device(plan: str, prefetch: int) -> None:
    with make(plan, prefetch=prefetch, audit="off") as engine:
        found: list[int] = []
        watch(engine, lambda: found.append(device_bytes(engine)))
        accept(engine)
        for step in range(2):
            engine.step(batch(step))
        assert len(found) > 2 * LAYERS
        assert max(found) <= (prefetch + 1) * UNIT + LAYERS * _SMALL
        assert max(found) >= (prefetch + 1) * UNIT  # so the bound says something
        assert device_bytes(engine) <= LAYERS * _SMALL


@pytest.mark.parametrize(
    ("plan", "fetches"),
    [("offload=parameters", 3), ("offload=parameters update=backward recompute=full", 2)],
)
def test_the_ledger_has_every_byte_that_crosses_the_boundary(plan: str, fetches: int) -> None:
    """Each unit comes for the forward pass, for the backward pass, and for an update of its own."""
    with make(plan) as engine:
        engine.step(batch())  # which is also audited, or rehearsed
        for step in (1, 2):
            before = [engine.ledger.total("host", name, "parameters").payload for name in ("fetch", "store")]
            engine.step(batch(step))
            after = [engine.ledger.total("host", name, "parameters").payload for name in ("fetch", "store")]
            moved = [b - a for a, b in zip(before, after, strict=True)]
            assert moved == [fetches * LAYERS * UNIT, LAYERS * UNIT]


def test_weights_that_are_resident_never_cross_the_boundary() -> None:
    with make("offload=parameters", resident_bytes=2 * UNIT + 100, audit="off") as engine:
        engine.step(batch())
        before = engine.ledger.total("host", "fetch").payload
        engine.step(batch(1))
        assert engine.ledger.total("host", "fetch").payload - before == 3 * (LAYERS - 2) * UNIT
        assert 2 * UNIT <= device_bytes(engine) <= 2 * UNIT + LAYERS * _SMALL
        held = sum(tensor.nbytes for tensor in engine.mesh.boundary.storages()["parameters"])
        assert held == (LAYERS - 2) * UNIT


@pytest.mark.parametrize("resident_bytes", [0, 3 * UNIT])
def test_an_engine_gives_the_weights_of_one_device_back(resident_bytes: int) -> None:
    models = {plan: Layers() for plan in ("data=1", "offload=parameters")}
    losses = {}
    for plan, model in models.items():
        options = {"resident_bytes": resident_bytes} if plan != "data=1" else {}
        with make(plan, model, **options) as engine:
            losses[plan] = [engine.step(batch(step)).loss for step in range(3)]
            losses[plan].append(engine.evaluate(batch(9)).loss)
            whole = engine.full_state_dict()
        assert all(torch.equal(whole[name], p) for name, p in model.state_dict().items())
    assert losses["data=1"] == pytest.approx(losses["offload=parameters"], rel=1e-6)
    for one, other in zip(*(model.parameters() for model in models.values()), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.slow_cases("backward-1000000000", "step-12288")
@pytest.mark.parametrize("resident_bytes", [3 * UNIT, 10**9])
@pytest.mark.parametrize("update", ["step", "backward"])
def test_resident_weights_that_the_host_updates_are_waited_for(update: str, resident_bytes: int) -> None:
    """Whoever reads one between two steps, or uses it in the next, finds it new."""
    plans = {
        "data=1": {},
        f"offload=optimizer,parameters update={update}": {"resident_bytes": resident_bytes},
    }
    seen = []
    for plan, options in plans.items():
        model = Layers()
        with make(plan, model, **options) as engine:
            losses = []
            for step in range(3):
                losses.append(engine.step(batch(step)).loss)
                first = next(model.parameters()).detach().clone()
        seen.append([torch.tensor(losses), first])
    torch.testing.assert_close(*seen)


def test_a_deferred_model_is_filled_in_host_memory() -> None:
    torch.manual_seed(3)
    model = echelon.deferred(Layers)
    with make("offload=parameters", model) as engine:
        weights = engine.full_state_dict()
        assert device_bytes(engine) <= LAYERS * _SMALL
        engine.step(batch())
        engine.close(restore=False)
    assert all(bool(weight.isfinite().all()) and float(weight.std()) > 0 for weight in weights.values())


def test_a_folder_is_read_into_host_memory(tmp_path: Path) -> None:
    config = ModelConfig("llama", layers=2, width=16, heads=2, vocab=32, sequence=8)
    tokens = torch.randint(32, (4, 9), generator=torch.Generator().manual_seed(0))
    losses = {}
    for plan in ("data=1", "offload=parameters"):
        weights = None if plan == "data=1" else tmp_path / "data=1"
        model = build(config) if weights is None else echelon.deferred(lambda: build(config))
        with make(plan, model, loss=cross_entropy, weights=weights) as engine:
            engine.export(tmp_path / plan)
            losses[plan] = [engine.step((tokens[:, :-1], tokens[:, 1:])).loss for _ in range(2)]
            engine.close(restore=False)
    assert losses["data=1"] == pytest.approx(losses["offload=parameters"], rel=1e-6)
    files = [(tmp_path / plan / "model.safetensors").read_bytes() for plan in losses]
    assert files[0] == files[1]


def test_a_model_that_changes_its_weights_in_a_pass_is_refused() -> None:
    model = Layers()

    def change(module: Any, *_: Any) -> None:
        module[0].weight.data.mul_(1.5)

    model[0].register_forward_hook(change)
    engine = make("offload=parameters", model, audit="off")
    with (
        pytest.raises(UserError, match=r"and with offload=parameters the change .* data=1 without offload"),
        engine,
    ):
        engine.step(batch())


def test_a_backward_pass_through_a_backward_pass_is_refused() -> None:
    """On the device are only the weights of a part of the model."""

    def loss_of_slopes(outputs: Tensor, targets: Tensor) -> Tensor:
        (slopes,) = torch.autograd.grad(outputs.square().sum(), slope_of, create_graph=True)
        return F.mse_loss(outputs, targets) + slopes.square().sum()

    slope_of: list[Tensor] = []
    model = Layers()
    model[2].register_forward_hook(lambda *results: slope_of.append(results[-1]))
    engine = make("offload=parameters", model, loss=loss_of_slopes)
    message = r"with offload=parameters weights are freed .* \(create_graph=True\) .*; drop offload"
    with pytest.raises(UserError, match=message), engine:
        engine.step(batch())


def test_an_optimizer_whose_steps_somebody_watches_is_refused() -> None:
    def watched(parameters: Any) -> torch.optim.Optimizer:
        optimizer = adamw(parameters)
        optimizer.register_step_post_hook(lambda *_: None)
        return optimizer

    with pytest.raises(UserError, match="AdamW with offload=parameters"):
        make("offload=parameters", optimizer=watched)
    with make("offload=parameters") as engine:
        engine.optimizer.register_step_pre_hook(lambda *_: None)
        with pytest.raises(UserError, match="drop the hooks"):
            engine.step(batch())


@pytest.mark.parametrize(
    ("plan", "value", "message"),
    [
        ("offload=parameters", -1, "resident_bytes=-1: must be a number of bytes"),
        ("offload=parameters", True, "resident_bytes=True: must be a number of bytes"),
        ("data=1", 100, "add offload=parameters, or drop resident_bytes"),
    ],
)
def test_resident_bytes_must_be_bytes_of_something(plan: str, value: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make(plan, resident_bytes=value)
