"""Data parallelism: its mathematics by the contract, its order and its bytes by the ledger."""

import time

import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon.collectives import Ledger, RecordingGroup, TorchGroup
from echelon.data_parallel import AllReduce
from echelon.verify import Case, assert_equal
from tests.cases import Branching, Perceptron, adamw, mean_loss, signed_vectors, vectors


@pytest.mark.parametrize("plan", ["data=2", "data=4", "data=3 microbatches=2"])
def test_parameters_that_only_some_replicas_use(plan: str) -> None:
    case = Case(Branching, signed_vectors, mean_loss, adamw)
    verdict = assert_equal(case, plan)
    assert "never.weight" in verdict.tensors
    assert "never.weight exp_avg" not in verdict.tensors, "as on one device, nothing was updated"


class SlowChain(nn.Module):
    """Layers whose backward pass takes a while, so that a reduction has something to hide behind."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x.register_hook(lambda _: time.sleep(0.02))
        return x


def reductions_during_backward() -> tuple[int, int, bool]:
    from torch import distributed as dist

    group = TorchGroup("data", dist.group.WORLD, Ledger())  # type: ignore[arg-type]
    model = SlowChain()
    sync = AllReduce(model, group, bucket_bytes=20_000)
    group.ledger.start_step()
    sync.start_step()
    for last in (False, True):
        loss = model(torch.ones(2, 64)).sum()
        sync.start_backward(last=last)
        loss.backward()
        if not last:
            assert group.ledger.moves == [], "earlier microbatches only accumulate"
    ended = time.perf_counter()
    sync.finish_gradients()
    gradients = [move for move in group.ledger.moves if move.subject == "gradients"]
    return len(gradients), sum(move.start < ended for move in gradients), gradients[0].hidden > 0


def test_buckets_are_reduced_while_the_backward_pass_goes_on() -> None:
    for buckets, started_early, hidden in echelon.launch(reductions_during_backward, 2):
        assert (buckets, started_early, hidden) == (6, 6, True)


def moved(microbatches: int) -> list[tuple[str, str, int, int]]:
    torch.manual_seed(0)
    engine = echelon.parallelize(
        Perceptron(), f"data=3 microbatches={microbatches}", optimizer=adamw, loss=mean_loss
    )
    engine.ledger.totals.clear()
    engine.step(engine.local(vectors(0)))
    return [
        (str(row["operation"]), str(row["subject"]), int(row["count"]), int(row["sent"]))
        for row in engine.ledger.rows()
    ]


@pytest.mark.parametrize("microbatches", [1, 4])
def test_one_synchronisation_a_step_of_two_psi(microbatches: int) -> None:
    size = sum(p.numel() for p in Perceptron().parameters() if p.requires_grad)
    flags = sum(1 for p in Perceptron().parameters() if p.requires_grad)
    for rows in echelon.launch(moved, 3, microbatches):
        assert rows == [
            ("all_reduce", "gradients", 1, 2 * 2 * 4 * size // 3),
            ("all_reduce", "metrics", 1, 2 * 2 * 16 // 3),
            ("all_reduce", "used parameters", 1, 2 * 2 * flags // 3),
        ]


def weights_of_rank_zero() -> list[Tensor]:
    from torch import distributed as dist

    torch.manual_seed(dist.get_rank())
    model = Perceptron()
    model.register_buffer("counter", torch.tensor(dist.get_rank()))
    model.first.weight.data = model.first.weight.data.t().contiguous().t()  # not contiguous
    AllReduce(model, TorchGroup("data", dist.group.WORLD, Ledger()))  # type: ignore[arg-type]
    return [*model.state_dict().values()]


def test_replicas_start_as_replica_zero() -> None:
    first, *others = echelon.launch(weights_of_rank_zero, 3)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_a_model_that_is_all_frozen_has_nothing_to_reduce() -> None:
    model = nn.Linear(2, 2).requires_grad_(False)
    sync = AllReduce(model, RecordingGroup("data", 0, 2))
    sync.start_step()
    sync.finish_gradients()
    assert sync.parameters() == []
