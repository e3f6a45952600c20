"""The contract holds for data parallelism, and it can fail."""

import os
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch

from echelon.engine import Engine
from echelon.errors import UserError
from echelon.launching import Ranks, torchrun
from echelon.launching.settings import FROM_ENVIRONMENT
from echelon.plan import Plan
from echelon.verify import Case, assert_equal, contract, verify
from tests.cases import (
    adamw,
    counted_loss,
    eleven_vectors,
    masked_vectors,
    mean_loss,
    perceptron_case,
    sgd,
    vectors,
)


@pytest.mark.slow_cases("data=3 microbatches=2", "data=4")
@pytest.mark.parametrize(
    "plan", ["data=1", "data=1 microbatches=3", "data=2", "data=3 microbatches=2", "data=4"]
)
def test_plans_are_equal_to_one_device(plan: str) -> None:
    verdict = assert_equal(perceptron_case(), plan)
    assert verdict.worst[1] < 1e-11


def test_running_ranks_can_be_used_again_and_again(warm_ranks: Callable[[int], Ranks]) -> None:
    for plan in ("data=2", "data=2 zero=1", "pipeline=auto data=2"):
        assert verify(perceptron_case(steps=3), plan, ranks=warm_ranks(2)).equal


def no_progress(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0)


def verify_under_torchrun(plan: str, case: Case) -> tuple[bool, str]:
    """What a rank of torchrun gets; a launched rank differs from one only in knowing that it was launched."""
    with patch.object(torchrun, "is_launched_rank", lambda: False):
        try:
            verdict = verify(case, plan)
        except UserError as error:
            return False, str(error)
    return verdict.equal, str(verdict)


def test_under_torchrun_every_rank_has_the_verdict(warm_ranks: Callable[[int], Ranks]) -> None:
    """Ranks above 0 have no results of each other: from 3 ranks on they failed."""
    case = perceptron_case(steps=2)
    (is_equal, words), *others = warm_ranks(3).run(verify_under_torchrun, "data=3", case)
    assert is_equal
    assert words.startswith("'data=3' is equal to one device")
    assert others == [(is_equal, words)] * 2


def test_under_torchrun_auto_takes_all_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "5")
    assert contract._ranks_to_launch(Plan.parse("pipeline=auto")) == 5


def test_under_torchrun_the_process_group_has_the_usual_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script goes on with the group: an operation of its training may take longer than one of verify."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    deadlines: list[object] = []
    monkeypatch.setattr(torchrun, "join", lambda _, deadline: deadlines.append(deadline))
    monkeypatch.setattr(torchrun, "share_results", lambda value: [value])
    monkeypatch.setattr(contract, "train_rank", lambda *_: None)
    contract._train(None, perceptron_case(), Plan.parse("data=2"), None)
    assert deadlines == [FROM_ENVIRONMENT]


def test_under_torchrun_every_rank_has_the_error(warm_ranks: Callable[[int], Ranks]) -> None:
    standstill = perceptron_case(steps=2, make_optimizer=no_progress)
    for equal, words in warm_ranks(3).run(verify_under_torchrun, "data=3", standstill):
        assert not equal
        assert "no weight has moved" in words
    for _, words in warm_ranks(3).run(verify_under_torchrun, "data=2", standstill):
        assert "needs 2, but 3 are running. Start torchrun with 2 processes in total" in words


def test_uneven_batches_weigh_by_samples() -> None:
    assert_equal(perceptron_case(eleven_vectors), "data=3 microbatches=2")


def test_counted_losses_weigh_by_tokens() -> None:
    assert_equal(perceptron_case(masked_vectors, counted_loss), "data=2 microbatches=3")


def test_other_optimizers_and_no_clipping() -> None:
    assert_equal(perceptron_case(make_optimizer=sgd, clip=None), "data=2")
    assert_equal(perceptron_case(make_optimizer=sgd, clip=0.01, steps=5), "data=2")


def other_targets_on_rank_one(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Not the same batch on every rank: rank 1 sees other targets than the reference."""
    inputs, targets = vectors(step)
    return (inputs, targets.flip(0)) if os.environ.get("RANK") == "1" else (inputs, targets)


def test_ranks_that_see_other_data_are_found() -> None:
    assert not verify(perceptron_case(other_targets_on_rank_one, steps=2), "data=2").equal


def test_a_model_with_nothing_to_train_is_refused() -> None:
    case = Case(torch.nn.Identity, vectors, mean_loss, adamw, steps=1)
    with pytest.raises(ValueError, match="nothing to train"):
        verify(case, "data=1")


def standing_still(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0)


def test_a_training_that_moves_nothing_proves_nothing() -> None:
    with pytest.raises(ValueError, match="no weight has moved"):
        verify(perceptron_case(make_optimizer=standing_still, steps=2), "data=2")


def test_a_plan_that_cannot_run_is_not_certified() -> None:
    with pytest.raises(ValueError, match="has no experts that ranks can share out"):
        verify(perceptron_case(), "data=2 expert=2")


class Captured(Exception):  # noqa: N818
    """Carries the first weight that a rank gives to `parallelize`."""


def first_weight(case: Case) -> torch.Tensor:
    def capture(model: Any, *_: Any, **__: Any) -> None:
        raise Captured(model.first.weight.detach())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contract, "parallelize", capture)
        try:
            contract.train_rank(case, Plan(data=2, precision="fp64"), None)
        except Captured as captured:
            weight: torch.Tensor = captured.args[0]
    return weight


def test_ranks_start_from_different_weights(warm_ranks: Callable[[int], Ranks]) -> None:
    """Else a plan that forgets to make them equal would not be found."""
    first, second = warm_ranks(2).run(first_weight, perceptron_case())
    assert torch.equal(first, perceptron_case().build().first.weight)
    assert not torch.equal(first, second)


def change_the_state_of_rank_one(engine: Engine) -> None:
    full_optimizer_state = engine.full_optimizer_state

    def changed() -> dict[str, dict[str, torch.Tensor]]:
        state = full_optimizer_state()
        if engine.mesh.rank == 1:
            state["first.bias"]["exp_avg"] += 1e-3
        return state

    engine.full_optimizer_state = changed  # type: ignore[method-assign]


def forget_the_start(engine: Engine) -> None:
    """Rank 1 trains from weights of its own."""
    if engine.mesh.rank == 1:
        with torch.no_grad():
            next(engine.module.parameters()).add_(1.0)


def break_evaluation(engine: Engine) -> None:
    evaluate = engine.evaluate
    engine.evaluate = lambda batch: evaluate(batch)._replace(loss=1.0)  # type: ignore[method-assign]


@pytest.mark.slow_cases("change_the_state_of_rank_one", "forget_the_start")
@pytest.mark.parametrize("bug", [change_the_state_of_rank_one, forget_the_start, break_evaluation])
def test_other_bugs_are_found_too(bug: Callable[[Engine], None]) -> None:
    assert not verify(perceptron_case(steps=2), "data=2", inject_bug=bug).equal


@pytest.mark.slow_cases("inf")
@pytest.mark.parametrize("staleness", ["1", "inf"])
def test_asynchronous_training_is_held_to_the_replay_of_its_log(staleness: str) -> None:
    verdict = assert_equal(perceptron_case(steps=8), f"data=3 sync=async staleness={staleness}")
    assert "the replay of its own log" in str(verdict)


def test_workers_in_rounds_are_compared_with_one_device() -> None:
    verdict = assert_equal(perceptron_case(steps=3), "data=2 sync=async staleness=0")
    assert verdict.against == "one device"
    assert verdict.numbers.keys() == {"loss", "grad_norm", "evaluation"}


def push_twice(engine: Engine) -> None:
    """A worker whose gradient is doubled on its way: the log does not say so."""
    push = engine._update.step

    def doubled() -> None:
        for parameter in engine.module.parameters():
            if parameter.grad is not None and engine.mesh.rank == 1:
                parameter.grad.mul_(2)
        push()

    engine._update.step = doubled  # type: ignore[method-assign]


def test_an_asynchronous_bug_is_found() -> None:
    case = perceptron_case(steps=4, make_optimizer=sgd)
    assert not verify(case, "data=2 sync=async staleness=2", inject_bug=push_twice).equal
