"""Asynchronous training: what it computes is what its log says, and the log keeps its bound."""

import dataclasses
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon.collectives import RecordingGroup
from echelon.errors import UserError
from echelon.update.async_training.update import WorkerGradients
from echelon.update.optim import constant
from echelon.update.update import Push
from echelon.verify import Case, assert_equal
from echelon.verify.replay import replay
from tests.cases import (
    Branching,
    Perceptron,
    adamw,
    counted_loss,
    eleven_vectors,
    masked_vectors,
    mean_loss,
    perceptron_case,
    signed_vectors,
    stop,
    vectors,
)
from tests.sets import padded_bytes, set_of
from tests.update.async_training.training import (
    assert_replays,
    asynchronous,
    engine_for,
    leads,
    same,
    train,
    train_with_a_straggler,
)


@pytest.mark.quick_cases(1)
@pytest.mark.slow_cases("data=3 microbatches=2", "data=4")
@pytest.mark.parametrize("plan", ["data=1", "data=2", "data=3 microbatches=2", "data=4"])
def test_without_staleness_it_is_bulk_synchronous(plan: str) -> None:
    assert_equal(perceptron_case(eleven_vectors), f"{plan} sync=async staleness=0")


def test_without_staleness_means_weigh_by_tokens_and_unused_parameters_rest() -> None:
    assert_equal(perceptron_case(masked_vectors, counted_loss), "data=3 sync=async staleness=0")
    assert_equal(Case(Branching, signed_vectors, mean_loss, adamw), "data=2 sync=async staleness=0")


@pytest.mark.slow_cases("0-2", "1-3", "2-4", "inf-2", "inf-4")
@pytest.mark.parametrize(
    ("staleness", "ranks"), [("0", 2), ("1", 3), ("2", 2), ("2", 4), ("inf", 2), ("inf", 4)]
)
def test_training_equals_the_replay_of_its_log(staleness: str, ranks: int) -> None:
    case = perceptron_case(eleven_vectors, steps=12)
    first, *others = echelon.launch(train, ranks, case, f"data={ranks} staleness={staleness}")
    assert all(same(first, other) for other in others)
    assert_replays(first, replay(first[2], case, workers=ranks))
    assert sorted((entry.worker, entry.step) for entry in first[2]) == [
        (worker, step) for worker in range(ranks) for step in range(12)
    ]


@pytest.mark.slow_cases("1")
@pytest.mark.parametrize("staleness", [1, 2])
def test_the_bound_holds_and_is_reached(staleness: int) -> None:
    """Before its step s the slowest waits until the others have made s + staleness + 1: all that they may."""
    plan, ahead = f"data=3 staleness={staleness}", staleness + 1
    _, _, log = echelon.launch(train_with_a_straggler, 3, perceptron_case(steps=8), plan, ahead)[0]
    assert max(leads(log, workers=3)) == staleness


def test_without_a_bound_the_others_are_done_before_the_slowest_begins() -> None:
    case = perceptron_case(steps=8)
    _, _, log = echelon.launch(train_with_a_straggler, 3, case, "data=3 staleness=inf", 8)[0]
    assert [entry.worker for entry in log][16:] == [2] * 8


def test_gradients_are_really_stale() -> None:
    """Else the replay would prove nothing."""
    _, _, log = echelon.launch(train, 4, perceptron_case(steps=10), "data=4 staleness=inf")[0]
    assert max(entry.pushed - entry.pulled for entry in log) > 1
    assert [entry.pushed - entry.pulled for entry in log[:4]] == [1, 2, 3, 4], "all pulled before any pushed"


def test_a_schedule_is_of_versions() -> None:
    case, schedule = perceptron_case(steps=6), constant(warmup=10)
    (first, _), (_, rates) = echelon.launch(train_with_schedule, 2, case)
    scheduled = dataclasses.replace(case, options={"schedule": schedule})
    assert_replays(first, replay(first[2], scheduled, workers=2))
    assert rates == pytest.approx([0.01 * schedule(e.pushed - 1) for e in first[2] if e.worker == 1])


def train_with_schedule(case: Case) -> tuple[object, list[float]]:
    engine = engine_for(case, "data=2 staleness=inf", schedule=constant(warmup=10))
    rates = []
    for batch in case.batches():
        engine.step(engine.local(batch))
        rates.append(engine.learning_rate)
    state = engine.full_state_dict(), engine.full_optimizer_state(), asynchronous(engine).log()
    return state, rates


def own_numbers() -> tuple[float, float, int]:
    engine = engine_for(perceptron_case(eleven_vectors), "data=2 staleness=inf")
    metrics = engine.step(engine.local(eleven_vectors(0)))
    return metrics.loss, engine.evaluate(engine.local(eleven_vectors(0))).loss, metrics.tokens


def test_a_step_reports_its_own_batch_and_an_evaluation_all() -> None:
    (first, together, six), (second, as_well, five) = echelon.launch(own_numbers, 2)
    assert first != second
    assert together == as_well
    assert (six, five) == (6, 5)


class Norms(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), norm(8), nn.Linear(8, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


def uneven_numbers_of_steps(staleness: str) -> tuple[list[dict[str, Tensor]], list[Push]]:
    """Worker w makes w + 1 steps between two meetings; no one may be left waiting."""
    model = partial(Norms, nn.LayerNorm) if staleness == "0" else Norms
    engine = engine_for(Case(model, vectors, mean_loss, adamw), f"data=3 staleness={staleness}")
    seen = []
    for meeting in range(3):
        for step in range(engine.replica + 1):
            engine.step(engine.local(vectors(meeting + step)))
        engine.evaluate(engine.local(vectors(0)))
        seen += [{k: v.clone() for k, v in engine.module.state_dict().items()}, engine.full_state_dict()]
    return seen, asynchronous(engine).log()


@pytest.mark.slow_cases("0", "1")
@pytest.mark.parametrize("staleness", ["0", "1", "inf"])
def test_meetings_bring_the_newest_weights_to_all(staleness: str) -> None:
    (first, log), *others = echelon.launch(uneven_numbers_of_steps, 3, staleness, deadline=60.0)
    assert all(other_log == log for _, other_log in others)
    for module, whole in zip(first[::2], first[1::2], strict=True):
        assert all(torch.equal(module[name], whole[name]) for name in whole)
    for seen, _ in others:
        for state, other_state in zip(first, seen, strict=True):
            assert all(torch.equal(value, other_state[name]) for name, value in state.items())
    assert [sum(entry.worker == worker for entry in log) for worker in range(3)] == [3, 6, 9]


class FrozenNorm(nn.BatchNorm1d):
    def train(self, mode: bool = True) -> "FrozenNorm":  # noqa: ARG002
        return super().train(mode=False)


def refusal_of_norms(norm: Callable[[int], nn.Module], *, is_late: bool = False) -> str:
    try:
        engine = engine_for(Case(partial(Norms, norm), vectors, mean_loss, adamw), "data=2 staleness=0")
        if is_late:
            engine.module.layers[1].training = True
            engine.step(engine.local(vectors(0)))
    except UserError as refusal:
        return str(refusal)
    return ""


def test_workers_without_staleness_take_no_statistics_of_their_own_samples() -> None:
    for refusal in echelon.launch(refusal_of_norms, 2, nn.BatchNorm1d):
        assert "layers.1 (BatchNorm1d) takes its statistics over the whole batch" in refusal
    assert echelon.launch(refusal_of_norms, 2, FrozenNorm) == ["", ""]
    for refusal in echelon.launch(partial(refusal_of_norms, is_late=True), 2, FrozenNorm):
        assert "layers.1 (FrozenNorm) takes its statistics over the whole batch" in refusal


def cost_of_steps(steps: int) -> tuple[dict[tuple[str, str], tuple[int, int]], dict[str, int]]:
    case = perceptron_case()
    engine = engine_for(case, "data=3 staleness=inf")
    asynchronous(engine).synchronize()
    asynchronous(engine).synchronize()  # so that the answers to the one before are counted
    engine.ledger.totals.clear()
    for step in range(steps):
        engine.step(engine.local(vectors(step)))
    asynchronous(engine).synchronize()
    rows = {
        (str(row["operation"]), str(row["subject"])): (int(row["sent"]), int(row["received"]))
        for row in engine.ledger.rows()
    }
    return rows, engine.memory().now


def test_what_the_server_moves_and_holds() -> None:
    (server, server_memory), *workers = echelon.launch(cost_of_steps, 3, 4)
    size = padded_bytes(Perceptron(), itemsize=8)
    flags = sum(p.requires_grad for p in Perceptron().parameters())
    assert server["recv", "gradients"] == (0, 2 * 4 * (size + flags))
    assert server["send", "parameters"][0] >= 2 * 4 * size
    for rows, memory in workers:
        assert rows["send", "gradients"] == (4 * (size + flags), 0)
        assert rows["recv", "parameters"] == (0, (4 + 1) * size)
        assert memory["optimizer"] == 0
        assert memory["gradients"] == size
    assert server_memory["optimizer"] > 0
    assert server_memory["gradients"] == 3 * size, "its own, and one for each worker"


def steps_around_an_empty_one() -> tuple[str, list[int], int]:
    """What a worker is told, which steps of worker 1 made updates, and how many steps this one began."""
    engine = engine_for(perceptron_case(), "data=2 staleness=1")
    inputs, targets = vectors(0)
    message = ""
    for is_empty in (False, True, False):
        try:
            engine.step((inputs[:0], targets[:0]) if is_empty and engine.replica else (inputs, targets))
        except echelon.UserError as error:
            message = str(error)
    pushed = [entry.step for entry in engine.log() if entry.worker == 1]
    return message, pushed, engine._counter.begun


def test_a_worker_s_step_without_samples_is_refused_and_keeps_its_number() -> None:
    first, second = echelon.launch(steps_around_an_empty_one, 2)
    assert first == ("", [0, 2], 3)
    assert second == (
        "this worker had no sample that the loss counts; give every worker at least one per step",
        [0, 2],
        3,
    )


pytestmark = pytest.mark.usefixtures("packed")


def make_worker() -> tuple[WorkerGradients, nn.ParameterList]:
    model = nn.ParameterList([torch.full((2,), float(number)) for number in range(3)])
    model[1].requires_grad_(False)
    return WorkerGradients(set_of(model, RecordingGroup("data", 1, 2))), model


def run(worker: WorkerGradients, *losses: torch.Tensor) -> None:
    worker.start_step()
    for loss in losses:
        worker.start_backward(last=True)
        loss.backward()
        worker.finish_backward()
    worker.reduce()


def test_gradients_of_microbatches_add_up_where_they_are_pushed_from() -> None:
    worker, model = make_worker()
    for _ in range(2):  # steps
        run(worker, (3 * model[0]).sum(), (4 * model[0] + model[2]).sum())
        assert [bucket.buffer.tolist() for bucket in worker.buckets] == [[7.0, 7.0, 1.0, 1.0]]
        assert worker.used_flags().tolist() == [1, 1]


def test_what_was_not_used_is_zeros_and_flagged_so_for_each_step() -> None:
    worker, model = make_worker()
    run(worker, model[2].sum())
    assert worker.used_flags().tolist() == [0, 1], "trained parameters, in the order of the model"
    assert worker.buckets[0].buffer.tolist() == [0.0, 0.0, 1.0, 1.0]
    run(worker, model[0].sum() + stop(model[2]).sum())
    assert worker.used_flags().tolist() == [1, 0], "a function without a gradient does not count"
    assert worker.buckets[0].buffer.tolist() == [1.0, 1.0, 0.0, 0.0]


def test_a_pull_into_the_weights_is_seen_by_the_model() -> None:
    worker, model = make_worker()
    assert [buffer.tolist() for buffer in worker.weights] == [[0.0, 0.0, 2.0, 2.0]]
    worker.weights[0].fill_(9.0)
    assert [parameter.tolist() for parameter in model] == [[9.0, 9.0], [1.0, 1.0], [9.0, 9.0]]


def test_a_worker_updates_and_owns_nothing_and_its_norm_is_the_server_s() -> None:
    worker, model = make_worker()
    run(worker, model[0].sum())
    assert worker.local_parameters() == worker.norm_share() == worker.owned() == []
    storages = worker.storages()
    assert len(storages.parameters) == 3
    assert [tensor is worker.buckets[0].buffer for tensor in storages.gradients] == [True]


def test_matrices_may_add_in_place_during_a_backward_pass_and_not_between() -> None:
    worker, _ = make_worker()
    assert worker.accumulation is not None
    states = [worker.accumulation.is_open]
    worker.start_backward(last=True)
    states.append(worker.accumulation.is_open)
    worker.finish_backward()
    states.append(worker.accumulation.is_open)
    assert states == [False, True, False]


def test_after_the_close_gradients_are_the_model_s_own() -> None:
    worker, model = make_worker()
    worker.start_step()
    worker.close()
    model[0].sum().backward()
    assert worker.used_flags().tolist() == [0, 0]
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model)
