"""Hybrid sharding: its mathematics by the contract, its messages by the ledger, its memory by storages."""

import dataclasses
import itertools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import echelon
from echelon.launching import Ranks
from echelon.verify import assert_equal
from tests.cases import adamw
from tests.contract_models import CASES, class_loss, token_loss, tokens, vectors
from tests.parallel.data.test_zero_training import STATE, deep, model_state, weights_around_a_failure
from tests.parallel.tensor.models import language_case
from tests.sets import padded_bytes

pytestmark = pytest.mark.usefixtures("warm_contract")

Warm = Callable[[int], Ranks]

FEW = [("gpt", 1, 4, 2, 1), ("llama", 2, 4, 2, 3), ("twice", 3, 4, 2, 2)]
MATRIX = [
    (name, level, ranks, shard, microbatches)
    for name, level, (ranks, shard), microbatches in itertools.product(
        CASES, (1, 2, 3), ((4, 2), (4, 4), (8, 2), (8, 4)), (1, 3)
    )
]


def check_equal(name: str, level: int, ranks: int, shard: int, microbatches: int) -> None:
    case = dataclasses.replace(CASES[name], steps=6, options={"smallest_unit": 0})
    assert_equal(case, f"data={ranks} zero={level} shard={shard} microbatches={microbatches}")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("name", "level", "ranks", "shard", "microbatches"), FEW)
def test_groups_are_equal_to_one_device(
    name: str, level: int, ranks: int, shard: int, microbatches: int
) -> None:
    check_equal(name, level, ranks, shard, microbatches)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "level", "ranks", "shard", "microbatches"), MATRIX)
def test_all_groups_are_equal_to_one_device(
    name: str, level: int, ranks: int, shard: int, microbatches: int
) -> None:
    check_equal(name, level, ranks, shard, microbatches)


@pytest.mark.slow_cases("data=2 context=2 zero=3 shard=2")
@pytest.mark.parametrize(
    "plan",
    [
        "data=2 context=2 zero=3 shard=2",
        *(
            pytest.param(plan, marks=pytest.mark.slow)
            for plan in (
                "context=4 zero=2 shard=2 microbatches=2",
                "data=4 tensor=2 zero=1 shard=2",
                "data=4 tensor=2 sequence=true zero=3 shard=2 microbatches=2",
                "data=4 pipeline=2 zero=1 shard=2 microbatches=3",
                "data=4 pipeline=2 zero=2 shard=2 microbatches=2 schedule=zero-bubble",
                "data=4 pipeline=2 zero=3 shard=2 microbatches=2",
                "data=2 context=2 pipeline=2 zero=3 shard=2 microbatches=2",
                "data=2 context=2 tensor=2 zero=2 shard=2",
            )
        ),
    ],
)
def test_groups_go_with_every_other_axis(plan: str) -> None:
    assert_equal(language_case("gpt", steps=4), plan)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", ["zero=1 microbatches=3", "zero=2 microbatches=8", "zero=2 microbatches=5"])
def test_replicas_of_a_stage_are_divided_into_groups(sizes: str) -> None:
    """Of five microbatches, three of four replicas have one, and make up for a round of the first."""
    assert_equal(dataclasses.replace(CASES["llama"], steps=4), f"pipeline=4-2 shard=2 {sizes}")


@pytest.mark.slow_cases("1", "2")
@pytest.mark.parametrize("level", [1, 2, 3])
def test_after_a_step_that_failed_in_both_sums_the_next_is_right(warm_ranks: Warm, level: int) -> None:
    plan = f"data=4 zero={level} shard=2"
    assert warm_ranks(4).run(weights_around_a_failure, plan, "backward") == [True] * 4


class Chooses(nn.Module):
    """Runs one of two layers of the same size."""

    def __init__(self, chosen: int) -> None:
        super().__init__()
        self.both, self.chosen = nn.ModuleList([nn.Linear(6, 5), nn.Linear(6, 5)]), chosen

    def forward(self, x: Tensor) -> Tensor:
        return self.both[self.chosen](x)  # type: ignore[no-any-return]


def step_of_choices(plan: str, chosen: list[int]) -> dict[str, Tensor] | str:
    """The weights after a step in which each rank runs the layer that it chose; or why it was refused."""
    torch.manual_seed(0)
    model = Chooses(chosen[dist.get_rank()])
    options = {"optimizer": adamw, "loss": class_loss, "smallest_unit": 0, "prefetch": 0, "audit": "off"}
    with echelon.parallelize(model, plan, **options) as engine:  # type: ignore[arg-type]
        try:
            engine.step(engine.local(vectors(0)))
        except echelon.UserError as error:
            return str(error)
        return engine.full_state_dict()


def test_groups_may_run_different_modules_at_level_3(warm_ranks: Warm) -> None:
    """They gather by themselves: it was refused without a need."""
    plans = "data=4 zero=2", "data=4 zero=3 shard=2"
    expected, weights = (warm_ranks(4).run(step_of_choices, plan, [0, 0, 1, 1]) for plan in plans)
    torch.testing.assert_close(weights, expected)


def test_if_one_group_ran_different_modules_all_ranks_refuse_the_step(warm_ranks: Warm) -> None:
    answers = warm_ranks(4).run(step_of_choices, "data=4 zero=3 shard=2", [0, 1, 1, 1])
    assert ["ranks ran different modules" in answer for answer in answers] == [True] * 4


# Messages.

Bytes = dict[tuple[str, str, str], int]


def moved(plan: str) -> Bytes:
    """What this rank sends in a step, by axis, operation and subject."""
    torch.manual_seed(0)
    engine = echelon.parallelize(deep(), plan, optimizer=adamw, loss=token_loss)
    engine.step(engine.local(tokens(0)))
    engine.ledger.totals.clear()
    engine.step(engine.local(tokens(1)))
    return {
        (str(row["axis"]), str(row["operation"]), str(row["subject"])): int(row["sent"])
        for row in engine.ledger.rows()
        if row["subject"] in ("gradients", "parameters")
    }


def part_bytes(shard: int) -> int:
    """Ψ/S: the parts of all units that a rank holds, each in blocks of 256 bytes."""
    layers = deep().layers()  # type: ignore[operator]
    return sum(-(-padded_bytes(layer) // shard // 256) * 256 for layer in layers)  # type: ignore[union-attr]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("level", "microbatches", "scatters", "gathers"), [(1, 2, 1, 1), (2, 2, 2, 1), (3, 2, 2, 4)]
)
def test_messages_are_those_of_the_formulas(
    warm_ranks: Warm, level: int, microbatches: int, scatters: int, gathers: int
) -> None:
    """Inside a group Ψ(S−1)/S for each reduce-scatter and gather; across groups 2(Ψ/S)(G−1)/G per step."""
    shard, copies = 2, 2
    part = part_bytes(shard)
    plan = f"data=4 zero={level} shard={shard} microbatches={microbatches}"
    for sent in warm_ranks(4).run(moved, plan):
        assert sent == {
            ("shard", "reduce_scatter", "gradients"): scatters * part * (shard - 1),
            ("copies", "all_reduce", "gradients"): 2 * part * (copies - 1) // copies,
            ("shard", "all_gather", "parameters"): gathers * part * (shard - 1),
        }


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 2, 3])
def test_model_state_is_that_of_one_group(level: int) -> None:
    """As of 2 ranks, on 4: 6 + 12/S, 2 + 16/S, 18/S bytes per parameter."""
    wanted = {1: 6 + 12 / 2, 2: 2 + 16 / 2, 3: 18 / 2}[level]
    plan = f"data=4 zero={level} shard=2 precision=bf16"
    for now, state in echelon.launch(model_state, 4, plan):
        assert state / STATE.num_parameters == pytest.approx(wanted, rel=0.02), now
