"""One engine: on one device here, on ranks through the contract and these."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon.engine import Engine
from echelon.optim import cosine
from echelon.program import Instruction
from tests.cases import Perceptron, adamw, counted_loss, mean_loss, perceptron_case, sgd, vectors


def engine_for(plan: str = "data=1", **options: object) -> Engine:
    torch.manual_seed(0)
    return echelon.parallelize(
        Perceptron(),
        plan,
        **({"optimizer": adamw, "loss": mean_loss} | options),  # type: ignore[arg-type]
    )


def test_the_loss_falls_and_weights_move() -> None:
    engine = engine_for()
    before = engine.full_state_dict()
    losses = [engine.step(vectors(0)).loss for _ in range(30)]
    after = engine.full_state_dict()
    assert losses[-1] < losses[0] / 2
    assert not torch.equal(before["first.weight"], after["first.weight"])
    assert torch.equal(before["frozen"], after["frozen"])
    assert torch.equal(after["middle.weight"], after["again.weight"])


def test_metrics_are_of_the_mean_loss_before_clipping() -> None:
    engine = engine_for(clip=1e-3, optimizer=sgd)
    inputs, targets = vectors(0)
    model = Perceptron()
    model.load_state_dict(engine.full_state_dict())
    loss = mean_loss(model(inputs), targets)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
    metrics = engine.step((inputs, targets))
    assert metrics.loss == pytest.approx(loss.item(), rel=1e-5)
    assert metrics.grad_norm == pytest.approx(norm.item(), rel=1e-5)
    assert (metrics.tokens, metrics.skipped) == (12, False)
    assert metrics.seconds > 0


def test_evaluate_changes_nothing_and_agrees_with_step() -> None:
    engine = engine_for("data=1 microbatches=5", loss=counted_loss)
    before = engine.full_state_dict()
    evaluation = engine.evaluate(vectors(3))
    assert engine.module.training
    assert all(torch.equal(value, before[name]) for name, value in engine.full_state_dict().items())
    metrics = engine.step(vectors(3))
    assert (evaluation.loss, evaluation.tokens) == (pytest.approx(metrics.loss, rel=1e-6), 12)


def test_the_learning_rate_follows_the_schedule() -> None:
    engine = engine_for(schedule=cosine(total=10, warmup=5))
    rates = []
    for step in range(3):
        engine.step(vectors(step))
        rates.append(engine.learning_rate)
    assert rates == pytest.approx([0.002, 0.004, 0.006])


class Fragile(nn.Module):
    """Fails on the forward pass that it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)
        self.fail = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fail:
            raise RuntimeError("failed on purpose")
        return self.layer(x)  # type: ignore[no-any-return]


def steps_around_a_failure(plan: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Training with a failed step in the middle, and training without it."""
    results = []
    for failing in (True, False):
        torch.manual_seed(0)
        model = Fragile()
        engine = echelon.parallelize(model, plan, optimizer=adamw, loss=mean_loss)
        engine.step(engine.local(vectors(0)))
        if failing:
            model.fail = True
            with pytest.raises(RuntimeError, match="failed on purpose"):
                engine.step(engine.local(vectors(1)))
            model.fail = False
        engine.step(engine.local(vectors(2)))
        results.append(engine.full_state_dict())
    return results[0], results[1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_after_a_forward_that_raised_the_next_step_works(ranks: int) -> None:
    for with_failure, without in echelon.launch(steps_around_a_failure, ranks, f"data={ranks}"):
        assert all(torch.equal(value, without[name]) for name, value in with_failure.items())


def fingerprint() -> list[bytes]:
    engine = engine_for("data=2 microbatches=2")
    for step in range(5):
        engine.step(engine.local(vectors(step)))
    return [value.numpy().tobytes() for value in engine.full_state_dict().values()]


def test_training_is_deterministic_to_the_bit() -> None:
    first, second = echelon.launch(fingerprint, 2), echelon.launch(fingerprint, 2)
    assert first == second
    assert first[0] == first[1]


def optimizer_state() -> dict[str, dict[str, Tensor]]:
    engine = engine_for("data=2")
    engine.step(engine.local(vectors(0)))
    return engine.full_optimizer_state()


def test_optimizer_state_has_every_original_name() -> None:
    state = echelon.launch(optimizer_state, 2)[0]
    names = {name for name, _ in Perceptron().named_parameters(remove_duplicate=False)}
    assert state.keys() == names
    assert state["first.weight"].keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert torch.equal(state["again.weight"]["exp_avg"], state["middle.weight"]["exp_avg"])
    assert state["unused.weight"] == {} == state["frozen"]


def uneven_parts() -> tuple[int, list[float], list[int]]:
    """Rank 0 gets everything, rank 1 nothing at all."""
    engine = engine_for("data=2")
    metrics = []
    for step in range(3):
        inputs, targets = vectors(step)
        metrics.append(engine.step((inputs, targets) if engine.replica == 0 else (inputs[:0], targets[:0])))
    return engine.replica, [m.loss for m in metrics], [m.tokens for m in metrics]


def test_a_replica_may_have_no_samples_at_all() -> None:
    alone = engine_for()
    losses = [alone.step(vectors(step)).loss for step in range(3)]
    for rank, (replica, its_losses, tokens) in enumerate(echelon.launch(uneven_parts, 2)):
        assert (replica, tokens) == (rank, [12, 12, 12])
        assert its_losses == pytest.approx(losses, rel=1e-5)


def test_inputs_take_the_type_of_the_plan() -> None:
    assert engine_for("precision=fp64").step(vectors(0)).loss > 0


def test_what_this_version_cannot_run_is_refused_all_at_once() -> None:
    with pytest.raises(echelon.UserError, match="cannot run yet") as caught:
        engine_for("data=2 expert=2 precision=fp16 offload=optimizer")
    names = ["expert", "precision", "offload"]
    assert [error.split("=")[0] for error in caught.value.errors] == names


def test_a_plan_needs_its_ranks() -> None:
    with pytest.raises(echelon.UserError, match="needs 2 ranks, but 1 is running"):
        engine_for("data=2")


def test_a_batch_without_samples_on_any_rank_is_refused() -> None:
    inputs, targets = vectors(0)
    with pytest.raises(echelon.UserError, match="no replica had a sample"):
        engine_for().step((inputs[:0], targets[:0]))


def test_the_case_of_the_contract_is_deterministic() -> None:
    case = perceptron_case()
    first, second = case.build().state_dict(), case.build().state_dict()
    assert all(torch.equal(value, second[name]) for name, value in first.items())


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
    engine = engine_for(f"schedule={schedule} microbatches=4")
    engine.step(vectors(0))
    assert instructions(engine) == f"{computed} REDUCE NORM UPDATE PUBLISH"


def test_a_replica_with_few_samples_runs_the_same_schedule_with_fewer_microbatches() -> None:
    engine = engine_for("schedule=gpipe microbatches=4")
    inputs, targets = vectors(0)
    engine.step((inputs[:3], targets[:3]))
    assert instructions(engine) == "F0 F1 F2 B0 B1 B2 REDUCE NORM UPDATE PUBLISH"


def test_a_schedule_file_for_one_stage_is_executed_as_written(tmp_path: Path) -> None:
    """It was checked, and then naive ran instead."""
    path = tmp_path / "mine.txt"
    path.write_text("rank 0: F1 F0 B0 F2 B2 B1\n")
    engine = engine_for(f"schedule={path} microbatches=3")
    engine.step(vectors(0))
    assert instructions(engine) == "F1 F0 B0 F2 B2 B1 REDUCE NORM UPDATE PUBLISH"


def test_an_engine_shows_its_plan_stages_sets_and_stacks() -> None:
    text = repr(engine_for("data=1 microbatches=2"))
    assert text.splitlines()[0] == "Engine('microbatches=2', rank 0 of 1)"
    assert "stage 0: dense" in text
    assert "parameters over data (1), SingleReplica" in text
    assert "wrapping, innermost first: nothing" in text
    dropping = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.1))
    engine = echelon.parallelize(dropping, "data=1", optimizer=adamw, loss=mean_loss)
    assert "wrapping, innermost first: dropout ×1" in repr(engine)
