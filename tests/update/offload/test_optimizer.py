"""offload=optimizer in one process: what users see of it, what it refuses, and what memory and ledger say."""

import contextlib
import copy
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon.engine.engine import Engine
from echelon.errors import UserError
from echelon.parallel.data.zero.weight_access import FreedParameter
from echelon.state.ownership import ENGINE
from echelon.update.numbers import HostCopy
from echelon.update.offload.host_twins import HostTwins
from echelon.update.offload.host_worker import HostRing
from echelon.update.offload.optimizer import HostStepper, _on_one_device
from echelon.update.synchronous_update import SynchronousUpdate
from tests.cases import adamw, mean_loss, sgd, vectors

Make = Callable[[Any], Any]
WIDE = 64


class Layers(nn.Module):
    """Six layers, each a unit."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [6, WIDE, 2 * WIDE, WIDE, WIDE, WIDE, 5]
        self.blocks = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))

    def layers(self) -> list[nn.Module]:
        return list(self.blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def model() -> nn.Module:
    torch.manual_seed(0)
    return Layers().double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    inputs, targets = vectors(step)
    return inputs.double(), targets


def make(plan: str, optimizer: Make = adamw, of: nn.Module | None = None, **options: Any) -> Engine:
    return echelon.parallelize(
        model() if of is None else of,
        f"precision=fp64 {plan}",
        optimizer=optimizer,
        loss=mean_loss,
        **options,
    )


def train(engine: Engine, steps: range) -> None:
    for step in steps:
        engine.step(batch(step))


def weights_after(plan: str, steps: int, optimizer: Make = adamw, **options: Any) -> dict[str, Tensor]:
    with make(plan, optimizer, **options) as engine:
        train(engine, range(steps))
        return engine.full_state_dict()


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-11, atol=1e-12, msg=name)


def stepper_of(engine: Engine) -> HostStepper:
    assert isinstance(engine._update, SynchronousUpdate)
    assert isinstance(engine._update.stepper, HostStepper)
    return engine._update.stepper


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Updates on the host begin when this is set."""
    gate, update = threading.Event(), HostTwins.update

    def late(*args: Any) -> None:
        assert gate.wait(30)
        update(*args)

    monkeypatch.setattr(HostTwins, "update", late)
    return gate


def release_soon(gate: threading.Event) -> None:
    threading.Timer(0.1, gate.set).start()


# Weights.


def late_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, dampening=0.1)


def foreach(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, foreach=True)


def rmsprop(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(parameters, lr=1e-3)


class Unknown(torch.optim.Optimizer):
    """Of which nobody knows what it needs: it counts its steps itself."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None
        self.steps += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter -= group["lr"] / self.steps * parameter.grad


@pytest.mark.parametrize("optimizer", [adamw, sgd, late_sgd, foreach, rmsprop, Unknown])
def test_it_is_equal_whatever_the_optimizer(optimizer: Make) -> None:
    assert_same(
        weights_after("offload=optimizer", 4, optimizer, clip=0.5),
        weights_after("data=1", 4, optimizer, clip=0.5),
    )


def test_the_worker_uses_the_rate_of_its_step() -> None:
    def with_scheduler(plan: str) -> dict[str, Tensor]:
        with make(plan) as engine:
            scheduler = torch.optim.lr_scheduler.ExponentialLR(engine.optimizer, 0.5)
            for step in range(4):
                engine.step(batch(step))
                scheduler.step()
            return engine.full_state_dict()

    assert_same(with_scheduler("offload=optimizer"), with_scheduler("data=1"))
    halving: Callable[[int], float] = lambda step: 0.5**step  # noqa: E731
    assert_same(
        weights_after("offload=optimizer update=backward", 4, schedule=halving),
        weights_after("data=1", 4, schedule=halving),
    )


def test_a_rate_that_is_set_during_the_update_is_for_the_next(held: threading.Event) -> None:
    with make("offload=optimizer") as engine:
        engine.step(batch(0))
        engine.optimizer.param_groups[0]["lr"] = 1e6
        held.set()
        weights = engine.full_state_dict()
    assert_same(weights, weights_after("data=1", 1))


class Late(nn.Module):
    """The second branch is used from the third step on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.calls = nn.Linear(6, 5), nn.Linear(6, 5), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training and torch.is_grad_enabled()
        return self.first(x) + (self.second(x) if self.calls > 2 else 0)


@pytest.mark.parametrize("plan", ["offload=optimizer", "offload=optimizer update=backward"])
def test_parameters_that_are_used_late(plan: str) -> None:
    def weights(of: str) -> dict[str, Tensor]:
        torch.manual_seed(0)
        with make(of, sgd, Late().double(), audit="off") as engine:
            train(engine, range(5))
            return engine.full_state_dict()

    assert_same(weights(plan), weights(plan.replace("offload=optimizer", "data=1")))


def test_reads_see_the_new_weights(held: threading.Event) -> None:
    expected = weights_after("data=1", 1)
    held.clear()
    with make("offload=optimizer") as engine:
        engine.step(batch(0))
        release_soon(held)
        first = engine.module.blocks[0].weight  # type: ignore[index,union-attr]
        torch.testing.assert_close(first.sum(), expected["blocks.0.weight"].sum())
        inputs, _ = batch(0)
        whole = model()
        whole.load_state_dict(expected)
        torch.testing.assert_close(engine.module(inputs), whole(inputs))
        assert_same(dict(engine.module.state_dict()), expected)
        assert not any(type(parameter) is FreedParameter for parameter in engine.module.parameters())


def test_a_copy_of_the_model_has_the_new_weights(held: threading.Event) -> None:
    with make("offload=optimizer") as engine:
        engine.step(batch(0))
        release_soon(held)
        twin = copy.deepcopy(engine.module.blocks)
        assert all(type(parameter) is nn.Parameter for parameter in twin.parameters())  # type: ignore[union-attr]


def test_an_evaluation_sees_the_new_weights(held: threading.Event) -> None:
    with make("offload=optimizer") as engine:
        engine.step(batch(0))
        release_soon(held)
        loss = engine.evaluate(batch(0)).loss
    with make("data=1") as engine:
        engine.step(batch(0))
        assert loss == pytest.approx(engine.evaluate(batch(0)).loss, rel=1e-12)


@pytest.mark.parametrize("plan", ["offload=optimizer", "offload=optimizer update=backward"])
def test_what_the_user_writes_into_weights_counts(plan: str) -> None:
    def weights(of: str) -> dict[str, Tensor]:
        with make(of) as engine:
            train(engine, range(2))
            with torch.no_grad():
                for number, parameter in enumerate(engine.module.parameters()):
                    if number % 2:
                        parameter.mul_(0.5)
                    else:
                        parameter.data = parameter.data * 2
            train(engine, range(2, 4))
            return engine.full_state_dict()

    assert_same(weights(plan), weights(plan.replace("offload=optimizer", "data=1")))


# State.


def test_state_dicts_wait_for_the_update(held: threading.Event) -> None:
    with make("offload=optimizer") as engine, make("data=1") as plain:
        engine.step(batch(0))
        plain.step(batch(0))
        release_soon(held)
        ours, theirs = engine.optimizer.state_dict(), plain.optimizer.state_dict()
        assert ours["state"].keys() == theirs["state"].keys()
        for index, state in ours["state"].items():
            for key, value in state.items():
                torch.testing.assert_close(value.double(), theirs["state"][index][key].double())
        assert ours["param_groups"] == theirs["param_groups"], "nobody has chosen a kernel for the user"


def test_the_full_optimizer_state_waits_for_the_update(held: threading.Event) -> None:
    with make("offload=optimizer") as engine, make("data=1") as plain:
        engine.step(batch(0))
        plain.step(batch(0))
        release_soon(held)
        ours, theirs = engine.full_optimizer_state(), plain.full_optimizer_state()
    for name, state in theirs.items():
        for key, value in state.items():
            torch.testing.assert_close(ours[name][key].double(), value.double())


def test_loaded_state_reaches_the_host() -> None:
    def continued(plan: str) -> dict[str, Tensor]:
        with make(plan) as engine:
            train(engine, range(2))
            kept = copy.deepcopy(engine.optimizer.state_dict())
            train(engine, range(2, 4))
            engine.optimizer.load_state_dict(kept)
            train(engine, range(4, 6))
            return engine.full_state_dict()

    assert_same(continued("offload=optimizer"), continued("data=1"))


def test_the_counter_of_rounded_updates_is_owned() -> None:
    def counters(plan: str) -> dict[str, float]:
        with echelon.parallelize(
            Layers(), f"precision=bf16 masters=false {plan}", optimizer=adamw, loss=mean_loss
        ) as engine:
            for step in range(3):
                engine.step(vectors(step))
            engine.synchronize()
            return {
                each.slice.part: float(each.tensor) for each in engine.owned() if each.slice.name == ENGINE
            }

    assert counters("offload=optimizer") == counters("data=1")


# One step late.


def test_a_delayed_update_is_of_the_step_before() -> None:
    with make("offload=optimizer delay=1", sgd_plain) as engine:
        start = engine.full_state_dict()
        engine.step(batch(0))
        read = dict(engine.module.state_dict())
        assert_same(read, start)  # a read between steps finds the weights of the next step
        engine.step(batch(1))
        assert_same(dict(engine.module.state_dict()), weights_after("data=1", 1, sgd_plain))
        newest = engine.full_state_dict()
        assert not torch.equal(
            newest["blocks.0.weight"], weights_after("data=1", 2, sgd_plain)["blocks.0.weight"]
        )
        assert_same(dict(engine.module.state_dict()), newest)


def sgd_plain(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


def test_after_synchronize_nothing_is_late() -> None:
    def synchronized() -> dict[str, Tensor]:
        with make("offload=optimizer delay=1") as engine:
            for step in range(3):
                engine.step(batch(step))
                engine.synchronize()
            return engine.full_state_dict()

    assert_same(synchronized(), weights_after("data=1", 3))


LOOKS: dict[str, Callable[[Engine], object]] = {
    "evaluate": lambda engine: engine.evaluate(batch(0)),
    "full_state_dict": Engine.full_state_dict,
    "full_optimizer_state": Engine.full_optimizer_state,
    "both": lambda engine: (engine.full_state_dict(), engine.evaluate(batch(0))),
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_look_at_the_newest_weights_changes_no_training(look: str) -> None:
    plan, undisturbed = "offload=optimizer delay=1", dict[str, Tensor]()
    with make(plan) as engine:
        for step in range(4):
            engine.step(batch(step))
            LOOKS[look](engine)
        undisturbed = engine.full_state_dict()
    assert_same(undisturbed, weights_after(plan, 4))


def test_a_look_finds_the_newest_weights() -> None:
    plan = "offload=optimizer delay=1"
    with make(plan) as engine:
        train(engine, range(2))
        newest = weights_after(plan, 2)
        assert_same(engine.full_state_dict(), newest)
        whole = model()
        whole.load_state_dict(newest)
        inputs, targets = batch(5)
        assert engine.evaluate((inputs, targets)).loss == pytest.approx(
            mean_loss(whole(inputs), targets).item(), rel=1e-12
        )
        with torch.no_grad():
            engine.module.blocks[1].weight.zero_()  # type: ignore[index,union-attr,operator]
        with pytest.raises(UserError, match="a weight was changed between two steps"):
            engine.step(batch(2))
        assert_same(engine.full_state_dict(), newest)


def test_after_a_look_synchronize_keeps_the_newest_weights() -> None:
    with make("offload=optimizer delay=1") as engine:
        for step in range(3):
            engine.step(batch(step))
            engine.full_state_dict()
            engine.synchronize()
        assert_same(engine.full_state_dict(), weights_after("data=1", 3))


def test_a_change_of_weights_before_a_late_update_is_refused() -> None:
    with make("offload=optimizer delay=1") as engine:
        train(engine, range(2))
        with torch.no_grad():
            engine.module.blocks[1].weight.zero_()  # type: ignore[index,union-attr,operator]
        with pytest.raises(UserError, match=r"a weight was changed between two steps.*synchronize"):
            engine.step(batch(2))
        with torch.no_grad():
            engine.module.blocks[1].weight.zero_()  # type: ignore[index,union-attr,operator]
        engine.step(batch(2))  # nothing is pending
        with torch.no_grad():
            engine.module.blocks[1].weight.add_(1)  # type: ignore[index,union-attr,operator]
        with pytest.raises(UserError, match=r"a weight was changed between two steps.*synchronize"):
            engine.synchronize()
        weight = engine.full_state_dict()["blocks.1.weight"]
        assert weight.abs().max() < 0.1, "updated from zero"


# Errors.


class SparseModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(11, 8, sparse=True), nn.Linear(8, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.table(tokens))


def test_a_sparse_embedding_is_refused_at_once() -> None:
    with pytest.raises(UserError, match=r"table.weight is of an embedding with sparse=True.*drop offload"):
        make("offload=optimizer", sgd, SparseModel().double())


@pytest.mark.parametrize("plan", ["offload=optimizer", "offload=optimizer update=backward"])
def test_a_sparse_gradient_is_refused_before_the_first_update(plan: str) -> None:
    torch.manual_seed(0)
    module = SparseModel().double()
    module.table.sparse = False
    with make(plan, sgd, module, audit="off") as engine:
        start = engine.full_state_dict()
        module.table.sparse = True
        with pytest.raises(UserError, match=r"table.weight has a sparse gradient.*sparse=False"):
            engine.step((torch.arange(11), torch.arange(11) % 5))
        assert_same(engine.full_state_dict(), start)
        module.table.sparse = False
        engine.step((torch.arange(11), torch.arange(11) % 5))
        assert not torch.equal(engine.full_state_dict()["table.weight"], start["table.weight"])


@pytest.mark.parametrize("plan", ["offload=optimizer", "offload=optimizer update=backward"])
def test_an_error_on_the_host_is_raised_by_every_later_read(
    plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(plan)
    train(engine, range(2))
    engine.synchronize()

    def fail(*_: Any) -> None:
        raise RuntimeError("no more memory")

    monkeypatch.setattr(HostTwins, "update", fail)
    step_error: UserError | None = None
    try:
        engine.step(batch(2))
    except UserError as error:
        step_error = error
    for read in (
        lambda: engine.step(batch(3)),
        lambda: engine.module.blocks[0].weight.sum(),  # type: ignore[index,union-attr,operator]
        lambda: engine.module(batch(0)[0]),
        engine.full_state_dict,
        engine.optimizer.state_dict,
        lambda: engine.evaluate(batch(0)),
    ):
        with pytest.raises(UserError, match=r"RuntimeError: no more memory|failed in its backward pass"):
            read()
    assert step_error is None or "no more memory" in str(step_error)
    with contextlib.suppress(UserError):
        engine.close()
    assert not threads()
    with pytest.raises(UserError):
        engine.module.blocks[0].weight.sum()  # type: ignore[index,union-attr,operator]


def test_a_failure_on_the_host_changes_no_parameter_in_its_own_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A forward pass may be under way in the thread of the step."""
    engine = make("offload=optimizer")
    train(engine, range(1))
    engine.synchronize()

    def fail(*_: Any) -> None:
        raise RuntimeError("no more memory")

    worker = stepper_of(engine)._worker
    worker.submit(fail)
    while not worker.has_failed:
        time.sleep(0.001)
    assert not any(type(parameter) is FreedParameter for parameter in engine.module.parameters())
    with pytest.raises(UserError, match="no more memory"):
        engine.step(batch(1))
    assert all(type(parameter) is FreedParameter for parameter in engine.module.parameters())
    with contextlib.suppress(UserError):
        engine.close()


def test_a_failure_lets_no_backward_pass_wait_for_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, has_room = threading.Event(), HostRing.take

    def fail(*_: Any) -> None:
        assert begun.wait(30)
        raise MemoryError("no memory for state")

    def take(ring: HostRing, num_bytes: int) -> Tensor:
        if ring._find(num_bytes) is None:  # this unit waits for those before it
            begun.set()
        return has_room(ring, num_bytes)

    monkeypatch.setattr(HostTwins, "update", fail)
    monkeypatch.setattr(HostRing, "take", take)
    engine = make("offload=optimizer update=backward", smallest_unit=0)
    with pytest.raises(UserError, match="MemoryError: no memory for state"):
        engine.step(batch(0))
    assert begun.is_set()
    with contextlib.suppress(UserError):
        engine.close()


def test_a_step_that_fails_changes_nothing_and_the_next_is_right() -> None:
    with make("offload=optimizer") as engine:
        train(engine, range(2))
        with pytest.raises(RuntimeError):
            engine.step((torch.zeros(3, 7, dtype=torch.float64), torch.zeros(3, dtype=torch.int64)))
        train(engine, range(2, 3))
        assert engine.steps == 3
        ours = engine.full_state_dict()
    assert_same(ours, weights_after("data=1", 3))


def capturable(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, capturable=True)


def test_an_optimizer_for_cuda_graphs_is_refused() -> None:
    with pytest.raises(UserError, match=r"capturable=True.*drop capturable"):
        make("offload=optimizer", capturable)


# Threads and memory.


_EARLIER: set[threading.Thread] = set()  # of engines that other tests have left open


@pytest.fixture(autouse=True)
def _know_earlier_threads() -> None:
    _EARLIER.clear()
    _EARLIER.update(threading.enumerate())


def threads() -> list[threading.Thread]:
    """Those that this test has started."""
    return [
        each for each in threading.enumerate() if each.name == "echelon-host-update" and each not in _EARLIER
    ]


@pytest.mark.parametrize("fails", [False, True])
def test_close_ends_the_thread_and_keeps_the_update(fails: bool, held: threading.Event) -> None:
    module = model()
    release_soon(held)
    try:
        with make("offload=optimizer", of=module) as engine:
            engine.step(batch(0))
            assert len(threads()) == 1
            if fails:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert not threads()
    assert all(type(parameter) is nn.Parameter for parameter in module.parameters())
    assert_same(dict(module.state_dict()), weights_after("data=1", 1))


NUMEL = sum(parameter.numel() for parameter in Layers().parameters())
LARGEST = max(sum(p.numel() for p in block.parameters()) for block in Layers().blocks)


def test_memory_of_the_device_is_weights_and_two_gradients() -> None:
    with make("offload=optimizer update=backward", smallest_unit=0, audit="off") as engine:
        train(engine, range(3))
        memory = engine.memory()
        in_flight = [copy.tensor for copies in stepper_of(engine)._stores for copy in copies]
        num_bytes = sum(tensor.numel() * 8 for tensor in in_flight if tensor is not None)
    assert memory.now["optimizer"] == memory.peak["optimizer"] == 0
    assert memory.now["parameters"] == 8 * NUMEL
    assert memory.peak["gradients"] <= 8 * 3 * LARGEST
    assert num_bytes <= 8 * 2 * LARGEST
    assert memory.host["optimizer"] >= 2 * 8 * NUMEL
    assert 8 * NUMEL <= memory.host["parameters"] < 1.2 * 8 * NUMEL
    assert memory.host["gradients"] < 1.2 * 8 * NUMEL


def test_host_bytes_are_known_before_they_are_taken() -> None:
    with make("offload=optimizer") as engine:
        expected = stepper_of(engine).host_bytes()
        assert sum(engine.memory().host.values()) == 0
        train(engine, range(1))
        engine.synchronize()
        taken = sum(engine.memory().host.values())
    assert taken <= 1.1 * expected
    assert expected <= 1.3 * taken


@pytest.mark.parametrize(
    ("plan", "down", "up"),
    [
        ("precision=fp64 offload=optimizer", 8, 8),
        ("precision=fp64 offload=optimizer delay=1", 8, 8),
        ("precision=bf16 offload=optimizer update=backward", 2, 2),
        ("precision=bf16 microbatches=2 offload=optimizer update=last-backward", 4, 2),
        ("precision=bf16 gradients=same offload=optimizer", 2, 2),
    ],
)
def test_the_ledger_has_gradients_down_and_weights_up(plan: str, down: int, up: int) -> None:
    torch.manual_seed(0)
    with echelon.parallelize(Layers(), plan, optimizer=adamw, loss=mean_loss, audit="off") as engine:
        for step in range(3):
            engine.step(vectors(step))
        before = engine.ledger.total("host", "store").sent, engine.ledger.total("host", "fetch").received
        engine.step(vectors(3))
        after = engine.ledger.total("host", "store").sent, engine.ledger.total("host", "fetch").received
    assert (after[0] - before[0], after[1] - before[1]) == (down * NUMEL, up * NUMEL)


def test_a_wait_that_is_left_out_is_found() -> None:
    """The pretended boundary shows it: weights that nobody waits for are not numbers."""
    with make("offload=optimizer", audit="off") as engine:
        stepper_of(engine).weights.on_expect = lambda _: None
        train(engine, range(1))
        stepper_of(engine)._worker.wait()
        weight = engine.module.blocks[0].weight  # type: ignore[index,union-attr]
        assert weight.isnan().all()
        engine.synchronize()
        assert not weight.isnan().any()


@pytest.mark.parametrize("factor", [0.25, torch.tensor(0.25), torch.tensor([0.25], dtype=torch.float64)])
@pytest.mark.parametrize("skip", [False, True, torch.tensor(True), torch.tensor(0.0)])
def test_numbers_of_the_host_are_read_as_they_are(factor: Any, skip: Any) -> None:
    found = HostCopy(_on_one_device(factor, skip)).wait()
    assert found == [0.25, float(bool(skip))]
