"""Taking samples: all contenders in turn, round after round.

What the samples mean is in `compare`.
"""

import time
from collections.abc import Callable, Mapping

import torch

Contender = Callable[[], float]  # does its work once and returns the seconds that count


def alternate(contenders: Mapping[str, Contender], rounds: int, *, warmup: int = 1) -> dict[str, list[float]]:
    """The seconds of every contender in every round, after `warmup` rounds that do not count.

    Each round starts one place further, so that nobody always runs first:

        alternate({"a": a, "b": b, "c": c}, rounds=3, warmup=0)     # a b c, b c a, c a b
    """
    names = list(contenders)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for number in range(warmup + rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            samples[name].append(contenders[name]())
    return {name: seconds[warmup:] for name, seconds in samples.items()}


def timed(work: Callable[[], object], before: Callable[[], object] = lambda: None) -> Contender:
    """A contender that does `work`; `before` comes first and does not count. Ranks meet in it."""

    def contender() -> float:
        before()
        _await_device()
        start = time.perf_counter()
        work()
        _await_device()
        return time.perf_counter() - start

    return contender


def _await_device() -> None:
    """A GPU still works when the call that gave it the work has returned."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
