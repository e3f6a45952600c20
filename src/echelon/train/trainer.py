"""A whole training run: the folder, the ranks, what is shown and kept meanwhile, and how it ends."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from echelon.data import open_corpus
from echelon.engine import TRAINING_MODULES
from echelon.launching import Ranks, is_launched_rank, join, preload, tell
from echelon.plan import Plan
from echelon.train.events import Event
from echelon.train.job import Job, as_plain, check
from echelon.train.logbook import Logbook
from echelon.train.loop import make_batches, train_rank
from echelon.train.run_folder import RunFolder

Show = Callable[[Event], None]


def train(job: Job, show: Show) -> dict[str, Any]:
    """Run `job` on the ranks of its plan and return the summary; `show` is called with every event.

    Starts the ranks on this machine; under torchrun this process is one of them already.
    """
    check(job)
    _check_data(job)
    return _train_among_peers(job, show) if "RANK" in os.environ else _train_here(job, show)


def _train_here(job: Job, show: Show) -> dict[str, Any]:
    preload(*TRAINING_MODULES, __name__)
    with _Run(job, show) as run:
        with Ranks(Plan.parse(job.plan).ranks) as ranks:
            ranks.run(_rank, job, run.folder.path, on_message=lambda _, event: run.take(event))
        return run.finish()


def _train_among_peers(job: Job, show: Show) -> dict[str, Any]:
    """Under torchrun rank 0 keeps the logbook; the others only train."""
    join()
    if os.environ["RANK"] != "0":
        train_rank(job, Path(), _ignore)
        return {}
    with _Run(job, show) as run:
        train_rank(job, run.folder.path, run.take)
        return run.finish()


def _rank(job: Job, folder: Path) -> None:
    assert is_launched_rank()
    train_rank(job, folder, tell)


def _ignore(event: Event) -> None:
    pass


def _check_data(job: Job) -> None:
    """Open the corpus here first: its faults should not have to come out of a rank."""
    corpus = open_corpus(job.data.source, vocab=job.model.config().vocab, dtype=job.data.dtype)
    make_batches(job, corpus)


class _Run:
    """A run folder that ends as finished or failed, whatever happens inside."""

    def __init__(self, job: Job, show: Show) -> None:
        about = {"job": as_plain(job), "plan": job.plan}
        self.folder = RunFolder.create(Path(job.out), job.name, about)
        self._logbook = Logbook(self.folder)
        self._show = show

    def take(self, event: Event) -> None:
        self._logbook.take(event)
        self._show(event)

    def finish(self) -> dict[str, Any]:
        summary = {"run": str(self.folder.path), **self._logbook.close()}
        self.folder.mark("finished", {"summary": summary})
        return summary

    def __enter__(self) -> "_Run":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if kind is not None:
            self.folder.fail(f"{kind.__name__}: {error}")
