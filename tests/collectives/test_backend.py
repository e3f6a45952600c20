"""Which backend moves which tensors: the group is asked, also one whose name says nothing."""

import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from echelon.collectives import Group, Ledger, TorchGroup, group_over, without_serialization_warning
from echelon.collectives.backend import backend_of, backends_of
from echelon.errors import UserError
from echelon.launching import Ranks

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
