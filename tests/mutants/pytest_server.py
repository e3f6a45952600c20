"""Runs pytest over and over, each time in a new child process that has torch loaded already.

Loading torch takes longer than most tests. So a server process loads it once, but nothing of echelon, and
forks a child for each run. The child imports echelon from the folder that it is given, and so do the ranks
that it starts. Requests are lines of JSON on standard input, answers are exit codes on standard output.
"""

import json
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import final

import pytest

PRELOADED = ("torch", "torch.distributed", "torch._dynamo", "numpy")
_INTERNAL_ERROR = int(pytest.ExitCode.INTERNAL_ERROR)
_OPTIONS = ("-x", "-q", "-p", "no:cacheprovider", "--tb=short")


@final
class PytestServer:
    """The server process, from outside."""

    def __init__(self, root: Path, modules: Sequence[str] = PRELOADED) -> None:
        """`root`: the checkout whose tests are run; `modules`: what children have loaded."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, *modules],
            cwd=Path(__file__).resolve().parents[2],
            env=os.environ | {"MUTANTS_ROOT": str(root)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, source: Path, tests: Sequence[str], output: Path, timeout: float) -> int | None:
        """The exit code of pytest, with echelon from the folder `source`; None if it does not end in time."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"source": str(source), "tests": list(tests), "output": str(output), "timeout": timeout}
        print(json.dumps(request), file=self._process.stdin, flush=True)
        code: int | None = json.loads(self._process.stdout.readline())
        return code

    def close(self) -> None:
        """End the process: it ends with its input."""
        self._process.communicate()


def _serve() -> int:
    """Answer requests until there are no more; in a child, return the exit code of pytest."""
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            return _run_pytest(request["source"], request["tests"], request["output"])
        print(json.dumps(_wait(child, request["timeout"])), flush=True)
    return 0


def _run_pytest(source: str, tests: list[str], output: str) -> int:
    os.setsid()
    with open(output, "wb") as file:
        for descriptor in (sys.stdout.fileno(), sys.stderr.fileno()):
            os.dup2(file.fileno(), descriptor)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    root = os.environ.pop("MUTANTS_ROOT")
    os.chdir(root)
    os.environ["PYTHONPATH"] = source
    if not any("tests/gpu/" in test for test in tests):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the others are for processors
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(Path(source).parent / "hypothesis")
    sys.path[:] = [source, root, *(path for path in sys.path if path not in ("", root))]
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    try:
        return int(pytest.main([*_OPTIONS, *tests]))
    except Exception:  # it would end the process with 1, as a test that fails does
        traceback.print_exc()
        return _INTERNAL_ERROR


def _wait(child: int, timeout: float) -> int | None:
    """The exit code of a child, which is killed after `timeout` seconds; what it started ends with it."""
    descriptor = os.pidfd_open(child)
    in_time = bool(select.select([descriptor], [], [], timeout)[0])
    os.close(descriptor)
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:  # it has no session of its own yet
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code if in_time else None


if __name__ == "__main__":
    for module in sys.argv[1:]:
        import_module(module)
    sys.exit(_serve())
