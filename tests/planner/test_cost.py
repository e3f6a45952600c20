"""The formulas, with numbers worked out by hand."""

from collections.abc import Callable
from typing import Any

import pytest

from echelon.planner import Echelon, PipeDream
from echelon.planner.cost import (
    MODELS,
    Bytes,
    CostModel,
    Level,
    StagePosition,
    cluster_errors,
    make_levels,
    read_bandwidths,
    read_workers,
)

FLAT = Level(workers=4, bandwidth=10.0, inside=1, ranks=4)


def test_levels_know_what_is_inside_them() -> None:
    assert make_levels((4, 2), (1e10, 1e9)) == (Level(4, 1e10, 1, 8), Level(2, 1e9, 4, 8))


def test_pipedream() -> None:
    model = PipeDream()
    # (12 + 4 · 2 · 60 / (10 · 3)) / 3
    assert model.stage(12.0, 60.0, 3, FLAT) == pytest.approx(28 / 3)
    # The second level's exchange is shared by the 4 ranks of a machine.
    assert model.stage(12.0, 60.0, 3, Level(3, 10.0, 4, 12)) == pytest.approx(16 / 3)
    assert model.transfer(30.0, 3, FLAT) == 2.0
    assert PipeDream(free_activations=True).transfer(30.0, 3, FLAT) == 0.0
    held = Bytes(parameters=5.0, outputs=7.0, stash=100.0, received=100.0)
    assert model.memory(held, StagePosition(2, 3, 0.0), FLAT) == 2 * 12.0
    assert model.memory(held, StagePosition(4, 0, 0.0), FLAT) == 0.0


def test_echelon() -> None:
    # Compute hides the exchange: max(12 / 3, 2 · 2/3 · 60 / 10 / 4).
    assert Echelon().stage(12.0, 60.0, 3, FLAT) == 4.0
    assert Echelon().stage(3.0, 60.0, 3, FLAT) == 2.0
    assert Echelon(microbatches=16).exchange(60.0, 3, FLAT) == 0.5
    assert Echelon().transfer(30.0, 3, FLAT) == 2.0
    held = Bytes(parameters=5.0, outputs=100.0, stash=7.0, received=3.0)
    # 2 replicas with 3 ranks behind keep 1 + ceil(3 / 2) microbatches each.
    assert Echelon().memory(held, StagePosition(2, 3, 0.0), FLAT) == 20.0 + 3 * 10.0
    assert Echelon().memory(held, StagePosition(1, 1, 4.0), FLAT) == 20.0 + 6 * 10.0
    assert Echelon(copies=2.0).memory(held, StagePosition(1, 0, 0.0), FLAT) == 10.0 + 10.0


@pytest.mark.parametrize("model", [kind() for kind in MODELS.values()], ids=list(MODELS))
def test_one_replica_exchanges_nothing(model: CostModel) -> None:
    assert model.stage(12.0, 1e9, 1, FLAT) == 12.0


@pytest.mark.parametrize(
    ("reader", "text", "value"),
    [
        (read_bandwidths, "1e10,1.25e9", (1e10, 1.25e9)),
        (read_bandwidths, "10GB/s, 10Gb/s", (1e10, 1.25e9)),
        (read_workers, "8", (8,)),
        (read_workers, "4x2", (4, 2)),
    ],
)
def test_what_is_read(reader: Callable[[str], Any], text: str, value: Any) -> None:
    assert reader(text) == value


@pytest.mark.parametrize("text", ["", "1e9,", "0", "1Gb", "x"])
def test_no_rate(text: str) -> None:
    with pytest.raises(ValueError, match="must be bytes per second"):
        read_bandwidths(text)


@pytest.mark.parametrize("text", ["", "0", "4x", "-4", "4.0", "four", "２", "1000000", "9" * 5000])
def test_no_workers(text: str) -> None:
    with pytest.raises(ValueError, match="integers"):
        read_workers(text)


def test_levels_know_the_ranks_inside_a_worker_and_in_the_cluster() -> None:
    assert make_levels((4, 2), (1e10, 1e9)) == (Level(4, 1e10, 1, 8), Level(2, 1e9, 4, 8))


def test_every_error_is_listed_at_once() -> None:
    errors = cluster_errors((0, 2), (-1.0,), memory=0)
    assert [error.split(":")[0] for error in errors] == [
        "workers 0",
        "bandwidth -1.0",
        "2 levels of workers and 1 bandwidths",
        "memory 0",
    ]
    assert cluster_errors((4, 2), (1e10, 1e9), memory=16e9) == []
    assert cluster_errors((4,), (float("inf"),), memory=None) != []
