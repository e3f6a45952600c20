"""One input: parsed in bounded time and memory. Anything but success or a UserError is a failure."""

import faulthandler
import os
import random
import resource
import signal
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NamedTuple, Never

from echelon.errors import UserError
from tests.fuzz_parsers.targets import Target

SECONDS = 20.0  # of one input; they take milliseconds, but machines are busy
_EXIT_SECONDS = 120.0  # what no exception can interrupt
MOST_BYTES = 10**9

OK, REFUSED, FAILED = "read", "refused", "failed"


class Outcome(NamedTuple):
    target: str
    number: int
    result: str
    text: str
    data: bytes
    seconds: float


class Hang(BaseException):
    """An input took too long."""


def pick(targets: list[Target], number: int) -> Target:
    """By their shares, in turn."""
    place = number % sum(target.share for target in targets)
    for target in targets:
        place -= target.share
        if place < 0:
            return target
    raise AssertionError


def run_input(targets: list[Target], seed: int, number: int) -> Outcome:
    """Draw and parse the input of a number."""
    target = pick(targets, number)
    data = target.draw(random.Random(f"{seed}/{number}"))
    result, text, begin = OK, "", time.monotonic()
    faulthandler.dump_traceback_later(_EXIT_SECONDS, exit=True)
    try:
        with _alarm():
            target.parse(data)
    except UserError as error:
        result, text = REFUSED, str(error)
        if not text.strip() or len(text) > 10_000_000:
            result, text = FAILED, f"an error of {len(text)} characters"
    except (Exception, Hang):
        result, text = FAILED, traceback.format_exc()
    finally:
        faulthandler.cancel_dump_traceback_later()
    return Outcome(target.name, number, result, text, data, time.monotonic() - begin)


@contextmanager
def _alarm() -> Iterator[None]:
    def ring(number: int, frame: FrameType | None) -> Never:
        raise Hang

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def limit_memory() -> None:
    """This process may take MOST_BYTES beyond what it has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * os.sysconf("SC_PAGE_SIZE") + MOST_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))
