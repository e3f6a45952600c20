"""The error of ranks that do different things where they must do the same."""


class MismatchError(RuntimeError):
    """Two ranks of a group called different operations where they must call the same one."""
