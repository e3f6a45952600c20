"""Prints the seconds that importing torch and the first launch of 4 ranks took; closes no warm ranks."""

import time

start = time.monotonic()
import torch  # noqa: E402, F401

torch_seconds = time.monotonic() - start

from echelon.launching import Ranks, launch  # noqa: E402


def work() -> None:
    pass


if __name__ == "__main__":
    start = time.monotonic()
    launch(work, 4)
    print(torch_seconds, time.monotonic() - start)
    ranks = Ranks(2)
    ranks.run(work)
