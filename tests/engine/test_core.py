"""What an engine tells of itself."""

import pytest
from torch import nn

import echelon
from echelon.update.optim import cosine
from tests.cases import adamw, mean_loss, vectors
from tests.engine.test_engine import engine_for


def test_the_learning_rate_follows_the_schedule() -> None:
    engine = engine_for(schedule=cosine(total=10, warmup=5))
    rates = []
    for step in range(3):
        engine.step(vectors(step))
        rates.append(engine.learning_rate)
    assert rates == pytest.approx([0.002, 0.004, 0.006])


def test_an_engine_shows_its_plan_stages_sets_and_stacks() -> None:
    text = repr(engine_for("data=1 microbatches=2"))
    assert text.splitlines()[0] == "Engine('microbatches=2', rank 0 of 1)"
    assert "stage 0: dense" in text
    assert "parameters over data (1), SingleReplica" in text
    assert "wrapping, innermost first: nothing" in text
    dropping = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.1))
    engine = echelon.parallelize(dropping, "data=1", optimizer=adamw, loss=mean_loss)
    assert "wrapping, innermost first: dropout ×1" in repr(engine)
