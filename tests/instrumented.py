"""Hooks and forwards that a test puts on a model behind `parallelize`, to see what an engine does."""

from echelon.engine import Engine


def accept(engine: Engine) -> None:
    """Take the modules and weights of now for those that `parallelize` was given. Users have no such call: the
    audit has not seen them."""
    engine._watch._structure.record()
    engine._watch._weights.record()
