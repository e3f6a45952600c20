"""The parameter server: its mathematics by the contract, its cost by the ledger and the memory meter."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon.collectives import RecordingGroup
from echelon.launching import Ranks
from echelon.parallel.data.parameter_server import ParameterServer
from echelon.verify import Case, assert_equal
from tests.cases import (
    Branching,
    Perceptron,
    adamw,
    counted_loss,
    eleven_vectors,
    masked_vectors,
    mean_loss,
    perceptron_case,
    sgd,
    signed_vectors,
    vectors,
)
from tests.groups import DeferredGroup
from tests.sets import padded_bytes, set_of

pytestmark = pytest.mark.usefixtures("warm_contract")

Warm = Callable[[int], Ranks]

PLAN = "sync=parameter-server"


@pytest.mark.slow_cases("2-3", "3-1", "3-3", "4-1", "4-3")
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_equal_to_one_device(ranks: int, microbatches: int) -> None:
    verdict = assert_equal(perceptron_case(), f"data={ranks} {PLAN} microbatches={microbatches}")
    assert verdict.worst[1] < 1e-11


def test_uneven_batches_and_counted_losses() -> None:
    assert_equal(perceptron_case(eleven_vectors), f"data=3 {PLAN} microbatches=2")
    assert_equal(perceptron_case(masked_vectors, counted_loss, make_optimizer=sgd), f"data=2 {PLAN}")


def test_an_optimizer_without_state_is_assembled_on_workers_too() -> None:
    assert_equal(perceptron_case(make_optimizer=plain_sgd, steps=3), f"data=2 {PLAN}")


def plain_sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def test_parameters_that_only_some_replicas_use() -> None:
    verdict = assert_equal(Case(Branching, signed_vectors, mean_loss, adamw), f"data=4 {PLAN}")
    assert "never.weight exp_avg" not in verdict.tensors, "as on one device, nothing was updated"


class Norms(nn.Module):
    """Has running statistics, of which replica 0's are everyone's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


def engine_for(model: nn.Module, ranks: int, **options: object) -> echelon.Engine:
    torch.manual_seed(0)
    given = {"optimizer": adamw, "loss": mean_loss} | options
    return echelon.parallelize(model, f"data={ranks} {PLAN}", **given)  # type: ignore[arg-type]


def weights_between_steps() -> list[dict[str, Tensor]]:
    """The module's own memory, and the whole state dict, after some steps; the ranks start unequal."""
    from torch import distributed as dist

    torch.manual_seed(dist.get_rank())
    engine = engine_for(Norms(), 3)
    for step in range(3):
        engine.step(engine.local(vectors(step)))
    return [{k: v.clone() for k, v in engine.module.state_dict().items()}, engine.full_state_dict()]


def test_every_rank_sees_the_newest_weights_between_steps(warm_ranks: Warm) -> None:
    (first, whole), *others = warm_ranks(3).run(weights_between_steps)
    for states in [[whole], *others]:
        assert all(torch.equal(first[name], state[name]) for state in states for name in first)


def one_empty_replica(empty: int) -> tuple[float, int]:
    engine = engine_for(Perceptron(), 2)
    inputs, targets = vectors(0)
    metrics = engine.step((inputs[:0], targets[:0]) if engine.replica == empty else (inputs, targets))
    return metrics.loss, metrics.tokens


@pytest.mark.parametrize("empty", [0, 1])
def test_the_server_or_a_worker_may_have_no_samples(warm_ranks: Warm, empty: int) -> None:
    first, second = warm_ranks(2).run(one_empty_replica, empty)
    assert first == second
    assert first[1] == 12


def cost_of_a_step() -> tuple[dict[tuple[str, str], tuple[int, int]], int, int]:
    """{(operation, subject): (sent, received)} of the second step, optimizer bytes, parameter bytes."""
    engine = engine_for(Perceptron(), 3)
    engine.step(engine.local(vectors(0)))
    engine.ledger.totals.clear()
    engine.step(engine.local(vectors(1)))
    rows = {
        (str(row["operation"]), str(row["subject"])): (int(row["sent"]), int(row["received"]))
        for row in engine.ledger.rows()
    }
    memory = engine.memory()
    return rows, memory.now["optimizer"], memory.now["parameters"]


def test_the_server_carries_the_bytes_and_alone_the_optimizer(warm_ranks: Warm) -> None:
    server, *workers = warm_ranks(3).run(cost_of_a_step)
    size = padded_bytes(Perceptron())
    assert server[0]["send", "parameters"] == (2 * size, 0)
    assert server[0]["recv", "gradients"] == (0, 2 * size)
    assert server[1] > 0
    for rows, optimizer, parameters in workers:
        assert rows["recv", "parameters"] == (0, size)
        assert rows["send", "gradients"] == (size, 0)
        assert optimizer == 0
        assert parameters == server[2]


@pytest.mark.parametrize(("rank", "expected"), [(0, [0, 1, 2, 2, 2, 2]), (1, [0, 1, 2, 3, 4, 5])])
def test_gradients_travel_while_the_backward_pass_goes_on(rank: int, expected: list[int]) -> None:
    """A worker sends and waits for nothing; the server receives two buckets at a time, not all of them."""
    group, model = DeferredGroup(rank=rank), nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    sharing = ParameterServer(set_of(model, group), bucket_bytes=16_640)
    on_the_way: list[int] = []
    received: list[int] = []
    sharing.start_step()
    x = torch.ones(2, 64)
    for layer in model:
        x = layer(x)
        x.register_hook(lambda _: on_the_way.append(len(group.pending)))
        x.register_hook(lambda _: received.append(len(sharing.storages().gradients) - 6))
    sharing.start_backward(last=True)
    x.sum().backward()
    assert on_the_way == expected
    assert received == (expected if rank == 0 else [0] * 6)
    assert group.subjects == ["gradients"] * 6, "all have begun before the backward pass is over"
    sharing.finish_backward()
    sharing.reduce()
    assert group.pending == []


def test_the_server_adds_each_worker_s_gradient_once() -> None:
    group, model = DeferredGroup(size=3), nn.ParameterList([torch.zeros(2) for _ in range(4)])
    sharing = ParameterServer(set_of(model, group), bucket_bytes=4)
    sharing.start_step()
    sharing.start_backward(last=True)
    torch.stack([5 * parameter.sum() for parameter in model]).sum().backward()
    sharing.finish_backward()
    sharing.reduce()
    assert [parameter.grad.tolist() for parameter in model] == [[7.0, 7.0]] * 4, "two workers sent ones"


def test_a_model_that_is_all_frozen_has_nothing_to_move() -> None:
    frozen = set_of(nn.Linear(2, 2).requires_grad_(False), RecordingGroup("data", 1, 2))
    sharing = ParameterServer(frozen)
    sharing.start_step()
    sharing.reduce()
    sharing.publish()
    assert frozen.trained == [] == sharing.local_parameters() == sharing.owned()


def fingerprint() -> list[bytes]:
    torch.manual_seed(0)
    engine = engine_for(Perceptron(), 4)
    for step in range(4):
        engine.step(engine.local(vectors(step)))
    return [value.numpy().tobytes() for value in engine.full_state_dict().values()]


def test_sums_are_in_rank_order_so_training_repeats_to_the_bit(warm_ranks: Warm) -> None:
    assert warm_ranks(4).run(fingerprint) == warm_ranks(4).run(fingerprint)
