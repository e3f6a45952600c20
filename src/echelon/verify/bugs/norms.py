"""Bugs of the gradient norm, by which gradients are clipped: what is counted, how often, and by whom."""

from echelon.collectives import Work
from echelon.engine import Engine
from echelon.update.synchronous_update import SynchronousUpdate
from echelon.verify.bugs.alterations import Message, alter


def keep_norms_apart(engine: Engine) -> bool:
    """Each rank clips by the norm of what it holds itself."""
    update = engine._update
    assert isinstance(update, SynchronousUpdate)

    def keep_square(message: Message) -> Work:
        square = message.tensors[0][3:4].clone()  # after loss total, count and scaled count
        work = message.begin()
        work.wait()
        message.tensors[0][3:4] = square  # of an evaluation there is none
        return work

    return alter(update._group, "metrics", keep_square)


def count_first_shard(engine: Engine) -> bool:
    """Of weights that are cut over tensor ranks, or of experts, only the first rank counts its part."""
    position = engine.mesh.position
    for sharing in engine._local.sharings:
        of = sharing.parameter_set
        is_expert = of.name == "experts"
        if (engine.mesh.group("expert").rank if is_expert else position.tensor) > 0:
            vars(of)["uncounted"] = frozenset(of.parameters.values())
    return True


def count_copies(engine: Engine) -> bool:
    """What several ranks hold alike is counted by each of them."""
    sets = [sharing.parameter_set for sharing in engine._local.sharings]
    is_shared = any(of.uncounted for of in sets)
    for of in sets:
        vars(of)["uncounted"] = frozenset()
    return is_shared
