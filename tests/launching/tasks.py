"""Functions that the tests run in ranks: a rank finds them by name, so they stand in a module."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from echelon.errors import UserError
from echelon.launching import PeerLost, beat, entered, is_launched_rank, launch, left, tell
from echelon.launching.group import all_gather_bytes


class NotForSending:
    def __reduce__(self) -> Any:
        raise TypeError("I stay here")


class NotForRebuilding:
    def __reduce__(self) -> Any:
        return refuse_to_rebuild, ()


def refuse_to_rebuild() -> None:
    raise ValueError("I stay there")


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


def fail(how: str, who: int) -> None:
    """Rank `who` fails; all others sit in a barrier that can never end."""
    if dist.get_rank() == who:
        time.sleep(0.05)  # the others are in the barrier by then
        WAYS_TO_FAIL[how]()
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


def lose_a_peer_before_the_cause(who: int) -> None:
    """Every other rank speaks first, of a lost peer; then the cause shows itself."""
    if dist.get_rank() == who:
        time.sleep(0.2)
        raise ValueError("the cause")
    try:
        raise PeerLost("rank 1 is gone")
    except PeerLost as error:
        raise RuntimeError("step 7 failed") from error


def return_something_stubborn(who: int, rebuild: bool) -> object:
    if dist.get_rank() != who:
        return None
    return NotForRebuilding() if rebuild else NotForSending()


def hang(who: int) -> None:
    entered("all_reduce data")
    left()
    if dist.get_rank() == who:
        sleep_through_the_step()
    entered("barrier")
    dist.barrier()
    left()


def sleep_through_the_step() -> None:
    time.sleep(600)


def wait_together() -> None:
    entered("recv")
    time.sleep(600)


def live_long(seconds: float) -> str:
    """Longer than the deadline, but with signs of life from one rank."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.05)
        if dist.get_rank() == 1:
            beat()
    return "done"


def count_aloud(steps: int) -> int:
    for step in range(steps):
        tell((step, torch.tensor([float(step)])))
    return steps


def speak_from_threads(threads: int, words: int) -> None:
    def speak(thread: int) -> None:
        for word in range(words):
            tell((thread, word))

    speakers = [threading.Thread(target=speak, args=(thread,)) for thread in range(threads)]
    for speaker in speakers:
        speaker.start()
    for speaker in speakers:
        speaker.join()


def speak_from_a_fork() -> tuple[int, bool]:
    """Fork a child that tries to speak; return what it says of itself through its exit code."""
    child = os.fork()
    if child == 0:
        tell("I am no rank")
        os._exit(int(is_launched_rank()))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), is_launched_rank()


def gather_bytes(lengths: list[int]) -> list[bytes]:
    """Rank r gives `lengths[r]` bytes, no two neighbours of which are equal."""
    length = lengths[dist.get_rank()]
    return all_gather_bytes(bytes((dist.get_rank() + index) % 251 for index in range(length)))


def use_the_device() -> tuple[str, int, torch.Tensor]:
    """The backend, the device that is current, and a sum made on it."""
    total = torch.ones(3, device="cuda")
    dist.all_reduce(total)
    dist.barrier()
    return dist.get_backend(), torch.cuda.current_device(), total


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
