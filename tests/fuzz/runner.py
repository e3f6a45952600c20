"""Trying random trainings, one after the other, on warm ranks; what fails does not stop the rest."""

import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from echelon.engine import TRAINING_MODULES
from echelon.errors import UserError
from echelon.launching import Ranks, preload
from echelon.plan import Plan
from echelon.verify import verify
from tests.fuzz.case import case_of
from tests.fuzz.drawn import ORDER_FILE, Drawn

EQUAL, REFUSED, FAILED = "equal", "refused", "FAILED"
_DEADLINE = 20.0  # seconds without a sign of life
_MOST_USES = 15  # of ranks: the groups of a training stay there, with their threads, until its ranks end


@dataclass(frozen=True)
class Tried:
    """What became of a training. `text`: the verdict, the refusal, or what went wrong."""

    drawn: Drawn
    result: str
    text: str
    seconds: float

    @property
    def summary(self) -> str:
        """The text without stacks: what happened, and the error in the end."""
        first, *rest = self.text.split("\n\n")
        last = rest[-1].splitlines()[-1] if rest else ""
        return f"{first}\n{last}".strip()

    @property
    def rules(self) -> list[str]:
        """Of a refusal: the rules, without the values that broke them."""
        sentences = re.findall(r"^  - (.*)", self.text, re.MULTILINE) or [self.text.splitlines()[0]]
        return [re.sub(r"\d+", "N", re.sub(r"order-\w+|/\S+", "FILE", its)) for its in sentences]


class Runner:
    """Ranks of every number that was asked for, kept until they fail."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sets: dict[int, Ranks] = {}
        self._uses: Counter[int] = Counter()

    def try_(self, drawn: Drawn) -> Tried:
        """Train and compare. Any error ends those ranks; the next training gets new ones."""
        start = time.monotonic()
        try:
            verdict = verify(case_of(drawn), self._plan(drawn), ranks=self._ranks(drawn.ranks))
            result, text = EQUAL if verdict.equal else FAILED, str(verdict)
        except UserError as error:
            result, text = REFUSED, str(error)
        except Exception as error:  # a rank that failed, died or hung, or the reference itself
            result, text = FAILED, f"{type(error).__name__}: {error}"
        if result != EQUAL:
            self._forget(drawn.ranks)
        return Tried(drawn, result, text, time.monotonic() - start)

    def close(self) -> None:
        for count in list(self._sets):
            self._sets.pop(count).close()

    def _ranks(self, count: int) -> Ranks:
        if self._uses[count] == _MOST_USES:
            self._sets.pop(count).close()
        if count not in self._sets:
            self._sets[count] = Ranks(count, deadline=_DEADLINE)
            self._uses[count] = 0
        self._uses[count] += 1
        return self._sets[count]

    def _forget(self, count: int) -> None:
        ranks = self._sets.pop(count, None)
        self._uses[count] = 0
        if ranks is not None:
            ranks.kill()

    def _plan(self, drawn: Drawn) -> Plan:
        """The plan, with its schedule file written."""
        if drawn.plan.schedule != ORDER_FILE:
            return drawn.plan
        path = self._folder / ORDER_FILE
        path.write_text(drawn.order_text)
        return replace(drawn.plan, schedule=str(path))


@contextmanager
def runner() -> Iterator[Runner]:
    """A runner; references are computed here, beside ranks that fill the cores, so by one thread."""
    preload(*TRAINING_MODULES)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="echelon-fuzz-") as folder:
        its = Runner(Path(folder))
        try:
            yield its
        finally:
            its.close()
            torch.set_num_threads(threads)
