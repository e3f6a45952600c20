"""The contract holds for data parallelism, and it can fail."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from echelon.engine import Engine
from echelon.launching import Ranks
from echelon.plan import Plan
from echelon.verify import Case, Verdict, assert_equal, verify
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


@pytest.mark.parametrize(
    "plan", ["data=1", "data=1 microbatches=3", "data=2", "data=3 microbatches=2", "data=4"]
)
def test_plans_are_equal_to_one_device(plan: str) -> None:
    verdict = assert_equal(perceptron_case(), plan)
    assert verdict.worst[1] < 1e-11


def test_ranks_that_are_there_are_used_again_and_again(warm_ranks: Callable[[int], Ranks]) -> None:
    for plan in ("data=2", "data=2 zero=1", "pipeline=auto data=2"):
        assert verify(perceptron_case(steps=3), plan, ranks=warm_ranks(2)).equal


def test_uneven_batches_weigh_by_samples() -> None:
    assert_equal(perceptron_case(eleven_vectors), "data=3 microbatches=2")


def test_counted_losses_weigh_by_tokens() -> None:
    assert_equal(perceptron_case(masked_vectors, counted_loss), "data=2 microbatches=3")


def test_other_optimizers_and_no_clipping() -> None:
    assert_equal(perceptron_case(make_optimizer=sgd, clip=None), "data=2")
    assert_equal(perceptron_case(make_optimizer=sgd, clip=0.01, steps=5), "data=2")


@pytest.mark.parametrize("plant", ["divide-twice", "skip-bucket"])
@pytest.mark.parametrize("plan", ["data=2", "data=4", "data=2 zero=1", "data=2 zero=3"])
def test_a_planted_bug_is_found_and_its_parameter_named(plant: str, plan: str) -> None:
    verdict = verify(perceptron_case(steps=3), plan, plant=plant)
    assert not verdict.equal
    names = {name for name, _ in perceptron_case().build().named_parameters(remove_duplicate=False)}
    assert verdict.worst[0].split()[0] in names
    assert verdict.worst[0] in str(verdict)
    assert "DIFFERS" in str(verdict)


def drops_a_sample(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Not the same batch on every rank: rank 1 sees other targets than the reference."""
    inputs, targets = vectors(step)
    import os

    return (inputs, targets.flip(0)) if os.environ.get("RANK") == "1" else (inputs, targets)


def test_ranks_that_see_other_data_are_found() -> None:
    assert not verify(perceptron_case(drops_a_sample, steps=2), "data=2").equal


def verdict_of(tensors: dict[str, float], numbers: dict[str, float] | None = None) -> Verdict:
    return Verdict(Plan(data=2), 20, tensors, numbers or {"loss": 0.0})


def test_not_a_number_is_never_equal() -> None:
    assert not verdict_of({"a": math.nan, "b": 1e-3}).equal
    assert verdict_of({"a": math.nan, "b": 1e-3}).worst[0] == "a"
    assert not verdict_of({"a": 0.0}, {"loss": math.nan}).equal


def test_a_wrong_loss_alone_is_named() -> None:
    assert verdict_of({"a": 1e-12}, {"loss": 0.5, "grad_norm": 0.0}).worst == ("loss", 0.5)
    assert verdict_of({"a": 1e-12}, {"loss": 1e-12}).equal


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
    with pytest.raises(ValueError, match="cannot run yet"):
        verify(perceptron_case(), "data=2 precision=fp16")


def test_a_bug_between_replicas_needs_replicas() -> None:
    with pytest.raises(ValueError, match="set data=2 or more"):
        verify(perceptron_case(), "data=1", plant="skip-bucket")
    with pytest.raises(ValueError, match="those of sync=all-reduce"):
        verify(perceptron_case(), "data=2 sync=parameter-server", plant="divide-twice")


class WithLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, num_layers=2, dropout=0.5)


def test_dropout_inside_a_module_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dropout inside lstm: only the masks .* set it to 0"):
        Case(WithLSTM, vectors, mean_loss, adamw).build()


def spoil_the_state_of_rank_one(engine: Engine) -> None:
    whole = engine.full_optimizer_state

    def spoilt() -> dict[str, dict[str, torch.Tensor]]:
        state = whole()
        if engine.mesh.rank == 1:
            state["first.bias"]["exp_avg"] += 1e-3
        return state

    engine.full_optimizer_state = spoilt  # type: ignore[method-assign]


def forget_the_start(engine: Engine) -> None:
    """Rank 1 trains from weights of its own."""
    if engine.mesh.rank == 1:
        with torch.no_grad():
            next(engine.module.parameters()).add_(1.0)


def break_evaluation(engine: Engine) -> None:
    evaluate = engine.evaluate
    engine.evaluate = lambda batch: evaluate(batch)._replace(loss=1.0)  # type: ignore[method-assign]


@pytest.mark.parametrize("bug", [spoil_the_state_of_rank_one, forget_the_start, break_evaluation])
def test_other_bugs_are_found_too(bug: Callable[[Engine], None]) -> None:
    assert not verify(perceptron_case(steps=2), "data=2", plant=bug).equal


@pytest.mark.parametrize("staleness", ["1", "inf"])
def test_asynchronous_training_is_held_to_the_replay_of_its_log(staleness: str) -> None:
    verdict = assert_equal(perceptron_case(steps=8), f"data=3 sync=async staleness={staleness}")
    assert "the replay of its own log" in str(verdict)


def push_twice(engine: Engine) -> None:
    """A worker whose gradient is doubled on its way: the log does not say so."""
    finish = engine._update.finish_step

    def doubled(tally: torch.Tensor) -> Any:
        for parameter in engine.module.parameters():
            if parameter.grad is not None and engine.mesh.rank == 1:
                parameter.grad.mul_(2)
        return finish(tally)

    engine._update.finish_step = doubled  # type: ignore[method-assign]


def test_an_asynchronous_bug_is_found() -> None:
    case = perceptron_case(steps=4, make_optimizer=sgd)
    assert not verify(case, "data=2 sync=async staleness=2", plant=push_twice).equal
