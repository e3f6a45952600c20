"""Long work of the host alone (a sample, a picture, a profile) gives signs of life as long as it computes."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from echelon.launching.watch import pulse

_PERIOD_SECONDS = 0.25


@contextmanager
def host_work(name: str) -> Iterator[None]:
    """Inside, this thread works alone, for as long as it takes: at 'the sample'.

    A second thread beats for it while it uses the processor, and names it where ranks are listed. Work that
    waits for a disk or a lock which never comes is silent, and found as a hang. Not for work that waits for a
    device: that uses the processor too.
    """
    if not pulse.has_slot():
        yield
        return
    done = threading.Event()
    clock = time.pthread_getcpuclockid(threading.get_ident())
    watcher = threading.Thread(target=_beat_while_busy, args=(clock, done), name="echelon-beat", daemon=True)
    pulse.at_instruction(name)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
        pulse.at_instruction("")


def _beat_while_busy(clock: int, done: threading.Event) -> None:
    last = time.clock_gettime(clock)
    while not done.wait(_PERIOD_SECONDS):
        now = time.clock_gettime(clock)
        if now > last and not pulse.read_own().waits:
            pulse.beat()
        last = now
