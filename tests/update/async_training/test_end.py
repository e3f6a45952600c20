"""How it ends: quietly when all is done, whoever is first; loudly when something breaks; never by hanging."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import echelon
from echelon.launching import RankFailed, rank_process
from tests.cases import perceptron_case, vectors
from tests.ports import free_port
from tests.update.async_training.training import engine_for

SCRIPT = Path(__file__).parent / "scripts" / "ending.py"


def start(*args: str, **environment: str) -> subprocess.Popen[str]:
    shared = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *args],
        env=os.environ | shared | environment | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run_plain_ranks(*args: str) -> list[subprocess.CompletedProcess[str]]:
    """The script as three processes that no one watches, as torchrun would start them."""
    port = str(free_port())
    ranks = [start(*args, MASTER_PORT=port, RANK=str(rank)) for rank in range(3)]
    try:
        return [
            subprocess.CompletedProcess(rank.args, rank.wait(), *rank.communicate(timeout=300))
            for rank in ranks
        ]
    finally:
        for rank in ranks:
            rank.kill()


def run_forked_ranks(folder: Path, *args: str) -> list[subprocess.CompletedProcess[str]]:
    """The same, but for the start: three processes that were one while it imported torch."""
    with start(*args, str(folder), MASTER_PORT=str(free_port())) as script:
        try:
            _, problems = script.communicate(timeout=300)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(script.pid, signal.SIGKILL)
    assert script.returncode == 0, problems

    def read(name: str) -> str:
        return (folder / name).read_text(encoding="utf-8")

    return [
        subprocess.CompletedProcess(
            script.args, int(read(f"code-{rank}")), read(f"stdout-{rank}"), read(f"stderr-{rank}")
        )
        for rank in range(3)
    ]


WHO_IS_DONE_FIRST = pytest.mark.parametrize(("longest", "engine"), [(0, "kept"), (2, "let-go"), (2, "kept")])


@pytest.mark.slow_cases("0-kept")
@pytest.mark.parametrize(
    ("longest", "engine"), [(0, "kept"), pytest.param(2, "let-go", marks=pytest.mark.slow)]
)
def test_a_script_ends_quietly_whoever_is_done_first(longest: int, engine: str, tmp_path: Path) -> None:
    assert_quiet(longest, run_forked_ranks(tmp_path, str(longest), engine))


@pytest.mark.slow
@WHO_IS_DONE_FIRST
def test_a_plain_script_ends_quietly_whoever_is_done_first(longest: int, engine: str) -> None:
    assert_quiet(longest, run_plain_ranks(str(longest), engine))


def assert_quiet(longest: int, ranks: list[subprocess.CompletedProcess[str]]) -> None:
    for rank, ended in enumerate(ranks):
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout == f"rank {rank} made {10 if rank == longest else 2} steps\n"
        assert "rror" not in ended.stderr
        assert "terminate" not in ended.stderr


kept: list[echelon.Engine] = []


def keep_the_engine() -> None:
    kept.append(engine_for(perceptron_case(), "data=3 staleness=1"))
    kept[0].step(kept[0].local(vectors(0)))


@pytest.mark.slow
def test_launched_ranks_end_at_once_though_the_engine_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_process, "_STOP_SECONDS", 300.0)
    begin = time.perf_counter()
    echelon.launch(keep_the_engine, 3)
    assert time.perf_counter() - begin < 250, "or a rank had to be killed after 300 seconds"


def threads_after_the_engine() -> list[str]:
    engine = engine_for(perceptron_case(), "data=3 staleness=inf")
    engine.step(engine.local(vectors(0)))
    del engine
    gc.collect()
    dist.barrier()
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("echelon-worker")]
    for thread in threads:
        thread.join(10.0)
    return [thread.name for thread in threads if thread.is_alive()]


def test_threads_end_with_the_engine() -> None:
    assert echelon.launch(threads_after_the_engine, 3) == [[], [], []]


def lose_a_worker(rank: int) -> None:
    engine = engine_for(perceptron_case(), "data=3 staleness=1")
    for step in range(1000):
        if step == 3 and engine.replica == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        engine.step(engine.local(vectors(step)))


@pytest.mark.slow_cases("0")
@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_dies_ends_the_run_and_is_named(rank: int) -> None:
    with pytest.raises(RankFailed, match=f"rank {rank} was killed by SIGKILL"):
        echelon.launch(lose_a_worker, 3, rank, deadline=30.0)


class Fails(torch.optim.SGD):
    """Fails on its fifth update."""

    updates = 0

    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        self.updates += 1
        if self.updates == 5:
            raise ZeroDivisionError("failed on purpose")


def failing_server(busy: bool) -> None:
    engine = engine_for(
        perceptron_case(), "data=3 staleness=inf", optimizer=lambda parameters: Fails(parameters, lr=0.1)
    )
    if busy and engine.replica == 0:
        time.sleep(600)  # this worker asks the server for nothing: only the others learn of the failure
    for step in range(1000):
        engine.step(engine.local(vectors(step)))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("busy", [False, True])
def test_an_update_that_fails_ends_the_run_loudly(busy: bool) -> None:
    begin = time.perf_counter()
    with pytest.raises(RankFailed, match="ZeroDivisionError: failed on purpose"):
        echelon.launch(failing_server, 3, busy, deadline=300.0)
    assert time.perf_counter() - begin < 250


def raise_in_a_worker() -> None:
    engine = engine_for(perceptron_case(), "data=2 staleness=0")
    engine.step(engine.local(vectors(0)))
    if engine.replica == 1:
        raise KeyError("the worker's own")
    engine.step(engine.local(vectors(1)))


def test_an_error_in_a_worker_is_the_one_that_is_reported() -> None:
    with pytest.raises(RankFailed, match="the worker's own"):
        echelon.launch(raise_in_a_worker, 2, deadline=30.0)
