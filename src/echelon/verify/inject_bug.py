"""Known bugs of data parallelism, injected into the parallel training to prove that `verify` can fail.

Each function takes a finished engine and breaks it. `echelon verify --inject-bug NAME` and tests use them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from echelon.collectives import CompletedWork, Handle
from echelon.data_parallel import Sharing
from echelon.engine import Engine
from echelon.errors import UserError

Bug = Callable[[Engine], None]


def _divide_twice(engine: Engine) -> None:
    """Divide the gradient by the number of replicas once more."""
    for sharing in _sharings(engine):
        reduce = partial(_reduce_and_divide, sharing, sharing.reduce, engine.replicas)
        sharing.reduce = reduce  # type: ignore[method-assign]


def _reduce_and_divide(sharing: Sharing, reduce: Callable[[], None], replicas: int) -> None:
    reduce()
    for local in sharing.local_parameters():
        if local.tensor.grad is not None:
            local.tensor.grad.div_(replicas)


def _skip_bucket(engine: Engine) -> None:
    """Never send the first gradient message of a step, so that this part of the gradient is not summed."""
    _sharings(engine)
    group = engine.mesh.group("data")
    do = group._do

    def do_all_but_the_first(*args: Any, **options: Any) -> Handle:
        operation, traffic, wait, begin, *tensors = args
        sent = any((move.axis, move.subject) == (group.axis, "gradients") for move in group.ledger.moves)
        if group.ledger.subject == "gradients" and not sent:
            begin = CompletedWork
        return do(operation, traffic, wait, begin, *tensors, **options)

    group._do = do_all_but_the_first  # type: ignore[method-assign]


def _sharings(engine: Engine) -> list[Sharing]:
    """How the engine's replicas sum gradients, which these bugs break."""
    if engine.plan.sync != "all-reduce":
        raise UserError(f"--inject-bug needs sync=all-reduce, but the plan is '{engine.plan}'; change sync")
    return engine._local.sharings


BUGS: dict[str, Bug] = {
    "divide-twice": _divide_twice,
    "skip-bucket": _skip_bucket,
}
