"""The synchronous update, in numbers that one can check by hand."""

import pytest
import torch
from torch import Tensor, nn

from echelon.collectives import Group, RecordingGroup
from echelon.errors import UserError
from echelon.parallel.data.buffers import Buffers
from echelon.parallel.data.sharing import Problem, SingleReplica
from echelon.parallel.stage import LocalStages, Stage
from echelon.program import build
from echelon.state.ownership import ENGINE
from echelon.update.numbers import Outcome
from echelon.update.precision.loss_scaling import DynamicScale, LossScale, LossScaling
from echelon.update.precision.stepper import DirectStepper, MasterStepper
from echelon.update.synchronous_update import SynchronousUpdate
from tests.groups import DeferredGroup
from tests.reads import no_reads
from tests.sets import set_of

NORMALISER = 8.0  # what losses are divided by: no update may depend on it


class Updated:
    """One weight, [0, 0], a frozen one, and an SGD of rate 1 over it."""

    def __init__(
        self,
        group: Group | None = None,
        everyone: Group | None = None,
        *,
        clip: float | None = None,
        steady: bool = True,
        deferred: bool = False,
        dtype: torch.dtype = torch.float64,
        loss_scale: LossScale | None = None,
    ) -> None:
        self.module = nn.Module()
        self.module.weight = self.weight = nn.Parameter(torch.zeros(2, dtype=dtype))
        self.module.frozen = nn.Parameter(torch.ones(1, dtype=dtype), requires_grad=False)
        self.replicas = RecordingGroup("data", 0, 2)
        self.module.register_buffer("counter", torch.zeros(1))
        sharing = SingleReplica(set_of(self.module, RecordingGroup("data")))
        stage = Stage(0, self.module, [sharing], Buffers(self.module, self.replicas))
        self.local = LocalStages({0: stage}, build("naive", (1,), 1), [])
        device = torch.device("cpu") if deferred else None
        self.scaling = None if loss_scale is None else LossScaling(loss_scale, device)
        kind = DirectStepper if dtype == torch.float64 else MasterStepper
        stepper = kind(
            torch.optim.SGD(self.local.trained(), lr=1.0, momentum=0.5),
            self.local.local_parameters(),
            deferred=deferred,
        )
        self.update = SynchronousUpdate(
            self.local,
            stepper,
            group or RecordingGroup("all"),
            clip,
            everyone=everyone or RecordingGroup("all"),
            schedule=lambda step: float(step),
            steady=steady,
            deferred=deferred,
            loss_scaling=self.scaling,
        )

    def step(self, total: float, count: float, gradient: list[float]) -> Outcome:
        """One update, of a loss total whose gradient is `gradient`, and a look at its numbers."""
        self.update_weights(total, count, gradient)
        return self.update.numbers.read()

    def update_weights(self, total: float, count: float, gradient: list[float]) -> None:
        self.update.start_step()
        normaliser = NORMALISER / float(self.update.loss_scale) if self.scaling else NORMALISER
        self.weight.grad = torch.tensor(gradient, dtype=self.weight.grad_dtype) / normaliser
        self.update.norm(tally(total, count, normaliser))
        self.update.step()
        self.update.publish()


def tally(total: float, count: float, normaliser: float = NORMALISER) -> Tensor:
    return torch.tensor([total, count, count * normaliser], dtype=torch.float64)


def test_an_update_is_of_the_mean_whatever_losses_were_divided_by() -> None:
    """Gradients are divided by a normaliser before the backward pass, and by the rest in the update."""
    updated = Updated()
    assert updated.step(8.0, 4.0, [12.0, 16.0]) == Outcome(8.0, 4.0, 5.0)
    assert updated.weight.tolist() == [-3.0, -4.0]
    assert updated.update.start_step() == 4.0, "the count of the step before"
    assert updated.step(6.0, 2.0, [6.0, 8.0]) == Outcome(6.0, 2.0, 5.0)
    assert updated.weight.tolist() == [-3.0 - 1.5 - 3.0, -4.0 - 2.0 - 4.0], "with momentum"


def test_clipping_is_by_the_norm_of_the_mean_which_is_reported_as_it_was() -> None:
    updated = Updated(clip=1.0)
    assert updated.step(8.0, 4.0, [12.0, 16.0]).norm == 5.0
    assert updated.weight.tolist() == pytest.approx([-0.6, -0.8], rel=1e-6)


def test_loss_count_and_norm_are_summed_over_the_ranks_of_one_update() -> None:
    group, everyone = DeferredGroup(size=3), DeferredGroup(size=5)
    updated = Updated(group, everyone)
    outcome = updated.step(8.0, 4.0, [12.0, 16.0])
    assert outcome == Outcome(24.0, 12.0, pytest.approx((3 * 20.0**2) ** 0.5 / 12))
    assert group.subjects == ["metrics"]
    assert everyone.subjects == []
    assert updated.update.agree(tally(2.0, 1.0)) == (10.0, 5.0), "an evaluation is over everyone"
    assert group.subjects == ["metrics"]
    assert everyone.subjects == ["metrics"]


def test_a_step_without_samples_on_any_rank_is_refused() -> None:
    updated = Updated()
    with pytest.raises(UserError, match="no replica had a sample that the loss counts"):
        updated.step(0.0, 0.0, [0.0, 0.0])
    with pytest.raises(UserError, match="no replica had a sample that the loss counts"):
        updated.update.agree(tally(0.0, 0.0))


@pytest.mark.parametrize("clip", [None, 1.0])
def test_numbers_that_nobody_reads_make_the_same_updates(clip: float | None) -> None:
    direct, deferred = Updated(clip=clip), Updated(clip=clip, deferred=True)
    steps = [(8.0, 4.0, [12.0, 16.0]), (6.0, 2.0, [6.0, 8.0]), (1.0, 3.0, [-1.0, 0.1])]
    outcomes = [direct.step(*step) for step in steps]
    deferred.step(*steps[0])
    numbers = []
    with no_reads():
        for total, count, gradient in steps[1:]:
            deferred.module.counter.add_(1)  # else the other rank is asked
            deferred.update_weights(total, count, gradient)
            numbers.append(deferred.update.numbers)
    assert [each.read() for each in numbers] == outcomes[1:]
    assert torch.equal(deferred.weight, direct.weight)


def test_a_deferred_step_without_samples_changes_nothing_and_tells_who_looks() -> None:
    updated, undisturbed = Updated(deferred=True), Updated(deferred=True)
    for each in (updated, undisturbed):
        each.step(8.0, 4.0, [12.0, 16.0])
    with no_reads():
        updated.module.counter.add_(1)
        updated.update_weights(0.0, 0.0, [7.0, float("nan")])
    with pytest.raises(UserError, match="no replica had a sample that the loss counts"):
        updated.update.numbers.read()
    before, after = ({e.slice: e.tensor for e in u.update.owned()} for u in (undisturbed, updated))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[each], after[each]) for each in before)
    assert updated.step(6.0, 2.0, [6.0, 8.0]) == undisturbed.step(6.0, 2.0, [6.0, 8.0])
    assert torch.equal(updated.weight, undisturbed.weight)


@pytest.mark.parametrize("deferred", [False, True])
def test_a_step_with_a_problem_is_refused_and_changes_nothing(deferred: bool) -> None:
    updated = Updated(deferred=deferred)
    updated.step(8.0, 4.0, [12.0, 16.0])
    weight = updated.weight.detach().clone()
    found = {Problem.DIFFERENT_UNITS: torch.tensor(True)}
    updated.local.sharings[0].problems = lambda: found  # type: ignore[method-assign]
    with pytest.raises(UserError, match="ranks ran different modules in this step"):
        updated.step(8.0, 5.0, [12.0, 16.0])
    assert torch.equal(updated.weight, weight)
    assert updated.update.start_step() == 4.0, "the count of the last update"


def test_in_a_pipeline_that_never_drains_an_update_of_no_samples_changes_nothing() -> None:
    updated = Updated(steady=False)
    updated.module.counter.add_(1)
    assert updated.step(0.0, 0.0, [7.0, 7.0]) == Outcome(0.0, 0.0, 0.0)
    assert updated.weight.tolist() == [0.0, 0.0]
    assert updated.replicas.ledger.moves == [], "and publishes nothing"
    updated.step(2.0, 2.0, [2.0, 4.0])
    assert updated.weight.tolist() == [-1.0, -2.0]
    assert updated.replicas.ledger.moves
    assert updated.update.start_step() is None, "stages are at different updates, so no count is everyone's"


SCALE = DynamicScale(start=64.0, interval=2)
INF = float("inf")


@pytest.mark.parametrize("deferred", [False, True])
def test_a_loss_scale_changes_no_update(deferred: bool) -> None:
    plain, scaled = Updated(clip=1.0), Updated(clip=1.0, deferred=deferred, loss_scale=SCALE)
    for step in [(8.0, 4.0, [12.0, 16.0]), (6.0, 2.0, [6.0, 8.0]), (1.0, 3.0, [-1.0, 0.1])]:
        expected = plain.step(*step)
        outcome = scaled.step(*step)
        assert outcome[:3] == pytest.approx(expected[:3])
    assert outcome.loss_scale == 128.0, "two steps were good"
    torch.testing.assert_close(scaled.weight, plain.weight)


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("bad", [INF, float("nan")])
def test_an_overflow_skips_the_update_and_halves_the_scale(deferred: bool, bad: float) -> None:
    updated, undisturbed = (Updated(deferred=deferred, loss_scale=SCALE) for _ in range(2))
    for each in (updated, undisturbed):
        each.step(8.0, 4.0, [12.0, 16.0])
    updated.module.counter.add_(1)
    outcome = updated.step(6.0, 2.0, [bad, 8.0])
    assert outcome == Outcome(6.0, 2.0, INF, 64.0, 1.0)
    assert torch.equal(updated.weight, undisturbed.weight)
    assert updated.update.start_step() == 2.0, "its count is as good as any"
    assert updated.step(6.0, 2.0, [6.0, 8.0]).loss_scale == 32.0
    undisturbed.step(6.0, 2.0, [6.0, 8.0])
    assert torch.equal(updated.weight, undisturbed.weight), "momentum has not seen it"


def test_an_overflow_is_skipped_without_a_look_at_the_device() -> None:
    updated = Updated(deferred=True, loss_scale=SCALE)
    updated.step(8.0, 4.0, [12.0, 16.0])
    weight = updated.weight.detach().clone()
    numbers = []
    for gradient in ([INF, 1.0], [1.0, 2.0]):
        updated.module.counter.add_(1)
        scale = float(updated.update.loss_scale)
        updated.weight.grad = torch.tensor(gradient, dtype=torch.float64) / NORMALISER * scale
        with no_reads():
            updated.update.norm(tally(2.0, 2.0, NORMALISER / scale))
            updated.update.step()
            updated.update.publish()
        numbers.append((updated.update.numbers, torch.equal(updated.weight, weight)))
    assert [(each.read().num_skipped, same) for each, same in numbers] == [(1.0, True), (0.0, False)]


def test_the_first_update_may_overflow_and_its_buffers_are_shared() -> None:
    """A skipped step keeps its running statistics, so replicas agree on them; a refused one undoes them."""
    updated = Updated(deferred=True, loss_scale=SCALE)
    updated.module.counter.add_(1)
    assert updated.step(6.0, 2.0, [INF, 8.0]).num_skipped == 1.0
    assert updated.update.skips
    assert not updated.update.refuses
    assert updated.weight.tolist() == [0.0, 0.0]
    assert updated.replicas.ledger.moves


def test_in_a_pipeline_that_never_drains_overflows_are_counted_until_somebody_asks() -> None:
    updated = Updated(steady=False, loss_scale=SCALE)
    for gradient in ([INF, 1.0], [1.0, 1.0], [1.0, INF]):
        updated.step(2.0, 2.0, gradient)
    assert updated.update.loss_scale == 64.0, "it is all stages' to decide"
    assert (updated.update.pop_overflows(), updated.update.pop_overflows()) == (2.0, 0.0)


def test_the_loss_scale_is_owned() -> None:
    updated = Updated(loss_scale=SCALE)
    updated.step(2.0, 2.0, [1.0, 1.0])
    owned = {
        each.slice.part: each.tensor.item() for each in updated.update.owned() if each.slice.name == ENGINE
    }
    assert owned == {"normaliser": 2.0, "loss scale": 64.0, "good steps": 1.0}


def test_start_step_forgets_gradients() -> None:
    updated = Updated()
    updated.weight.grad = torch.ones(2, dtype=torch.float64)
    updated.update.start_step()
    assert updated.weight.grad is None


def test_the_learning_rate_is_the_schedule_s() -> None:
    updated = Updated()
    updated.update.set_learning_rate(3)
    assert updated.update.optimizer.param_groups[0]["lr"] == 3.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_everything_that_a_training_needs_to_go_on_is_owned(dtype: torch.dtype) -> None:
    updated = Updated(dtype=dtype)
    updated.step(8.0, 4.0, [4.0, 8.0])
    owned = {(each.slice.name, each.slice.part): each.tensor.tolist() for each in updated.update.owned()}
    masters = {("weight", "master"): [-1.0, -2.0]} if dtype == torch.bfloat16 else {}
    assert owned == {
        ("weight", "value"): [-1.0, -2.0],
        ("frozen", "value"): [1.0],
        ("weight", "momentum_buffer"): [1.0, 2.0],
        (ENGINE, "normaliser"): 4.0,
        **masters,
    }


def test_memory_is_told_apart_by_what_it_is_for() -> None:
    updated = Updated(dtype=torch.bfloat16)
    updated.step(8.0, 4.0, [4.0, 8.0])
    storages = updated.update.storages()
    assert {name: len(tensors) for name, tensors in storages.items()} == {
        "parameters": 2,
        "gradients": 1,
        "optimizer": 2,
    }
    assert {tensor.dtype for tensor in storages["optimizer"]} == {torch.float32}


def test_closing_an_update_closes_its_stages() -> None:
    updated = Updated()
    closed: list[bool] = []
    updated.local.sharings[0].close = lambda: closed.append(True)  # type: ignore[method-assign]
    updated.update.close()
    assert closed == [True]


def test_ties_are_summed_when_the_program_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    updated = Updated()
    calls: list[LocalStages] = []
    monkeypatch.setattr(LocalStages, "sum_tied_gradients", lambda self: calls.append(self))
    updated.step(1.0, 1.0, [1.0, 1.0])
    assert calls == []
    updated.update.tie()
    assert calls == [updated.local]
