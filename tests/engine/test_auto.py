"""pipeline=auto: how many ranks there are to split, what is asked for, and that all ranks agree."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from echelon.engine import auto
from echelon.engine.auto import Resolved, ranks_here, resolve
from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.plan import Plan
from tests.cases import vectors

Warm = Callable[[int], Ranks]

AUTO = Plan.parse("pipeline=auto microbatches=2")


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))


def test_a_plan_that_says_its_stages_stays_as_it_is() -> None:
    plan = Plan.parse("pipeline=3-1 microbatches=2")
    assert resolve(model(), plan, None, [1]) == Resolved(plan, [1])


def test_measuring_takes_a_batch() -> None:
    with pytest.raises(
        UserError, match=r"pipeline=auto: .*sample_batch=\(inputs, targets\), or say the stages"
    ):
        resolve(model(), AUTO, None, None)


def test_on_one_rank_there_is_one_stage() -> None:
    plan = Plan.parse("microbatches=2")
    assert resolve(model(), AUTO, vectors(0), None) == Resolved(plan, None)


@pytest.mark.parametrize(
    ("replicas", "layers", "plan", "boundaries"),
    [
        ([1, 1], [2, 3], "pipeline=2 microbatches=2", [2]),
        ([3, 1, 1], [2, 3, 4], "pipeline=3-1-1 microbatches=2", [2, 5]),
        ([4], [9], "data=4 microbatches=2", None),
    ],
)
def test_a_partition_becomes_a_plan(
    replicas: list[int], layers: list[int], plan: str, boundaries: Sequence[int] | None
) -> None:
    assert auto._resolved(AUTO, replicas, layers) == Resolved(Plan.parse(plan), boundaries)


def test_one_stage_of_replicas_multiplies_those_of_the_plan() -> None:
    plan = Plan.parse("pipeline=auto data=2")
    assert auto._resolved(plan, [3], [9]).plan == Plan.parse("data=6")


def test_the_pipeline_takes_the_ranks_that_other_axes_leave() -> None:
    plan = Plan.parse("pipeline=auto data=2 tensor=2 context=2")
    assert auto._workers(plan, 16) == 2
    with pytest.raises(UserError, match=r"data × tensor × context = 8 leaves.*; start 8 ranks"):
        auto._workers(plan, 12)
    with pytest.raises(UserError, match="start 8 ranks"):
        auto._workers(plan, 4)


@pytest.mark.parametrize(
    ("plan", "cores", "expected"),
    [
        ("data=2 tensor=2", 64, 4),
        ("pipeline=auto", 6, 6),
        ("pipeline=auto data=2 tensor=2", 7, 4),
        ("pipeline=auto data=4", 2, 4),
    ],
)
def test_as_many_ranks_as_devices_that_the_other_axes_divide(
    monkeypatch: pytest.MonkeyPatch, plan: str, cores: int, expected: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert ranks_here(Plan.parse(plan)) == expected


def test_versions_and_gathered_weights_have_no_replicas_of_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    class Split:
        replicas, layer_counts = (1, 1), (1, 2)

    def partition(*_: Any, straight: bool) -> type[Split]:
        asked.append(straight)
        return Split

    monkeypatch.setattr(auto, "partition", partition)
    monkeypatch.setattr(auto, "profile", lambda *_: None)
    for options in ("", " schedule=pipedream", " zero=3 data=2"):
        plan = Plan.parse(f"pipeline=auto microbatches=2{options}")
        auto._choose(model(), plan, vectors(0), 2, 1e9, torch.device("cpu"))
    assert asked == [False, True, True]


def test_layers_are_measured_on_one_microbatch_of_one_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def profile(_: nn.Module, batch: Any) -> None:
        sizes.append(len(batch[0]))
        raise StopIteration

    monkeypatch.setattr(auto, "profile", profile)
    plan = Plan.parse("pipeline=auto microbatches=3 data=2")
    with pytest.raises(StopIteration):
        auto._choose(model(), plan, vectors(0), 2, 1e9, torch.device("cpu"))
    assert sizes == [2], "of 12 samples"


def resolved_here(replicas: list[int], layers: list[int]) -> tuple[str, list[int] | None]:
    """Rank 0 measures and chooses these; the others would choose something else."""
    choose = auto._choose

    def choice(*_: Any) -> dict[str, Any]:
        assert torch.distributed.get_rank() == 0, "ranks measure differently, so that one measures for all"
        return {"replicas": replicas, "layers": layers}

    auto._choose = choice
    try:
        plan, boundaries = resolve(model(), AUTO, vectors(0), None)
    finally:
        auto._choose = choose
    return str(plan), None if boundaries is None else list(boundaries)


@pytest.mark.parametrize(
    ("replicas", "layers", "expected"),
    [([1, 1], [1, 2], ("pipeline=2 microbatches=2", [1])), ([2], [3], ("data=2 microbatches=2", None))],
)
def test_all_ranks_have_what_the_first_one_chose(
    warm_ranks: Warm, replicas: list[int], layers: list[int], expected: tuple[str, list[int] | None]
) -> None:
    plan, boundaries = expected
    assert warm_ranks(2).run(resolved_here, replicas, layers) == [(str(Plan.parse(plan)), boundaries)] * 2


def measured_here() -> int:
    return resolve(model(), AUTO, vectors(0), None).plan.ranks


def test_layers_are_measured_and_split_over_all_ranks(warm_ranks: Warm) -> None:
    assert warm_ranks(2).run(measured_here) == [2, 2]


class Layerless(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def refusal() -> str:
    with pytest.raises(UserError) as caught:
        resolve(Layerless(), AUTO, vectors(0), None)
    return str(caught.value)


def test_what_the_first_rank_finds_wrong_is_an_error_on_every_rank(warm_ranks: Warm) -> None:
    first, second = warm_ranks(2).run(refusal)
    assert first == second
    assert "Layerless does not say where it can be cut" in first
