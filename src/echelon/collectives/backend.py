"""What a process group uses for the tensors of a device, and what that means for who waits where."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist

from echelon.errors import UserError
from echelon.launching.group import backends_of

__all__ = ["Backend", "backend_of", "backends_of", "without_serialization_warning"]

_HOST_BACKENDS = ("gloo", "mpi")
_BLOCKING_WAIT = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")
_SHOW_WARNING = "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"


class Backend(NamedTuple):
    """A backend of a process group, for the tensors of one type of device."""

    name: str
    runs_on_host: bool  # in threads, which copy from and to a device; else on streams of the device
    waits_on_host: bool  # whether `wait` returns when an operation is complete
    has_urgent_streams: bool  # whether its streams have high priority


def backend_of(group: dist.ProcessGroup, device_type: str, caller: str) -> Backend:
    """The backend for tensors of this type of device; `caller` opens the message if there is none."""
    names = backends_of(group)
    if device_type not in names:
        raise UserError(
            f"{caller}: the process group must have a backend for the device of the tensors, got tensors on "
            f"{device_type} and backends {_listed(names)}; move the tensors to {' or '.join(names)}, or "
            f"initialise the group with a backend for both, such as backend='cpu:gloo,cuda:nccl'"
        )
    name = names[device_type]
    runs_on_host = device_type == "cpu" or name in _HOST_BACKENDS
    waits_on_host = runs_on_host or any(_is_set(variable) for variable in _BLOCKING_WAIT)
    options = getattr(group._get_backend(torch.device(device_type)), "options", None)
    is_urgent = getattr(options, "is_high_priority_stream", False) or _is_set("TORCH_NCCL_HIGH_PRIORITY")
    return Backend(name, runs_on_host, waits_on_host, is_urgent)


@contextmanager
def without_serialization_warning() -> Iterator[None]:
    """Process groups that are made inside do not warn that their sends and receives run in one order.

    For groups of two ranks in which one sends to the other: one order is what they are for. torch asks the
    environment when a group is made; a filter of Python warnings does not see what its C++ code prints.
    """
    before = os.environ.get(_SHOW_WARNING)
    os.environ[_SHOW_WARNING] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SHOW_WARNING]
        else:
            os.environ[_SHOW_WARNING] = before


def _listed(names: dict[str, str]) -> str:
    return ", ".join(f"{name} for {device}" for device, name in names.items()) or "none"


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("1", "true", "yes", "y")
