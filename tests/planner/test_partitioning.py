"""The dynamic program: never above any split there is, nor above PipeDream's own answers."""

import csv
import json
import math
import os
import subprocess
import sys
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.errors import UserError
from echelon.plan import Plan
from echelon.planner import (
    CostModel,
    Echelon,
    Node,
    Partition,
    PipeDream,
    Profile,
    Stage,
    chain,
    make_profile,
    partition,
    partitioning,
    read_profile,
)
from echelon.planner.cost import StagePosition, make_levels
from echelon.planner.graph import find_states
from echelon.planner.partitioning import assess
from echelon.planner.solver import Piece, Problem
from tests.planner import brute_force
from tests.planner.shared_data import PIPEDREAM, needs_pipedream


def layer(name: str, seconds: float, output: float = 0.0, parameters: float = 0.0) -> Node:
    return Node(name, seconds / 3, seconds * 2 / 3, output, parameters, stash_bytes=output)


# --- against every split -----------------------------------------------------------------------------


def model_of(case: brute_force.Case) -> CostModel:
    return (
        PipeDream(case.free) if case.model == "pipedream" else Echelon(case.free, case.microbatches or None)
    )


def assert_best(case: brute_force.Case, workers: list[int], bandwidths: list[float]) -> None:
    memory = None if math.isinf(case.memory) else case.memory
    best = brute_force.fastest(case, workers, bandwidths)
    if math.isinf(best):
        with pytest.raises(UserError, match="the leanest split over"):
            partition(case.profile, workers, bandwidths, cost_model=model_of(case), memory=memory)
        return
    split = partition(case.profile, workers, bandwidths, cost_model=model_of(case), memory=memory)
    assert split.pipeline_seconds == pytest.approx(best, rel=1e-9)
    assert split.exact
    assert sorted(number for stage in split.stages for number in stage.workers) == list(
        range(math.prod(workers))
    )
    assert sorted(name for stage in split.stages for name in stage.layers) == sorted(
        node.name for node in case.profile.nodes
    )


@st.composite
def cases(draw: st.DrawFn, most: int) -> brute_force.Case:
    return brute_force.Case(
        draw(brute_force.profiles(most)),
        draw(st.sampled_from(["echelon", "pipedream"])),
        draw(st.sampled_from([0, 8])),
        draw(st.booleans()),
        draw(st.sampled_from([math.inf, math.inf, 40.0, 80.0, 160.0])),
    )


@settings(max_examples=120, deadline=None)
@given(cases(most=5), st.integers(1, 4), st.sampled_from([0.5, 2.0, 20.0]))
def test_flat_is_the_best_of_all_splits(case: brute_force.Case, workers: int, bandwidth: float) -> None:
    assert_best(case, [workers], [bandwidth])


@settings(max_examples=60, deadline=None)
@given(cases(most=4), st.sampled_from([[1, 2], [2, 1], [2, 2], [3, 2], [2, 3]]), st.sampled_from([0.5, 5.0]))
def test_two_levels_are_the_best_of_all_splits(
    case: brute_force.Case, workers: list[int], bandwidth: float
) -> None:
    assert_best(case, workers, [20.0, bandwidth])


@settings(max_examples=60, deadline=None)
@given(brute_force.profiles(6), st.sampled_from([[3], [4], [2, 2]]), st.booleans(), st.booleans())
def test_never_worse_than_data_parallelism_or_a_straight_pipeline(
    profile: Profile, workers: list[int], use_pipedream: bool, free: bool
) -> None:
    model = PipeDream(free) if use_pipedream else Echelon(free)
    bandwidths = [4.0] * len(workers)
    split = partition(profile, workers, bandwidths, cost_model=model)
    assert split.pipeline_seconds <= split.data_parallel_seconds * (1 + 1e-9)
    try:
        straight = partition(profile, workers, bandwidths, cost_model=model, straight=True)
    except UserError as error:
        assert "a straight pipeline of" in str(error)
        return
    assert set(straight.replicas) == {1}
    assert split.pipeline_seconds <= straight.pipeline_seconds * (1 + 1e-9)


# --- against PipeDream's answers ---------------------------------------------------------------------


def expected_rows() -> list[Any]:
    if not PIPEDREAM.is_dir():
        return []
    with (PIPEDREAM / "expected.csv").open(encoding="utf-8") as file:
        return [pytest.param(row, id=f"{row['model']} {row['args']}") for row in csv.DictReader(file)]


def numbers_after(flag: str, words: list[str]) -> list[float]:
    split = []
    for word in words[words.index(flag) + 1 :]:
        if word.startswith("-"):
            break
        split.append(float(word))
    return split


@needs_pipedream
@pytest.mark.parametrize("row", expected_rows())
def test_not_above_the_answer_of_pipedreams_optimizer(row: dict[str, str]) -> None:
    words = row["args"].split()
    begin = time.process_time()
    split = partition(
        read_profile(PIPEDREAM / f"{row['model']}.graph.txt"),
        [int(count) for count in numbers_after("-n", words)],
        numbers_after("-b", words),
        cost_model=PipeDream(free_activations="--activation_compression_ratio" not in words),
        memory=numbers_after("-s", words)[0] if "--use_memory_constraint" in words else None,
        straight="--straight_pipeline" in words,
    )
    assert time.process_time() - begin < 2
    assert split.pipeline_seconds <= float(row["pipeline_time_s"]) * (1 + 1e-9)
    assert split.single_device_seconds == pytest.approx(float(row["single_machine_time_s"]), rel=1e-9)
    data_parallel = float(row["speedup_vs_data_parallel"]) * float(row["pipeline_time_s"])
    assert split.data_parallel_seconds == pytest.approx(data_parallel, rel=1e-9)
    if "13-2-1" in row["replication"]:  # the one split of the paper's figure that has no tie
        assert split.plan == "pipeline=13-2-1"


@needs_pipedream
@pytest.mark.parametrize("name", ["vgg16", "gnmt", "resnet18"])
@pytest.mark.parametrize("workers", [[4], [16], [4, 4]])
def test_echelons_model_on_measured_profiles(name: str, workers: list[int]) -> None:
    profile = read_profile(PIPEDREAM / f"{name}.graph.txt")
    bandwidths = [1e9] if len(workers) == 1 else [1e10, 1.25e9]
    split = partition(profile, workers, bandwidths)
    straight = partition(profile, workers, bandwidths, straight=True)
    assert split.pipeline_seconds <= min(split.data_parallel_seconds, straight.pipeline_seconds) * (1 + 1e-9)


# --- by hand -----------------------------------------------------------------------------------------


def test_a_stage_with_three_replicas() -> None:
    profile = chain([layer("a", 3.0, parameters=0.0), layer("b", 1.0, parameters=400.0)])
    split = partition(profile, 4, 1.0, cost_model=Echelon(microbatches=4))
    # As data parallelism: max(4 / 4, 2 · 3/4 · 400 / 4) = 150. As 3-1: max(3 / 3, 1) = 1.
    assert (split.plan, split.replicas, split.layer_counts) == ("pipeline=3-1", (3, 1), (1, 1))
    assert (split.pipeline_seconds, split.data_parallel_seconds) == (1.0, 150.0)
    assert split.speedup_over_data_parallel == 150.0
    assert [stage.workers for stage in split.stages] == [(0, 1, 2), (3,)]
    assert [stage.limit for stage in split.stages] == ["compute", "compute"]


def test_what_limits_a_stage() -> None:
    profile = chain([layer("a", 1.0, output=100.0), layer("b", 1.0, parameters=1e6)])
    straight = partition(profile, 2, 50.0)
    assert straight.plan == "pipeline=2"
    assert [stage.limit for stage in straight.stages] == ["activations", "activations"]
    assert straight.pipeline_seconds == 2 * 100 / 50
    assert partition(profile, 2, 50.0, cost_model=Echelon(free_activations=True)).pipeline_seconds == 1.0
    alike = chain([layer("a", 1.0, parameters=100.0)])
    assert partition(alike, 2, 1.0).stages[0].limit == "gradients"


def test_one_stage_is_data_parallelism() -> None:
    split = partition(chain([layer("a", 1.0), layer("b", 3.0)]), 4, 1e9)
    assert (split.plan, split.layer_counts) == ("data=4", (2,))
    assert split.speedup_over_data_parallel == 1.0


def test_machines_keep_their_workers_together() -> None:
    # Inside a machine links are fast; between machines nothing may be exchanged, so stages differ by machine.
    profile = chain([layer("a", 3.0, 1.0, 8.0), layer("b", 1.0, 1.0, 1e9), layer("c", 4.0, 1.0, 1e9)])
    split = partition(profile, [4, 2], [1e6, 1.0], cost_model=PipeDream())
    assert split.plan == "pipeline=3-1-4" or split.replicas[-1] == 4
    assert [stage.workers for stage in split.stages][-1] == (4, 5, 6, 7)
    assert all(len({number // 4 for number in stage.workers}) == 1 for stage in split.stages)


def test_replicas_of_a_machine_are_workers_of_each() -> None:
    profile = chain([layer("a", 30.0), layer("b", 10.0, parameters=1e6)])
    split = partition(profile, [4, 2], [10.0, 1e12], cost_model=PipeDream(free_activations=True))
    assert split.plan == "pipeline=6-2"
    assert [stage.workers for stage in split.stages] == [(0, 1, 2, 4, 5, 6), (3, 7)]


def test_memory_changes_the_split() -> None:
    profile = chain([layer(str(place), 1.0, output=10.0, parameters=100.0) for place in range(4)])
    free = partition(profile, 4, 1e9)
    assert free.plan == "data=4"
    assert free.stages[0].memory_bytes == 4 * 400 + 40
    tight = partition(profile, 4, 1e9, memory=500.0)
    assert tight.plan == "pipeline=4"
    # d − i microbatches in flight on stage i; the first receives nothing.
    assert [stage.memory_bytes for stage in tight.stages] == [400 + 4 * 10, 400 + 60, 400 + 40, 400 + 20]


def test_the_smallest_need_is_named_and_is_enough() -> None:
    profile = chain([layer(str(place), 1.0, output=10.0, parameters=100.0) for place in range(4)])
    for workers in (4, [2, 2]):
        bandwidth = [1e9] if workers == 4 else [1e9, 1e9]
        with pytest.raises(UserError, match=r"the leanest split over 4 workers needs 460 bytes"):
            partition(profile, workers, bandwidth, memory=459)
        assert partition(profile, workers, bandwidth, memory=460).plan == "pipeline=4"


def test_the_fewest_stages_among_the_fastest() -> None:
    profile = chain([layer("a", 4.0, parameters=1e9), *(layer(str(place), 0.25) for place in range(8))])
    assert partition(profile, 3, 1.0).replicas in ((1, 2), (2, 1))
    assert len(partition(profile, 3, 1.0, straight=True).stages) == 3


def test_the_least_traffic_among_the_fewest_stages() -> None:
    # Three cuts leave 2 seconds on each side; the middle one passes the least.
    profile = chain([layer("a", 2.0, 9.0), layer("b", 0.0, 3.0), layer("c", 0.0, 5.0), layer("d", 2.0)])
    assert [s.layers for s in partition(profile, 2, 1e9, straight=True).stages] == [("a", "b"), ("c", "d")]


def test_both_ends_of_a_link_carry_what_passes() -> None:
    profile = chain([layer("a", 1.0, output=30.0, parameters=1e9), layer("b", 1.0, parameters=1.0)])
    ours = partition(profile, 4, 10.0)
    pipedream = partition(profile, 4, 10.0, cost_model=PipeDream())
    # One worker must send 30 bytes and take their gradients: 6 s, though three would take 2 s to receive.
    assert (ours.plan, ours.pipeline_seconds) == ("pipeline=1-3", 6.0)
    assert (pipedream.plan, pipedream.pipeline_seconds) == ("pipeline=1-3", 2.0)


def test_memory_counts_the_ranks_behind_on_other_machines() -> None:
    profile = chain([layer(str(place), 1.0, output=10.0) for place in range(4)])
    flat = partition(profile, 4, 1e9, straight=True)
    levels = partition(profile, [2, 2], [1e9, 1e9], straight=True)
    needs = [40.0, 60.0, 40.0, 20.0]
    assert [stage.memory_bytes for stage in flat.stages] == needs
    assert [stage.memory_bytes for stage in levels.stages] == needs


def test_free_layers_go_where_they_are_used() -> None:
    nodes = [layer("state", 0.0), layer("item", 0.0), *(layer(name, 1.0, 1.0) for name in "abcd")]
    edges = [("a", "b"), ("b", "c"), ("c", "d"), ("state", "item"), ("item", "c"), ("state", "d")]
    split = partition(make_profile(nodes, edges), 4, 1e9, straight=True)
    assert [stage.layers for stage in split.stages] == [("a",), ("b",), ("state", "item", "c"), ("d",)]
    unused = partition(make_profile([*nodes, layer("unused", 0.0)], edges), 4, 1e9, straight=True)
    assert unused.stages[-1].layers == ("d", "unused")


def test_a_graph_too_wide_for_all_its_splits_is_still_split(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [str(place) for place in range(20)]
    wide = make_profile(
        [layer("in", 1.0), *(layer(name, 1.0) for name in names), layer("out", 1.0)],
        [("in", name) for name in names] + [(name, "out") for name in names],
    )
    split = partition(wide, 2, 1e9, cost_model=PipeDream(), straight=True)
    assert not split.exact
    assert split.pipeline_seconds == pytest.approx(11.0)
    monkeypatch.setattr(partitioning, "MOST_STATES", 4)
    chained = chain([layer(name, 1.0) for name in names])
    assert partition(chained, 2, 1e9).exact


def test_every_error_of_the_cluster_at_once() -> None:
    profile = chain([layer("a", 1.0)])
    with pytest.raises(UserError) as caught:
        partition(profile, [0, 2], [-1.0], memory=0)
    assert len(caught.value.errors) == 4
    with pytest.raises(UserError, match="at least 4 microbatches"):
        partition(profile, 4, 1e9, cost_model=Echelon(microbatches=2))
    with pytest.raises(UserError, match="4 workers needs 4 layers, but there is only 1 layer"):
        partition(profile, 4, 1e9, straight=True)


def determinism_of(seed: str) -> str:
    """The answer of another process, whose sets and dicts of strings are ordered by another seed."""
    script = (
        "import json\n"
        "from echelon.planner import Node, make_profile, partition\n"
        "nodes = [Node(n, 1.0, 1.0, 4.0, 8.0, 4.0) for n in 'abcdefgh']\n"
        "edges = [('a', n) for n in 'bcdefg'] + [(n, 'h') for n in 'bcdefg']\n"
        "found = [partition(make_profile(nodes, edges), w, b).to_dict()\n"
        "         for w, b in ((4, 5.0), ((2, 2), (9.0, 3.0)), ((3, 2), (9.0, 3.0)))]\n"
        "print(json.dumps(found))\n"
    )
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    return subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.slow
def test_the_same_answer_whatever_the_hash_seed() -> None:
    answers = {determinism_of(seed) for seed in ("0", "1", "77")}
    assert len(answers) == 1
    assert len(json.loads(answers.pop())) == 3


@pytest.mark.parametrize(("workers", "memory"), [(120, None), (12, 1e12)])
def test_progress_rises_to_its_end(workers: int, memory: float | None) -> None:
    done: list[float] = []
    nodes = [Node(str(number), 1.0 + number, 1.0, 1.0, 1.0, 1.0) for number in range(4)]
    partition(chain(nodes), workers, 1e3, memory=memory, progress=done.append)
    assert done == sorted(done)
    assert 0 <= done[0] <= done[-1] <= 1


PROFILE = chain(
    [
        Node("a", 1.0, 3.0, output_bytes=10.0, parameter_bytes=100.0, stash_bytes=7.0),
        Node("b", 1.0, 1.0, output_bytes=20.0, parameter_bytes=200.0, stash_bytes=5.0),
        Node("c", 2.0, 4.0, output_bytes=30.0, parameter_bytes=300.0, stash_bytes=3.0),
    ]
)


def problem(workers: tuple[int, ...], bandwidths: tuple[float, ...], model: CostModel) -> Problem:
    return Problem(find_states(PROFILE, 100), make_levels(workers, bandwidths), model)


def test_two_stages_of_the_echelon_model() -> None:
    pieces = (
        Piece(0, 1, StagePosition(2, 1, 0.0), ()),
        Piece(1, 3, StagePosition(1, 0, 0.0), ()),
    )
    first, second = assess(problem((3,), (10.0,), Echelon()), PROFILE, pieces)
    assert (first.layers, first.replicas, first.workers) == (("a",), 2, (0, 1))
    assert (second.layers, second.replicas, second.workers) == (("b", "c"), 1, (2,))
    assert (first.compute_seconds, second.compute_seconds) == (4.0 / 2, 8.0)
    # A ring of 2 moves 2 · 1/2 · 100 bytes at 10 per second, once per update of 3 microbatches.
    assert first.gradient_seconds == 2 * (1 / 2) * 100 / 10 / 3
    assert second.gradient_seconds == 0.0
    # 10 bytes there and 10 back: by each of two senders every other one, by the receiver all.
    assert (first.activation_seconds, second.activation_seconds) == (2 * 10 / 10 / 2, 2 * 10 / 10)
    assert (first.limit, second.limit) == ("gradients", "compute")
    assert (first.seconds, second.seconds) == (first.gradient_seconds, 8.0)
    # Four copies of the weights; one microbatch of its own and ⌈1 / 2⌉ for the rank behind.
    assert first.memory_bytes == 4 * 100 + 2 * 7
    assert second.memory_bytes == 4 * 500 + 1 * (5 + 3 + 10)


def test_pipedream_charges_the_receiver_alone() -> None:
    pieces = (
        Piece(0, 1, StagePosition(1, 1, 0.0), ()),
        Piece(1, 3, StagePosition(1, 0, 0.0), ()),
    )
    first, second = assess(problem((2,), (1.0,), PipeDream()), PROFILE, pieces)
    assert (first.activation_seconds, second.activation_seconds) == (0.0, 20.0)
    assert (first.seconds, second.seconds, second.limit) == (4.0, 20.0, "activations")


def test_levels_become_flat_stages_with_their_workers() -> None:
    """Two machines of two workers: the first machine splits a | b, the second replicates c."""
    machine = StagePosition(1, 1, 0.0), StagePosition(1, 0, 0.0)
    pieces = (
        Piece(0, 2, machine[0], (Piece(0, 1, machine[0], ()), Piece(1, 2, machine[1], ()))),
        Piece(2, 3, machine[1], (Piece(2, 3, StagePosition(2, 0, 0.0), ()),)),
    )
    stages = assess(problem((2, 2), (1e9, 1e9), Echelon()), PROFILE, pieces)
    assert [stage.layers for stage in stages] == [("a",), ("b",), ("c",)]
    assert [stage.workers for stage in stages] == [(0,), (1,), (2, 3)]
    assert [stage.compute_seconds for stage in stages] == [4.0, 2.0, 3.0]


def stage(replicas: int, seconds: float = 1.0) -> Stage:
    return Stage(("a", "b"), replicas, seconds, 0.5, 0.25, seconds, 8.0, tuple(range(replicas)))


def split_of(*replicas: int) -> Partition:
    return Partition(tuple(map(stage, replicas)), 1.0, 3.0, 4.0, "echelon", True)


@pytest.mark.parametrize(
    ("replicas", "plan"), [((4,), "data=4"), ((1, 1, 1), "pipeline=3"), ((3, 1), "pipeline=3-1")]
)
def test_its_plan_takes_as_many_ranks(replicas: tuple[int, ...], plan: str) -> None:
    result = split_of(*replicas)
    assert result.plan == plan
    assert Plan.parse(plan).ranks == sum(replicas)


def test_as_json() -> None:
    value = json.loads(json.dumps(split_of(3, 1).to_dict()))
    assert value["pipeline_seconds"] == 1.0
    assert value["speedup_over_data_parallel"] == 3.0
    assert value["plan"] == "pipeline=3-1"
    assert [stage["replicas"] for stage in value["stages"]] == [3, 1]
    assert value["stages"][0]["layers"] == ["a", "b"]
    assert value["stages"][0]["limit"] == "activations"
