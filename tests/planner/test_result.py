"""A partition as a plan and as JSON."""

import json

import pytest

from echelon.plan import Plan
from echelon.planner import Partition, Stage


def stage(replicas: int, seconds: float = 1.0) -> Stage:
    return Stage(("a", "b"), replicas, seconds, 0.5, 0.25, seconds, 8.0, tuple(range(replicas)))


def partition(*replicas: int) -> Partition:
    return Partition(tuple(map(stage, replicas)), 1.0, 3.0, 4.0, "echelon", True)


@pytest.mark.parametrize(
    ("replicas", "plan"), [((4,), "data=4"), ((1, 1, 1), "pipeline=3"), ((3, 1), "pipeline=3-1")]
)
def test_its_plan_takes_as_many_ranks(replicas: tuple[int, ...], plan: str) -> None:
    result = partition(*replicas)
    assert result.plan == plan
    assert Plan.parse(plan).ranks == sum(replicas)


def test_as_json() -> None:
    value = json.loads(json.dumps(partition(3, 1).to_dict()))
    assert value["pipeline_seconds"] == 1.0
    assert value["speedup_over_data_parallel"] == 3.0
    assert value["plan"] == "pipeline=3-1"
    assert [stage["replicas"] for stage in value["stages"]] == [3, 1]
    assert value["stages"][0]["layers"] == ["a", "b"]
    assert value["stages"][0]["limit"] == "activations"
