"""One engine: on one device here, on ranks through the contract and these."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon.engine import Engine
from echelon.launching import Ranks
from echelon.update.optim import cosine
from tests.cases import Perceptron, adamw, counted_loss, mean_loss, perceptron_case, vectors

Warm = Callable[[int], Ranks]


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


def fingerprint() -> list[bytes]:
    engine = engine_for("data=2 microbatches=2")
    for step in range(5):
        engine.step(engine.local(vectors(step)))
    return [value.numpy().tobytes() for value in engine.full_state_dict().values()]


def test_training_is_deterministic_to_the_bit(warm_ranks: Warm) -> None:
    first, second = warm_ranks(2).run(fingerprint), warm_ranks(2).run(fingerprint)
    assert first == second
    assert first[0] == first[1]


def optimizer_state() -> dict[str, dict[str, Tensor]]:
    engine = engine_for("data=2")
    engine.step(engine.local(vectors(0)))
    return engine.full_optimizer_state()


def test_optimizer_state_has_every_original_name(warm_ranks: Warm) -> None:
    state = warm_ranks(2).run(optimizer_state)[0]
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


def test_a_replica_may_have_no_samples_at_all(warm_ranks: Warm) -> None:
    alone = engine_for()
    losses = [alone.step(vectors(step)).loss for step in range(3)]
    for rank, (replica, rank_losses, tokens) in enumerate(warm_ranks(2).run(uneven_parts)):
        assert (replica, tokens) == (rank, [12, 12, 12])
        assert rank_losses == pytest.approx(losses, rel=1e-5)


def test_inputs_take_the_type_of_the_plan() -> None:
    assert engine_for("precision=fp64").step(vectors(0)).loss > 0


def test_a_batch_without_samples_on_any_rank_is_refused() -> None:
    inputs, targets = vectors(0)
    with pytest.raises(echelon.UserError, match="no replica had a sample"):
        engine_for().step((inputs[:0], targets[:0]))


def test_the_case_of_the_contract_is_deterministic() -> None:
    case = perceptron_case()
    first, second = case.build().state_dict(), case.build().state_dict()
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_an_engine_shows_its_plan_stages_sets_and_stacks() -> None:
    text = repr(engine_for("data=1 microbatches=2"))
    assert text.splitlines()[0] == "Engine('microbatches=2', rank 0 of 1)"
    assert "stage 0: dense" in text
    assert "parameters over data (1), SingleReplica" in text
    assert "wrapping, innermost first: nothing" in text
    dropping = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.1))
    engine = echelon.parallelize(dropping, "data=1", optimizer=adamw, loss=mean_loss)
    assert "wrapping, innermost first: dropout ×1" in repr(engine)


def test_a_submodule_in_evaluation_mode_stays_there() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 5))
    model[1].eval()
    engine = echelon.parallelize(model, "data=1", optimizer=adamw, loss=mean_loss)
    engine.step(vectors(0))
    engine.evaluate(vectors(1))
    assert [module.training for module in model] == [True, False, True]
