"""Runs the tests, one folder after the other, with the tracer in all their processes.

`python -m tests.mutants.sampling.recording` does it for what is not recorded yet, in `.mutants` of the
checkout, or for the folders that it is given. It takes about twice as long as the tests.
"""

import os
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from tests.mutants.mutant import PACKAGE, ROOT
from tests.mutants.sampling.coverage import merge
from tests.mutants.sampling.draw import HEART

RECORDS = ROOT / ".mutants"
MAP = RECORDS / "map.json"
PACKAGES = [package for packages in HEART.values() for package in packages]

# What tests the library as a whole comes last; what needs a GPU, or tests the tools of tests, is not traced.
_LONGEST = 1800.0  # seconds for one folder; what was recorded until then is used
_LATER = ("engine", "verify", "parallel/pipeline", "parallel/tensor", "train", "nn/dropout")
_NEVER = (
    *("gpu", "mutants", "fuzz", "fuzz_parsers", "chaos", "foreign", "examples"),
    *("benchmarks", "planner", "cli"),
)


def test_folders() -> list[str]:
    """Every folder with test files of its own, below `tests`; "." is `tests` itself."""
    tests = ROOT / "tests"
    folders = sorted({path.parent.relative_to(tests).as_posix() for path in tests.rglob("test_*.py")})
    others = [
        name for name in folders if name not in (*PACKAGES, *_LATER) and name.split("/")[0] not in _NEVER
    ]
    return [name for name in (*PACKAGES, *_LATER, *others) if name in folders]


def record(folder: str) -> None:
    """Trace the tests that lie in one folder of `tests`."""
    place = RECORDS / _name(folder)
    place.mkdir(parents=True, exist_ok=True)
    (place / "test").write_bytes(bytes(4))
    for name in ("hits", "tests"):
        (place / name).write_bytes(b"")
    paths = [ROOT / "src", Path(__file__).parent / "tracer", ROOT]
    variables = {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "MUTANTS_TRACE": str(place),
        "MUTANTS_SOURCE": str(ROOT / PACKAGE),
        "MUTANTS_PACKAGES": ",".join(PACKAGES),
    }
    options = ("-q", "-p", "no:cacheprovider", "-p", "tests.mutants.sampling.pytest_marker", "--durations=0")
    files = sorted(map(str, (ROOT / "tests" / folder).glob("test_*.py")))
    command = [sys.executable, "-m", "pytest", *options, *files]
    with (place / "output").open("wb") as output, suppress(subprocess.TimeoutExpired):
        environment = os.environ | variables
        subprocess.run(command, cwd=ROOT, env=environment, stdout=output, stderr=output, timeout=_LONGEST)
    (place / "done").touch()
    print(f"recorded {folder}", flush=True)


def _name(folder: str) -> str:
    return "top" if folder == "." else folder.replace("/", "-")


def main(folders: Iterable[str]) -> None:
    missing = [name for name in test_folders() if not (RECORDS / _name(name) / "done").is_file()]
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as executor:
        list(executor.map(record, folders or missing))
    merge(RECORDS, PACKAGES).save(MAP)


if __name__ == "__main__":
    main(sys.argv[1:])
