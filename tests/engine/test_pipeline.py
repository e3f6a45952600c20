"""Engines over pipelines: the state between steps, where stages begin, schedules from files, and messages."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon.engine import Engine
from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.program import build, show
from echelon.update.optim import cosine
from echelon.verify import assert_equal
from tests.cases import adamw, mean_loss, vectors
from tests.contract_models import token_loss
from tests.parallel.pipeline.models import (
    dropping,
    gpt_case,
    perceptron,
    shallow,
    tokens,
    vector_case,
)

pytestmark = pytest.mark.usefixtures("warm_contract")

Warm = Callable[[int], Ranks]
State = dict[str, Tensor]


def engine_for(plan: str, make: Callable[[], nn.Module] = perceptron, **options: Any) -> Engine:
    torch.manual_seed(0)
    given = {"optimizer": adamw, "loss": mean_loss} | options
    return echelon.parallelize(make(), plan, **given)


def fingerprint(plan: str) -> list[bytes]:
    engine = engine_for(plan, dropping, loss=token_loss)
    for step in range(3):
        engine.step(engine.local(tokens(step)))
    return [value.numpy().tobytes() for value in engine.full_state_dict().values()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        "pipeline=2 data=2 microbatches=2 schedule=interleaved chunks=2 zero=2",
        "pipeline=2-1-1 microbatches=3 schedule=zero-bubble",
    ],
)
def test_training_is_deterministic_to_the_bit(warm_ranks: Warm, plan: str) -> None:
    first, second = warm_ranks(4).run(fingerprint, plan), warm_ranks(4).run(fingerprint, plan)
    assert first == second
    assert all(rank == first[0] for rank in first)


# The state between steps.


def with_looks(plan: str) -> tuple[State, State, list[float], list[float]]:
    """Training with a look at everything between steps, and without."""
    results = []
    for looking in (True, False):
        engine = engine_for(plan)
        evaluations, losses = [], []
        for step in range(4):
            losses.append(engine.step(engine.local(vectors(step))).loss)
            if looking:
                evaluations.append(engine.evaluate(engine.local(vectors(step + 1))).loss)
                engine.full_state_dict()
                engine.full_optimizer_state()
                assert engine.module.training
        results.append((engine.full_state_dict(), evaluations, losses))
    (looked, evaluations, losses), (plain, _, others) = results
    assert losses == others
    return looked, plain, evaluations, losses


@pytest.mark.slow_cases("pipeline=2 data=2 zero=3 microbatches=2")
@pytest.mark.parametrize("plan", ["pipeline=2 microbatches=3", "pipeline=2 data=2 zero=3 microbatches=2"])
def test_looking_between_steps_changes_nothing(warm_ranks: Warm, plan: str) -> None:
    ranks = echelon.Plan.parse(plan).ranks
    for looked, plain, evaluations, losses in warm_ranks(ranks).run(with_looks, plan):
        assert looked.keys() == perceptron().state_dict().keys()
        assert all(torch.equal(value, plain[name]) for name, value in looked.items())
        # What is evaluated is the batch of the next step, with the weights that this step starts from.
        assert evaluations[:-1] == pytest.approx(losses[1:], rel=1e-5)


def rates_of(plan: str) -> list[float]:
    engine = engine_for(plan, schedule=cosine(total=10, warmup=5))
    rates = []
    for step in range(3):
        engine.step(vectors(step))
        rates.append(engine.learning_rate)
    return rates


def test_the_learning_rate_follows_the_schedule(warm_ranks: Warm) -> None:
    for rates in warm_ranks(2).run(rates_of, "pipeline=2 microbatches=3"):
        assert rates == pytest.approx([0.002, 0.004, 0.006])


def in_low_precision(plan: str) -> tuple[list[float], list[torch.dtype], bytes]:
    engine = engine_for(plan, shallow, loss=token_loss)
    losses = [engine.step(engine.local(tokens(0))).loss for _ in range(20)]
    state, optimizer = engine.full_state_dict(), engine.full_optimizer_state()
    name = "blocks.3.mlp.up.weight"
    whole = b"".join(value.view(torch.uint8).numpy().tobytes() for value in state.values())
    return losses, [state[name].dtype, optimizer[name]["exp_avg"].dtype], whole


@pytest.mark.slow
def test_low_precision_trains_through_masters(warm_ranks: Warm) -> None:
    results = warm_ranks(4).run(in_low_precision, "pipeline=2 data=2 zero=1 microbatches=2 precision=bf16")
    losses, types, _ = results[0]
    assert losses[-1] < losses[0] - 0.3
    assert types == [torch.bfloat16, torch.float32]
    assert all(result == results[0] for result in results)


# Where stages begin.


def test_stages_may_begin_where_the_user_says() -> None:
    case = vector_case(perceptron, options={"boundaries": [1, 3]}, steps=2)
    assert_equal(case, "pipeline=3 microbatches=2")
    assert_equal(
        vector_case(perceptron, options={"boundaries": [3]}, clip=None), "pipeline=2 schedule=pipedream"
    )


# Schedules from files.


def test_a_schedule_from_a_file_runs(tmp_path: Path) -> None:
    """One in no book: rank 0 holds the first and the last stage, and works backwards through the batch."""
    file = tmp_path / "own.txt"
    file.write_text(
        "stage 0: 0\nstage 1: 1\nstage 2: 0\n"
        "rank 0: F2@0 F1@0 F0@0 F2@2 B2@2 F1@2 F0@2 B0@2 B1@2 B2@0 B0@0 B1@0\n"
        "rank 1: F2 F1 F0 B2 B0 B1\n"
    )
    verdict = assert_equal(vector_case(perceptron), f"pipeline=2 microbatches=3 schedule={file}")
    assert verdict.worst[1] < 1e-12


@pytest.mark.slow
def test_a_printed_program_runs_with_its_sends(tmp_path: Path) -> None:
    file = tmp_path / "interleaved.txt"
    file.write_text(show(build("interleaved", (1, 1), 4, 2)))
    assert_equal(gpt_case(shallow, steps=2), f"pipeline=2 microbatches=4 schedule={file} data=2 zero=3")


# What is refused in the first step.


def one_step(plan: str, make: Callable[[], nn.Module]) -> None:
    engine = engine_for(plan, make)
    engine.step(engine.local(vectors(0)))


class Sends(nn.Module):
    """Returns what no message can hold."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(6, 6), kind

    def forward(self, x: Tensor) -> Any:
        output = self.linear(x)
        return {output} if self.kind == "set" else output.to_sparse()


def sends_a_set() -> nn.Module:
    return nn.Sequential(Sends("set"), nn.Linear(6, 5))


def sends_a_sparse_tensor() -> nn.Module:
    return nn.Sequential(Sends("sparse"), nn.Linear(6, 5))


@pytest.mark.slow_cases("sends_a_set-returned a set, which cannot be sent .*; return tensors")
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (sends_a_set, "returned a set, which cannot be sent .*; return tensors"),
        (sends_a_sparse_tensor, "layout torch.sparse_coo, which cannot be sent; make it dense"),
    ],
)
def test_what_no_message_can_hold_is_refused(make: Callable[[], nn.Module], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        echelon.launch(one_step, 2, "pipeline=2", make)


def no_samples(plan: str) -> str:
    engine = engine_for(plan)
    inputs, targets = vectors(0)
    with pytest.raises(UserError) as caught:
        engine.step((inputs[:0], targets[:0]))
    return str(caught.value)


def test_a_replica_without_samples_is_refused_for_the_right_reason(warm_ranks: Warm) -> None:
    """Regression: it blamed zero=2 or 3, in a plan that has neither, and offered zero=1."""
    for message in warm_ranks(2).run(no_samples, "pipeline=2 microbatches=2"):
        assert "no sample" in message
        assert "pipeline" in message
        assert "use zero=1" not in message
