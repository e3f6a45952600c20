"""What any plan has saved, any other plan loads: the same training as on one device without a stop."""

from collections.abc import Callable
from pathlib import Path

import pytest

from echelon.launching import Ranks
from echelon.plan import Plan
from echelon.verify.reference import train_on_one_device
from tests.state.checkpoint.trainings import OPTIMIZERS, State, case_of, largest_gaps, save_each

PLANS = [
    "precision=fp64",
    "data=4 zero=3 precision=fp64",
    "tensor=2 pipeline=2 microbatches=2 precision=fp64",
    "pipeline=4 schedule=interleaved chunks=2 microbatches=4 precision=fp64",
    "data=2 tensor=2 zero=1 precision=fp64",
    "data=2 expert=2 precision=fp64",
    "context=2 precision=fp64",
    "pipeline=3-1 microbatches=3 precision=fp64",
]
TOLERANCE = 1e-9

WarmRanks = Callable[[int], Ranks]


def reference(optimizer: str) -> State:
    result = train_on_one_device(case_of(optimizer))
    weights = {f"{name} value": value for name, value in result.weights.items()}
    return weights | {
        f"{name} {part}": value for name, parts in result.optimizer.items() for part, value in parts.items()
    }


def reshard(
    warm_ranks: WarmRanks, folder: Path, optimizers: list[str], sources: list[str], targets: list[str]
) -> dict[str, float]:
    """Save under each of the sources, and go on under each of the targets."""
    references = {optimizer: reference(optimizer) for optimizer in optimizers}
    saved = []
    for number, source in enumerate(sources):
        paths = {optimizer: str(folder / f"{number}-{optimizer}") for optimizer in optimizers}
        warm_ranks(Plan.parse(source).ranks).run(save_each, source, paths)
        saved += [(source, optimizer, path) for optimizer, path in paths.items()]
    gaps: dict[str, float] = {}
    for target in targets:
        gaps |= warm_ranks(Plan.parse(target).ranks).run(largest_gaps, target, saved, references)[0]
    return gaps


def test_a_checkpoint_of_shards_loads_into_stages(warm_ranks: WarmRanks, tmp_path: Path) -> None:
    gaps = reshard(warm_ranks, tmp_path, ["adamw"], [PLANS[1]], [PLANS[2]])
    assert len(gaps) == 1
    assert max(gaps.values()) <= TOLERANCE, gaps


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_every_plan_loads_what_every_other_has_saved(
    optimizer: str, warm_ranks: WarmRanks, tmp_path: Path
) -> None:
    gaps = reshard(warm_ranks, tmp_path, [optimizer], PLANS, PLANS)
    assert len(gaps) == len(PLANS) ** 2
    print(f"{optimizer}: {len(gaps)} pairs, the largest difference {max(gaps.values()):.1e}")
    assert max(gaps.values()) <= TOLERANCE, {pair: gap for pair, gap in gaps.items() if gap > TOLERANCE}
