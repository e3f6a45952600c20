"""A drawn training is valid, prints as a line, and has what was wished for."""

import random

import pytest
from hypothesis import HealthCheck, find, settings

from echelon.plan import Plan
from echelon.program import load_schedule
from tests.fuzz.draw import Wish, draw_random, field_values, wishes
from tests.fuzz.random_training import ORDER_FILE, RandomTraining
from tests.fuzz.strategy import trainings
from tests.fuzz.values import MOST_RANKS


@pytest.mark.quick_cases(25)
@pytest.mark.parametrize("wish", list(wishes()), ids=str)
def test_a_wish_never_ends_without_a_value_and_comes_true(wish: Wish) -> None:
    for number in range(2):
        training = draw_random(f"wish/{number}", wish)
        assert wish.items() <= dict(field_values(training)).items()
        assert 1 <= training.ranks <= MOST_RANKS


def test_a_training_is_read_from_its_line() -> None:
    for number in range(30):
        training = draw_random(f"line/{number}")
        assert RandomTraining.parse(str(training)) == training
        assert "\n" not in str(training)


def test_a_seed_draws_the_same_and_another_seed_something_else() -> None:
    assert draw_random("0/1") == draw_random("0/1")
    assert len({str(draw_random(f"{seed}/1")) for seed in range(20)}) > 15


def test_random_orders_are_complete_programs(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("orders") / ORDER_FILE
    for number in range(30):
        training = draw_random(f"order/{number}", {"schedule": ORDER_FILE})
        path.write_text(training.order_text)
        assert load_schedule(path).microbatches == training.plan.microbatches


@pytest.mark.slow
def test_hypothesis_shrinks_to_the_smallest_training() -> None:
    quick = settings(database=None, suppress_health_check=list(HealthCheck), max_examples=200)

    def condition(training: RandomTraining) -> bool:
        return training.plan.data > 1 and training.plan.zero > 0

    smallest = find(trainings(), condition, settings=quick, random=random.Random(0))
    assert smallest == RandomTraining(Plan(data=2, zero=1), samples=2)
