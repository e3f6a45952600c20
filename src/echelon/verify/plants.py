"""Planted mistakes: the classic bugs of data parallelism, to prove that `verify` can fail.

Each takes a finished engine and spoils it. They are for `echelon verify --plant NAME` and for tests.
"""

from collections.abc import Callable
from typing import Any

from echelon.collectives import Handle
from echelon.collectives.local import Done
from echelon.data_parallel import Sync, Synchronous
from echelon.engine import Engine
from echelon.errors import UserError

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
    """The first gradient message of every step is never sent, so that part of the gradient is not summed."""
    _sync(engine)
    group = engine.mesh.group("data")
    do = group._do

    def do_all_but_the_first(*args: Any, **options: Any) -> Handle:
        operation, traffic, wait, begin, *tensors = args
        sent = any(move.subject == "gradients" for move in group.ledger.moves)
        if group.ledger.subject == "gradients" and not sent:
            begin = Done
        return do(operation, traffic, wait, begin, *tensors, **options)

    group._do = do_all_but_the_first  # type: ignore[method-assign]


def _sync(engine: Engine) -> Sync:
    """How the engine's replicas agree; the planted bugs are of replicas that sum among themselves."""
    if engine.plan.sync != "all-reduce":
        raise UserError(f"--plant with '{engine.plan}': the bugs are those of sync=all-reduce; use that")
    assert isinstance(engine._update, Synchronous)
    return engine._update.sync


PLANTS: dict[str, Plant] = {
    "divide-twice": _divide_twice,
    "skip-bucket": _skip_bucket,
}
