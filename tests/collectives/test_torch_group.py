"""Every collective over real processes: values for several rank counts, lengths and types."""

import os
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from echelon.collectives import (
    Group,
    Ledger,
    TorchGroup,
    group_over,
    naive_all_reduce,
    ring_all_reduce,
    torch_group,
)
from echelon.collectives.process_groups import without_serialization_warning
from echelon.collectives.torch_group import Backend, backend_of, backends_of
from echelon.collectives.work import HOST_TIMING, EventClock, EventTiming
from echelon.errors import UserError
from echelon.launching import Ranks
from tests.collectives.fake_device import FakeDevice

Warm = Callable[[int], Ranks]

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8]


def world() -> TorchGroup:
    assert dist.group.WORLD is not None
    return TorchGroup("data", dist.group.WORLD, Ledger())


def each_rank(size: int, length: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """The initial values of every rank: small integers, exact in every type."""
    return [(torch.arange(length) % 5 + rank + 1).to(dtype) for rank in range(size)]


def reductions(length: int, dtype: torch.dtype) -> None:
    group = world()
    inputs = torch.stack(each_rank(group.size, length, dtype)).double()
    expected = {"sum": inputs.sum(0), "min": inputs.amin(0), "max": inputs.amax(0)}
    if dtype.is_floating_point:
        expected["mean"] = inputs.mean(0).to(dtype).double()
    for op, value in expected.items():
        for reduce in (
            lambda t, op=op: group.all_reduce(t, op),
            lambda t, op=op: group.all_reduce(t, op, wait=False).wait(),
            lambda t, op=op: ring_all_reduce(group, t, op),
            lambda t, op=op: naive_all_reduce(group, t, op, hub=group.size - 1),
        ):
            tensor = inputs[group.rank].to(dtype, copy=True)
            reduce(tensor)
            torch.testing.assert_close(tensor.double(), value, rtol=0.01 if op == "mean" else 0, atol=0)
        tensor = inputs[group.rank].to(dtype, copy=True)
        group.reduce(tensor, target=group.size - 1, op=op)
        if group.rank == group.size - 1:
            torch.testing.assert_close(tensor.double(), value, rtol=0.01 if op == "mean" else 0, atol=0)


@pytest.mark.quick_cases(1)
@pytest.mark.slow_cases("4")
@pytest.mark.parametrize("size", [2, 3, 4])
def test_reductions(warm_ranks: Warm, size: int) -> None:
    for length in (0, 1, size - 1, size, 7, 1000):
        warm_ranks(size).run(reductions, length, torch.float64)
    for dtype in DTYPES:
        warm_ranks(size).run(reductions, 5, dtype)


def movements(part: int, dtype: torch.dtype) -> None:
    group = world()
    size, rank, last = group.size, group.rank, group.size - 1
    inputs = each_rank(size, part * size, dtype)
    whole = torch.stack(inputs)
    own = inputs[rank].clone()

    tensor = own.clone()
    group.broadcast(tensor, source=last)
    assert torch.equal(tensor, inputs[last])

    output = torch.empty(part, dtype=dtype)
    group.reduce_scatter(output, own.clone())
    assert torch.equal(output.double(), whole.double().sum(0)[rank * part : (rank + 1) * part])

    gathered = torch.empty(size, part * size, dtype=dtype)
    group.all_gather(gathered, own)
    assert torch.equal(gathered, whole)

    swapped = torch.empty_like(own)
    group.all_to_all(swapped, own)
    assert torch.equal(swapped, whole[:, rank * part : (rank + 1) * part].flatten())

    group.scatter(output, own if rank == last else None, source=last)
    assert torch.equal(output, inputs[last][rank * part : (rank + 1) * part])

    gathered = torch.empty(size, part * size, dtype=dtype)
    group.gather(own, gathered if rank == 0 else None, target=0)
    assert rank != 0 or torch.equal(gathered, whole)

    left, right = (rank - 1) % size, (rank + 1) % size
    incoming = torch.empty_like(own)
    receiving = group.recv(incoming, left, wait=False)
    group.send(own, right)
    receiving.wait()
    receiving.wait()  # waiting again is harmless
    assert torch.equal(incoming, inputs[left])
    group.barrier()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_movements(warm_ranks: Warm, size: int) -> None:
    for part in (0, 1, 3, 250):
        warm_ranks(size).run(movements, part, torch.float32)
    for dtype in DTYPES:
        warm_ranks(size).run(movements, 2, dtype)


def carries_types_gloo_does_not_know() -> None:
    group = world()
    for dtype in (torch.int16, torch.complex64, torch.bool, torch.float8_e4m3fn):
        sent = torch.arange(6).to(dtype)
        tensor = sent.clone() if group.rank == 0 else torch.zeros(6, dtype=dtype)
        group.broadcast(tensor, source=0)
        assert torch.equal(tensor.view(torch.uint8), sent.view(torch.uint8))


def test_types_that_gloo_does_not_know_travel_as_bytes(warm_ranks: Warm) -> None:
    warm_ranks(2).run(carries_types_gloo_does_not_know)


def uneven_exchange() -> tuple[list[float], int, int]:
    """Rank r sends r+1 rows to rank 0 and nothing to the others."""
    group = world()
    to_all = [group.rank + 1] + [0] * (group.size - 1)
    from_all = [rank + 1 for rank in range(group.size)] if group.rank == 0 else [0] * group.size
    output = torch.empty(sum(from_all), 2)
    group.all_to_all(output, torch.full((sum(to_all), 2), float(group.rank)), from_all, to_all)
    total = group.ledger.total(operation="all_to_all")
    return output[:, 0].tolist(), total.sent, total.received


def test_uneven_and_empty_parts(warm_ranks: Warm) -> None:
    results = warm_ranks(3).run(uneven_exchange)
    assert [rows for rows, _, _ in results] == [[0, 1, 1, 2, 2, 2], [], []]
    assert [sent for _, sent, _ in results] == [0, 2 * 8, 3 * 8]
    assert [received for _, _, received in results] == [5 * 8, 0, 0]


def closes_and_goes_on() -> None:
    """Two groups over one process group: the second close finds it destroyed already."""
    process_group = dist.new_group()
    assert isinstance(process_group, dist.ProcessGroup)
    first, second = (TorchGroup("data", process_group, Ledger()) for _ in range(2))
    del process_group
    first.all_reduce(torch.ones(3))
    for group in (first, first, second):
        group.close()
    with pytest.raises(RuntimeError, match="send along data: the group is closed"):
        first.send(torch.ones(3), 1 - first.rank)
    over_world = world()
    over_world.close()
    dist.barrier()  # the world's process group stays


def test_a_closed_group_is_refused_and_the_world_stays(warm_ranks: Warm) -> None:
    warm_ranks(2).run(closes_and_goes_on)


def connects() -> tuple[list[str], int]:
    """Over a backend of which the host does not wait: the operations of `connect`, in order."""
    group = world()
    assert group.waits_on_host(torch.device("cpu"))
    group.connect(torch.device("cpu"))
    group._backends["cpu"] = Backend("stand-in", False, False, False)
    assert not group.waits_on_host(torch.device("cpu"))
    calls: list[str] = []
    begin = group._begin
    group._begin = lambda call, *args, **kwargs: calls.append(call.__name__) or begin(call, *args, **kwargs)  # type: ignore[method-assign,func-returns-value]
    group.connect(torch.device("cpu"))
    return calls, len(group.ledger.rows())


def test_a_group_connects_before_its_first_operation(warm_ranks: Warm) -> None:
    """Two ranks also exchange a message: torch makes a communicator of its own for those."""
    assert warm_ranks(2).run(connects) == [
        (["all_reduce", "isend", "irecv"], 0),
        (["all_reduce", "irecv", "isend"], 0),
    ]
    assert warm_ranks(3).run(connects) == [(["all_reduce"], 0)] * 3


def asks_for_no_callback() -> list[bool]:
    """Whether the time of completion comes from a callback: in threads of the host, and on a device."""
    group = world()
    results = []
    for runs_on_host in (True, False):
        group._backends["cpu"] = Backend("gloo", runs_on_host, runs_on_host, False)
        work = group._all_reduce(torch.ones(3), "sum")
        work.wait()
        results.append(work.done_at() is not None)
    return results


def test_a_device_has_no_callbacks(warm_ranks: Warm) -> None:
    """torch would run them on a stream that waits for the operation, and is another communicator's too."""
    assert warm_ranks(2).run(asks_for_no_callback) == [[True, False]] * 2


class OnDevice(NamedTuple):
    """As much of a tensor as decides how an operation is measured."""

    device: torch.device


def test_operations_over_nccl_are_measured_by_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collectives on a side stream of another priority than NCCL's, messages without one."""
    clock = EventClock(FakeDevice())
    monkeypatch.setattr(torch_group, "cuda_clock", lambda _device: clock)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: (device, priority))
    group = TorchGroup("data", StandIn(), Ledger())  # type: ignore[arg-type]
    gpu = torch.device("cuda", 0)
    collective, message = (group._timing(name, [OnDevice(gpu)]) for name in ("all_reduce", "recv"))  # type: ignore[list-item]
    assert isinstance(collective, EventTiming)
    assert isinstance(message, EventTiming)
    assert collective._side_stream is not None
    assert collective._side_stream() == (gpu, -1)
    assert message._side_stream is None
    assert group._timing("all_reduce", [torch.ones(2)]) is HOST_TIMING
    assert group._timing("barrier", []) is HOST_TIMING
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    blocking = TorchGroup("data", StandIn(), Ledger())  # type: ignore[arg-type]
    assert blocking._timing("all_reduce", [OnDevice(gpu)]) is HOST_TIMING  # type: ignore[list-item]


def test_after_a_failure_communicators_of_nccl_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """To release one, NCCL waits for operations whose peers may be gone."""
    destroyed: list[object] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", destroyed.append)
    for backends, failed, expected in (
        ({"cuda": "nccl"}, True, 0),
        ({"cpu": "gloo", "cuda": "nccl"}, True, 0),
        ({"cpu": "gloo"}, True, 1),
        ({"cuda": "nccl"}, False, 1),
    ):
        monkeypatch.setattr("echelon.collectives.torch_group.backends_of", lambda _, names=backends: names)
        destroyed.clear()
        TorchGroup("data", StandIn(), Ledger()).close(failed=failed)
        assert len(destroyed) == expected


Warm = Callable[[int], Ranks]

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SHOW_WARNING = "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"


def new_group(backend: str | None) -> dist.ProcessGroup:
    group = dist.new_group(backend=backend)
    assert isinstance(group, dist.ProcessGroup)
    return group


def kinds() -> list[tuple[dict[str, str], str, float]]:
    """For groups of several names: their backends, the kind of Group over them, and a sum."""
    results = []
    for backend in (None, "gloo", "cpu:gloo", "cpu:gloo,cuda:gloo"):
        process_group = new_group(backend)
        group = group_over("data", process_group, Ledger())
        tensor = torch.ones(3)
        group.all_reduce(tensor)
        results.append((backends_of(process_group), type(group).__name__, tensor.sum().item()))
        group.close()
    return results


def test_a_group_has_shared_memory_if_gloo_moves_its_cpu_tensors_whatever_its_name(warm_ranks: Warm) -> None:
    both, host = {"cpu": "gloo", "cuda": "gloo"}, {"cpu": "gloo"}
    for results in warm_ranks(2).run(kinds):
        assert [group for _, group, _ in results] == ["SharedGroup"] * 4
        assert [total for _, _, total in results] == [6.0] * 4
        for backends, expected in zip(results, (both, both, host, both), strict=True):
            assert {device: backends[0][device] for device in expected} == expected


def refused() -> list[str]:
    process_group = new_group("cpu:gloo")
    messages = []
    over_torch = TorchGroup("data", process_group, Ledger())
    groups: list[Group] = [over_torch, group_over("data", process_group, Ledger())]
    for group in groups:
        tensor = torch.ones(3, device="meta")
        for call in (group.all_reduce, lambda tensor, group=group: group.send(tensor, 1 - group.rank)):
            with pytest.raises(UserError) as raised:
                call(tensor)
            messages.append(str(raised.value))
        assert group.ledger.rows() == []
    groups[1].close()
    return messages


def test_tensors_on_a_device_without_a_backend_are_refused_before_anything_moves(warm_ranks: Warm) -> None:
    for messages in warm_ranks(2).run(refused):
        assert len(messages) == 4
        assert messages[0] == (
            "all_reduce along data: the process group must have a backend for the device of the tensors, got "
            "tensors on meta and backends gloo for cpu; move the tensors to cpu, or initialise the group "
            "with a backend for both, such as backend='cpu:gloo,cuda:nccl'"
        )
        assert messages[1].startswith("send along data: ")


class StandIn:
    """A process group of two ranks with NCCL for CUDA tensors and Gloo for others."""

    class _Backend:
        def __init__(self, name: str) -> None:
            self._name = name

        def name(self) -> str:
            return self._name

    _device_types = (CPU, CUDA)

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2

    def _get_backend(self, device: torch.device) -> "StandIn._Backend":
        return self._Backend("nccl" if device.type == "cuda" else "gloo")


def test_only_nccl_lets_the_host_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    group: dist.ProcessGroup = StandIn()  # type: ignore[assignment]
    assert backends_of(group) == {"cpu": "gloo", "cuda": "nccl"}
    assert backend_of(group, "cpu", "send")[:3] == ("gloo", True, True)
    assert backend_of(group, "cuda", "send")[:3] == ("nccl", False, False)
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    assert backend_of(group, "cuda", "send")[:3] == ("nccl", False, True)


def test_streams_of_high_priority_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    group: dist.ProcessGroup = StandIn()  # type: ignore[assignment]
    assert not backend_of(group, "cuda", "send").has_urgent_streams
    monkeypatch.setenv("TORCH_NCCL_HIGH_PRIORITY", "true")
    assert backend_of(group, "cuda", "send").has_urgent_streams


@pytest.mark.parametrize("before", [None, "true"])
def test_the_warning_is_off_only_while_a_group_is_made(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SHOW_WARNING, raising=False)
    if before is not None:
        monkeypatch.setenv(SHOW_WARNING, before)
    with pytest.raises(UserError, match="false"), without_serialization_warning():
        raise UserError(os.environ[SHOW_WARNING])
    assert os.environ.get(SHOW_WARNING) == before
