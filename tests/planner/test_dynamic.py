"""One level of the dynamic program on costs given as plain numbers."""

import random
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.planner import Echelon, Node, PipeDream, Profile, chain, partition, solver
from echelon.planner.cost import StagePosition
from echelon.planner.dynamic import Costs, Team, _smear, _window_min, fewest_stages, least_bottleneck
from tests.planner.brute_force import profiles

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


def answers(profile: Profile, workers: tuple[int, ...], bandwidth: float, free: bool) -> list[object]:
    rates = (bandwidth,) * len(workers)
    return [
        partition(profile, workers, rates, cost_model=model(free)).to_dict() for model in (Echelon, PipeDream)
    ]


@settings(max_examples=60, deadline=None)
@given(
    profiles(),
    st.sampled_from([(1,), (2,), (3,), (5,), (8,), (2, 3), (3, 4)]),
    st.sampled_from([1.0, 10.0, 1e3]),
    st.booleans(),
)
def test_the_same_split_as_the_dynamic_program(
    profile: Profile, workers: tuple[int, ...], bandwidth: float, free: bool
) -> None:
    expected = answers(profile, workers, bandwidth, free)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solver, "MANY_WORKERS", 1)
        assert answers(profile, workers, bandwidth, free) == expected


def test_two_thousand_workers_take_seconds() -> None:
    # 2,048 workers took more than four minutes, without a word.
    dice = random.Random(1)
    nodes = [
        Node(str(number), dice.uniform(1e-3, 3e-3), 2e-3, 1e6, dice.randint(1, 90) * 1e6, 1e7)
        for number in range(24)
    ]
    began = time.process_time()
    split = partition(chain(nodes), 2048, 1e10)
    assert sum(stage.replicas for stage in split.stages) == 2048
    assert time.process_time() - began < 10


def test_bits_and_windows() -> None:
    assert [_smear(0b101, count) for count in (1, 2, 3)] == [0b101, 0b1111, 0b11111]
    assert _smear(1, 7) == 0b1111111
    values = np.array([3.0, 1.0, 4.0, 1.5, 5.0])
    assert _window_min(values, 1, 1).tolist() == [np.inf, 3.0, 1.0, 4.0, 1.5]
    assert _window_min(values, 1, 3).tolist() == [np.inf, 3.0, 1.0, 1.0, 1.0]
    assert _window_min(values, 0, 4).tolist() == [3.0, 1.0, 1.0, 1.0, 1.0]
