"""Data parallelism: its mathematics by the contract, its order and its bytes by the ledger."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon import UserError
from echelon.collectives import Ledger, RecordingGroup, TorchGroup
from echelon.launching import Ranks
from echelon.parallel.data.all_reduce import AllReduce
from echelon.verify import Case, assert_equal
from tests.cases import Branching, Perceptron, adamw, mean_loss, signed_vectors, vectors
from tests.groups import DeferredGroup
from tests.sets import padded_bytes, set_of

pytestmark = pytest.mark.usefixtures("warm_contract")

Warm = Callable[[int], Ranks]


@pytest.mark.slow_cases("data=3 microbatches=2", "data=4")
@pytest.mark.parametrize("plan", ["data=2", "data=4", "data=3 microbatches=2"])
def test_parameters_that_only_some_replicas_use(plan: str) -> None:
    case = Case(Branching, signed_vectors, mean_loss, adamw)
    verdict = assert_equal(case, plan)
    assert "never.weight" in verdict.tensors
    assert "never.weight exp_avg" not in verdict.tensors, "as on one device, nothing was updated"


def test_buckets_are_reduced_while_the_backward_pass_goes_on() -> None:
    """Nothing is waited for before its end, so that the sums can hide behind it."""
    group, model = DeferredGroup(), nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    sharing = AllReduce(set_of(model, group), bucket_bytes=16_640)
    on_the_way: list[int] = []
    sharing.start_step()
    for last in (False, True):
        x = torch.ones(2, 64)
        for layer in model:
            x = layer(x)
            x.register_hook(lambda _: on_the_way.append(len(group.pending)))
        sharing.start_backward(last=last)
        x.sum().backward()
        if not last:
            assert group.ledger.moves == [], "earlier microbatches only accumulate"
            on_the_way.clear()
    assert on_the_way == [0, 1, 2, 3, 4, 5], "a bucket is on its way before the layer below has a gradient"
    assert group.subjects == ["gradients"] * 6
    assert len(group.pending) == 6
    sharing.finish_backward()
    sharing.reduce()
    assert group.subjects == ["gradients"] * 6 + ["used parameters"]
    assert group.pending == []


def moved(microbatches: int) -> list[tuple[str, str, int, int]]:
    torch.manual_seed(0)
    engine = echelon.parallelize(
        Perceptron(), f"data=3 microbatches={microbatches}", optimizer=adamw, loss=mean_loss, audit="off"
    )
    for step in range(5):  # the first also agree on the order of gradients, and on whether forwards draw
        engine.step(engine.local(vectors(step)))
    engine.ledger.totals.clear()
    engine.step(engine.local(vectors(5)))
    return [
        (str(row["operation"]), str(row["subject"]), int(row["count"]), int(row["sent"]))
        for row in engine.ledger.rows()
    ]


@pytest.mark.parametrize("microbatches", [1, 4])
def test_one_synchronisation_per_step_of_two_psi(warm_ranks: Warm, microbatches: int) -> None:
    size = padded_bytes(Perceptron())
    flags = sum(1 for p in Perceptron().parameters() if p.requires_grad)
    for rows in warm_ranks(3).run(moved, microbatches):
        assert rows == [
            ("all_gather", "loss counts", 1, 2 * 24),
            ("all_reduce", "gradients", 1, 2 * 2 * size // 3),
            ("all_reduce", "metrics", 1, 2 * 2 * 80 // 3),
            ("all_reduce", "used parameters", 1, 2 * 2 * flags // 3),
        ]


def gradients_after_a_foreign_backward() -> float:
    """Rank 0 alone runs a backward pass of its own between two steps."""
    torch.manual_seed(0)
    engine = echelon.parallelize(Perceptron(), "data=2", optimizer=adamw, loss=mean_loss)
    engine.step(engine.local(vectors(0)))
    if engine.replica == 0:
        with pytest.raises(UserError, match=r"write engine.backward\(loss\)"):
            engine.module(vectors(1)[0]).sum().backward()
    return engine.step(engine.local(vectors(2))).loss


def test_a_backward_pass_outside_a_step_does_not_concern_other_ranks(warm_ranks: Warm) -> None:
    first, second = warm_ranks(2).run(gradients_after_a_foreign_backward)
    assert first == second


class FailsInBackward(nn.Module):
    """Layers in small buckets; once, the backward pass fails after some of them are on their way."""

    def __init__(self) -> None:
        super().__init__()
        self.layers_ = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.last = nn.Linear(6, 5)
        self.fail = False

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers_):
            x = torch.tanh(layer(x))
            if index == 1 and self.fail:
                x.register_hook(self._raise)
        return self.last(x)  # type: ignore[no-any-return]

    def _raise(self, _: Tensor) -> None:
        raise RuntimeError("failed on purpose")


def weights_around_a_failed_backward(fail: bool) -> list[Tensor]:
    from torch import distributed as dist

    torch.manual_seed(0)
    model = FailsInBackward()
    group = TorchGroup("data", dist.group.WORLD, Ledger())  # type: ignore[arg-type]
    sharing = AllReduce(set_of(model, group), bucket_bytes=100)
    optimizer = adamw(list(model.parameters()))
    for step in range(3):
        model.fail = fail and step == 1
        if step == 1 and not fail:
            continue
        sharing.start_step()
        inputs, targets = vectors(step)
        loss = mean_loss(model(inputs * (dist.get_rank() + 1)), targets)
        sharing.start_backward(last=True)
        if model.fail:
            with pytest.raises(RuntimeError, match="failed on purpose"):
                loss.backward()
            continue
        loss.backward()
        sharing.finish_backward()
        sharing.reduce()
        optimizer.step()
        sharing.publish()
    return [p.detach() for p in model.parameters()]


def test_after_a_backward_that_raised_the_next_step_is_right(warm_ranks: Warm) -> None:
    with_failure, without = (
        warm_ranks(2).run(weights_around_a_failed_backward, fail) for fail in (True, False)
    )
    for weight, expected in zip(with_failure[0], without[0], strict=True):
        assert torch.equal(weight, expected)


def test_a_model_that_is_all_frozen_has_nothing_to_reduce() -> None:
    model = nn.Linear(2, 2).requires_grad_(False)
    sharing = AllReduce(set_of(model, RecordingGroup("data", 0, 2)))
    sharing.start_step()
    sharing.reduce()
    assert sharing.local_parameters() == []


class _Stop(torch.autograd.Function):
    """A product that has no gradient for its matrix."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient @ ctx.saved_tensors[0], None


class Stopped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.stopped, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(_Stop.apply(self.first(x), self.stopped.weight))


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("sync", ["zero=0", "zero=1", "zero=2", "zero=3", "sync=async staleness=0"])
def test_functions_without_a_gradient_leave_their_weights_alone(sync: str) -> None:
    assert_equal(Case(Stopped, vectors, mean_loss, adamw, steps=3), f"data=2 microbatches=2 {sync}")


def test_a_step_waits_for_every_bucket() -> None:
    model, group = Perceptron(), RecordingGroup("data", 0, 2)
    sharing = AllReduce(set_of(model, group), bucket_bytes=100)
    sharing.start_step()
    sharing.start_backward(last=True)
    model(vectors(0)[0]).sum().backward()
    sharing.finish_backward()
    sums = [move for move in group.ledger.moves if move.subject == "gradients"]
    assert sums
    assert not any(move.wait_start for move in sums), "the backward pass waits for none"
    sharing.reduce()
    assert all(move.wait_start for move in sums)
