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
_TOP = "top"  # files that lie in no folder
_LATER = ("engine", "verify", "pipeline_parallel", "async_training", "tensor_parallel", "train", "dropout")
_NEVER = ("gpu", "mutants", "fuzz", "fuzz_parsers", "chaos", "foreign", "examples", "bench", "planner", "cli")


def test_folders() -> list[str]:
    folders = [path.name for path in sorted((ROOT / "tests").iterdir()) if list(path.glob("test_*.py"))]
    others = [name for name in folders if name not in (*PACKAGES, *_LATER, *_NEVER)]
    return [name for name in (*PACKAGES, *_LATER, *others) if name in folders] + [_TOP]


def record(folder: str) -> None:
    """Trace the tests of one folder of `tests`."""
    place = RECORDS / folder
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
    files = sorted(map(str, (ROOT / "tests").glob("test_*.py"))) if folder == _TOP else [f"tests/{folder}"]
    command = [sys.executable, "-m", "pytest", *options, *files]
    with (place / "output").open("wb") as output, suppress(subprocess.TimeoutExpired):
        environment = os.environ | variables
        subprocess.run(command, cwd=ROOT, env=environment, stdout=output, stderr=output, timeout=_LONGEST)
    (place / "done").touch()
    print(f"recorded {folder}", flush=True)


def main(folders: Iterable[str]) -> None:
    missing = [name for name in test_folders() if not (RECORDS / name / "done").is_file()]
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as executor:
        list(executor.map(record, folders or missing))
    merge(RECORDS, PACKAGES).save(MAP)


if __name__ == "__main__":
    main(sys.argv[1:])
