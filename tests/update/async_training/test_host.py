"""What replica 0 has beside its worker: weights, memory and connections of its own."""

import sys
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.update.async_training import host
from echelon.update.async_training.host import Host, flat_buckets
from echelon.update.precision.stepper import DirectStepper, MasterStepper
from tests.update.async_training.serving import Remote, Served, sgd

pytestmark = pytest.mark.usefixtures("packed")


def tensors(served: Served) -> list[Tensor]:
    return [owned.tensor for owned in served.host.owned()]


def test_the_host_owns_weights_and_state_of_its_own() -> None:
    served = Served(1, staleness=1, make=lambda parameters: torch.optim.SGD(parameters, lr=1.0, momentum=0.9))
    served.push(0, 0, 2.0)
    assert [value.tolist() for value in tensors(served)] == [[-2.0, -2.0], [2.0, 2.0]]
    assert served.parameter.tolist() == [0.0, 0.0], "the worker's weights stay as it pulled them"
    assert [(each.slice.name, each.slice.part) for each in served.host.owned()] == [
        *(("w", "value"), ("w", "momentum_buffer"))
    ]


def make_host(kind: type[DirectStepper] | type[MasterStepper], *parameters: nn.Parameter) -> Host:
    named = [(f"p{number}", parameter) for number, parameter in enumerate(parameters)]
    return Host(named, sgd, kind, workers=1, staleness=0, clip=None, schedule=None)


def test_weights_start_as_the_model_s_in_one_memory_for_each_type() -> None:
    parameters = [nn.Parameter(torch.full((2,), float(number))) for number in range(3)]
    parameters[2].data = parameters[2].data.double()
    made = make_host(DirectStepper, *parameters)
    assert [owned.tensor.tolist() for owned in made.owned()] == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
    assert [tensor.dtype for tensor in made.storages()["parameters"]] == [torch.float32, torch.float64]
    assert len(flat_buckets(parameters)) == 2


def test_masters_are_owned_too() -> None:
    made = make_host(MasterStepper, nn.Parameter(torch.ones(2, dtype=torch.bfloat16)))
    assert [each.slice.part for each in made.owned()] == ["value"], "until the first update"
    made._stepper.step(1.0)
    parts = {each.slice.part: each.tensor.dtype for each in made.owned()}
    assert parts == {"value": torch.bfloat16, "master": torch.float32}
    assert [tensor.dtype for tensor in made.storages()["optimizer"]] == [torch.float32]


def test_each_connection_has_memory_for_weights_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    remote = Remote(monkeypatch, staleness=1)
    assert len(remote.host.storages()["parameters"]) == 1
    assert remote.host.storages()["gradients"] == []
    remote.host._connections.append(remote.connection)
    storages = remote.host.storages()
    assert [tensor.shape for tensor in storages["parameters"]] == [(2,), (2,)]
    assert [tensor.shape for tensor in storages["gradients"]] == [(2,)]
    assert len({tensor.data_ptr() for tensor in (*storages["parameters"], *storages["gradients"])}) == 3
    remote.port.leave()
    remote.host.close()
    assert not remote.connection.thread.is_alive()


class Group:
    """As many ranks as there are workers."""

    def size(self) -> int:
        return 4


def test_every_other_worker_has_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    class Connection:
        def __init__(self, *arguments: Any) -> None:
            self.worker = arguments[2]

        def start(self) -> None:
            started.append(self.worker)

    monkeypatch.setattr(host, "Connection", Connection)
    group: Any = Group()
    Served(4, staleness=1).host.connect(group)
    assert started == [1, 2, 3]


def test_at_exit_a_server_serves_on_unless_the_process_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(1, staleness=1)
    patience: list[float] = []
    monkeypatch.setattr(served.server, "linger", patience.append)
    host._serve_on(weakref.ref(served.server))
    assert patience == [host._PATIENCE_SECONDS]
    monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
    host._serve_on(weakref.ref(served.server))
    assert len(patience) == 1, "nobody comes after an exception"
    monkeypatch.delattr(sys, "last_value")
    host._serve_on(lambda: None)  # type: ignore[arg-type]  # a server that is gone
