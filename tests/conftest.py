"""Shared by all tests: one thread here, and ranks that are kept warm or start with all they need.

Starting new ranks is slow, and so is each module that every one of them must import for itself. A contract
test computes its reference here, beside ranks that fill the cores: its tensors are tiny, and threads that
wait for each other cost it four times its time.
"""

import gc
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch

from echelon.collectives import buffer_layout
from echelon.launching import TRAINING_MODULES, Ranks, launch, preload
from echelon.plan import Plan
from echelon.verify import Case, contract
from echelon.verify.reference import TrainingResult, train_on_one_device
from tests.warm_ranks import WarmRanks

preload(*TRAINING_MODULES, "echelon.verify", "hypothesis", "pytest", "tests.contract_models")
preload("tests.parallel.pipeline.models", "tests.parallel.tensor.models", "tests.fuzz.case")

with suppress(ImportError):  # tests/gpu can do without it
    from hypothesis import HealthCheck, settings

    # That a machine is busy is no reason to fail.
    settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any speed")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that started this in the background has it ignored, by all processes of tests too.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is there before the first test stays to the end: garbage collection need not look at it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Mark as slow the cases that `@pytest.mark.slow_cases(id, …)` names; each must exist."""
    named: dict[str, set[str]] = {}
    for item in items:
        for mark in item.iter_markers("slow_cases"):
            function, _, case = item.nodeid.removesuffix("]").partition("[")
            if case in mark.args:
                item.add_marker("slow")
            named.setdefault(function, set(mark.args)).discard(case)
    _mark_rest_as_slow(items)
    unknown = {function: sorted(cases) for function, cases in named.items() if cases}
    # Of a test chosen by its id, not every case is here.
    if unknown and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(f"slow_cases names cases that do not exist: {unknown}")


def _mark_rest_as_slow(items: Sequence[pytest.Item]) -> None:
    """Of a test with `@pytest.mark.quick_cases(number)`, leave so many cases quick: the first, and others at
    equal distances."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("quick_cases") and not item.get_closest_marker("slow"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for found in cases.values():
        number = found[0].get_closest_marker("quick_cases").args[0]  # type: ignore[union-attr]
        quick = {index * len(found) // number for index in range(number)}
        for index, item in enumerate(found):
            if index not in quick:
                item.add_marker("slow")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flat memory without gaps in this process, so that a test can list all of it."""
    monkeypatch.setattr(buffer_layout, "ALIGNMENT", 1)


@pytest.fixture(scope="session")
def warm_ranks() -> Iterator[Callable[[int], Ranks]]:
    """`warm_ranks(4).run(fn, …)`: one set of ranks for all tests, but a new one after fn has failed."""
    sets: dict[int, Ranks] = {}

    def ranks(count: int) -> Ranks:
        if count not in sets or not sets[count]._is_open:
            sets[count] = WarmRanks(count, deadline=300.0).__enter__()
        return sets[count]

    yield ranks
    for started in sets.values():
        started.__exit__(None, None, None)


MOST_REFERENCES = 16  # that are kept; tests of one case stand beside each other


class _Trainers:
    """Sets of ranks that train for one contract test after the other; a failure ends a set."""

    def __init__(self) -> None:
        self._sets: dict[int, Ranks] = {}
        self._references: dict[object, tuple[Case, TrainingResult]] = {}

    def reference(self, case: Case, dtype: torch.dtype, **settings: Any) -> TrainingResult:
        """The training of a case on one device: of several plans of a case, in float64, the same."""
        made = (case.make_model, case.make_batch, case.loss, case.make_optimizer)
        key = (*made, repr((case.steps, case.clip, case.seed, case.options, settings)))
        if dtype != torch.float64 or key not in self._references:
            result = train_on_one_device(case, dtype, **settings)
            if dtype != torch.float64:
                return result
            if len(self._references) == MOST_REFERENCES:
                self._references.clear()
            self._references[key] = case, result
        return self._references[key][1]

    def launch(
        self, fn: Callable[..., Any], count: int, case: Case, plan: Plan, *args: object, deadline: float
    ) -> list[Any]:
        """As `echelon.launch` does it, but for the start; asynchronous workers want ranks of their own."""
        if plan.sync == "async":
            return launch(fn, count, case, plan, *args, deadline=deadline)
        if count not in self._sets:
            self._sets[count] = WarmRanks(count, deadline=deadline)
        try:
            return self._sets[count].run(fn, case, plan, *args)
        except BaseException:
            del self._sets[count]  # whose ranks have been ended
            raise

    def close(self) -> None:
        for ranks in self._sets.values():
            ranks.close()


@pytest.fixture(scope="session")
def _trainers() -> Iterator[_Trainers]:
    trainers = _Trainers()
    yield trainers
    trainers.close()


@pytest.fixture
def warm_contract(_trainers: _Trainers, monkeypatch: pytest.MonkeyPatch) -> None:
    """`verify` trains on warm ranks, where it would start new ones each time, and on one device once."""
    monkeypatch.setattr(contract, "launch", _trainers.launch)
    monkeypatch.setattr(contract, "train_on_one_device", _trainers.reference)
