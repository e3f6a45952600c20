"""Whole state of an engine, by the names of the model."""

import torch
from torch import Tensor

from tests.cases import Perceptron, vectors
from tests.engine.test_engine import Warm, engine_for


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
