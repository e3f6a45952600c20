"""Planted mistakes: the classic bugs of data parallelism, to prove that `verify` can fail.

Each takes a finished engine and spoils it. They are for `echelon verify --plant NAME` and for tests.
"""

from collections.abc import Callable

from echelon.data_parallel import Sync
from echelon.data_parallel.update import Synchronous
from echelon.engine import Engine

Plant = Callable[[Engine], None]


def _divide_twice(engine: Engine) -> None:
    """The gradient is divided by the number of replicas once more."""
    sync = _sync(engine)
    finish = sync.finish_gradients

    def finish_and_divide() -> None:
        finish()
        for held in sync.held():
            if held.tensor.grad is not None:
                held.tensor.grad.div_(engine.replicas)

    sync.finish_gradients = finish_and_divide  # type: ignore[method-assign]


def _skip_bucket(engine: Engine) -> None:
    """The first gradient buffer of every step is not reduced, so replicas drift apart."""
    group = engine.mesh.group("data")
    reduce = group.all_reduce

    def reduce_all_but_the_first(tensor, op="sum", *, wait=True):  # type: ignore[no-untyped-def]
        about = [move.subject for move in group.ledger.moves]
        if group.ledger.subject == "gradients" and "skipped" not in about:
            with group.ledger.about("skipped"):
                return reduce(tensor[:0].new_zeros(1), op, wait=wait)
        return reduce(tensor, op, wait=wait)

    group.all_reduce = reduce_all_but_the_first  # type: ignore[method-assign]


def _sync(engine: Engine) -> Sync:
    assert isinstance(engine._update, Synchronous)
    return engine._update.sync


PLANTS: dict[str, Plant] = {
    "divide-twice": _divide_twice,
    "skip-bucket": _skip_bucket,
}
