"""Job files and settings."""

import re
import sys
from pathlib import Path

import pytest

from echelon.errors import UserError
from echelon.train.jobs import job_file
from echelon.train.jobs.job import Job
from echelon.train.jobs.job_file import read_job, read_values
from echelon.train.jobs.job_rules import job_errors


def error_of(path: Path | None, *settings: str) -> UserError:
    with pytest.raises(UserError) as caught:
        read_job(path, settings)
    return caught.value


def write(folder: Path, text: str, name: str = "job.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_without_a_file_it_is_the_default() -> None:
    assert read_job() == Job()
    assert read_job(plan="data=1").plan == "data=1"


def test_a_file_and_settings_over_it(tmp_path: Path) -> None:
    path = write(tmp_path, 'plan = "data=4"\nsteps = 7\n[model]\npreset = "llama-tiny"\n')
    job = read_job(path, ["model.layers=2", "optimizer.learning_rate=1e-4", "data.source=some/file.txt"])
    assert (job.plan, job.steps, job.model.preset, job.model.layers) == ("data=4", 7, "llama-tiny", 2)
    assert (job.optimizer.learning_rate, job.data.source) == (1e-4, "some/file.txt")
    assert read_job(path, ["plan=data=2 microbatches=2"]).plan == "data=2 microbatches=2"


def test_a_missing_file_suggests_its_neighbour(tmp_path: Path) -> None:
    write(tmp_path, "", "large.toml")
    assert "did you mean 'large.toml'?" in str(error_of(tmp_path / "lage.toml"))
    assert "does not exist; without a file" in str(error_of(tmp_path / "no" / "such.toml"))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert "is not TOML" in str(error_of(write(tmp_path, "steps = = 3")))
    assert str(error_of(tmp_path)) == f"job file {tmp_path} is a folder; give a file"
    (tmp_path / "run.json").touch()
    fix = f"is the folder of a run; to go on with it: --resume {tmp_path}"
    assert str(error_of(tmp_path)) == f"job file {tmp_path} {fix}"
    (tmp_path / "b.toml").write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in str(error_of(tmp_path / "b.toml"))


def test_unknown_keys_and_wrong_types_are_listed_together(tmp_path: Path) -> None:
    path = write(tmp_path, 'step = 3\nbatch = "many"\n[modle]\n[model]\nlayer = 2\n[data]\nsource = 5\n')
    errors = error_of(path).errors
    assert len(errors) == 5
    text = "\n".join(errors)
    assert "step: there is no such key (did you mean 'steps'?)" in text
    assert "modle: there is no such key (did you mean 'model'?)" in text
    assert "model.layer: there is no such key (did you mean 'layers'?)" in text
    assert "batch='many': must be an integer" in text
    assert "data.source=5: must be text" in text


def test_errors_of_settings() -> None:
    assert "must be written key=value" in error_of(None, "steps").errors[0]
    assert "is a value, not a table" in error_of(None, "plan=data=1", "plan.data=2").errors[0]
    assert "did you mean 'layers'?" in error_of(None, "model.layrs=2").errors[0]


def test_errors_are_said_to_be_where_they_are(tmp_path: Path) -> None:
    good, bad = write(tmp_path, "steps = 3"), write(tmp_path, "batch = 'x'", "bad.toml")
    assert error_of(good, "keep=x").title == "1 error in the settings:"
    assert error_of(good, "keep=x", "nonsense").title == "2 errors in the settings:"
    assert error_of(bad, "steps=3").title == f"1 error in job file {bad}:"
    assert error_of(bad, "keep=x").title == f"2 errors in job file {bad} and the settings:"
    assert error_of(bad, "nonsense").title == f"2 errors in job file {bad} and the settings:"
    assert error_of(None, "keep=x", "batch=0").title == "2 errors in the settings:"


def keys(error: UserError) -> list[str]:
    return [error.split(":")[0] for error in error.errors]


def test_what_cannot_be_read_does_not_hide_what_is_wrong() -> None:
    # First only steps came, after a fix the plan, after another the data.
    error = error_of(None, "steps=x", "plan=data=0", "data.source=nowhere")
    assert keys(error) == ["steps='x'", "plan", "data.source=nowhere"]
    error = error_of(None, "model.layers=x", "model.preset=gpt-tny", "optimizer.betas=['a', 'b']", "seed=-1")
    assert keys(error) == [
        "model.layers='x'",
        "optimizer.betas=['a', 'b']",
        "seed=-1",
        "model",
    ]


@pytest.mark.parametrize(
    "settings",
    [
        ("batch=x", "plan=data=64"),
        ("plan=5", "batch=1"),
        ("steps=x", "optimizer.warmup=10000"),
        ("optimizer.schedule=5", "optimizer.decay=3"),
        ("model.heads=x", "model.width=130"),
        ("model.vocab=x", "data.dtype=uint8"),
        ("sequence=x", "model.sequence=8"),
        ("stps=3",),
    ],
)
def test_what_cannot_be_read_is_not_judged_by_its_default(settings: tuple[str, ...]) -> None:
    assert len(error_of(None, *settings).errors) == 1


@pytest.mark.parametrize(
    ("setting", "error"),
    [
        ("steps=x", "steps='x': must be an integer"),
        ("steps=1.5", "steps=1.5: must be an integer"),
        ("steps=[1]", "steps=[1]: must be an integer"),
        ("steps='" + "9" * 5000 + "'", "steps='" + "9" * 5000 + "': must be an integer of fewer digits"),
        ("optimizer.clip=x", "optimizer.clip='x': must be a number"),
        ("optimizer.clip=[1]", "optimizer.clip=[1]: must be a number"),
        ("model.tied=x", "model.tied='x': must be true or false"),
        ("model.tied=[1]", "model.tied=[1]: must be true or false"),
        ("data.source=5", "data.source=5: must be text"),
        ("optimizer.betas=5", "optimizer.betas=5: must be two numbers"),
        ("optimizer.betas=[0.9]", "optimizer.betas=[0.9]: must be two numbers"),
        ("optimizer.betas=[0.9, 'x']", "optimizer.betas=[0.9, 'x']: must be two numbers"),
        ("optimizer.betas=[1, 2, 3]", "optimizer.betas=[1, 2, 3]: must be two numbers, got 3"),
    ],
)
def test_a_wrong_type_is_answered_with_the_rule_and_not_with_pydantics_words(
    setting: str, error: str
) -> None:
    assert error_of(None, setting).errors == (error,)


@pytest.mark.parametrize(
    ("setting", "error"),
    [
        ("steps=true", "steps=true: must be an integer"),
        ("keep=true", "keep=true: must be an integer, or memory"),
        ("keep=1.5", "keep=1.5: must be an integer, or memory"),
        ("optimizer.clip=false", "optimizer.clip=false: must be a number"),
        ("model.layers=true", "model.layers=true: must be an integer"),
        (
            "layers=4",
            "layers=4: must be the name of a list in the model, like blocks; how many layers it has is "
            "model.layers",
        ),
        ("optimizer.betas=[true, 0.9]", "optimizer.betas=[True, 0.9]: must be two numbers"),
        ("steps=１２", "steps='１２': must be an integer, written with the digits 0 to 9"),
        ("batch=٣٢", "batch='٣٢': must be an integer, written with the digits 0 to 9"),
        (
            "optimizer.learning_rate=１e-3",
            "optimizer.learning_rate='１e-3': must be a number, written with the digits 0 to 9",
        ),
        ("model.tied=1", "model.tied=1: must be true or false"),
        ("model.tied=yes", "model.tied='yes': must be true or false"),
        ("steps=inf", "steps=inf: must be an integer"),
        ("steps=nan", "steps=nan: must be an integer"),
        ("steps={a = 1}", "steps={'a': 1}: must be an integer"),
        ("optimizer.betas={}", "optimizer.betas={}: must be two numbers"),
        ("optimizer.betas=2026-01-01", "optimizer.betas=datetime.date(2026, 1, 1): must be two numbers"),
        ("name=[1]", "name=[1]: must be text"),
    ],
)
def test_what_only_looks_like_a_value_is_refused(setting: str, error: str) -> None:
    # --set steps=true trained one step, and digits of other scripts were read by Python's int().
    assert error_of(None, setting).errors == (error,)


def test_true_and_false_as_python_writes_them() -> None:
    assert read_job(None, ["model.tied=False"]).model.tied is False
    assert read_job(None, ["model.tied=true"]).model.tied is True


def test_numbers_that_are_not_finite_are_refused_by_name() -> None:
    settings = ["learning_rate=nan", "clip=inf", "weight_decay=nan", "floor=nan", "betas=[nan, 0.9]"]
    job = read_job(None, [f"optimizer.{setting}" for setting in settings])
    errors = job_errors(job)
    assert [error.split("=")[0] for error in errors] == [
        "optimizer.learning_rate",
        "optimizer.weight_decay",
        "optimizer.clip",
        "optimizer.betas",
        "optimizer.schedule: floor",
    ]


def test_a_plan_given_twice() -> None:
    with pytest.raises(UserError, match="--plan 'data=1' and --set plan=data=4: the plan is given twice"):
        read_job(None, ["plan=data=4"], "data=1")


@pytest.mark.parametrize("setting", ["=5", "model.=2", ".layers=2", "model..layers=2", ""])
def test_a_setting_without_a_key(setting: str) -> None:
    assert "must be written key=value" in error_of(None, setting).errors[0]


def test_a_table_is_no_value() -> None:
    (error,) = error_of(None, "data=2").errors
    assert error == "data=2: data is a table, like data.source=…; did you mean --plan data=2?"
    (error,) = error_of(None, "model=gpt-tiny").errors
    assert error == "model=gpt-tiny: model is a table, like model.preset=…"
    (error,) = error_of(None, "tensor=2").errors
    assert error.endswith("did you mean --plan tensor=2?")


def test_odd_toml_is_no_traceback(tmp_path: Path) -> None:
    assert "is not TOML" in str(error_of(write(tmp_path, "seed = " + "9" * 5000)))
    assert "is not TOML" in str(error_of(write(tmp_path, "seed = " + "[" * 5000)))
    assert "seed=" in error_of(None, "seed=" + "9" * 5000).errors[0]
    assert read_job(None, ["name=3\nbatch=5"]).name == "3\nbatch=5", "one setting is one value"


def test_the_default_needs_no_pydantic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydantic", None)
    assert read_job() == Job()
    with pytest.raises(UserError, match="needs pydantic"):
        read_job(None, ["steps=3"])
    importing = re.compile(r"^( *)(?:from|import) pydantic\b", re.MULTILINE)
    sources = Path(job_file.__file__).parents[2]
    found = {path.name: importing.findall(path.read_text()) for path in sources.rglob("*.py")}
    assert {name: indents for name, indents in found.items() if indents} == {"job_file.py": [" " * 8]}


@pytest.mark.parametrize(("text", "value"), [("1024", 1024.0), ("0.5", 0.5), ("dynamic", "dynamic")])
def test_a_loss_scale_is_a_number_or_dynamic(text: str, value: object) -> None:
    job = read_job(settings=["plan=precision=fp16", f"loss_scale={text}"])
    assert job.loss_scale == value
    assert job_errors(job) == []


@pytest.mark.parametrize("text", ["much", "[1, 2]", "true"])
def test_another_loss_scale_is_refused(text: str) -> None:
    with pytest.raises(UserError) as caught:
        read_job(settings=["plan=precision=fp16", f"loss_scale={text}"])
    (error,) = caught.value.errors
    assert error.startswith("loss_scale=")
    assert "must be a number" in error


def test_a_loss_scale_needs_fp16_and_a_value_above_0() -> None:
    (error,) = job_errors(Job(plan="precision=bf16", loss_scale=8.0))
    assert error.startswith("loss_scale=8.0 precision=bf16: only losses of fp16 are scaled")
    (error,) = job_errors(Job(plan="precision=fp16", loss_scale=-1.0))
    assert error.startswith("loss_scale=-1.0: must be 'dynamic', a number above 0")


@pytest.mark.parametrize("key", ["keep", "loss_scale"])
def test_a_table_where_one_of_several_kinds_of_values_must_be(tmp_path: Path, key: str) -> None:
    """It was an error of pydantic: what was removed of the values was not the value."""
    path = tmp_path / "job.toml"
    path.write_text(f"{key} = {{a = 1}}\n")
    with pytest.raises(UserError, match=f"{key}="):
        read_job(path)


def test_a_key_that_is_half_a_character_is_refused() -> None:
    with pytest.raises(UserError, match=r"the key '\\ud800' is not Unicode text"):
        read_values({"steps": 3, chr(0xD800): 1}, (), None, "run.json")


@pytest.mark.parametrize("value", ["wandb", "3", "[1]", "true"])
def test_trackers_are_a_list_of_names(value: str) -> None:
    assert read_job(settings=['track=["jsonl"]']).track == ("jsonl",)
    with pytest.raises(UserError) as caught:
        read_job(settings=[f"track={value}"])
    assert caught.value.errors[0].endswith('must be a list of names, like track=["tensorboard", "wandb"]')
