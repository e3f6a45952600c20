"""Runs random trainings one after the other on warm ranks; a failure does not stop the rest."""

import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from echelon.errors import UserError
from echelon.launching import TRAINING_MODULES, Ranks, preload
from echelon.plan import Plan
from echelon.verify import Precision, verify
from tests.fuzz.case import case_of
from tests.fuzz.model_rules import LOW_PRECISIONS
from tests.fuzz.ownership import RecordingRanks
from tests.fuzz.random_training import ORDER_FILE, RandomTraining
from tests.fuzz.refusal import run_or_refuse
from tests.fuzz.stopping import go_on_and_list, train_and_save

EQUAL, REFUSED, FAILED = "equal", "refused", "FAILED"
_DEADLINE = 60.0  # seconds without a sign of life
_COMPILING = 180.0  # the same with compile=true: a layer takes many on cores that are shared with other runs
_MOST_USES = 15  # of a set of ranks: a training leaves its groups and their threads there


@dataclass(frozen=True)
class Attempt:
    """A training and its result. `text`: the verdict, the refusal, or the error."""

    training: RandomTraining
    result: str
    text: str
    seconds: float

    @property
    def summary(self) -> str:
        """The text without stacks: what happened, and the last line of the error."""
        first, *rest = self.text.split("\n\n")
        last = rest[-1].splitlines()[-1] if rest else ""
        return f"{first}\n{last}".strip()

    @property
    def rules(self) -> list[str]:
        """Of a refusal: the rules, without the values that broke them."""
        sentences = re.findall(r"^  - (.*)", self.text, re.MULTILINE) or [self.text.splitlines()[0]]
        return list(map(_without_values, sentences))


class Kind(NamedTuple):
    """A set of ranks: how many, and the seconds without a sign of life after which they hang."""

    ranks: int
    deadline: float


class Runner:
    """Sets of ranks by size and deadline, kept until they fail."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sets: dict[Kind, Ranks] = {}
        self._uses: Counter[Kind] = Counter()

    def run(self, training: RandomTraining) -> Attempt:
        """Train, compare, and check what ranks own. An error ends the set of ranks; the next training gets a
        new one."""
        start = time.monotonic()
        kind = _kind_of(training)
        try:
            case, plan = case_of(training), self._plan(training)
            ranks = self._train_first_part(training, kind) if training.before else None
            ranks = ranks or RecordingRanks(self._ranks(kind))
            precision: Precision = plan.precision if plan.precision in LOW_PRECISIONS else "fp64"
            verdict = verify(case, plan, precision=precision, ranks=ranks)
            text = "\n".join([str(verdict), *ranks.errors])
            result = EQUAL if verdict.holds and not ranks.errors else FAILED
        except UserError as error:
            result, text = REFUSED, str(error)
        except Exception as error:  # a rank that failed, died or hung, or the reference itself
            result, text = FAILED, f"{type(error).__name__}: {error}"
        if result == FAILED:
            self._forget(kind)
            if training.before:
                self._forget(_kind_of(training.first_part))
        return Attempt(training, result, text, time.monotonic() - start)

    def _train_first_part(self, training: RandomTraining, kind: Kind) -> RecordingRanks:
        """Train to a checkpoint; returns ranks that go on from there."""
        first, path = training.first_part, self._folder / "checkpoint"
        shutil.rmtree(path, ignore_errors=True)
        plan = replace(first.plan, precision="fp64", gradients="fp32", masters=True)  # as `verify` does it
        train = partial(train_and_save, str(path), training.stop)
        numbers = run_or_refuse(self._ranks(_kind_of(first)), train, case_of(first), plan)[0]
        return RecordingRanks(self._ranks(kind), partial(go_on_and_list, str(path), numbers))

    def close(self) -> None:
        for kind in list(self._sets):
            self._sets.pop(kind).close()

    def _ranks(self, kind: Kind) -> Ranks:
        if self._uses[kind] == _MOST_USES:
            self._sets.pop(kind).close()
        if kind not in self._sets:
            self._sets[kind] = Ranks(kind.ranks, deadline=kind.deadline)
            self._uses[kind] = 0
        self._uses[kind] += 1
        return self._sets[kind]

    def _forget(self, kind: Kind) -> None:
        ranks = self._sets.pop(kind, None)
        self._uses[kind] = 0
        if ranks is not None:
            ranks.kill()

    def _plan(self, training: RandomTraining) -> Plan:
        """The plan, with its schedule file written."""
        if training.plan.schedule != ORDER_FILE:
            return training.plan
        path = self._folder / ORDER_FILE
        path.write_text(training.order_text)
        return replace(training.plan, schedule=str(path))


@contextmanager
def open_runner(*, with_pool: bool = False) -> Iterator[Runner]:
    """A runner; ranks have the packages of the pool from their start, if many will use them. References are
    computed in this process, beside ranks that fill the cores: by one thread."""
    preload(*TRAINING_MODULES, "tests.fuzz.case", *(["tests.fuzz.preloaded"] if with_pool else []))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="echelon-fuzz-") as folder:
        runner = Runner(Path(folder))
        try:
            yield runner
        finally:
            runner.close()
            torch.set_num_threads(threads)


def _kind_of(training: RandomTraining) -> Kind:
    return Kind(training.ranks, _COMPILING if training.plan.compile else _DEADLINE)


def _without_values(text: str) -> str:
    """The words of a refusal: no numbers, no plan, no names of files."""
    text = re.sub(r"order-\w+|/\S+", "FILE", re.sub(r"'\w+=[^']*'", "'…'", text))
    return re.sub(r"\d+", "N", text)
