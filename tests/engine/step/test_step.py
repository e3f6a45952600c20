"""One step after the other: what a step that failed leaves to the next, and what losses may return."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import echelon
from echelon.errors import UserError
from echelon.launching import Ranks
from tests.cases import adamw, mean_loss, vectors
from tests.engine.step.test_runner import Fragile, engine_for

Warm = Callable[[int], Ranks]


def fragile_first() -> nn.Module:
    return nn.Sequential(Fragile(), nn.Linear(6, 5))


def stepping_on_after_a_failure(call: str) -> None:
    """The first rank takes its own failure lightly; the other waits in the step that failed."""
    engine = engine_for("pipeline=2 microbatches=2", fragile_first)
    engine.module[0].fail = True
    if engine.mesh.rank == 1:
        engine.step(vectors(0))
    with pytest.raises(RuntimeError, match="failed on purpose"):
        engine.step(vectors(0))
    engine.module[0].fail = False
    getattr(engine, call)(vectors(1))


@pytest.mark.slow_cases("evaluate")
@pytest.mark.parametrize("call", ["step", "evaluate"])
def test_a_step_after_a_failed_one_is_refused(call: str) -> None:
    with pytest.raises(UserError, match=r"an earlier step failed in the middle.*; start again"):
        echelon.launch(stepping_on_after_a_failure, 2, call, deadline=20.0)


def test_with_one_stage_no_other_rank_is_in_the_failed_step_and_the_next_one_works() -> None:
    engine = echelon.parallelize(
        fragile_first(), "microbatches=2", optimizer=adamw, loss=mean_loss, audit="off"
    )
    engine.module[0].fail = True
    with pytest.raises(RuntimeError, match="failed on purpose"):
        engine.step(vectors(0))
    engine.module[0].fail = False
    assert engine.step(vectors(0)).loss > 0


class FragileModel(nn.Module):
    """Fails where `fail` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)
        self.fail = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fail:
            raise RuntimeError("failed on purpose")
        return self.layer(x)  # type: ignore[no-any-return]


def steps_around_a_failure(plan: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Training with a failed step in the middle, and training without it."""
    results = []
    for failing in (True, False):
        torch.manual_seed(0)
        model = FragileModel()
        engine = echelon.parallelize(model, plan, optimizer=adamw, loss=mean_loss, audit="first")
        engine.step(engine.local(vectors(0)))
        if failing:
            model.fail = True
            with pytest.raises(RuntimeError, match="failed on purpose"):
                engine.step(engine.local(vectors(1)))
            model.fail = False
        engine.step(engine.local(vectors(2)))
        results.append(engine.full_state_dict())
    return results[0], results[1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_after_a_forward_that_raised_the_next_step_works(warm_ranks: Warm, ranks: int) -> None:
    for with_failure, without in warm_ranks(ranks).run(steps_around_a_failure, f"data={ranks}"):
        assert all(torch.equal(value, without[name]) for name, value in with_failure.items())


def test_a_count_may_have_a_gradient() -> None:
    """Learned weights of samples are a part of the count."""

    def weighted(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        weights = output.softmax(-1).amax(-1)
        return (weights * F.cross_entropy(output, targets, reduction="none")).sum(), weights.sum()

    torch.manual_seed(0)
    with echelon.parallelize(
        nn.Linear(6, 5), "data=1", optimizer=adamw, loss=weighted, audit="off"
    ) as engine:
        losses = [engine.step((torch.ones(4, 6), torch.tensor([0, 1, 2, 3]))).loss for _ in range(2)]
    assert losses[1] < losses[0]
