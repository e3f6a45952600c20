"""Shared by all tests: ranks that are kept warm, since starting them anew for every test is slow."""

from collections.abc import Callable, Iterator

import pytest

from echelon.engine import TRAINING_MODULES
from echelon.launching import Ranks, preload

preload(*TRAINING_MODULES)


@pytest.fixture(scope="session")
def warm_ranks() -> Iterator[Callable[[int], Ranks]]:
    """`warm_ranks(4).run(fn, …)`: one set of ranks for all tests. Do not let fn fail in it."""
    sets: dict[int, Ranks] = {}

    def ranks(count: int) -> Ranks:
        if count not in sets:
            sets[count] = Ranks(count, deadline=60.0).__enter__()
        return sets[count]

    yield ranks
    for started in sets.values():
        started.__exit__(None, None, None)
