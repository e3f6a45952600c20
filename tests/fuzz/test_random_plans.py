"""Random plans are equal to one device, and the drawn ones have every value of every field.

For each value that a field may have, the smallest training that has it, and random ones. `make fuzz` tries
many more.
"""

import shlex
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, seed, settings

from tests.fuzz.draw import Wish, covered, drawings, values_to_cover, wishes
from tests.fuzz.drawn import Drawn
from tests.fuzz.runner import EQUAL, Runner, Tried, runner

WISHES = list(wishes())
EACH = (2, 1, 1)  # trainings for a wish, in turn; the first is the smallest that has it

Tries = list[tuple[Wish, Tried]]


@pytest.fixture(scope="module")
def its() -> Iterator[Runner]:
    with runner() as started:
        yield started


@pytest.fixture(scope="module")
def tries() -> Tries:
    """What was tried before."""
    return []


@pytest.mark.parametrize("number", range(len(WISHES)), ids=lambda n: "-".join(map(str, WISHES[n].values())))
def test_random_plans_are_equal_to_one_device(number: int, its: Runner, tries: Tries) -> None:
    @seed(number)
    @settings(
        database=None,
        max_examples=1 if "compile" in WISHES[number] else EACH[number % len(EACH)],
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(drawings(WISHES[number]))
    def is_equal(drawn: Drawn) -> None:
        tried = its.try_(drawn)
        tries.append((WISHES[number], tried))
        again = f"again: python -m tests.fuzz --replay {shlex.quote(str(drawn))}"
        assert tried.result == EQUAL, f"{tried.summary}\n{again}"

    is_equal()


def test_every_value_of_every_field_was_drawn(tries: Tries) -> None:
    if {tuple(wish.items()) for wish, _ in tries} < {tuple(wish.items()) for wish in WISHES}:
        pytest.skip("only some of the random plans were tried")
    drawn = {pair for _, tried in tries for pair in covered(tried.drawn)}
    assert set(values_to_cover()) - drawn == set()
    assert len(tries) >= 100
