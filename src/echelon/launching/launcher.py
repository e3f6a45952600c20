"""`launch`: run one function in several ranks and return their results."""

from collections.abc import Callable
from typing import TypeVar

from echelon.launching import torchrun
from echelon.launching.environment import Environment
from echelon.launching.messages.calls import pack_call
from echelon.launching.ranks import Ranks
from echelon.launching.watch import guard
from echelon.launching.watch.deadline import FROM_ENVIRONMENT, Deadline

T = TypeVar("T")


def launch(
    fn: Callable[..., T],
    ranks: int,
    *args: object,
    backend: str | None = None,
    deadline: Deadline = FROM_ENVIRONMENT,
    environment: Environment | None = None,
) -> list[T]:
    """Call `fn(*args)` in `ranks` processes of one process group; return the results in rank order.

        results = launch(train, 4, config)

    `deadline` is how many seconds may pass without a sign of life from any rank (None: no limit); without it,
    ECHELON_DEADLINE of the environment, or 1,800. `environment(rank)` has more environment variables for a
    rank, set before CUDA and the process group start there. An error in one rank ends them all and is raised
    as `RankFailed`, with that rank's traceback; a `UserError` is raised unchanged.

    Under torchrun this process is a rank already: `fn` runs here, among its peers. Rank 0 returns all
    results; every other rank returns its own and rank 0's, and a `RemoteResult` in place of the others.
    """
    if torchrun.is_under_torchrun():
        return torchrun.run_among_peers(fn, ranks, args, backend, deadline, environment)
    guard.refuse_while_main_is_imported()
    call = pack_call(fn, args)  # before any process starts
    with Ranks(ranks, backend=backend, deadline=deadline, environment=environment) as started:
        started.run(request_training_modules)  # for the next launch
        return started.run_packed(call)


def request_training_modules() -> None:
    """Runs in every rank: only there may `fork_server` be imported."""
    from echelon.launching import fork_server

    fork_server.request_training_modules()
