"""Checkpoints of a CUDA device: what a new engine goes on with is the same in every bit, and lies there."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.engine import Engine, parallelize
from echelon.state.checkpoint.snapshot import SnapshotMemory
from echelon.update.precision.loss_scaling import DynamicScale
from echelon.update.precision.stepper import MasterStepper
from echelon.update.synchronous_update import SynchronousUpdate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PLANS = [
    "precision=fp32",
    "precision=bf16",
    "precision=fp16",
    "precision=bf16 masters=false",
    "precision=bf16 offload=optimizer",
    "precision=bf16 offload=optimizer delay=1",
    "precision=bf16 offload=optimizer,parameters",
    "precision=bf16 update=backward",
]


def make_engine(plan: str, seed: int) -> Engine:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Dropout(0.1), nn.Linear(256, 32))
    options: dict[str, Any] = {}
    if "fp16" in plan:  # too large at first
        options["loss_scale"] = DynamicScale(start=2.0**26, interval=2)
    return parallelize(
        model,
        plan,
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2),
        loss=F.mse_loss,
        seed=0,
        **options,
    )


def train(engine: Engine, begin: int, end: int) -> None:
    for step in range(begin, end):
        generator = torch.Generator().manual_seed(step)
        engine.step((torch.randn(16, 64, generator=generator), torch.randn(16, 32, generator=generator)))


def state_of(engine: Engine) -> dict[str, Tensor]:
    engine.synchronize()
    return {f"{each.slice.name} {each.slice.part}": each.tensor.clone() for each in engine.owned()}


@pytest.mark.parametrize("plan", PLANS)
def test_a_new_engine_goes_on_in_every_bit(plan: str, tmp_path: Path) -> None:
    engine, other = make_engine(plan, 0), make_engine(plan, 1)
    train(engine, 0, 8)
    engine.save(tmp_path / "a")
    train(engine, 8, 12)
    train(other, 20, 22)
    other.load(tmp_path / "a")
    train(other, 8, 12)
    expected, found = state_of(engine), state_of(other)
    assert expected.keys() == found.keys()
    assert {key: value.device for key, value in expected.items()} == {
        key: value.device for key, value in found.items()
    }
    assert [key for key in expected if not torch.equal(expected[key], found[key])] == []


@pytest.mark.parametrize("copy_behind", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_steps_do_not_change_what_is_being_saved(
    plan: str, copy_behind: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = SnapshotMemory._copy_on_device

    def copy_late(memory: SnapshotMemory, rest: Sequence[Any]) -> torch.cuda.Event:
        memory._stream = memory._stream or torch.cuda.Stream()
        with torch.cuda.stream(memory._stream):
            torch.cuda._sleep(500_000_000)  # clock cycles: longer than the steps behind it
        return copy(memory, rest)

    monkeypatch.setattr(SnapshotMemory, "_copy_on_device", copy_late)
    engine, other = make_engine(plan, 0), make_engine(plan, 1)
    train(engine, 0, 8)
    expected = state_of(engine)
    engine.save(tmp_path / "a", wait=False, copy_behind=copy_behind)
    train(engine, 8, 10)
    engine.finish_saving()
    other.load(tmp_path / "a")
    found = state_of(other)
    assert expected.keys() == found.keys()
    # A new engine has its numbers on the host until its first step.
    assert [key for key in expected if not torch.equal(expected[key].cpu(), found[key].cpu())] == []


def test_steps_are_counted_and_losses_scaled_on_the_device(tmp_path: Path) -> None:
    engine, other = make_engine("precision=fp16", 0), make_engine("precision=fp16", 1)
    train(engine, 0, 8)
    engine.save(tmp_path / "a")
    other.load(tmp_path / "a")
    assert other.skipped_steps == engine.skipped_steps > 0
    update = other._update
    assert isinstance(update, SynchronousUpdate)
    assert isinstance(update.stepper, MasterStepper)
    assert all(state["step"].is_cuda for state in other.optimizer.state.values())
    assert isinstance(update.loss_scale, Tensor)
    assert update.loss_scale.is_cuda
    train(other, 8, 10)
    fused = update.stepper._fused
    assert fused is not None
    assert fused._prepared  # and not torch's own kernel, for want of state that fits
