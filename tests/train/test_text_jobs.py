"""Jobs that train on documents with a tokenizer: from a folder of transformers to a run that keeps both."""

from collections.abc import Callable
from pathlib import Path

import pytest

from echelon.data import Batches
from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.train import loop
from echelon.train.events import Event, Sampled, Stepped
from echelon.train.export_run import export_run
from echelon.train.jobs.job import DataJob, Job, ModelJob, OptimizerJob
from echelon.train.jobs.job_rules import check
from echelon.train.task import LanguageTask
from echelon.train.write_text import write_text
from tests.data.tiny_folders import make_model, make_tokenizer, write_texts
from tests.train.test_export_run import saved_run


def text_job(folder: Path, plan: str = "data=2 precision=fp64", steps: int = 4) -> Job:
    model = folder / "model"
    if not model.exists():
        make_model(model)
        write_texts(folder / "texts", 40)
    data = DataJob(source=str(folder / "texts"), cache=str(folder / "cache"))
    return Job(
        plan=plan,
        steps=steps,
        batch=4,
        sequence=16,
        save_every=2,
        evaluate_every=0,
        evaluate_batches=1,
        model=ModelJob(weights=str(model)),
        optimizer=OptimizerJob(schedule="constant", warmup=0),
        data=data,
    )


def losses_of(job: Job, folder: Path) -> tuple[list[float], list[str]]:
    """The losses that this rank reported, and what the model wrote."""
    events: list[Event] = []
    loop.train_rank(job, folder, events.append)
    losses = [event.loss for event in events if isinstance(event, Stepped)]
    return losses, [event.text for event in events if isinstance(event, Sampled)]


def test_a_run_goes_on_at_the_same_sample_under_another_plan(
    tmp_path: Path, warm_ranks: Callable[[int], Ranks]
) -> None:
    whole, begun = tmp_path / "whole", tmp_path / "begun"
    whole.mkdir(), begun.mkdir()
    (losses, (sample,)), _ = warm_ranks(2).run(losses_of, text_job(tmp_path), whole)
    (first, _), _ = warm_ranks(2).run(losses_of, text_job(tmp_path, steps=2), begun)
    other = "pipeline=2 microbatches=2 precision=fp64"
    (rest, _), _ = warm_ranks(2).run(losses_of, text_job(tmp_path, other), begun)
    assert (len(first), len(rest)) == (2, 2)
    assert first + rest == pytest.approx(losses, abs=1e-9)
    assert sample.startswith("Text number 0. ")


def test_the_run_keeps_the_tokenizer(tmp_path: Path, warm_ranks: Callable[[int], Ranks]) -> None:
    run = tmp_path / "run"
    run.mkdir()
    warm_ranks(2).run(losses_of, text_job(tmp_path, "data=2", steps=1), run)
    files = {"tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in (run / "tokenizer").iterdir()} == files
    assert files < {path.name for path in (run / "model").iterdir()}
    written = write_text(run, "Text", tokens=5, temperature=0)
    assert written.text.startswith("Text")
    next_job = Job(model=ModelJob(weights=str(run / "model")))
    assert next_job.tokenizer == str(run / "model"), "a job from these weights reads text as this one did"


def test_an_export_has_the_tokenizer_too(tmp_path: Path) -> None:
    job = text_job(tmp_path)
    run = tmp_path / "run"
    saved_run(run, job, LanguageTask(job).load(tmp_path / "model"))
    make_tokenizer(run / "tokenizer")
    assert (export_run(run, "hf").folder / "tokenizer.json").is_file()


def test_batches_are_documents_of_the_tokenizer(tmp_path: Path) -> None:
    batches = LanguageTask(text_job(tmp_path)).training
    assert isinstance(batches, Batches)
    inputs, targets = batches.at(0)
    assert inputs.args[0].shape == inputs.kwargs["position_ids"].shape == targets.shape == (4, 16)
    assert int(inputs.args[0].max()) < 258


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    text_job(tmp_path)
    data = DataJob(source=str(tmp_path / "texts"), tokenizer=str(tmp_path / "model"))
    with pytest.raises(UserError, match=r"has 258 ids; set model\.vocab=258"):
        check(Job(data=data, sequence=16))


def test_documents_and_a_shared_sequence_are_refused_together(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"ranks that share a sequence \(context=2\) cannot tell"):
        check(text_job(tmp_path, "context=2"))
