import itertools
import pickle
import signal

import pytest
import torch.distributed as dist

from echelon.errors import UserError
from echelon.launching import RankFailed, RankHung
from echelon.launching.watch.failure import (
    Failure,
    Kind,
    PeerLost,
    from_exception,
    from_exit_code,
    is_peer_error,
    root_cause,
)


def test_a_death_comes_before_an_exception_and_a_lost_peer_last() -> None:
    lost = Failure(0, Kind.PEER_LOST, "", stamp=1.0)
    raised = Failure(1, Kind.RAISED, "", stamp=2.0)
    aborted = Failure(3, Kind.ABORTED, "", stamp=3.0)
    died = Failure(2, Kind.DIED, "", stamp=4.0)
    assert root_cause([lost, raised, aborted, died]) is died
    assert root_cause([lost, raised, aborted]) is aborted
    assert root_cause([lost, raised]) is raised
    assert root_cause([lost]) is lost


@pytest.mark.parametrize("kind", Kind)
def test_of_one_kind_the_earliest_is_the_cause_whatever_its_rank(kind: Kind) -> None:
    first = Failure(2, kind, "", stamp=1.0)
    second = Failure(0, kind, "", stamp=2.0)
    third = Failure(1, kind, "", stamp=3.0)
    for failures in itertools.permutations((first, second, third)):
        assert root_cause(failures) is first


@pytest.mark.parametrize(
    "error",
    [
        PeerLost("rank 2 is gone"),
        dist.DistBackendError("NCCL remote error"),
        dist.DistNetworkError("lost"),
        dist.DistStoreError("wait timeout"),
        RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:7050"),
        RuntimeError("Read error: Connection reset by peer"),
    ],
)
def test_peer_errors_are_recognised_also_as_a_cause(error: Exception) -> None:
    wrapped = ValueError("the step failed")
    wrapped.__cause__ = error
    assert is_peer_error(error)
    assert is_peer_error(wrapped)


@pytest.mark.parametrize("error", [ValueError("connection closed by peer"), RuntimeError("shapes differ")])
def test_other_errors_are_no_peer_errors(error: Exception) -> None:
    assert not is_peer_error(error)


def test_an_endless_chain_of_causes_ends() -> None:
    first, second = RuntimeError("a"), RuntimeError("b")
    first.__cause__, second.__cause__ = second, first
    assert not is_peer_error(first)


def test_a_user_error_that_cannot_be_sent_is_reported_as_text() -> None:
    class LocalError(UserError):
        pass

    failure = from_exception(2, LocalError("lr=-1: must be positive"))
    assert failure.user_error is None
    assert "lr=-1: must be positive" in failure.reason


def test_exit_codes_in_words() -> None:
    assert from_exit_code(0, 7, while_starting=False).reason == "exited with code 7 before it finished"
    assert from_exit_code(0, -signal.SIGSEGV, while_starting=True).reason.startswith(
        "was killed by SIGSEGV while it started"
    )
    assert "cannot import the main module" in from_exit_code(0, 1, while_starting=True).reason
    assert "memory runs out" in from_exit_code(0, -signal.SIGKILL, while_starting=False).reason
    assert "signal 63" in from_exit_code(0, -63, while_starting=False).reason


def test_a_rank_that_aborts_is_a_consequence_of_one_that_was_killed() -> None:
    """torch aborts a rank whose NCCL has lost a peer; both ends may be noticed at once, in rank order."""
    aborted = from_exit_code(0, -signal.SIGABRT, while_starting=False)
    killed = from_exit_code(1, -signal.SIGKILL, while_starting=False)
    assert root_cause([aborted, killed]) is killed


def test_a_full_disk_of_temporary_files_is_no_lost_peer() -> None:
    """Ranks were started again and again, which finds the disk as full."""
    for error in (dist.DistStoreError("No space left on device"), _raised_from(dist.DistStoreError)):
        failure = from_exception(1, error)
        assert failure.kind == Kind.RAISED
        assert "whose disk is full (No space left on device); free space there" in str(failure.user_error)
    assert from_exception(1, dist.DistStoreError("wait timeout")).kind == Kind.PEER_LOST
    assert from_exception(1, OSError(28, "No space left on device")).user_error is None, "the user's own"


def _raised_from(kind: type[Exception]) -> Exception:
    try:
        raise RuntimeError from kind("[enforce fail] No space left on device")
    except RuntimeError as error:
        return error


@pytest.mark.parametrize("kind", [RankFailed, RankHung])
def test_the_text_names_rank_reason_others_and_traceback(kind: type[RankFailed]) -> None:
    error = kind(2, "raised ValueError: no", "Traceback …\nValueError: no\n", ["rank 0 was ended"])
    assert str(error) == "rank 2 raised ValueError: no\n  rank 0 was ended\n\nTraceback …\nValueError: no"


def test_it_survives_pickle() -> None:
    error = RankHung(1, "hangs", "stacks", ["rank 0 waits"])
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is RankHung
    assert (copy.rank, copy.reason, copy.traceback, copy.others) == (1, "hangs", "stacks", ("rank 0 waits",))
