"""What users hand to the engine: every mistake is named, with its fix."""

from typing import Any

import numpy as np
import pytest
from torch import nn
from torch.optim import LBFGS, SGD, AdamW

from echelon.engine.arguments import check_arguments, check_optimizer
from echelon.errors import UserError
from echelon.plan import Plan


def errors_of(check: Any, *arguments: Any) -> tuple[str, ...]:
    with pytest.raises(UserError) as caught:
        check(*arguments)
    return caught.value.errors or (caught.value.title,)


def good(**changes: Any) -> dict[str, Any]:
    given = {"model": nn.Linear(2, 2), "plan": "data=2", "optimizer": AdamW, "loss": nn.MSELoss()}
    given |= {
        "clip": None,
        "prefetch": 1,
        "seed": 0,
        "boundaries": None,
        "tensor_table": None,
    }
    return given | changes


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"plan": Plan(data=2)},
        {"clip": 1},
        {"clip": np.float32(0.5)},
        {"prefetch": 0},
        {"seed": None},
        {"plan": "pipeline=2", "boundaries": (1,)},
        {"plan": "pipeline=2", "boundaries": [np.int64(1)]},
        {"boundaries": []},
        {"loss": None},
        {"tensor_table": {"up": "column"}},
    ],
)
def test_good_arguments_pass(changes: dict[str, Any]) -> None:
    check_arguments(**good(**changes))


def test_all_errors_of_the_arguments_at_once() -> None:
    errors = errors_of(check_arguments, "model", 2, 3, 4, 0, -1)
    starts = [
        "model is a str",
        "plan is a int",
        "optimizer is a int",
        "loss is a int",
        "clip=0",
        "prefetch=-1",
    ]
    assert [error[: len(start)] for error, start in zip(errors, starts, strict=True)] == starts


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": nn.Identity}, "give a model, like Identity("),
        ({"plan": "data=0 zero=7"}, "plan: data=0"),
        ({"optimizer": SGD(nn.Linear(2, 2).parameters(), lr=0.1)}, "optimizer=lambda params: SGD(params)"),
        ({"loss": nn.MSELoss}, "give a loss, like MSELoss()"),
        ({"clip": float("nan")}, "clip=nan"),
        ({"clip": -1.0}, "clip=-1.0"),
        ({"clip": "1"}, "clip='1'"),
        ({"clip": True}, "clip=True"),
        ({"prefetch": 1.5}, "prefetch=1.5"),
        ({"prefetch": True}, "prefetch=True"),
        ({"seed": 1.0}, "seed=1.0"),
        ({"seed": False}, "seed=False"),
        ({"boundaries": 3}, "boundaries=3: must be a list of integers"),
        ({"boundaries": ["a"]}, "boundaries=['a']: must be a list of integers"),
        ({"boundaries": [1]}, "boundaries=[1] with pipeline=1"),
        ({"boundaries": [1], "plan": "pipeline=auto"}, "boundaries=[1] with pipeline=auto"),
        ({"tensor_table": ["x"]}, "tensor_table is a list: must map names of modules to words"),
        ({"tensor_table": {"x": 3}}, "tensor_table has 'x': 3"),
    ],
)
def test_one_bad_argument(changes: dict[str, Any], says: str) -> None:
    assert says in errors_of(check_arguments, *good(**changes).values())[0]


def test_optimizers_over_the_given_parameters_pass() -> None:
    weight, bias = nn.Linear(2, 2).parameters()
    check_optimizer(AdamW([weight, bias]), [weight, bias])
    check_optimizer(SGD([{"params": [weight]}, {"params": []}], lr=0.1), [weight, bias])


def test_optimizers_that_train_something_else() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    given = list(model.parameters())
    (error,) = errors_of(check_optimizer, AdamW([*other.parameters(), given[0]]), given)
    assert "2 of its 3 parameters are not those" in error
    optimizer = AdamW(given)
    optimizer.param_groups[0]["params"] = []
    assert "leaves out every parameter" in errors_of(check_optimizer, optimizer, given)[0]
    assert "returned a list" in errors_of(check_optimizer, given, given)[0]
    assert len(errors_of(check_optimizer, LBFGS(other.parameters()), given)) == 2


def test_the_audit_is_one_of_four_and_checks_come_after_some_steps() -> None:
    check_arguments(**good(audit="always", check_every=0))
    assert errors_of(lambda: check_arguments(**good(audit="never", check_every=-1))) == (
        "audit='never': must be one of 'first', 'sampled', 'always', 'off'",
        "check_every=-1: must be a number of steps, or 0 to compare never",
    )
    assert len(errors_of(lambda: check_arguments(**good(audit=["first"], check_every=True)))) == 2
