"""Which engines record passes at all."""

import pytest

import echelon
from echelon.engine.step.graphs.assembly import make_graphs
from echelon.engine.step.step import FlushedRunner
from tests.engine.step.graphs.fake_recorder import FakeRecorder, engine_of, network, recorded, train


def test_passes_of_a_cpu_are_not_recorded() -> None:
    engine = engine_of(network())
    assert isinstance(engine._runner, FlushedRunner)
    assert engine._runner.graphs is None


def test_a_plan_with_an_obstacle_has_no_recorder() -> None:
    engine = engine_of(network(), "recompute=full")
    assert isinstance(engine._runner, FlushedRunner)
    assert make_graphs(engine._setup, engine._runner, FakeRecorder()) is None


def test_graphs_true_with_such_a_plan_is_refused() -> None:
    with pytest.raises(echelon.UserError, match="graphs=true recompute=full: layers run again"):
        echelon.Plan.parse("graphs=true recompute=full")


def test_the_engine_says_what_is_recorded() -> None:
    engine = engine_of(network())
    recorded(engine)
    assert "graphs: no passes are recorded yet" in repr(engine)
    train(engine, 10)
    assert "graphs: passes are replayed (1 form of batches)" in repr(engine)
