"""Checkpoints of a run for other programs: Hugging Face folders, safetensors, torch's own format."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from echelon.engine import parallelize
from echelon.errors import UserError
from echelon.models import build, build_image, cross_entropy, load_hf, load_image, preset
from echelon.state.weight_files.weight_folder import read_headers
from echelon.train.export_run import export_run
from echelon.train.jobs.job import Job, ModelJob, as_plain

TINY = {"layers": 1, "width": 16, "heads": 2, "vocab": 256, "sequence": 16}


def saved_run(folder: Path, job: Job, model: nn.Module, plan: str = "data=1") -> dict[str, Tensor]:
    """A run folder with a checkpoint after one step, as training leaves it; returns the whole weights."""
    engine = parallelize(
        model,
        plan,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        loss=cross_entropy,
        audit="off",
    )
    engine.step((torch.arange(32).view(2, 16), torch.arange(1, 33).view(2, 16)))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps({"state": "running", "job": as_plain(job)}))
    engine.save(folder / "checkpoints" / "step-00000001", extra={"step": 1})
    engine.export(folder / "model")
    state = engine.full_state_dict()
    engine.close()
    return state


def language_job(**changes: Any) -> Job:
    return Job(model=ModelJob(preset="gpt-tiny", **TINY, **changes), plan="data=1", steps=1)


def tiny(**changes: Any) -> nn.Module:
    torch.manual_seed(0)
    return build(dataclasses.replace(preset("gpt-tiny"), **TINY, **changes))


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("tied", [False, True])
def test_hf_is_what_the_engine_exports(tmp_path: Path, tied: bool) -> None:
    saved_run(tmp_path / "run", language_job(tied=tied), tiny(tied=tied))
    done = export_run(tmp_path / "run", "hf")
    assert done.folder == tmp_path / "run" / "export" / "hf"
    assert done.step == 1
    assert files_of(done.folder) == files_of(tmp_path / "run" / "model")


def test_a_training_begins_from_an_export(tmp_path: Path) -> None:
    state = saved_run(tmp_path / "run", language_job(), tiny())
    folder = export_run(tmp_path / "run", "hf", tmp_path / "out").folder
    again = dataclasses.replace(language_job(), model=ModelJob(weights=str(folder)))
    loaded = saved_run(tmp_path / "again", again, load_hf(folder))
    assert state.keys() == loaded.keys()
    assert any(not torch.equal(state[name], loaded[name]) for name in state)  # it has trained on
    assert files_of(export_run(tmp_path / "again", "hf").folder) == files_of(tmp_path / "again" / "model")


def test_safetensors_have_plain_names_in_shards(tmp_path: Path) -> None:
    state = saved_run(tmp_path / "run", language_job(tied=False), tiny(tied=False))
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000001"
    done = export_run(checkpoint, "safetensors", tmp_path / "out", shard_bytes=10_000)
    headers = read_headers(tmp_path / "out")
    assert not headers.errors
    assert headers.names == set(state)
    assert done.num_bytes == sum(tensor.nbytes for tensor in state.values())
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 1
    assert not (tmp_path / "out" / "config.json").exists()


def test_torch_loads_a_dcp_folder_in_one_process(tmp_path: Path) -> None:
    state = saved_run(tmp_path / "run", language_job(tied=True), tiny(tied=True))
    folder = export_run(tmp_path / "run" / "checkpoints", "dcp").folder
    model = tiny(tied=True)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(loaded, checkpoint_id=folder, no_dist=True)
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[name], state[name]) for name in state)


def test_a_wider_type_comes_from_the_masters(tmp_path: Path) -> None:
    job = dataclasses.replace(language_job(), plan="data=1 precision=bf16")
    saved_run(tmp_path / "run", job, tiny(), plan="data=1 precision=bf16")
    plain, wide = (
        load_hf(export_run(tmp_path / "run", "hf", tmp_path / str(t), t).folder) for t in (None, "float32")
    )
    assert {p.dtype for p in plain.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in wide.parameters()} == {torch.float32}
    assert all(
        torch.equal(p, w.bfloat16()) for p, w in zip(plain.parameters(), wide.parameters(), strict=True)
    )
    assert any(
        not torch.equal(p.float(), w) for p, w in zip(plain.parameters(), wide.parameters(), strict=True)
    )


def test_what_cannot_be_exported_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(UserError) as refusal:
        export_run(tmp_path, "zip", None, "int3")
    assert [error.split(":")[0] for error in refusal.value.errors] == [
        "--to zip",
        "--dtype int3",
        str(tmp_path),
    ]
    with pytest.raises(UserError, match="holds no checkpoint"):
        export_run(tmp_path, "dcp", tmp_path / "out")


@pytest.mark.parametrize("layers", [2, 10**12])
def test_a_job_that_is_not_that_of_the_checkpoint_is_refused(tmp_path: Path, layers: int) -> None:
    saved_run(tmp_path / "run", language_job(), tiny())
    other = dataclasses.replace(
        language_job(), model=ModelJob(preset="gpt-tiny", **{**TINY, "layers": layers})
    )
    (tmp_path / "run" / "run.json").write_text(json.dumps({"job": as_plain(other)}))
    with pytest.raises(UserError, match="is no checkpoint of the job"):
        export_run(tmp_path / "run", "hf")


def test_images(tmp_path: Path) -> None:
    job = Job(task="images", model=ModelJob(preset="alexnet-tiny"), plan="data=1", steps=1)
    from echelon.train.task import config_of

    config = config_of(job)
    torch.manual_seed(0)
    model = build_image(config)  # type: ignore[arg-type]
    engine = parallelize(
        model, "data=1", optimizer=lambda p: torch.optim.SGD(p, lr=1e-2), loss=cross_entropy, audit="off"
    )
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "run.json").write_text(json.dumps({"job": as_plain(job)}))
    engine.save(tmp_path / "checkpoints" / "step-00000001")
    engine.export(tmp_path / "model")
    engine.close()
    assert files_of(export_run(tmp_path, "hf").folder) == files_of(tmp_path / "model")
    load_image(tmp_path / "export" / "hf")
