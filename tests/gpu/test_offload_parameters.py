"""Weights in host memory, with a real boundary: equal and bounded. pytest -m gpu tests/gpu"""

import dataclasses
import gc
from typing import Any

import pytest
import torch

import echelon
from echelon.engine import Engine
from echelon.models import ModelConfig, build, cross_entropy
from echelon.verify import assert_equal
from tests.contract_models import CASES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CONFIG = ModelConfig("llama", layers=32, width=1024, heads=8, vocab=512, sequence=128)
_UPDATE = "precision=bf16 masters=false update=backward recompute=full offload=parameters"


@pytest.mark.parametrize(
    "plan",
    [
        "offload=parameters",
        "offload=parameters recompute=full",
        "offload=parameters update=backward",
        "data=2 offload=parameters microbatches=2",
        "data=2 zero=1 offload=parameters",
        "data=2 zero=3 offload=parameters",
        "data=2 zero=3 offload=parameters update=backward",
    ],
)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_plans_are_equal_to_one_device(plan: str, prefetch: int) -> None:
    changes = {"clip": None} if "backward" in plan else {}
    options = {"smallest_unit": 0, "prefetch": prefetch}
    assert_equal(dataclasses.replace(CASES["gpt"], options=options, **changes), plan)


def adafactor(parameters: Any) -> torch.optim.Optimizer:
    return echelon.optim.Adafactor(parameters, lr=1e-3)


def make(plan: str, **options: Any) -> Engine:
    torch.manual_seed(0)
    model = echelon.deferred(lambda: build(CONFIG))
    return echelon.parallelize(model, plan, optimizer=adafactor, loss=cross_entropy, **options)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(512, (2, 65), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def unit_bytes() -> int:
    layers = build(dataclasses.replace(CONFIG, layers=1)).layers()
    return max(2 * sum(p.numel() for p in layer.parameters()) for layer in layers)


@pytest.mark.parametrize("prefetch", [1, 2])
def test_the_device_holds_a_few_units(prefetch: int) -> None:
    unit, weights = unit_bytes(), 2 * CONFIG.num_parameters
    with make(_UPDATE, prefetch=prefetch) as engine:
        for step in range(4):  # warm-up: kernels, workspaces, statistics
            engine.step(batch(step))
        gc.collect()
        torch.cuda.synchronize()
        standing = torch.cuda.memory_allocated()
        assert standing < weights / 4
        torch.cuda.reset_peak_memory_stats()
        engine.step(batch(4))
        torch.cuda.synchronize()
        # Units; and of one: float32 gradients, float32 copies, and what the optimizer computes of them.
        assert torch.cuda.max_memory_allocated() - standing <= (prefetch + 1 + 16) * unit
        held = sum(tensor.nbytes for tensor in engine.mesh.boundary.storages()["parameters"])
        assert held >= weights
        engine.close(restore=False)


def test_losses_are_those_without_offload() -> None:
    losses = {}
    for plan in (_UPDATE, _UPDATE.replace(" offload=parameters", "")):
        with make(plan) as engine:
            losses[plan] = [engine.step(batch(step)).loss for step in range(5)]
            engine.close(restore=False)
    one, other = losses.values()
    assert one == pytest.approx(other, rel=1e-2)


def test_resident_weights_never_cross_the_boundary() -> None:
    unit = unit_bytes()
    with make(_UPDATE, resident_bytes=6 * unit + unit // 2) as engine:
        engine.step(batch(0))
        before = engine.ledger.total("host", "store").payload
        engine.step(batch(1))
        moved = engine.ledger.total("host", "store").payload - before
        assert 0 < moved <= 2 * CONFIG.num_parameters - 5 * unit
        engine.close(restore=False)


def test_a_closed_engine_gives_pinned_memory_back() -> None:
    engine = make(_UPDATE)
    engine.step(batch(0))
    boundary: Any = engine.mesh.boundary
    assert boundary._pinned
    engine.close(restore=False)
    assert not boundary._pinned
    assert not any(tensor.numel() for tensor in boundary.storages()["parameters"])
