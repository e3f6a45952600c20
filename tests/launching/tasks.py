"""Functions that the tests run in ranks. A rank finds them by name, so they are in a module."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from echelon.collectives.agreement import ask_rank_0
from echelon.errors import UserError
from echelon.launching import (
    PeerLost,
    at_instruction,
    beat,
    channel,
    enter_operation,
    group,
    is_launched_rank,
    join,
    launch,
    leave_operation,
    send_message,
)
from echelon.launching.group import all_gather_bytes, broadcast_bytes, gather_bytes
from echelon.launching.placement import RankReport
from echelon.launching.torchrun import share_results
from tests.launching.processes import wait_until


class NotForSending:
    def __reduce__(self) -> Any:
        raise TypeError("I cannot be sent")


class NotForRebuilding:
    def __reduce__(self) -> Any:
        return refuse_to_rebuild, ()


def refuse_to_rebuild() -> None:
    raise ValueError("I cannot be rebuilt")


def rank() -> int:
    return dist.get_rank()


def nothing() -> None:
    pass


def echo(*values: object) -> tuple[object, ...]:
    return values


def sum_of_ranks(start: torch.Tensor) -> torch.Tensor:
    total = start + dist.get_rank()
    dist.all_reduce(total)
    return total


def pid_and_group() -> tuple[int, int, int]:
    dist.barrier()
    return os.getpid(), os.getsid(0), os.getpgid(0)


def surroundings() -> dict[str, Any]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "ECHELON_TEST_MARK")
    return {
        "environment": {name: os.environ.get(name) for name in names},
        "threads": torch.get_num_threads(),
        "stdin": os.read(0, 10),
        "folder": os.getcwd(),
        "backend": dist.get_backend(),
        "launched": is_launched_rank(),
    }


def fail(way: str, failing_rank: int) -> None:
    """Rank `failing_rank` fails when all others are about to enter a barrier that can never end."""
    token = torch.zeros(1)
    if dist.get_rank() == failing_rank:
        for peer in set(range(dist.get_world_size())) - {failing_rank}:
            dist.recv(token, peer)
        WAYS_TO_FAIL[way]()
    dist.send(token, failing_rank)
    dist.barrier()


def _raise_value_error() -> None:
    raise ValueError("the learning rate went for a walk")


def _raise_user_error() -> None:
    raise UserError("2 errors in the job:", ["lr=-1: must be positive", "steps=0: must be at least 1"])


def _dump_core() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


WAYS_TO_FAIL = {
    "raise": _raise_value_error,
    "user error": _raise_user_error,
    "sys.exit": lambda: sys.exit(3),
    "_exit 0": lambda: os._exit(0),
    "_exit 7": lambda: os._exit(7),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSEGV": _dump_core,
}


def lose_a_peer_before_the_cause(failing_rank: int, folder: str) -> None:
    """Every other rank reports a lost peer first; then the cause follows."""
    others = set(range(dist.get_world_size())) - {failing_rank}
    if dist.get_rank() == failing_rank:
        _await_reports(others, folder)
        raise ValueError("the cause")
    _note_when_reported(folder)
    try:
        raise PeerLost("rank 1 is gone")
    except PeerLost as error:
        raise RuntimeError("step 7 failed") from error


def fail_in_order(order: list[int], folder: str) -> None:
    """The ranks of `order` fail one after the other: each when the one before has reported its failure."""
    place = order.index(dist.get_rank())
    _await_reports(order[:place], folder)
    _note_when_reported(folder)
    raise ValueError(f"failure {place}")


def _note_when_reported(folder: str) -> None:
    """Leave a file in `folder` as soon as this rank has sent its next message, which is its failure."""
    rank_channel = channel._channel
    assert rank_channel is not None
    send, note = rank_channel.send, Path(folder) / f"reported-{dist.get_rank()}"

    def send_and_note(data: bytes) -> None:
        send(data)
        note.touch()

    rank_channel.send = send_and_note  # type: ignore[method-assign]


def _await_reports(ranks: Iterable[int], folder: str) -> None:
    notes = [Path(folder) / f"reported-{rank}" for rank in ranks]
    assert wait_until(lambda: all(note.exists() for note in notes), 60)


def return_something_stubborn(failing_rank: int, rebuild: bool) -> object:
    if dist.get_rank() != failing_rank:
        return None
    return NotForRebuilding() if rebuild else NotForSending()


def hang(sleeping_rank: int) -> None:
    enter_operation("all_reduce data")
    leave_operation()
    if dist.get_rank() == sleeping_rank:
        sleep_through_the_step()
    enter_operation("barrier")
    dist.barrier()
    leave_operation()


def sleep_through_the_step() -> None:
    time.sleep(600)


def wait_together() -> None:
    enter_operation("recv")
    time.sleep(600)


def beat_until(end: str) -> str:
    """Rank 1 gives signs of life, and no other does, until the file `end` exists."""
    while not Path(end).exists():
        time.sleep(0.005)
        if dist.get_rank() == 1:
            beat()
    return "done"


def send_counts(steps: int) -> int:
    for step in range(steps):
        send_message((step, torch.tensor([float(step)])))
    return steps


def send_counts_and_die(steps: int) -> None:
    send_counts(steps)
    os._exit(7)


def fail_after_a_message(seconds: Sequence[float]) -> None:
    """Each rank waits, says its number and fails."""
    rank = dist.get_rank()
    time.sleep(seconds[rank])
    send_message(rank)
    raise RuntimeError(f"rank {rank}")


def send_from_threads(threads: int, words: int) -> None:
    def send(thread: int) -> None:
        for word in range(words):
            send_message((thread, word))

    senders = [threading.Thread(target=send, args=(thread,)) for thread in range(threads)]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()


def send_from_a_fork() -> tuple[int, bool]:
    """Fork a child that tries to send; its exit code says whether it takes itself for a rank."""
    child = os.fork()
    if child == 0:
        send_message("I am no rank")
        os._exit(int(is_launched_rank()))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), is_launched_rank()


def bytes_of(rank: int, length: int) -> bytes:
    """What `rank` gives: no two neighbours are equal."""
    return bytes((rank + index) % 251 for index in range(length))


def all_gather(lengths: list[int]) -> list[bytes]:
    return all_gather_bytes(bytes_of(dist.get_rank(), lengths[dist.get_rank()]))


def gather_and_broadcast(lengths: list[int], chunk: int) -> tuple[list[bytes], bytes]:
    data = bytes_of(dist.get_rank(), lengths[dist.get_rank()])
    with patch.object(group, "_CHUNK_BYTES", chunk):
        return gather_bytes(data, lengths), broadcast_bytes(data, lengths[0])


def kinds_of_backends() -> list[str | None]:
    """The backends for CPU and GPU tensors of the world, and of a group that has one for the CPU alone."""
    world = dist.group.WORLD
    cpu_group = dist.new_group(backend="cpu:gloo")
    kinds = [group.backend_for(device, each) for each in (world, cpu_group) for device in ("cpu", "cuda")]
    dist.barrier()  # the other rank may still be connecting
    dist.destroy_process_group(cpu_group)
    return kinds


def join_on_gpus(gpus: list[str]) -> str:
    """What `join` raises in a group of the user's, over NCCL, where rank r uses `gpus[r]`."""
    report = RankReport("this host", "id", None, (gpus[dist.get_rank()],))
    with (
        patch.object(group, "_checked_world", None),
        patch.object(group, "backend_for", lambda *_: "nccl"),
        patch.object(group, "report_current", lambda: report),
    ):
        try:
            join()
        except UserError as error:
            return str(error)
    return ""


def share(values: list[Any]) -> Any:
    """What `share_results` makes of `values[r]`, or the text of its error."""
    try:
        return share_results(values[dist.get_rank()])
    except (UserError, TypeError) as error:
        return f"{type(error).__name__}: {error}"


def share_something_stubborn(failing_rank: int) -> Any:
    stubborn = {"runs": [1, 2, NotForSending()]}
    return share([stubborn if rank == failing_rank else rank for rank in range(dist.get_world_size())])


def ask_something_stubborn() -> str:
    """The error of this rank where rank 0 answers with what cannot be sent."""
    try:
        return f"returned {ask_rank_0(NotForSending)}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def hold_the_interpreter() -> None:
    """Sleep in C, without letting any Python thread run."""
    send_message("about to sleep")
    while True:
        ctypes.PyDLL(None).sleep(600)


def environment_of(names: list[str]) -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in names}


def hang_at_an_instruction(sleeping_rank: int) -> None:
    """As on a GPU: the host runs ahead of its operations, then waits for the device."""
    at_instruction(f"RG5 of stage {dist.get_rank()}")
    for _ in range(1 if dist.get_rank() == sleeping_rank else 2):
        enter_operation("recv pipeline")
        leave_operation()
    sleep_through_the_step()


def launch_again() -> None:
    launch(nothing, 1)


def leave_a_child_behind() -> int:
    return subprocess.Popen(["sleep", "600"]).pid


def sit(folder: str) -> None:
    """Leave the ids of this rank and of a child of it in `folder`, then never end."""
    child = leave_a_child_behind()
    note = Path(folder) / f"rank-{dist.get_rank()}"
    note.with_suffix(".part").write_text(f"{os.getpid()} {child}")
    note.with_suffix(".part").rename(note)
    if dist.get_rank() == 0:
        time.sleep(600)
    dist.barrier()


def send_and_sleep() -> None:
    send_message("about to sleep")
    time.sleep(600)
