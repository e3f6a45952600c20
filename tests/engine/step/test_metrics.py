"""What a step reports: the mean over the global batch, the same on every rank."""

import math
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

import echelon
from echelon.engine.step.metrics import Metrics, StepTimer
from echelon.launching import Ranks
from echelon.update.numbers import HostCopy, Outcome, StepNumbers
from tests.cases import Perceptron, adamw, counted_loss, mean_loss, sgd, vectors
from tests.parallel.pipeline.models import perceptron

Warm = Callable[[int], Ranks]


def test_metrics_are_of_the_mean_loss_before_clipping() -> None:
    engine = echelon.parallelize(Perceptron(), "data=1", optimizer=sgd, loss=mean_loss, clip=1e-3)
    inputs, targets = vectors(0)
    model = Perceptron()
    model.load_state_dict(engine.full_state_dict())
    loss = mean_loss(model(inputs), targets)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
    metrics = engine.step((inputs, targets))
    assert metrics.loss == pytest.approx(loss.item(), rel=1e-5)
    assert metrics.grad_norm == pytest.approx(norm.item(), rel=1e-5)
    assert (metrics.tokens, metrics.skipped) == (12, False)
    assert metrics.seconds > 0


def test_metrics_show_compare_and_travel_by_their_values() -> None:
    numbers = StepNumbers.known(Outcome(6.0, 4.0, 0.5))
    metrics = Metrics(numbers, 0.25)
    assert str(metrics) == "Metrics(loss=1.5, grad_norm=0.5, tokens=4, seconds=0.25, skipped=False)"
    assert metrics.is_ready
    assert pickle.loads(pickle.dumps(metrics)) == metrics
    assert metrics != Metrics(numbers, 0.5)
    assert len({metrics, Metrics(numbers, 0.25)}) == 1


def test_metrics_are_printed_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    # A debugger, or a failed assertion, that printed them waited for the GPU.
    metrics = Metrics(StepNumbers(torch.tensor([6.0, 4.0, 0.5, 1.0, 0.0])), 0.25)
    with monkeypatch.context() as patch:
        patch.setattr(HostCopy, "is_ready", False)
        patch.setattr(HostCopy, "wait", lambda _: pytest.fail("waits for the device"))
        assert repr(metrics) == "Metrics(not read yet)"
    assert repr(metrics) == "Metrics(loss=1.5, grad_norm=0.5, tokens=4, seconds=0.25, skipped=False)"


def test_the_metrics_of_a_refused_step_are_printed_with_its_error() -> None:
    metrics = Metrics(StepNumbers(torch.zeros(5)), 0.25)
    assert repr(metrics).startswith("Metrics(refused: no replica had a sample that the loss counts; ")


class FakeEvent:
    """Of a device that is done when somebody waits for it, 2 s after the start."""

    def __init__(self, **_: object) -> None:
        self.is_done = False

    def record(self) -> None: ...

    def query(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        self.is_done = True

    def elapsed_time(self, end: "FakeEvent") -> float:
        assert end.is_done
        return 2000.0


def test_a_step_is_not_ready_before_its_last_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    # The numbers are there before the update is done. A look at `seconds` waited for the rest.
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    timer = StepTimer(torch.device("cuda"))
    timer.stop()
    metrics = Metrics(StepNumbers.known(Outcome(6.0, 4.0, 0.5)), timer)
    assert not metrics.is_ready
    assert repr(metrics) == "Metrics(not read yet)"
    assert metrics.seconds == 2.0
    assert metrics.is_ready
    assert metrics.seconds == 2.0


def test_a_timer_counts_from_its_start_to_its_stop() -> None:
    timer = StepTimer(torch.device("cpu"))
    timer.stop()
    seconds = timer.seconds()
    assert 0 <= seconds == timer.seconds()


def metrics_of(plan: str) -> list[tuple[float, float, int]]:
    torch.manual_seed(0)
    engine = echelon.parallelize(perceptron(), plan, optimizer=adamw, loss=counted_loss)
    metrics = [engine.step(engine.local(vectors(step, samples=11))) for step in range(4)]
    evaluation = engine.evaluate(engine.local(vectors(9, samples=11)))
    return [(m.loss, m.grad_norm, m.tokens) for m in metrics] + [(evaluation.loss, 0.0, evaluation.tokens)]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "plan",
    ["pipeline=2 data=2 microbatches=2", "pipeline=3-1 microbatches=3", "pipeline=4 schedule=pipedream"],
)
def test_metrics_are_the_same_on_every_rank(warm_ranks: Warm, plan: str) -> None:
    first, *others = warm_ranks(4).run(metrics_of, plan)
    assert all(other == first for other in others)
    assert [tokens for _, _, tokens in first] == [11] * 5
    assert all(math.isfinite(loss) and loss > 0 for loss, _, _ in first)
    assert all(norm > 0 for _, norm, _ in first[:-1]) or "pipedream" in plan
