"""The optimizer of a Trainer, of the parameters of a rank."""

from typing import Any

import pytest
import torch
from torch import nn

import echelon
from echelon.errors import UserError
from echelon.train.integrations.hf_optimizer import EngineOptimizer, ModelInLoop, optimizer_maker


def test_groups_follow_the_names_of_what_a_rank_holds() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    make = optimizer_maker(model, torch.optim.AdamW, {"lr": 0.5}, ["0.weight", "1.weight"], 0.25)
    first, second = make(model[1].parameters()).param_groups  # a stage's
    assert (first["params"], first["weight_decay"], first["lr"]) == ([model[1].weight], 0.25, 0.5)
    assert (second["params"], second["weight_decay"]) == ([model[1].bias], 0.0)
    (only,) = make([model[0].bias]).param_groups
    assert only["params"] == [model[0].bias]


@pytest.mark.parametrize(("kind", "options"), [(torch.optim.SGD, {"params": []}), (lambda: None, {})])
def test_an_optimizer_that_groups_parameters_itself_is_refused(kind: Any, options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="use an optimizer of torch"):
        optimizer_maker(nn.Linear(1, 1), kind, options, [], 0.0)


def test_the_loop_sees_groups_of_the_engine_and_whole_shapes() -> None:
    model = nn.Linear(2, 3).double()
    in_loop = ModelInLoop(model)
    sgd, loss = torch.optim.SGD, nn.functional.mse_loss
    with echelon.parallelize(
        model, "precision=fp64", optimizer=lambda p: sgd(p, lr=0.5), loss=loss
    ) as engine:
        optimizer = EngineOptimizer(engine)
        assert optimizer.param_groups is engine.optimizer.param_groups
        before = model.weight.clone()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(model.weight, before), "the engine has made the update"
        with pytest.raises(UserError, match="closure"):
            optimizer.step(lambda: None)  # type: ignore[arg-type]
    assert in_loop.count() == 9
    assert all(each.is_meta for each in in_loop.parameters())
