"""What became of a rank that failed, and which failure of several is the root cause.

When one rank is lost, the others soon fail too, in their collectives, and their messages may arrive
first. So failures are ordered by kind before they are ordered by time.
"""

import enum
import signal
import sys
import time
import traceback as tracebacks
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from echelon.errors import UserError
from echelon.launching.errors import PeerLost
from echelon.launching.transport import pack, unpack

# What gloo, and the sockets under it, say in a plain RuntimeError when the other side is gone.
_PEER_WORDS = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "timed out waiting",
    "gloo/transport",
    "gloo connectfullmesh",
)


class Kind(enum.IntEnum):
    """The lower, the more likely the root cause."""

    DIED = 0  # killed, or left without an answer
    RAISED = 1
    PEER_LOST = 2  # raised because another rank was gone


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
    """The failure to report: of the most telling kind, the earliest."""
    return min(failures, key=lambda failure: (failure.kind, failure.stamp))


def from_exception(rank: int, error: BaseException) -> Failure:
    """The failure of a rank whose function raised `error`; made in the rank, while it is handled."""
    text = "".join(tracebacks.format_exception(error))
    if isinstance(error, SystemExit):
        return Failure(rank, Kind.DIED, f"called sys.exit({error.code!r}) before it was done", text)
    kind = Kind.PEER_LOST if is_peer_error(error) else Kind.RAISED
    headline = "".join(tracebacks.format_exception_only(error)).strip()
    return Failure(rank, kind, f"raised {headline}", text, _portable_user_error(error))


def from_exit_code(rank: int, code: int, while_starting: bool) -> Failure:
    """The failure of a rank whose process ended by itself."""
    reason = f"was killed by {_signal_name(-code)}" if code < 0 else f"exited with code {code}"
    reason += " while it started" if while_starting else " before it was done"
    if -code == signal.SIGKILL:
        reason += " (the system kills with SIGKILL when memory runs out: see dmesg, or use less memory)"
    if while_starting and code == 1:
        reason += " (mostly because it cannot import the main module; its standard error says why)"
    return Failure(rank, Kind.DIED, reason)


def is_peer_error(error: BaseException) -> bool:
    """Whether `error`, or one that led to it, says that another rank was lost."""
    return any(_says_peer_lost(each) for each in _chain(error))


def _portable_user_error(error: BaseException) -> UserError | None:
    """`error` if it is the user's and arrives whole; a subclass may be made so that it cannot."""
    if not isinstance(error, UserError):
        return None
    try:
        return error if type(unpack(pack(error))) is type(error) else None
    except Exception:
        return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _says_peer_lost(error: BaseException) -> bool:
    if isinstance(error, PeerLost):
        return True
    if "torch.distributed" in sys.modules:  # without it nothing can be an error of torch.distributed
        import torch.distributed as dist

        if isinstance(error, dist.DistBackendError | dist.DistNetworkError | dist.DistStoreError):
            return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _PEER_WORDS)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
