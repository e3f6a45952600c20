"""One level of the dynamic program on costs given as plain numbers."""

import numpy as np

from echelon.planner.cost import StagePosition
from echelon.planner.dynamic import Costs, Team, fewest_stages, least_bottleneck

WORK = np.array([0.0, 4.0, 5.0, 9.0])  # three layers of 4, 1 and 4


def stage(position: StagePosition) -> np.ndarray:
    spans = (WORK[None, :] - WORK[:, None]) / position.replicas
    return np.where(spans > 0, spans, np.inf)


def free(_: int) -> np.ndarray:
    return np.zeros(4)


def test_the_least_bottleneck_from_every_state() -> None:
    costs = Costs(stage, free)
    best = least_bottleneck(costs, Team(2, 2, 0.0), [3])
    assert best[:, 0].tolist() == [4.5, 2.5, 2.0, np.inf]
    assert least_bottleneck(costs, Team(2, 2, 0.0), [2, 3])[:, 1].tolist() == best[:, 0].tolist()
    straight = least_bottleneck(costs, Team(2, 1, 0.0), [3])
    assert straight[:, 0].tolist() == [5.0, 4.0, np.inf, np.inf]


def test_what_enters_is_charged_where_a_stage_begins() -> None:
    costs = Costs(stage, lambda replicas: np.array([99.0, 7.0, 6.0, 0.0]) / replicas)
    assert least_bottleneck(costs, Team(2, 1, 0.0), [3])[0, 0] == 6.0  # at the begin, the level above charges


def test_the_fewest_stages_within_a_limit() -> None:
    costs = Costs(stage, free)
    stages = fewest_stages(costs, Team(2, 2, 0.0), 0, 3, 4.5, np.zeros(4))
    assert stages == [(0, 3, StagePosition(2, 0, 0.0))]
    two = fewest_stages(costs, Team(2, 1, 0.0), 0, 3, 5.0, np.array([0.0, 5.0, 2.0, 0.0]))
    assert two == [(0, 2, StagePosition(1, 1, 0.0)), (2, 3, StagePosition(1, 0, 0.0))]
    assert fewest_stages(costs, Team(2, 1, 0.0), 0, 3, 5.0, np.array([0.0, 1.0, 2.0, 0.0]))[0][1] == 1
