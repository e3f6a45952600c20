"""Under the same plan a rank's own file in memory is all that it needs."""

from collections.abc import Callable
from pathlib import Path

import pytest

from echelon.launching import Ranks
from tests.engine.saving.test_engine_state import FEW, ONE_RANK, TWO_RANKS, Training
from tests.state.checkpoint.copies.kept import differences_from_memory

WarmRanks = Callable[[int], Ranks]

OWNERS = [each for each in TWO_RANKS if "sync=" not in each.plan]  # a job with a server is refused

FOUR_RANKS = [
    Training("tensor=2 pipeline=2 precision=bf16"),
    Training("data=2 tensor=2 zero=1 precision=bf16"),
    Training("data=4 zero=3 precision=bf16"),
    Training("data=4 zero=3 shard=2 precision=fp32"),
    Training("expert=2 data=4 precision=fp32", gate="sigmoid"),
    Training("context=2 data=2 precision=bf16"),
]


def check(found: list[dict[str, list[str]]], trainings: list[Training]) -> None:
    for of_rank in found:
        assert len(of_rank) == len(trainings)
        assert not any(of_rank.values()), {name: keys for name, keys in of_rank.items() if keys}


def test_ranks_of_two_hosts_go_on_in_every_bit(warm_ranks: WarmRanks, tmp_path: Path) -> None:
    check(warm_ranks(2).run(differences_from_memory, FEW[:1], str(tmp_path), 2), FEW[:1])


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "trainings"), [(1, ONE_RANK), (2, OWNERS), (4, FOUR_RANKS)])
def test_every_plan_goes_on_in_every_bit(
    warm_ranks: WarmRanks, tmp_path: Path, ranks: int, trainings: list[Training]
) -> None:
    check(warm_ranks(ranks).run(differences_from_memory, trainings, str(tmp_path), ranks), trainings)
