"""What can be wrong with an image job shows before a rank starts, all at once."""

from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from echelon.cli import main
from echelon.errors import UserError
from echelon.train.jobs.job import DataJob, Job, ModelJob
from echelon.train.jobs.job_rules import check
from tests.data.image_files import save_colour, two_classes

JOB = Job(task="images", model=ModelJob(preset="nin-tiny"), batch=4)


def errors_of(job: Job) -> tuple[str, ...]:
    with pytest.raises(UserError) as caught:
        check(job)
    return caught.value.errors


def test_the_embedded_images_are_valid() -> None:
    check(Job(task="images"))
    check(Job(task="images", plan="pipeline=2 microbatches=2 zero=0"))


def test_an_unknown_task_is_answered_with_the_nearest() -> None:
    (error,) = errors_of(Job(task="image"))
    assert error == "task='image': is not a task (did you mean 'images'?)"


def test_keys_of_another_task_are_refused() -> None:
    job = replace(JOB, sequence=8, model=ModelJob(layers=3), data=DataJob(dtype="uint8"))
    assert [error.split(":")[0] for error in errors_of(job)] == [
        "sequence=8",
        "model.layers=3",
        "data.dtype=uint8",
    ]
    language = Job(model=ModelJob(image_size=8, divisor=2), data=DataJob(augment=False))
    assert [error.split(":")[0] for error in errors_of(language)] == [
        "model.image_size=8",
        "model.divisor=2",
        "data.augment=False",
    ]


def test_sizes_and_plans_that_do_not_fit() -> None:
    (error,) = errors_of(replace(JOB, model=ModelJob(preset="alexnet", image_size=32)))
    assert "too small for alexnet" in error
    (error,) = errors_of(replace(JOB, model=ModelJob(preset="gpt-tiny")))
    assert "'gpt-tiny' is not an image preset" in error
    (error,) = errors_of(replace(JOB, plan="tensor=2"))
    assert "convolutions are not split along tensor" in error
    (error,) = errors_of(replace(JOB, plan="pipeline=40 microbatches=40", batch=40))
    assert "12 layers" in error


def test_a_folder_with_many_problems_ends_with_exit_code_2_and_names_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = two_classes(tmp_path / "images", 3)
    (root / "a" / "text.jpg").write_text("no image")
    save_colour(root / "b" / "strip.png", size=(300, 2))
    Image.new("F", (8, 8)).save(root / "b" / "float.tiff")
    settings = ["task=images", f"data.source={root}", f"out={tmp_path / 'runs'}", "steps=0", "batch=2"]
    with pytest.raises(SystemExit) as end:
        main(["train", *(word for setting in settings for word in ("--set", setting))])
    text = " ".join(capsys.readouterr().err.split())
    assert end.value.code == 2
    for part in ("steps=0: must be", "text.jpg", "strip.png", "float.tiff"):
        assert part in text
    assert not (tmp_path / "runs").exists()


def test_a_batch_needs_as_many_images(tmp_path: Path) -> None:
    data = DataJob(source=str(two_classes(tmp_path, 1)), validation_fraction=0.0)
    (error,) = errors_of(replace(JOB, data=data))
    assert "there are 2 images to train on; lower the batch to 2" in error
