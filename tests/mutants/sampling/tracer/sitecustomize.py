"""Python imports this at the start of every process that has its folder on PYTHONPATH: pytest and ranks.

MUTANTS_TRACE names a folder with two files: `test`, the number of the test that runs now, which all processes
map; and `hits`, to which each appends a record (test, file, line) when a test reaches a line for the first
time there. Records are written at once, because ranks are killed. Lines of the packages of MUTANTS_PACKAGES
alone are traced, and a function whose lines were all reached is not traced again for the same test.
"""

import mmap
import os
import struct
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

RECORD = struct.Struct("=IHH")


def traced_files(source: Path, places: Iterable[str]) -> list[str]:
    """Of folders, with all below them, and of patterns. In one order for all processes: records have the
    position of a file in this list."""
    patterns = [place if place.endswith(".py") else f"{place}/**/*.py" for place in places]
    return sorted({str(path) for pattern in patterns for path in source.glob(pattern)})


def _install(folder: Path, source: Path, packages: list[str]) -> Any:
    """Returns the trace function: Python forgets one that has raised, as at the end of a recursion."""
    numbers = {path: number for number, path in enumerate(traced_files(source, packages))}
    with (folder / "test").open("r+b") as file:
        test = mmap.mmap(file.fileno(), 4)
    hits = os.open(folder / "hits", os.O_WRONLY | os.O_APPEND)
    tracers: dict[CodeType, Any] = {}
    now = test[:]

    def tracer_of(code: CodeType) -> Any:
        number = numbers[code.co_filename]
        missing = {line for _, _, line in code.co_lines() if line}
        missing.discard(code.co_firstlineno)

        def trace_line(frame: FrameType, event: str, _: object) -> Any:
            if event == "line" and frame.f_lineno in missing:
                missing.discard(frame.f_lineno)
                with suppress(OSError):  # tests limit how large files may be
                    os.write(hits, RECORD.pack(int.from_bytes(test[:], "little"), number, frame.f_lineno))
            return trace_line

        return missing, trace_line

    def trace_call(frame: FrameType, _: str, __: object) -> Any:
        nonlocal now
        code = frame.f_code
        if code.co_filename not in numbers:
            return None
        if test[:] != now:
            now = test[:]
            tracers.clear()
        if code not in tracers:
            tracers[code] = tracer_of(code)
        missing, trace_line = tracers[code]
        return trace_line if missing else None

    threading.settrace(trace_call)
    sys.settrace(trace_call)
    return trace_call


if "MUTANTS_TRACE" in os.environ:
    trace = _install(
        Path(os.environ["MUTANTS_TRACE"]),
        Path(os.environ["MUTANTS_SOURCE"]),
        os.environ["MUTANTS_PACKAGES"].split(","),
    )
