"""Jobs: defaults that hold, and every fault at once."""

import dataclasses

import pytest

from echelon.errors import UserError
from echelon.models import build, save_hf
from echelon.train.job import DataJob, Job, ModelJob, OptimizerJob, as_plain, check


def faults_of(job: Job) -> tuple[str, ...]:
    with pytest.raises(UserError) as caught:
        check(job)
    return caught.value.faults


def test_the_embedded_default_is_sound() -> None:
    check(Job())
    assert Job().sequence_length == 128
    assert Job().model.config().num_parameters < 2_000_000


def test_all_faults_come_at_once() -> None:
    job = Job(
        plan="data=0",
        steps=0,
        batch=4,
        name="a/b",
        model=ModelJob(preset="gpt-tny"),
        optimizer=OptimizerJob(name="adam", learning_rate=-1, clip=0, betas=(0.9, 1.0), schedule="cosin"),
    )
    faults = faults_of(job)
    starts = [
        "steps=0",
        "name='a/b'",
        "optimizer.name=adam",
        "optimizer.learning_rate=-1",
        "optimizer.clip=0",
        "optimizer.betas",
        "plan: data=0",
        "model: ",
        "optimizer.schedule: ",
    ]
    assert all(any(fault.startswith(start) for fault in faults) for start in starts), faults
    assert any("gpt-tiny" in fault for fault in faults), "near-miss of the preset"
    assert any("did you mean 'cosine'" in fault for fault in faults)


def test_values_that_do_not_fit_together() -> None:
    assert "set batch=8" in faults_of(Job(plan="data=8", batch=4))[0]
    assert "set model.sequence=4096 too" in faults_of(Job(sequence=4096))[0]


def test_model_values_change_the_preset() -> None:
    config = ModelJob(layers=2, width=64, tied=False).config()
    assert (config.layers, config.width, config.heads, config.tied) == (2, 64, 4, False)


def test_weights_bring_their_own_sizes(tmp_path) -> None:  # type: ignore[no-untyped-def]
    save_hf(build(dataclasses.replace(ModelJob().config(), layers=1)), tmp_path / "hf")
    assert ModelJob(weights=str(tmp_path / "hf")).config().layers == 1
    fault = faults_of(Job(model=ModelJob(weights=str(tmp_path / "hf"), layers=3)))[0]
    assert "leave it out" in fault
    assert faults_of(Job(model=ModelJob(weights=str(tmp_path / "nowhere"))))


def test_plain_values_leave_out_what_is_not_set() -> None:
    plain = as_plain(Job(data=DataJob(source="x.txt")))
    assert plain["data"] == {"source": "x.txt", "validation_fraction": 0.05}
    assert "sequence" not in plain
