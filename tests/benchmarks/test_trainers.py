from collections.abc import Callable

import pytest
from benchmarks.step import make_work

from echelon.launching import Ranks
from echelon.models import ModelConfig

CONFIG = ModelConfig("gpt", layers=1, width=16, heads=2, vocab=32, sequence=8, tied=True)


def train(contender: str) -> list[tuple[float, float]]:
    """Runs in a rank."""
    work = make_work(contender, CONFIG)
    return [work() for _ in range(5)]


@pytest.mark.parametrize("count", [1, 2])
def test_contenders_do_the_same_work(count: int, warm_ranks: Callable[[int], Ranks]) -> None:
    """Otherwise the bench would compare different trainings: losses and norms must agree, step by step."""
    ranks = warm_ranks(count)
    echelon_results, torch_results = ranks.run(train, "echelon")[-1], ranks.run(train, "torch")[-1]

    assert echelon_results == [pytest.approx(numbers, rel=1e-4) for numbers in torch_results]
    losses = [loss for loss, _ in echelon_results]
    assert losses == sorted(losses, reverse=True)
