"""What one rank prints, and what all measure together."""

import math
from collections.abc import Callable

import pytest
import torch

from echelon.engine import parallelize
from echelon.errors import UserError
from echelon.launching import Ranks
from tests.cases import mean_loss, sgd
from tests.contract_models import Twice, gpt


def measure(plan: str) -> tuple[bool, list[float]]:
    engine = parallelize(gpt(), plan, optimizer=sgd, loss=mean_loss)
    value = float(engine.replica + 1)
    with pytest.raises(UserError, match=r"engine\.average: value must be one number, got str 'one'"):
        engine.average("one")  # type: ignore[arg-type]
    return engine.main, [
        engine.average(value),
        engine.average(torch.tensor(value), count=torch.tensor(engine.replica * 2)),
        engine.average(math.nan if engine.replica == 0 else 7, count=engine.replica),
        engine.average(value, count=0),
    ]


@pytest.mark.parametrize("plan", ["data=2", "data=2 tensor=2"])
@pytest.mark.slow_cases("data=2 tensor=2")
def test_an_average_is_weighted_and_the_same_on_every_rank(
    plan: str, warm_ranks: Callable[[int], Ranks]
) -> None:
    results = warm_ranks(2 if plan == "data=2" else 4).run(measure, plan)
    assert [is_main for is_main, _ in results] == [True, *[False] * (len(results) - 1)]
    for _, (mean, weighted, without_nan, of_nothing) in results:
        assert (mean, weighted, without_nan) == (1.5, 2.0, 7.0)
        assert math.isnan(of_nothing)


def test_rank_0_prints(capsys: pytest.CaptureFixture[str]) -> None:
    with parallelize(Twice(), "data=1", optimizer=sgd, loss=mean_loss) as engine:
        engine.print("loss", 1.5, sep="=", end=";")
        engine.mesh.rank = 1
        engine.print("not here")
        assert capsys.readouterr().out == "loss=1.5;"
        engine.mesh.rank = 0
