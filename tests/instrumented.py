"""Hooks and forwards that a test puts on a model behind `parallelize`, to see what an engine does."""

from echelon.engine import Engine


def accept(engine: Engine) -> None:
    """Take the modules and weights of now for those that `parallelize` was given. Users have no such call,
    since no audit would see them."""
    engine._watch._structure.record()
    engine._watch._weights.record()
