"""Steps and evaluations: what they take, and what they leave."""

import pytest
import torch
from torch import nn

import echelon
from tests.cases import adamw, counted_loss, mean_loss, vectors
from tests.engine.test_engine import Warm, engine_for


def test_evaluate_changes_nothing_and_agrees_with_step() -> None:
    engine = engine_for("data=1 microbatches=5", loss=counted_loss)
    before = engine.full_state_dict()
    evaluation = engine.evaluate(vectors(3))
    assert engine.module.training
    assert all(torch.equal(value, before[name]) for name, value in engine.full_state_dict().items())
    metrics = engine.step(vectors(3))
    assert (evaluation.loss, evaluation.tokens) == (pytest.approx(metrics.loss, rel=1e-6), 12)


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


def test_a_submodule_in_evaluation_mode_stays_there() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 5))
    model[1].eval()
    engine = echelon.parallelize(model, "data=1", optimizer=adamw, loss=mean_loss)
    engine.step(vectors(0))
    engine.evaluate(vectors(1))
    assert [module.training for module in model] == [True, False, True]
