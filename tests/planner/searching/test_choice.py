"""`auto`: what is chosen, what a person is told of it, and what is no choice."""

import pytest

from echelon.errors import UserError
from echelon.plan import Plan
from echelon.planner.cluster.cluster import Cluster, Link
from echelon.planner.cluster.measured import Figures, cpu_cluster
from echelon.planner.cluster.read import read_cluster
from echelon.planner.searching.choice import choose
from echelon.planner.searching.request import Request
from echelon.planner.searching.search import search
from echelon.planner.shape.presets import preset_shape

TINY, LARGE = preset_shape("gpt-tiny"), preset_shape("gpt-1.3b")
FIGURES = Figures(dict.fromkeys(("fp64", "fp32", "bf16", "fp16"), 50e9), 20e9, 8e9, 5e-6)


def processor(ranks: int) -> Cluster:
    return cpu_cluster(FIGURES, ranks, Link(2e9, 1e-4))


def accept(_: str) -> str | None:
    return None


def test_the_fastest_plan_is_chosen_and_said_with_its_reasons() -> None:
    cluster, request = read_cluster("h100:8"), Request.parse("auto precision=bf16")
    choice = choose(LARGE, cluster, 16, request, accept)
    best = search(LARGE, cluster, 16, request=request).best
    assert choice.plan == best[0].plan
    assert choice.others == best[1:]
    for part in (
        f'plan="{choice.plan}"',
        "8 ranks",
        "predicted: a step of",
        "next: ",
        "asked for: precision=bf16",
    ):
        assert part in choice.why


def test_what_the_model_cannot_have_is_no_choice() -> None:
    def refuse(text: str) -> str | None:
        plan = Plan.parse(text)
        return "no table" if plan.tensor > 1 else "no layers" if plan.stages > 1 else None

    choice = choose(TINY, processor(2), 8, Request.parse("auto"), refuse)
    plan = Plan.parse(choice.plan)
    assert (plan.tensor, plan.stages) == (1, 1)
    assert "not possible: tensor: no table" in choice.why
    assert "not possible: pipeline: no layers" in choice.why


def test_a_plan_that_is_refused_gives_way_to_the_next() -> None:
    first = choose(TINY, processor(2), 8, Request.parse("auto"), accept)
    second = choose(
        TINY, processor(2), 8, Request.parse("auto"), lambda text: "no" if text == first.plan else None
    )
    assert second.plan == first.others[0].plan
    assert first.plan not in [each.plan for each in second.others]


def test_a_limit_of_memory_is_kept() -> None:
    free = choose(TINY, processor(2), 8, Request.parse("auto"), accept)
    limit = 12 * 2**20
    choice = choose(TINY, processor(2), 8, Request.parse("auto memory=12MiB"), accept)
    assert choice.plan != free.plan
    found = search(TINY, processor(2).limited_to(limit), 8, request=Request("")).best
    assert all(each.prediction.peak <= limit for each in found)


def test_where_nothing_fits_it_is_said_what_would() -> None:
    with pytest.raises(UserError, match="plan 'auto' for 2 ranks, each a cpu") as caught:
        choose(TINY, processor(2), 8, Request.parse("auto memory=1MiB"), accept)
    assert "does not fit: the smallest plan needs" in caught.value.errors[0]


def test_the_processor_offloads_nothing_unless_it_is_asked_to() -> None:
    request = Request.parse("auto memory=8MiB")
    assert all("offload" not in each for each in (choose(TINY, processor(4), 8, request, accept).plan,))
    asked = choose(TINY, processor(2), 8, Request.parse("auto offload=optimizer"), accept)
    assert "offload=optimizer" in asked.plan
