"""The formulas, with numbers worked out by hand."""

import pytest

from echelon.planner import Echelon, PipeDream
from echelon.planner.cluster import Level, make_levels
from echelon.planner.cost import MODELS, Bytes, CostModel, StagePosition

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
