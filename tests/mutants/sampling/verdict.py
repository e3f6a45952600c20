"""Whether the tests of a mutant find it. What fails must pass without the change, or it is no evidence.

So a test that fails is run again on the unchanged sources, once for all mutants; if it fails there too, on
this machine or at this moment, the mutant is run without it. What does not end in time is found if the
same tests do end without the change.
"""

import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from tests.mutants.runner import FOUND, HANGING, INVALID, SURVIVED, Runner
from tests.mutants.sampling.coverage import Coverage
from tests.mutants.sampling.draw import DrawnMutant

_PASSED, _NO_TESTS = 0, 5  # exit codes of pytest
_BLAMED = re.compile(r"^(?:FAILED|ERROR)(?::? not found:)? (?:\S*?/)??(tests/.*?)(?: - .*)?$", re.MULTILINE)
_MOST_RUNS = 6


@dataclass(frozen=True)
class Verdict:
    """`by`: the test that found it."""

    mutant: DrawnMutant
    result: str
    seconds: float
    by: str = ""
    output: str = ""

    @property
    def is_found(self) -> bool:
        return self.result in (FOUND, HANGING)


@final
class Judge:
    """`patience`: seconds that tests have beside three times what the record says."""

    def __init__(self, runner: Runner, coverage: Coverage, patience: float) -> None:
        self._runner, self._coverage, self._patience = runner, coverage, patience
        self._passing: set[str] = set()
        self.failing: set[str] = set()  # without any change
        self._lock = threading.Lock()

    def judge(self, mutant: DrawnMutant) -> Verdict:
        start = time.monotonic()
        result, by, output = self._find(mutant)
        return Verdict(mutant, result, time.monotonic() - start, by, output)

    def _find(self, mutant: DrawnMutant) -> tuple[str, str, str]:
        output = ""
        with self._runner.planted(mutant) as source:
            for _ in range(_MOST_RUNS):
                tests = [test for test in mutant.tests if not self._is_failing(test)]
                if not tests:
                    return INVALID, "", f"no tests are left\n{output}"
                limit = self._patience + 3 * self._coverage.seconds_of(tests)
                code, output = self._runner.run_tests(source, tests, limit)
                if code in (_PASSED, _NO_TESTS):
                    return SURVIVED, "", ""
                # A process that crashed names no test, nor do tests that did not end.
                blamed = [] if code is None or code < 0 else _BLAMED.findall(output)
                if self._pass_clean(_of_files(blamed, tests) or tests, limit):
                    return (HANGING if code is None else FOUND), blamed[0] if blamed else "", ""
        return INVALID, "", output

    def _is_failing(self, test: str) -> bool:
        return test in self.failing or test.partition("::")[0] in self.failing

    def _pass_clean(self, tests: Sequence[str], limit: float) -> bool:
        """Whether tests pass without a change; if not, those that fail are remembered."""
        if set(tests) <= self._passing:
            return True
        code, output = self._runner.run_tests(self._runner.clean, tests, limit)
        with self._lock:
            if code in (_PASSED, _NO_TESTS):
                self._passing |= set(tests)
                return True
            self.failing |= set([] if code is None or code < 0 else _BLAMED.findall(output)) or set(tests)
        return False


def _of_files(blamed: Sequence[str], tests: Sequence[str]) -> list[str]:
    """For a file that cannot be imported: its tests among those that were to run."""
    return [t for t in tests if t in blamed or t.partition("::")[0] in blamed] or list(blamed)
