"""Which program runs on which microbatches, and what a step that failed leaves."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon.engine import Engine
from echelon.launching import RankFailed
from echelon.program import Instruction
from tests.cases import Perceptron, adamw, mean_loss, vectors
from tests.contract_models import class_loss
from tests.parallel.pipeline.models import Hidden


def engine_for(plan: str, make: Callable[[], nn.Module]) -> Engine:
    torch.manual_seed(0)
    return echelon.parallelize(make(), plan, optimizer=adamw, loss=mean_loss, audit="off")


def one_stage(plan: str) -> Engine:
    return engine_for(plan, Perceptron)


# The program.


def instructions(engine: Engine) -> str:
    """What the last step executed, as text."""
    return " ".join(str(word) for word in (describe(span.instruction) for span in engine.spans))


def describe(instruction: Instruction) -> str:
    number = "" if instruction.microbatch is None else str(instruction.microbatch)
    return f"{instruction.op.value}{number}"


@pytest.mark.parametrize(
    ("schedule", "computed"),
    [
        ("gpipe", "F0 F1 F2 F3 B0 B1 B2 B3"),
        ("1f1b", "F0 B0 F1 B1 F2 B2 F3 B3"),
        ("naive", "F0 B0 F1 B1 F2 B2 F3 B3"),
        ("zero-bubble", "F0 I0 W0 F1 I1 W1 F2 I2 W2 F3 I3 W3"),
    ],
)
def test_one_stage_runs_the_program_of_the_plan(schedule: str, computed: str) -> None:
    """Every schedule ran as naive there."""
    engine = one_stage(f"schedule={schedule} microbatches=4")
    engine.step(vectors(0))
    assert instructions(engine) == f"{computed} REDUCE NORM UPDATE PUBLISH"


def test_a_replica_with_few_samples_runs_the_same_schedule_with_fewer_microbatches() -> None:
    engine = one_stage("schedule=gpipe microbatches=4")
    inputs, targets = vectors(0)
    engine.step((inputs[:3], targets[:3]))
    assert instructions(engine) == "F0 F1 F2 B0 B1 B2 REDUCE NORM UPDATE PUBLISH"


def test_a_schedule_file_for_one_stage_is_executed_as_written(tmp_path: Path) -> None:
    """It was checked, and then naive ran instead."""
    path = tmp_path / "own.txt"
    path.write_text("rank 0: F1 F0 B0 F2 B2 B1\n")
    engine = one_stage(f"schedule={path} microbatches=3")
    engine.step(vectors(0))
    assert instructions(engine) == "F1 F0 B0 F2 B2 B1 REDUCE NORM UPDATE PUBLISH"


# Failures.


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.fail = nn.Linear(6, 6), False

    def forward(self, x: Tensor) -> Tensor:
        if self.fail:
            raise RuntimeError("failed on purpose")
        return self.linear(x)  # type: ignore[no-any-return]


def fragile_in_the_middle() -> nn.Module:
    return nn.Sequential(Hidden(), Fragile(), nn.Linear(6, 5))


def failing_on_one_rank() -> None:
    engine = engine_for("pipeline=3 microbatches=4", fragile_in_the_middle)
    engine.step(vectors(0))
    engine.module[1].fail = True
    engine.step(vectors(1))


def test_a_forward_that_fails_ends_all_ranks_with_its_error() -> None:
    with pytest.raises(RankFailed, match="rank 1 raised RuntimeError: failed on purpose"):
        echelon.launch(failing_on_one_rank, 3, deadline=20.0)


class KeepsDropout(nn.Module):
    """Draws masks in an evaluation too, as its own `train` says."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(6, 5), nn.Dropout(0.5)
        self.seen: list[bool] = []

    def train(self, mode: bool = True) -> "KeepsDropout":
        super().train(mode)
        self.dropout.train()
        return self

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.dropout.training)
        return self.linear(self.dropout(x))


def test_an_evaluation_leaves_the_mode_to_a_model_that_sets_its_own() -> None:
    model = KeepsDropout()
    with echelon.parallelize(model, "data=1", optimizer=adamw, loss=class_loss, audit="off") as engine:
        engine.evaluate((torch.randn(4, 6), torch.randint(5, (4,))))
    assert model.seen == [True]


def test_a_batch_of_one_microbatch_stays_the_users_own() -> None:
    """A model may ask for gradients of its inputs, or turn them: the batch is no other afterwards."""

    class Turns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x.requires_grad_().mul(1.0))

    inputs = torch.randn(4, 6)
    with echelon.parallelize(Turns(), "data=1", optimizer=adamw, loss=class_loss, audit="off") as engine:
        engine.step((inputs, torch.randint(5, (4,))))
    assert (inputs.requires_grad, inputs.grad) == (False, None)
