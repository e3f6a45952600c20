"""The contract holds with dropout: masks do not depend on how a batch is cut."""

import dataclasses
from typing import Any

import pytest
from torch import Tensor, nn

from echelon.engine import Engine
from echelon.engine.step.samples import no_scope
from echelon.models import build
from echelon.plan import Plan
from echelon.train.jobs.job import Job, ModelJob
from echelon.verify import Case, assert_equal, verify
from echelon.verify.job_case import case_of
from tests.cases import adamw, sgd
from tests.contract_models import VOCAB, gpt, token_loss, tokens

pytestmark = pytest.mark.usefixtures("warm_contract")


def dropping_gpt() -> nn.Module:
    return build(dataclasses.replace(gpt().config, dropout=0.1))


class Foreign(nn.Module):
    """torch's own transformer layer, one dropout used twice, and dropout of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 16)
        self.dropout, self.channels, self.alpha = nn.Dropout(0.2), nn.Dropout1d(0.3), nn.AlphaDropout(0.1)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.encoder.self_attn.dropout = 0.0
        self.head = nn.Linear(16, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.dropout(self.embedding(tokens))
        x = self.channels(self.dropout(self.encoder(x)))
        output: Tensor = self.head(self.alpha(x))
        return output


def twelve(step: int) -> tuple[Tensor, Tensor]:
    inputs, targets = tokens(step)
    return inputs[:12], targets[:12]


def case(make_model: Any = dropping_gpt, make_batch: Any = tokens, **changes: Any) -> Case:
    return Case(make_model, make_batch, token_loss, **({"make_optimizer": adamw, "seed": 3} | changes))


@pytest.mark.slow_cases(
    "data=2 sync=parameter-server-dropping_gpt",
    "data=2 zero=2 microbatches=3-Foreign",
    "data=2 zero=2 microbatches=3-dropping_gpt",
    "data=2-Foreign",
    "data=2-dropping_gpt",
    "data=3 microbatches=2-Foreign",
    "data=3 microbatches=2-dropping_gpt",
    "data=3 zero=3-Foreign",
    "data=3 zero=3-dropping_gpt",
    "microbatches=3-Foreign",
    "microbatches=3-dropping_gpt",
)
@pytest.mark.parametrize("make_model", [dropping_gpt, Foreign])
@pytest.mark.parametrize(
    "plan",
    [
        "microbatches=3",
        "data=2",
        "data=3 microbatches=2",
        "data=2 zero=2 microbatches=3",
        "data=3 zero=3",
        "data=2 sync=parameter-server",
    ],
)
def test_plans_with_dropout_are_equal_to_one_device(make_model: Any, plan: str) -> None:
    assert_equal(case(make_model, steps=6), plan)


@pytest.mark.slow_cases("dropping_gpt")
@pytest.mark.parametrize("make_model", [dropping_gpt, Foreign])
def test_workers_in_rounds_are_equal_to_one_device_where_they_hold_as_many(make_model: Any) -> None:
    assert_equal(case(make_model, twelve, steps=6), "data=2 sync=async staleness=0 microbatches=2")


@pytest.mark.slow
def test_asynchronous_workers_are_held_to_the_replay_of_their_masks_too() -> None:
    assert_equal(case(steps=6), "data=3 sync=async staleness=2 microbatches=2")


def untied_gpt() -> nn.Module:
    return build(dataclasses.replace(gpt().config, dropout=0.1, tied=False))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw"])
def test_the_formulas_of_pipelines_that_never_drain_have_the_same_masks(schedule: str) -> None:
    plan = f"pipeline=2 data=2 schedule={schedule} microbatches=3"
    assert_equal(case(untied_gpt, steps=4, clip=None), plan)


@pytest.mark.slow
def test_after_twenty_steps_too() -> None:
    assert assert_equal(case(), "data=2 microbatches=2").worst[1] < 1e-11


def count_from_zero(engine: Engine) -> None:
    """Every replica takes its samples for the first of the batch."""
    engine._runner._scopes._counts = lambda samples: [0] * engine.replica + [samples]


def take_the_next_step(engine: Engine) -> None:
    """The masks of rank 1 are those of the step after."""
    of_step = engine._runner._scopes.of_step
    engine._runner._scopes.of_step = (  # type: ignore[method-assign]
        lambda step, samples, call=0: of_step(step + engine.replica, samples, call)
    )


def draw_by_torch(engine: Engine) -> None:
    """Nothing says which samples are in a pass."""
    engine._runner._scopes.of_step = lambda *_: no_scope  # type: ignore[method-assign]


@pytest.mark.parametrize("bug", [count_from_zero, take_the_next_step, draw_by_torch])
def test_wrong_masks_are_found(bug: Any) -> None:
    assert not verify(case(steps=2, make_optimizer=sgd), "data=2", inject_bug=bug).equal


def test_without_dropout_wrong_places_do_not_matter() -> None:
    assert verify(case(gpt, steps=2), "data=2", inject_bug=count_from_zero).equal


@pytest.mark.slow_cases("data=2 sync=async staleness=0 microbatches=3")
@pytest.mark.parametrize("plan", ["data=2 microbatches=3", "data=2 sync=async staleness=0 microbatches=3"])
def test_a_job_with_dropout_is_verified(plan: str) -> None:
    job = Job(plan=plan, model=ModelJob(dropout=0.1, layers=1, width=16, heads=2))
    job_case = case_of(job, Plan.parse(plan), steps=3)
    assert len(job_case.make_batch(0)[0]) % 6 == (2 if "async" in plan else 1)
    assert_equal(job_case, plan)
