"""Weights in host memory, with a real boundary: equal and bounded. pytest -m gpu tests/gpu"""

import dataclasses
import gc
from typing import Any

import pytest
import torch
from torch import Tensor

import echelon
from echelon.collectives import boundary
from echelon.engine import Engine
from echelon.models import ModelConfig, build, cross_entropy
from echelon.verify import assert_equal
from tests.contract_models import CASES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SMALL = ModelConfig("gpt", 3, 64, 2, vocab=64, sequence=16, tied=True)
CONFIG = ModelConfig("llama", layers=16, width=1024, heads=8, vocab=512, sequence=128)
_UPDATE = "precision=bf16 masters=false update=backward recompute=full offload=parameters"


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def weights_after(plan: str, **options: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    clip = None if "backward" in plan else 0.5
    with echelon.parallelize(
        build(SMALL), plan, optimizer=adamw, loss=cross_entropy, clip=clip, **options
    ) as engine:
        for step in range(3):
            tokens = torch.randint(64, (4, 17), generator=torch.Generator().manual_seed(step))
            engine.step((tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))
        return engine.full_state_dict()


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize(
    "plan",
    [
        "precision=fp64",
        "precision=fp64 microbatches=2 recompute=full",
        "precision=fp64 update=backward",
    ],
)
def test_it_is_equal(plan: str, prefetch: int) -> None:
    theirs = weights_after(plan)
    ours = weights_after(f"{plan} offload=parameters", prefetch=prefetch)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.parametrize(
    "plan", ["data=2 zero=1 offload=parameters", "data=2 zero=3 offload=parameters update=backward"]
)
def test_ranks_are_equal_to_one_device(plan: str) -> None:
    """Two ranks that share the GPU. On a CPU more plans run: here it is about streams."""
    changes = {"clip": None} if "backward" in plan else {}
    options = {"smallest_unit": 0, "prefetch": 2}
    assert_equal(dataclasses.replace(CASES["gpt"], options=options, **changes), plan)


def adafactor(parameters: Any) -> torch.optim.Optimizer:
    return echelon.optim.Adafactor(parameters, lr=1e-3)


def make(plan: str, **options: Any) -> Engine:
    torch.manual_seed(0)
    model = echelon.deferred(lambda: build(CONFIG))
    given = {"optimizer": adafactor, "loss": cross_entropy, "audit": "off"} | options
    return echelon.parallelize(model, plan, **given)


def batch(step: int) -> tuple[Tensor, Tensor]:
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
        assert standing < weights / 3
        torch.cuda.reset_peak_memory_stats()
        engine.step(batch(4))
        torch.cuda.synchronize()
        # Units; and of one: float32 gradients, float32 copies, and what the optimizer computes of them.
        assert torch.cuda.max_memory_allocated() - standing <= (prefetch + 1 + 10) * unit
        held = sum(tensor.nbytes for tensor in engine.mesh.boundary.storages().get("parameters", []))
        assert held >= weights
        engine.close(restore=False)


def test_losses_are_those_without_offload() -> None:
    losses = {}
    for plan in (_UPDATE, _UPDATE.replace(" offload=parameters", "")):
        with make(plan) as engine:
            losses[plan] = [engine.step(batch(step)).loss for step in range(3)]
            engine.close(restore=False)
    one, other = losses.values()
    assert one == pytest.approx(other, rel=1e-2)


def test_resident_weights_never_cross_the_boundary() -> None:
    unit = unit_bytes()
    with make(_UPDATE, resident_bytes=4 * unit + unit // 2) as engine:
        engine.step(batch(0))
        before = engine.ledger.total("host", "store").payload
        engine.step(batch(1))
        moved = engine.ledger.total("host", "store").payload - before
        assert 0 < moved <= 2 * CONFIG.num_parameters - 3 * unit
        engine.close(restore=False)


def test_the_first_step_needs_no_more_than_others() -> None:
    """Its rehearsal keeps no gradients."""
    peaks = []
    with make(_UPDATE.replace(" offload=parameters", "")) as engine:
        for step in range(3):
            torch.cuda.reset_peak_memory_stats()
            engine.step(batch(step))
            torch.cuda.synchronize()
            peaks.append(torch.cuda.max_memory_allocated())
        engine.close(restore=False)
    assert peaks[0] <= peaks[2] + 64 * 2**20  # workspaces


def test_a_closed_engine_gives_pinned_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[int] = []
    unpin = boundary._unpin

    def count(address: int) -> None:
        if address in pinned:  # and not memory of an engine before this one
            pinned.remove(address)
        unpin(address)

    empty = boundary.CudaBoundary.empty

    def watched(self: Any, size: int, dtype: torch.dtype) -> Tensor:
        host = empty(self, size, dtype)
        if size:
            pinned.append(host.data_ptr())  # `is_pinned` asks for the begin of the storage, which is not
        return host

    monkeypatch.setattr(boundary, "_unpin", count)
    monkeypatch.setattr(boundary.CudaBoundary, "empty", watched)
    engine = make(_UPDATE)
    engine.step(batch(0))
    assert len(pinned) >= CONFIG.layers
    engine.close(restore=False)
    gc.collect()
    assert not pinned
    left = engine.mesh.boundary.storages().values()
    assert not any(tensor.numel() for tensors in left for tensor in tensors)
