"""The tasks of a job: batches of a corpus, and images."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from echelon.data import Corpus
from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.models import load_image
from echelon.train import loop
from echelon.train.events import Evaluated, Event, Sampled, Started
from echelon.train.jobs.job import DataJob, Job, ModelJob
from echelon.train.task import ImageTask, make_batches
from tests.data.image_files import BLUE, GREEN, save_colour, two_classes


def corpus(tokens: int) -> Corpus:
    return Corpus(np.zeros(tokens, dtype=np.uint8), 256, "zeros")


def job(plan: str = "data=2", fraction: float = 0.25) -> Job:
    return Job(plan=plan, batch=4, sequence=10, seed=3, data=DataJob(validation_fraction=fraction))


def test_both_splits_have_the_sizes_of_the_job() -> None:
    training, validation = make_batches(job(), corpus(1000))
    assert validation is not None
    assert (training.split, training.batch, training.sequence, training.seed) == ("train", 4, 10, 3)
    assert (validation.split, validation.batch, validation.sequence) == ("validation", 4, 10)
    assert (training.tokens, validation.tokens) == (750, 250)


def test_a_short_validation_split_has_a_smaller_batch() -> None:
    _, validation = make_batches(job(), corpus(124))  # 31 tokens: 3 windows
    assert validation is not None
    assert validation.batch == 3


@pytest.mark.parametrize(("plan", "validates"), [("data=1", True), ("data=2", True), ("data=3", False)])
def test_every_replica_needs_a_sample_of_a_validation_batch(plan: str, validates: bool) -> None:
    _, validation = make_batches(job(plan), corpus(84))  # 21 tokens: 2 windows
    assert (validation is not None) == validates


def test_without_a_fraction_there_is_no_validation() -> None:
    training, validation = make_batches(job(fraction=0.0), corpus(100))
    assert (training.tokens, validation) == (100, None)


def test_training_needs_a_whole_batch() -> None:
    with pytest.raises(UserError, match="the train split has 40 tokens"):
        make_batches(job(fraction=0.0), corpus(40))


def image_job(source: Path, **changes: object) -> Job:
    data = DataJob(source=str(source), validation_fraction=0.4)
    model = ModelJob(preset="nin-tiny", divisor=32)
    job = Job(task="images", plan="data=2", steps=4, batch=6, data=data, model=model)
    return replace(job, **changes)  # type: ignore[arg-type]


def train(job: Job, folder: Path) -> list[Event]:
    events: list[Event] = []
    loop.train_rank(job, folder, events.append)
    return events


def evaluation(events: list[Event]) -> Evaluated:
    (last,) = (event for event in events if isinstance(event, Evaluated))
    return last


def test_a_folder_is_learned_under_any_plan_and_its_weights_keep_their_classes(
    tmp_path: Path, warm_ranks: Callable[[int], Ranks]
) -> None:
    root = two_classes(tmp_path / "images", 12)
    for index in range(6):
        save_colour(root / "c" / f"{index}.png", GREEN)
    results = {}
    for plan in ("data=2", "pipeline=2 microbatches=2"):
        events, silent = warm_ranks(2).run(train, image_job(root, plan=plan), tmp_path / plan)
        assert silent == []
        results[plan] = evaluation(events)
        (started,) = (event for event in events if isinstance(event, Started))
        assert (started.unit, started.corpus) == ("images", "images")
        (sampled,) = (event for event in events if isinstance(event, Sampled))
        assert "\na: " in sampled.text
    first, second = results.values()
    assert first.loss == pytest.approx(second.loss, rel=1e-4)
    assert first.accuracy == second.accuracy
    assert load_image(tmp_path / "data=2" / "model").config.class_names == ("a", "b", "c")

    # A folder without the first class: by their places its classes would be 0 and 1.
    fewer = tmp_path / "fewer"
    for index in range(12):
        save_colour(fewer / "b" / f"{index}.png", BLUE)
        save_colour(fewer / "c" / f"{index}.png", GREEN)
    job = image_job(fewer, model=ModelJob(weights=str(tmp_path / "data=2" / "model")), steps=1)
    assert set(ImageTask(job).training.images.labels.tolist()) == {1, 2}
    warm_ranks(2).run(train, job, tmp_path / "on")
    assert load_image(tmp_path / "on" / "model").config.class_names == ("a", "b", "c")


def test_validation_takes_all_images_unless_a_number_of_batches_is_given(tmp_path: Path) -> None:
    job = image_job(two_classes(tmp_path, 20), batch=4)
    task = ImageTask(job)
    assert task.validation is not None
    number = len(task.validation.images)
    assert task.num_validation_batches == -(-number // 4) > 1
    assert ImageTask(replace(job, evaluate_batches=1)).num_validation_batches == 1
    assert ImageTask(replace(job, data=replace(job.data, validation_fraction=0.0))).validation is None
