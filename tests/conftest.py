"""Shared by all tests: ranks that are kept warm, since starting them anew for every test is slow."""

from collections.abc import Callable, Iterator

import pytest

from echelon.launching import Ranks


@pytest.fixture(scope="session")
def warm_ranks() -> Iterator[Callable[[int], Ranks]]:
    """`warm_ranks(4).run(fn, …)`: one set of ranks a count for the whole session. Do not let fn fail in it."""
    sets: dict[int, Ranks] = {}

    def ranks(count: int) -> Ranks:
        if count not in sets:
            sets[count] = Ranks(count, deadline=60.0).__enter__()
        return sets[count]

    yield ranks
    for started in sets.values():
        started.__exit__(None, None, None)
