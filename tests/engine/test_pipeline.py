"""Engines over pipelines: what all ranks are told, the state between steps, failures, and what is refused."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon.engine import Engine
from echelon.errors import UserError
from echelon.launching import RankFailed, Ranks
from echelon.optim import cosine
from echelon.program import build, show
from echelon.verify import assert_equal
from tests.cases import adamw, counted_loss, mean_loss, vectors
from tests.contract_models import token_loss
from tests.pipeline_parallel.models import (
    Hidden,
    dropping,
    gpt_case,
    perceptron,
    shallow,
    tokens,
    vector_case,
)

Warm = Callable[[int], Ranks]
State = dict[str, Tensor]


def engine_for(plan: str, make: Callable[[], nn.Module] = perceptron, **options: Any) -> Engine:
    torch.manual_seed(0)
    given = {"optimizer": adamw, "loss": mean_loss} | options
    return echelon.parallelize(make(), plan, **given)


# What all ranks are told.


def metrics_of(plan: str) -> list[tuple[float, float, int]]:
    engine = engine_for(plan, loss=counted_loss)
    told = [engine.step(engine.local(vectors(step, samples=11))) for step in range(4)]
    evaluation = engine.evaluate(engine.local(vectors(9, samples=11)))
    return [(m.loss, m.grad_norm, m.tokens) for m in told] + [(evaluation.loss, 0.0, evaluation.tokens)]


@pytest.mark.parametrize(
    "plan",
    ["pipeline=2 data=2 microbatches=2", "pipeline=3-1 microbatches=3", "pipeline=4 schedule=pipedream"],
)
def test_metrics_are_the_same_on_every_rank(warm_ranks: Warm, plan: str) -> None:
    first, *others = warm_ranks(4).run(metrics_of, plan)
    assert all(its == first for its in others)
    assert [tokens for _, _, tokens in first] == [11] * 5
    assert all(math.isfinite(loss) and loss > 0 for loss, _, _ in first)
    assert all(norm > 0 for _, norm, _ in first[:-1]) or "pipedream" in plan


def fingerprint(plan: str) -> list[bytes]:
    engine = engine_for(plan, dropping, loss=token_loss)
    for step in range(3):
        engine.step(engine.local(tokens(step)))
    return [value.numpy().tobytes() for value in engine.full_state_dict().values()]


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
    assert all(its == first[0] for its in first)


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


def test_low_precision_trains_through_masters(warm_ranks: Warm) -> None:
    told = warm_ranks(4).run(in_low_precision, "pipeline=2 data=2 zero=1 microbatches=2 precision=bf16")
    losses, types, _ = told[0]
    assert losses[-1] < losses[0] - 0.3
    assert types == [torch.bfloat16, torch.float32]
    assert all(its == told[0] for its in told)


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


def test_a_printed_program_runs_with_its_sends(tmp_path: Path) -> None:
    file = tmp_path / "interleaved.txt"
    file.write_text(show(build("interleaved", (1, 1), 4, 2)))
    assert_equal(gpt_case(shallow, steps=2), f"pipeline=2 microbatches=4 schedule={file} data=2 zero=3")


@pytest.mark.parametrize(
    ("text", "plan", "reason"),
    [
        (
            "rank 0: F0 B0\nrank 1: F0 B0\n",
            "pipeline=3",
            "replicas 1-1, and the plan has pipeline=1-1-1; set pipeline=1-1",
        ),
        (
            "rank 0: F0 B0\nrank 1: F0 B0\n",
            "pipeline=2 microbatches=4",
            "for 1 microbatches, .* has 4; set",
        ),
        ("rank 0: F0 B0\nrank 1: B0 F0\n", "pipeline=2", r"line 2, rank 1"),
        (
            show(build("pipedream", (1, 1), 2)),
            "pipeline=2 microbatches=2",
            "keeps weight versions, .*; leave",
        ),
        (
            show(build("zero-bubble", (1, 1), 2)),
            "pipeline=2 microbatches=2 compile=true",
            "backwards in two, .*; drop compile",
        ),
        ("rank 0: F0 Q0\n", "pipeline=2", "line 1"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(tmp_path: Path, text: str, plan: str, reason: str) -> None:
    file = tmp_path / "own.txt"
    file.write_text(text)
    with pytest.raises(UserError, match=reason):
        launch(f"{plan} schedule={file}", perceptron)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        launch(f"pipeline=2 schedule={tmp_path / 'none.txt'}", perceptron)


# What is refused.


def launch(plan: str, make: Callable[[], nn.Module], **options: Any) -> None:
    """One step of the plan, on its ranks."""
    echelon.launch(one_step, echelon.Plan.parse(plan).ranks, plan, make, options)


def one_step(plan: str, make: Callable[[], nn.Module], options: dict[str, Any]) -> None:
    engine = engine_for(plan, make, **options)
    engine.step(engine.local(vectors(0)))


class Bare(nn.Module):
    """Lists no layers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)  # type: ignore[no-any-return]


class Outside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.scale = perceptron(2), nn.Parameter(torch.ones(5))

    def layers(self) -> list[nn.Module]:
        return list(self.body)


def tied() -> nn.Module:
    layer = Hidden()
    return nn.Sequential(layer, Hidden(), layer, nn.Linear(6, 5))


def with_shared_dropout() -> nn.Module:
    dropout = nn.Dropout(0.1)
    return nn.Sequential(Hidden(), dropout, Hidden(), dropout, nn.Linear(6, 5))


def with_shared_buffers() -> nn.Module:
    norm = nn.BatchNorm1d(6, affine=False)
    return nn.Sequential(Hidden(), norm, Hidden(), norm, nn.Linear(6, 5))


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


@pytest.mark.parametrize(
    ("plan", "make", "reason"),
    [
        ("pipeline=2", Bare, "Bare lists no layers to cut between; make it an nn.Sequential"),
        (
            "pipeline=2 schedule=interleaved chunks=3 microbatches=2",
            perceptron,
            "4 layers .* cannot make 6 stages",
        ),
        ("pipeline=2", Outside, "scale of Outside belong to no layer.*; move them"),
        ("pipeline=2", sends_a_set, "returned a set, which cannot be sent .*; return tensors"),
        ("pipeline=2", sends_a_sparse_tensor, "layout torch.sparse_coo, which cannot be sent; make it dense"),
        ("pipeline=2 schedule=pipedream", tied, "0.linear.weight.* in several stages: .* drift apart; untie"),
        (
            "pipeline=2-1 zero=1",
            tied,
            "zero=1 pipeline=2-1 with 0.linear.weight.*; untie .* zero=0",
        ),
        (
            "pipeline=2 schedule=interleaved chunks=2 microbatches=2",
            tied,
            "0.linear.weight is in the stages 0, 2, two of them on one rank; use other chunks",
        ),
        ("pipeline=2", with_shared_buffers, "one BatchNorm1d is used in .* have other buffers there; give"),
        (
            "pipeline=2",
            with_shared_dropout,
            "one Dropout is used in the stages 0 and 1, .* repeat its masks there; give",
        ),
    ],
)
def test_models_that_a_pipeline_cannot_cut_are_refused(plan: str, make: Any, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        launch(plan, make)


def test_clipping_without_one_norm_is_refused() -> None:
    with pytest.raises(UserError, match=r"clip=1.0 schedule=pipedream: .*; drop clip, or use schedule=1f1b"):
        launch("pipeline=2 schedule=pipedream", perceptron, clip=1.0)


def nothing_trains() -> nn.Module:
    return perceptron().requires_grad_(False)


def test_a_model_with_nothing_to_train_is_refused_still() -> None:
    with pytest.raises(UserError, match="nothing to train"):
        launch("pipeline=2", nothing_trains)


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


# Failures.


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.fail = nn.Linear(6, 6), False

    def forward(self, x: Tensor) -> Tensor:
        if self.fail:
            raise RuntimeError("failed on purpose")
        return self.linear(x)  # type: ignore[no-any-return]


def fragile_in_the_middle() -> nn.Module:
    return nn.Sequential(Hidden(), Fragile(), nn.Linear(6, 5))


def fragile_first() -> nn.Module:
    return nn.Sequential(Fragile(), nn.Linear(6, 5))


def failing_on_one_rank() -> None:
    engine = engine_for("pipeline=3 microbatches=4", fragile_in_the_middle)
    engine.step(vectors(0))
    engine.module[1].fail = True
    engine.step(vectors(1))


def test_a_forward_that_fails_ends_all_ranks_with_its_error() -> None:
    with pytest.raises(RankFailed, match="rank 1 raised RuntimeError: failed on purpose"):
        echelon.launch(failing_on_one_rank, 3, deadline=20.0)


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


@pytest.mark.parametrize("call", ["step", "evaluate"])
def test_a_step_after_a_failed_one_is_refused(call: str) -> None:
    with pytest.raises(UserError, match=r"an earlier step failed in the middle.*; start again"):
        echelon.launch(stepping_on_after_a_failure, 2, call, deadline=20.0)


def test_with_one_stage_nobody_else_is_in_the_failed_step_and_the_next_one_works() -> None:
    engine = engine_for("pipeline=1 microbatches=2", fragile_first)
    engine.module[0].fail = True
    with pytest.raises(RuntimeError, match="failed on purpose"):
        engine.step(vectors(0))
    engine.module[0].fail = False
    assert engine.step(vectors(0)).loss > 0
