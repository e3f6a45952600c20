"""Jobs that this machine cannot run are refused: too many ranks, or too little memory."""

import os
import time
from typing import NamedTuple

import pytest
import torch

from echelon.errors import UserError
from echelon.models import preset
from echelon.plan import Plan
from echelon.train.jobs import machine_fit
from echelon.train.jobs.job import Job, ModelJob, OptimizerJob
from echelon.train.jobs.job_rules import job_errors
from echelon.train.jobs.machine_fit import (
    RANKS_PER_CORE,
    RankBytes,
    host_memory_errors,
    num_states,
    rank_bytes,
    rank_error,
    ranks_on_this_host,
    refuse_small_device,
)


def test_too_many_ranks_for_this_machine() -> None:
    most = RANKS_PER_CORE * (os.cpu_count() or 1)
    assert rank_error(Plan(data=most)) is None
    assert f"needs {most + 1} ranks, but this machine" in str(rank_error(Plan(data=most + 1)))
    assert rank_error(Plan.parse("pipeline=auto")) is None


def test_torchrun_must_have_started_the_plans_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    # Every rank started, and said so with a traceback of its own.
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert rank_error(Plan(data=4)) is None
    assert rank_error(Plan(data=2)) == (
        "plan 'data=2': needs 2 ranks, but torchrun started 4; start torchrun with 2 processes in total, or "
        "change the plan"
    )
    assert rank_error(Plan(data=6, pipeline=2)) == (
        "plan 'data=6 pipeline=2': needs 12 ranks, but torchrun started 4; start torchrun with 12 processes "
        "in total, or change the plan; or add --elastic, which trains with data=2 and the same global batch"
    )
    assert "--elastic" not in (rank_error(Plan(data=6, pipeline=3)) or ""), "4 ranks are no 3 stages"
    assert rank_error(Plan.parse("pipeline=auto data=2")) is None
    assert "start a multiple of 3" in str(rank_error(Plan.parse("pipeline=auto data=3")))


def test_the_ranks_of_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ranks_on_this_host(8) == 8
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert ranks_on_this_host(8) == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert ranks_on_this_host(8) == 4


GB = 10**9


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ("data=4", RankBytes(4 * GB, 4 * GB, 8 * GB)),
        ("data=4 zero=1", RankBytes(4 * GB, 4 * GB, 2 * GB)),
        ("data=4 zero=2", RankBytes(4 * GB, 1 * GB, 2 * GB)),
        ("data=4 zero=3", RankBytes(1 * GB, 1 * GB, 2 * GB)),
        ("data=4 zero=3 shard=2", RankBytes(2 * GB, 2 * GB, 4 * GB)),
        ("data=2 context=2 zero=3", RankBytes(1 * GB, 1 * GB, 2 * GB)),
        ("data=4 sync=parameter-server", RankBytes(4 * GB, 4 * GB, 2 * GB)),
        ("tensor=2 pipeline=2", RankBytes(1 * GB, 1 * GB, 2 * GB)),
        ("precision=bf16", RankBytes(2 * GB, 2 * GB, 12 * GB)),
        ("precision=fp64", RankBytes(8 * GB, 8 * GB, 16 * GB)),
        ("pipeline=auto", RankBytes(4 * GB, 0, 0)),
    ],
)
def test_what_a_rank_holds_of_a_billion_parameters(plan: str, expected: RankBytes) -> None:
    assert rank_bytes(GB, Plan.parse(plan), states=2) == expected


def test_the_states_of_optimizers() -> None:
    states = {
        name: num_states(Job(optimizer=OptimizerJob(name=name)))
        for name in ("adamw", "sgd", "sm3", "adafactor")
    }
    assert states == {"adamw": 2, "sgd": 1, "sm3": 1, "adafactor": 0}
    still = [Job(optimizer=OptimizerJob(name=name, momentum=0)) for name in ("sgd", "sm3")]
    assert [num_states(job) for job in still] == [0, 0]
    assert num_states(Job(average=0.9)) == 3


def test_a_model_far_too_large_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # gpt-175b on 23 GB sat silent for a minute, and then the machine ended it.
    monkeypatch.setattr(machine_fit, "available_memory", lambda: 23 * 2**30)
    began = time.process_time()
    (error,) = job_errors(Job(model=ModelJob(preset="gpt-175b"), plan="data=2 zero=3", batch=2, sequence=128))
    assert time.process_time() - began < 5
    assert error.startswith(
        "plan 'data=2 zero=3': 174,604,259,328 parameters take at least 1.3 TiB (weights "
    )
    assert "on each of 2 ranks here, and this machine has 23.0 GiB of memory free" in error
    assert "a smaller model (the preset gpt-1.3b fits)" in error


def test_the_fix_is_the_least_sharding_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    config = preset("gpt-small")
    whole = rank_bytes(config.num_parameters, Plan.parse("data=2"), 2).total
    job = Job(model=ModelJob(preset="gpt-small"))
    for share, fix in (
        (0.76, "add zero=1 to the plan"),
        (0.63, "zero=2"),
        (0.51, "zero=3"),
        (0.4, "smaller model"),
    ):
        monkeypatch.setattr(machine_fit, "available_memory", lambda share=share: 2 * share * whole)
        (error,) = host_memory_errors(job, config, Plan.parse("data=2"), 2)
        assert fix in error


def test_where_it_fits_or_nobody_knows_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config, plan = preset("gpt-small"), Plan.parse("data=2")
    needed = int(rank_bytes(config.num_parameters, plan, 2).total)
    for free in (None, 2 * needed):
        monkeypatch.setattr(machine_fit, "available_memory", lambda free=free: free)
        assert host_memory_errors(Job(), config, plan, 2) == []
    monkeypatch.setattr(machine_fit, "available_memory", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert host_memory_errors(Job(), config, plan, 2) == [], "the GPUs hold it"
    assert host_memory_errors(Job(), config, plan, 3), "ranks that share GPUs compute on the CPU"


class _Device(NamedTuple):
    type: str = "cuda"


def test_a_gpu_that_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(model=ModelJob(preset="gpt-small"), plan="data=2")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2**30, 2**31))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A GPU")
    with pytest.raises(UserError, match=r"on each rank, and A GPU has 1\.0 GiB free; add zero=3 to the plan"):
        refuse_small_device(job, preset("gpt-small"), _Device())  # type: ignore[arg-type]
    refuse_small_device(job, preset("gpt-small"), torch.device("cpu"))
    refuse_small_device(job, preset("gpt-tiny"), _Device())  # type: ignore[arg-type]
