"""Random plans are equal to one device, and together they have every value of every field.

For each value that a field may have, the smallest training that has it, and random ones. A few of them here;
all of them, and many more, by `make fuzz`.
"""

import shlex
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, seed, settings

from tests.fuzz.draw import Wish, field_values, values_to_cover, wishes
from tests.fuzz.pool import POOL
from tests.fuzz.random_training import RandomTraining
from tests.fuzz.runner import EQUAL, REFUSED, Attempt, Runner, open_runner
from tests.fuzz.strategy import trainings

WISHES = list(wishes())
EACH = (2, 1, 1)  # trainings for a wish, in turn; the first is the smallest that has it
FEW: list[Wish] = [  # of different kinds, of which only the smallest training runs here
    {"schedule": "zero-bubble"},
    {"schedule": "pipedream"},
    {"schedule": "order.txt"},
    {"sync": "async"},
    {"tensor": 2},
    {"context": 2},
    {"attention": "all-to-all", "context": 2},
    {"tokens": 7},
    {"zero": 3},
    {"shard": 2, "sync": "all-reduce", "data": 4},
    {"dropout": 0.2},
    {"precision": "bf16"},
    {"precision": "fp16"},
    {"gradients": "same", "precision": "bf16", "data": 2},
]

OF_OTHERS = [  # what the smallest training of a wish does not have
    "data=2 zero=1 | model=hf-gpt2 layers=2 optimizer=adamw samples=5 batch=own targets=some rates=falling",
    "pipeline=2 microbatches=2 | model=hf-llama layers=2 samples=4 batch=dict boundaries=early deferred=True",
    *(  # compiled in several graphs, with attentions that have a region of their own
        pytest.param(f"{plan} compile=true | model={model} samples=4 seed=3", marks=pytest.mark.slow)
        for plan, model in (("tensor=2", "hf-vit"), ("tensor=2 sequence=true", "hf-qwen3"))
    ),
]

Attempts = list[tuple[Wish, Attempt]]


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with open_runner() as started:
        yield started


@pytest.fixture(scope="module")
def attempts() -> Attempts:
    """The attempts of all tests before."""
    return []


@pytest.mark.slow_cases("0.2", "2-all-reduce-4", "2_0", "2_1")
@pytest.mark.parametrize("wish", FEW, ids=lambda wish: "-".join(map(str, wish.values())))
def test_some_random_plans_are_equal_to_one_device(wish: Wish, runner: Runner) -> None:
    run(WISHES.index(wish), 1, runner, [])


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("line", OF_OTHERS, ids=lambda line: line.split("model=")[1].split()[0])
def test_a_model_of_transformers_is_equal_with_options_of_parallelize(line: str, runner: Runner) -> None:
    attempt = runner.run(RandomTraining.parse(line))
    assert attempt.result == EQUAL, attempt.summary


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(WISHES)), ids=lambda n: "-".join(map(str, WISHES[n].values())))
def test_random_plans_are_equal_to_one_device(number: int, runner: Runner, attempts: Attempts) -> None:
    run(number, 1 if "compile" in WISHES[number] else EACH[number % len(EACH)], runner, attempts)


def run(number: int, num_trainings: int, runner: Runner, attempts: Attempts) -> None:
    """The trainings of a wish: the smallest that has it, and random ones."""

    @seed(number)
    @settings(
        database=None,
        max_examples=num_trainings,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(trainings(WISHES[number]))
    def is_equal(training: RandomTraining) -> None:
        attempt = runner.run(training)
        attempts.append((WISHES[number], attempt))
        again = f"again: python -m tests.fuzz --replay {shlex.quote(str(training))}"
        is_refused = attempt.result == REFUSED and training.model in POOL
        assert attempt.result == EQUAL or is_refused, f"{attempt.summary}\n{again}"

    is_equal()


@pytest.mark.slow
def test_every_value_of_every_field_was_drawn(attempts: Attempts) -> None:
    if {tuple(wish.items()) for wish, _ in attempts} < {tuple(wish.items()) for wish in WISHES}:
        pytest.skip("only some of the random plans were attempt")
    ran = {pair for _, attempt in attempts for pair in field_values(attempt.training)}
    assert set(values_to_cover()) - ran == set()
    assert len(attempts) >= 100
