"""A slow worker slows the others only as far as the staleness says. One of four takes five times as long."""

import time

import pytest

import echelon
from tests.async_training.training import asynchronous, engine_for
from tests.cases import perceptron_case, vectors

PAUSE, SLOWER, SECONDS = 0.03, 5, 1.2


def step_of(engine: echelon.Engine) -> None:
    time.sleep(PAUSE * (SLOWER if engine.replica == 3 else 1))
    engine.step(engine.local(vectors(0)))


def asynchronous_pace(staleness: str) -> float:
    """All workers' steps in a second, while each steps as fast as it may."""
    engine = engine_for(perceptron_case(), f"data=4 staleness={staleness}")
    step_of(engine)  # warm
    before = len(asynchronous(engine).log())
    begin = time.perf_counter()
    while time.perf_counter() - begin < SECONDS:
        step_of(engine)
    pushes = len(asynchronous(engine).log()) - before
    return pushes / (time.perf_counter() - begin)


def synchronous_pace() -> float:
    """The same, where every step waits for every worker."""
    case = perceptron_case()
    engine = echelon.parallelize(case.build(), "data=4", optimizer=case.make_optimizer, loss=case.loss)
    step_of(engine)
    steps = round(SECONDS / (PAUSE * SLOWER))
    begin = time.perf_counter()
    for _ in range(steps):
        step_of(engine)
    return 4 * steps / (time.perf_counter() - begin)


def all_paces() -> dict[str, float]:
    return {"bsp": synchronous_pace()} | {bound: asynchronous_pace(bound) for bound in ("0", "1", "inf")}


@pytest.fixture(scope="module")
def paces() -> dict[str, float]:
    return echelon.launch(all_paces, 4)[0]


def test_without_a_bound_the_others_go_on(paces: dict[str, float]) -> None:
    assert paces["inf"] > 2.5 * paces["bsp"], paces


def test_with_a_bound_the_slowest_sets_the_pace(paces: dict[str, float]) -> None:
    assert paces["0"] < 1.3 * paces["bsp"], paces
    assert paces["1"] < 1.6 * paces["bsp"], paces
