"""The failure of a rank, the root cause among several failures, and the errors of a launch that loses a rank.

When one rank is lost, the others soon fail too, in their collectives, and their messages may arrive
first. So failures are ordered by kind first, and then by time.
"""

import contextlib
import enum
import errno
import os
import signal
import sys
import tempfile
import time
import traceback as tracebacks
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from echelon.errors import UserError
from echelon.launching.packing import pack, unpack


class PeerLost(RuntimeError):  # noqa: N818 (says what happened)
    """A rank cannot continue because another rank is gone or failed: a consequence, never the root cause."""


class RankFailed(RuntimeError):  # noqa: N818 (says what happened)
    """One rank ended the run. `rank` is the root cause; `others` has a line about each other rank."""

    def __init__(self, rank: int, reason: str, traceback: str = "", others: Sequence[str] = ()) -> None:
        self.rank = rank
        self.reason = reason
        self.traceback = traceback
        self.others = tuple(others)
        stack = ["", traceback.rstrip()] if traceback else []
        super().__init__("\n".join([f"rank {rank} {reason}", *(f"  {line}" for line in others), *stack]))

    def __reduce__(self) -> tuple[type["RankFailed"], tuple[int, str, str, tuple[str, ...]]]:
        return type(self), (self.rank, self.reason, self.traceback, self.others)


class RankHung(RankFailed):
    """No rank gave a sign of life within the deadline. `traceback` holds the stacks of every rank."""


# In a RuntimeError of gloo, or of the sockets below it, these words mean that the other side is gone.
_PEER_WORDS = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "timed out waiting",
    "gloo/transport",
    "gloo connectfullmesh",
)
_NO_SPACE = os.strerror(errno.ENOSPC)


class Kind(enum.IntEnum):
    """The lower, the more likely it is the root cause."""

    DIED = 0  # killed, or exited without an answer
    ABORTED = 1  # by itself: torch ends a rank so whose NCCL has lost a peer
    RAISED = 2
    PEER_LOST = 3  # raised because another rank was gone


@dataclass(frozen=True)
class Failure:
    """One rank's failure; `reason` follows 'rank 3 …'. `stamp` is monotonic time, one clock for all ranks."""

    rank: int
    kind: Kind
    reason: str
    traceback: str = ""
    user_error: UserError | None = None
    stamp: float = field(default_factory=time.monotonic)


def root_cause(failures: Iterable[Failure]) -> Failure:
    """Return the failure to report: of the likeliest kind, the earliest."""
    return min(failures, key=lambda failure: (failure.kind, failure.stamp))


def from_exception(rank: int, error: BaseException) -> Failure:
    """Return the failure of a rank whose function raised `error`; called in the rank's `except`."""
    text = "".join(tracebacks.format_exception(error))
    if isinstance(error, SystemExit):
        return Failure(rank, Kind.DIED, f"called sys.exit({error.code!r}) before it finished", text)
    full = full_disk_error(error)
    if full is not None:  # a restart would not help
        return Failure(rank, Kind.RAISED, f"raised {full}", text, full)
    kind = Kind.PEER_LOST if is_peer_error(error) else Kind.RAISED
    headline = "".join(tracebacks.format_exception_only(error)).strip()
    user_error = None
    with contextlib.suppress(Exception):  # a subclass may not survive pickling
        if isinstance(error, UserError) and type(unpack(pack(error))) is type(error):
            user_error = error
    return Failure(rank, kind, f"raised {headline}", text, user_error)


def from_exit_code(rank: int, code: int, while_starting: bool) -> Failure:
    names = {each.value: each.name for each in signal.Signals}
    reason = (
        f"was killed by {names.get(-code, f'signal {-code}')}" if code < 0 else f"exited with code {code}"
    )
    reason += " while it started" if while_starting else " before it finished"
    if -code == signal.SIGKILL:
        reason += " (the system sends SIGKILL when memory runs out: see dmesg, or use less memory)"
    if while_starting and code == 1:
        reason += " (usually because it cannot import the main module; see its standard error)"
    return Failure(rank, Kind.ABORTED if -code == signal.SIGABRT else Kind.DIED, reason)


def is_peer_error(error: BaseException) -> bool:
    """Return whether `error`, or one of its causes, means that another rank was lost."""
    return any(_means_peer_lost(each) for each in _chain(error))


def full_disk_error(error: BaseException) -> UserError | None:
    """Return the error that the disk of temporary files, where ranks meet, is full; None for other errors."""
    if not any(_NO_SPACE in str(each) and "Store" in type(each).__name__ for each in _chain(error)):
        return None
    return UserError(
        f"ranks meet in a file of {tempfile.gettempdir()}, whose disk is full ({_NO_SPACE}); free space "
        "there, or set TMPDIR to a folder on another disk"
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _means_peer_lost(error: BaseException) -> bool:
    if isinstance(error, PeerLost):
        return True
    if "torch.distributed" in sys.modules:  # otherwise no error can come from it
        import torch.distributed as dist

        if isinstance(error, dist.DistBackendError | dist.DistNetworkError | dist.DistStoreError):
            return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _PEER_WORDS)
