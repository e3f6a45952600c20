"""Ranks of torchrun: they are started again and go on; SIGTERM saves, whoever gets it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from echelon.train.jobs.job import Job
from echelon.train.trainer import train
from tests.chaos.parent import flat_settings
from tests.chaos.training import differences, short_job
from tests.launching.processes import still_alive
from tests.ports import free_port

pytestmark = pytest.mark.slow


@contextmanager
def torchrun(job: Job, *options: str, more: tuple[str, ...] = ()) -> Iterator["subprocess.Popen[str]"]:
    with agent(job, "--standalone", *options, more=more) as process:
        yield process


@contextmanager
def agent(job: Job, *options: str, more: tuple[str, ...] = ()) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "torch.distributed.run", *options]
    command += ["--module", "echelon", "train", *more, *flat_settings(job)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def workers(process: "subprocess.Popen[str]") -> list[int]:
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(pid) for pid in path.read_text(encoding="utf-8").split()]


def rank_of(pid: int) -> int:
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    (text,) = [each for each in variables if each.startswith(b"RANK=")]
    return int(text.partition(b"=")[2])


def await_step(process: "subprocess.Popen[str]", out: Path, step: int) -> Path:
    def reached() -> bool:
        assert process.poll() is None, process.stdout and process.stdout.read()
        return any(f'"step": {step},' in path.read_text() for path in out.glob("*/metrics.jsonl"))

    _await(reached)
    (run,) = out.iterdir()
    return run


def _await(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < give_up, "it never came"
        time.sleep(0.01)


def state(run: Path) -> str:
    return str(json.loads((run / "run.json").read_text(encoding="utf-8"))["state"])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_started_again_and_finds_its_run(rank: int, tmp_path: Path) -> None:
    reference = Path(train(short_job(tmp_path / "a", "data=2 zero=1"), lambda _: None)["run"])
    job = short_job(tmp_path / "b", "data=2 zero=1")
    with torchrun(job, "--nproc-per-node=2", "--max-restarts=2") as process:
        run = await_step(process, tmp_path / "b", 5)
        pids = workers(process)
        os.kill(next(pid for pid in pids if rank_of(pid) == rank), signal.SIGKILL)
        out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    assert "going on after step" in out
    assert state(run) == "finished"
    assert differences(run, reference) == []
    assert still_alive(pids) == []


@pytest.mark.parametrize("who", ["torchrun", "rank 0", "rank 1"])
def test_sigterm_saves_whoever_gets_it(who: str, tmp_path: Path) -> None:
    job = short_job(tmp_path, "data=2", steps=5000)
    with torchrun(job, "--nproc-per-node=2", "--max-restarts=0") as process:
        run = await_step(process, tmp_path, 3)
        pids = workers(process)
        ranks = {f"rank {rank_of(pid)}": pid for pid in pids}
        os.kill(ranks.get(who, process.pid), signal.SIGTERM)
        out, _ = process.communicate(timeout=300)
    assert state(run) == "preempted", out
    assert still_alive(pids) == []
    last = max(int(path.name.removeprefix("step-")) for path in run.glob("checkpoints/step-*"))
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(lines[-1])["step"] == last
    assert f"step {last} was the last, and is saved" in out


def test_fewer_ranks_are_named_and_elastic_trains_with_them(tmp_path: Path) -> None:
    job = short_job(tmp_path, "data=3", steps=2)
    with torchrun(job, "--nproc-per-node=2") as process:
        out, _ = process.communicate(timeout=300)
    assert "add --elastic, which trains with data=2" in out
    with torchrun(job, "--nproc-per-node=2", more=("--elastic",)) as process:
        out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    assert "training with 'data=2', and the same global batch of 6" in " ".join(out.split())


def test_a_node_that_is_lost_for_good_leaves_a_smaller_job_that_goes_on(tmp_path: Path) -> None:
    # Two agents of torchrun, each a node of one rank. The one that does not hold the rendezvous is killed.
    job = short_job(tmp_path, "data=2", steps=60)
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=nodes"]
    quick = "--rdzv-conf=last_call_timeout=15,keep_alive_interval=1,keep_alive_max_attempt=3,is_host="
    options = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--local-addr=127.0.0.1"]
    with (
        agent(job, *options, *rendezvous, f"{quick}true", more=("--elastic",)) as stays,
        agent(job, *options, *rendezvous, f"{quick}false", more=("--elastic",)) as lost,
    ):
        run = await_step(stays, tmp_path, 5)
        assert {rank_of(pid) for pid in (*workers(stays), *workers(lost))} == {0, 1}
        pids = [lost.pid, *workers(lost)]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        out, _ = stays.communicate(timeout=300)
    assert stays.returncode == 0, out
    assert "training with 'data=1', and the same global batch of 6" in " ".join(out.split())
    assert state(run) == "finished"
    assert still_alive(pids) == []
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert sorted(set(steps)) == list(range(1, 61))
