"""`launch`: one function, some ranks, what each returned."""

from collections.abc import Callable
from typing import TypeVar

from echelon.launching import guard, torchrun
from echelon.launching.calls import pack_call
from echelon.launching.ranks import Ranks

T = TypeVar("T")


def request_training_modules() -> None:
    """In a rank: let the fork server load what training needs, for later launches (`fork_server.py`)."""
    # The fork server and its ranks alone may import this.
    from echelon.launching import fork_server

    fork_server.request_training_modules()


def launch(
    fn: Callable[..., T],
    ranks: int,
    *args: object,
    backend: str | None = None,
    deadline: float | None = 1800.0,
) -> list[T]:
    """Call `fn(*args)` in `ranks` processes of one process group; return the results in rank order.

        results = launch(train, 4, config)

    Under torchrun this process is a rank already: `fn` runs here, among the peers, and every rank
    returns all results. An error in one rank ends them all and is raised as `RankFailed`, with that
    rank's traceback; a `UserError` is raised as it is.
    """
    if torchrun.is_under_torchrun():
        return torchrun.run_among_peers(fn, ranks, args, backend, deadline)
    guard.refuse_while_main_is_imported()
    call = pack_call(fn, args)  # before anything is started
    with Ranks(ranks, backend=backend, deadline=deadline) as started:
        started.run(request_training_modules)
        return started.run_packed(call)
