"""One more number from the forward of an evaluation."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon.engine.measuring import Measuring, check_measure
from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.models import cross_entropy
from echelon.plan import Plan
from tests.cases import adamw, masked_vectors


def num_right(output: Tensor, targets: Tensor) -> Tensor:
    return (output.argmax(dim=-1) == targets).sum()


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 5))


def evaluate(plan: str) -> list[tuple[float, int, float | None]]:
    with echelon.parallelize(model(), plan, optimizer=adamw, loss=cross_entropy) as engine:
        batch = engine.local(masked_vectors(3))
        measured = engine.evaluate(batch, num_right)
        engine.step(batch)
        return [measured, engine.evaluate(batch)]


@pytest.mark.parametrize("plan", ["data=2 microbatches=5", "pipeline=2 microbatches=3"])
def test_the_mean_is_that_of_one_device(plan: str, warm_ranks: Callable[[int], Ranks]) -> None:
    inputs, targets = masked_vectors(3)
    counted = int((targets != -100).sum())
    for measured, plain in warm_ranks(2).run(evaluate, plan):
        loss, tokens, mean = measured
        assert tokens == counted
        assert mean == int(num_right(model()(inputs), targets)) / counted
        assert loss == pytest.approx(cross_entropy(model()(inputs), targets)[0].item() / counted, rel=1e-5)
        assert plain[2] is None


def test_a_measure_is_one_number() -> None:
    measuring = Measuring()
    with (
        measuring.using(lambda output, _: output),
        pytest.raises(UserError, match=r"one number as a tensor.*got \[2\]"),
    ):
        measuring.add(torch.zeros(2), None, 1)
    with measuring.using(lambda *_: 1), pytest.raises(UserError, match="got int"):  # type: ignore[arg-type]
        measuring.add(torch.zeros(2), None, 1)


def test_what_only_fills_up_does_not_count() -> None:
    measuring = Measuring()
    with measuring.using(lambda output, _: output.sum()):
        measuring.add(torch.ones(2), None, 1)
        measuring.add(torch.ones(5), None, 0)
    assert measuring.total == 2
    measuring.add(torch.ones(9), None, 1)
    assert measuring.total == 2, "outside of an evaluation nothing is measured"


def test_where_ranks_hold_parts_of_an_output_it_is_refused() -> None:
    check_measure(None, Plan.parse("tensor=2"))
    with pytest.raises(UserError, match="a rank holds parts of an output"):
        check_measure(num_right, Plan.parse("tensor=2"))
