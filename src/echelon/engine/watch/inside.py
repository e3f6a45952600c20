"""Whether the engine is at work, or the user is: the same call means something else then."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final


@final
class Inside:
    """True while a method of the engine runs, and in threads of the engine's own.

    Hooks on the user's modules hold it. A copy of such a module is nobody's, and asks nobody.
    """

    def __init__(self) -> None:
        self._depth, self._thread = 0, threading.get_ident()

    def __bool__(self) -> bool:
        return self._depth > 0 or threading.get_ident() != self._thread

    @contextmanager
    def __call__(self) -> Iterator[None]:
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def __deepcopy__(self, _: Any) -> "Inside":
        return always_inside()

    def __reduce__(self) -> tuple[Any, ...]:
        return always_inside, ()


def always_inside() -> Inside:
    inside = Inside()
    inside._depth = 1
    return inside
