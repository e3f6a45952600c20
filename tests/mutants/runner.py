"""Runs the tests of a mutant against a changed copy of the sources. The tree itself is never changed.

A test that fails has found the mutant, and so has one that does not end in time or crashes. Where quick ones
pass, those marked `slow` run too.
"""

import shutil
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol, Self, final

from tests.mutants.mutant import ROOT, Mutant
from tests.mutants.pytest_server import PRELOADED, PytestServer

FOUND, HANGING, SURVIVED, INVALID = "found", "found (hangs)", "survived", "invalid"

_PASSED, _FAILED, _NO_TESTS = 0, 1, 5  # exit codes of pytest; others mean that no test ran
_SLOW = ("-m", "slow")
_SHOWN = 4000  # characters of the output of tests that should have run


class Change(Protocol):
    """What can be made in a copy of `src`."""

    def apply(self, copy: Path, /) -> None: ...


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant. `output` is that of its tests, where these could not run."""

    mutant: Mutant
    result: str
    seconds: float
    output: str = ""

    @property
    def is_found(self) -> bool:
        return self.result in (FOUND, HANGING)


@final
class Runner:
    """Copies of the sources in a temporary folder, and `jobs` processes that run tests against them."""

    def __init__(
        self,
        root: Path = ROOT,
        *,
        jobs: int = 1,
        timeout: float = 120.0,
        preloaded: Sequence[str] = PRELOADED,
    ) -> None:
        self._jobs, self._timeout = jobs, timeout
        self._folder = tempfile.TemporaryDirectory(prefix="mutants-")
        # One copy for all, of the tests too, so that changes of the tree during a run do not matter.
        checkout = Path(self._folder.name) / "clean"
        self.clean = checkout / "src"
        for folder in ("src", "tests"):
            shutil.copytree(root / folder, checkout / folder)
        shutil.copy(root / "pyproject.toml", checkout)
        self._servers = [PytestServer(checkout, preloaded) for _ in range(jobs)]
        self._idle: SimpleQueue[PytestServer] = SimpleQueue()
        for server in self._servers:
            self._idle.put(server)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            server.close()
        self._folder.cleanup()

    def check_clean(self, tests: Iterable[str], timeout: float) -> str | None:
        """Run the tests against unchanged sources; returns their output, if one fails or none runs."""
        code, output = self.run_tests(self.clean, sorted(set(tests)), timeout)
        return None if code == _PASSED else output

    def run_all(self, mutants: Sequence[Mutant]) -> Iterator[Outcome]:
        """The outcome of each mutant, in order."""
        with ThreadPoolExecutor(self._jobs) as executor:
            yield from executor.map(self.run, mutants)

    def run(self, mutant: Mutant) -> Outcome:
        start = time.monotonic()
        with self.planted(mutant) as copy:
            code, output = self.run_tests(copy, mutant.tests, self._timeout)
            if code in (_PASSED, _NO_TESTS) and self._slow_tests_fail(copy, mutant.tests):
                code = _FAILED
        result = _result(code)
        return Outcome(mutant, result, time.monotonic() - start, output if result == INVALID else "")

    def _slow_tests_fail(self, copy: Path, tests: Sequence[str]) -> bool:
        """Return whether a slow test fails in the copy, and not without the mutant."""
        slow, timeout = (*_SLOW, *tests), 5 * self._timeout
        return (
            self.run_tests(copy, slow, timeout)[0] == _FAILED
            and self.run_tests(self.clean, slow, timeout)[0] == _PASSED
        )

    @contextmanager
    def planted(self, mutant: Change) -> Iterator[Path]:
        """A copy of the sources with the change."""
        with tempfile.TemporaryDirectory(dir=self._folder.name) as folder:
            copy = Path(folder) / "src"
            shutil.copytree(self.clean, copy)
            mutant.apply(copy)
            yield copy

    def run_tests(self, source: Path, tests: Sequence[str], timeout: float) -> tuple[int | None, str]:
        """The exit code, or None if the tests did not end in time; and what they printed."""
        output = Path(self._folder.name) / f"output-{threading.get_ident()}"
        server = self._idle.get()
        try:
            code = server.run(source, tests, output, timeout)
        finally:
            self._idle.put(server)
        return code, output.read_text(encoding="utf-8", errors="replace")[-_SHOWN:]


def _result(code: int | None) -> str:
    if code is None:
        return HANGING
    if code == _PASSED:
        return SURVIVED
    return FOUND if code == _FAILED or code < 0 else INVALID
