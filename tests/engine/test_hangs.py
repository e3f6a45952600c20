"""Ranks of an engine that do not do the same: with debug=true one error, else a report of where each is."""

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from echelon import Engine, parallelize
from echelon.collectives import MismatchError
from echelon.launching import RankHung, Ranks

Warm = Callable[[int], Ranks]


class Sleepy(nn.Linear):
    """Sleeps in the second step."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 5:
            time.sleep(600)
        return super().forward(x)


def engine_of(plan: str, last: type[nn.Linear] = nn.Linear) -> Engine:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), last(8, 4)).double()
    make = torch.optim.AdamW
    return parallelize(model, plan, optimizer=make, loss=nn.functional.mse_loss, audit="off")


def batch(step: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(step)
    return torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)


def weights(plan: str) -> dict[str, Tensor]:
    with engine_of(f"{plan} precision=fp64") as engine:
        for step in range(3):
            engine.step(engine.local(batch(step)))
        engine.evaluate(engine.local(batch(3)))
        return engine.full_state_dict()


@pytest.mark.parametrize(
    "plan",
    [
        "data=2 zero=3",
        "pipeline=2 microbatches=4",
    ],
)
def test_comparing_calls_changes_no_bit(warm_ranks: Warm, plan: str) -> None:
    plain, compared = (warm_ranks(2).run(weights, f"{plan}{more}")[0] for more in ("", " debug=true"))
    for name, weight in plain.items():
        assert torch.equal(weight, compared[name]), name


def evaluate_on_one_rank() -> str:
    engine = engine_of("data=2 precision=fp64 debug=true")
    engine.step(engine.local(batch(0)))
    try:
        if engine.mesh.rank == 1:
            engine.evaluate(engine.local(batch(1)))
        else:
            engine.step(engine.local(batch(1)))
    except MismatchError as error:
        return str(error)
    return ""


def test_a_rank_in_another_branch_is_one_error_with_debug(warm_ranks: Warm) -> None:
    first, second = warm_ranks(2).run(evaluate_on_one_rank)
    assert first == second
    assert first.startswith("rank 0 calls all_gather of 6 float64 along data (in step 2), rank 1 calls ")
    assert "rank 1 calls all_reduce (sum) of 3 float64 along data (has done step 1): all ranks" in first


def sleep_in_a_pipeline() -> None:
    engine = engine_of("pipeline=2 microbatches=4 precision=fp64", Sleepy)
    for step in range(3):
        engine.step(batch(step))


@pytest.mark.slow
def test_a_rank_that_sleeps_in_a_pipeline_is_named_with_step_and_microbatch() -> None:
    with pytest.raises(RankHung) as caught:
        Ranks(2, deadline=3.0).run(sleep_in_a_pipeline)
    assert caught.value.rank == 1
    first, second = caught.value.others
    assert first.startswith("rank 0 is in step 2, at RG0 of stage 0, microbatch 0, waits in recv pipeline")
    assert second.startswith(
        "rank 1 is in step 2, at F0 of stage 1, microbatch 0, works outside any operation"
    )
