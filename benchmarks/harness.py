"""Takes samples of all contenders in turn, round after round. `compare` evaluates them. `tell` says on stderr
how far a long bench is."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from echelon.launching import Ranks

Contender = Callable[[], float]  # does its work once and returns the seconds that count


@contextmanager
def measuring_ranks(count: int) -> Iterator[Ranks]:
    """Ranks on GPUs if there is one for each, else on the CPU.

    NCCL refuses two ranks on one GPU, and over Gloo the peers cannot send from a GPU.
    """
    environment = dict(os.environ)
    if 0 < torch.cuda.device_count() < count:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # for the ranks, which look for GPUs themselves
    try:
        with Ranks(count) as ranks:
            yield ranks
    finally:
        os.environ.clear()
        os.environ.update(environment)


def alternate(contenders: Mapping[str, Contender], rounds: int, *, warmup: int = 1) -> dict[str, list[float]]:
    """The seconds of every contender in every round, after `warmup` rounds that do not count.

    Each round starts with the next contender, so that none always runs first:

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
    """A contender that times `work`. `before` runs first and does not count: a barrier between ranks."""

    def contender() -> float:
        before()
        _await_device()
        start = time.perf_counter()
        work()
        _await_device()
        return time.perf_counter() - start

    return contender


def tell(bench: str, text: str) -> None:
    print(f"{bench}: {text}", file=sys.stderr, flush=True)


def _await_device() -> None:
    """Wait for the GPU: calls return before it has done their work."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
