"""The trackers that there are record what metrics.jsonl has, also of a run that was started again."""

import importlib.util
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from echelon.train.runs.run_folder import RunFolder
from echelon.train.tracker_kinds import is_installed, make_trackers, tracker_errors
from tests.train.recording_tracker import evaluated, stepped
from tests.train.test_trackers import part, started

Found = dict[str, dict[int, float]]  # by name, by step


def needs(package: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed: pip install 'echelon[trackers]'")


def read_lines(run: Path) -> list[tuple[int, dict[str, float]]]:
    rows = map(json.loads, (run / "tracked.jsonl").read_text().splitlines())
    return [(row.pop("step"), row) for row in rows if row.pop("kind") != "checkpoint"]


def read_tensorboard(run: Path) -> list[tuple[int, dict[str, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    rows = []
    for path in sorted((run / "tensorboard").iterdir()):
        events = EventAccumulator(str(path))
        events.Reload()
        rows += [
            (each.step, {tag: each.value}) for tag in events.Tags()["scalars"] for each in events.Scalars(tag)
        ]
    return rows


def read_wandb(run: Path) -> list[tuple[int, dict[str, float]]]:
    from wandb.proto import wandb_internal_pb2

    rows = []
    for path in sorted(run.glob("wandb/offline-run-*/*.wandb")):
        for data in wandb_records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            values = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            if values:
                rows.append((values.pop("step"), values))
    return rows


def wandb_records(data: bytes) -> Iterator[bytes]:
    """The records of a file of wandb: the log format of LevelDB, after a header of 7 bytes."""
    at, parts = 7, b""
    while at + 7 <= len(data):
        left = 2**15 - at % 2**15
        if left < 7:  # no room for another record
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def read_mlflow(run: Path) -> list[tuple[int, dict[str, float]]]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"file:{run.absolute() / 'mlflow'}")
    (experiment,) = [each for each in client.search_experiments() if each.name == "echelon"]
    (record,) = client.search_runs([experiment.experiment_id])
    assert record.info.status == "FINISHED"
    return [
        (each.step, {name: each.value})
        for name in record.data.metrics
        for each in client.get_metric_history(record.info.run_id, name)
    ]


def read_trackio(run: Path, project: str = "echelon") -> list[tuple[int, dict[str, float]]]:
    from trackio.sqlite_storage import SQLiteStorage

    rows = SQLiteStorage.get_logs(project, run.name)
    return [(row.pop("step"), {key: row[key] for key in row if key != "timestamp"}) for row in rows]


def by_name(rows: list[tuple[int, dict[str, Any]]]) -> Found:
    """Each number once: a step that came twice is an error."""
    found: Found = {}
    for step, values in rows:
        for name, value in values.items():
            if not name.startswith("_"):
                assert step not in found.setdefault(name, {}), f"{name} of step {step} came twice"
                found[name][step] = value
    return found


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("jsonl", read_lines),
        pytest.param("tensorboard", read_tensorboard, marks=needs("tensorboard")),
        pytest.param("wandb", read_wandb, marks=needs("wandb")),
        pytest.param("mlflow", read_mlflow, marks=needs("mlflow")),
        pytest.param("trackio", read_trackio, marks=needs("trackio")),
    ],
)
def test_values_are_those_of_metrics_also_after_a_restart(
    name: str, read: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read by its first import
    folder = RunFolder.create(tmp_path, "a", {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of these packages' own
        first = [stepped(1), stepped(2), evaluated(2), stepped(3)]
        second = [stepped(3), stepped(4), evaluated(4)]
        for events in ((started(), *first), (started(2), *second)):
            logbook = part(folder, make_trackers([name]), *events)
            assert logbook.failures() == []
        found = by_name(read(folder.path))
    lines = map(json.loads, (folder.path / "metrics.jsonl").read_text().splitlines())
    wanted: Found = {}
    for line in lines:
        kind, step = line.pop("kind"), line.pop("step")
        prefix = "validation_" if kind == "evaluation" else ""
        for gate in line.pop("experts", ()):
            wanted.setdefault(f"entropy/{gate['gate']}", {})[step] = gate["entropy"]
        for key, value in line.items():
            wanted.setdefault(prefix + key, {})[step] = float(value)
    assert found.keys() == wanted.keys()
    for key, values in wanted.items():
        assert found[key] == pytest.approx(values, rel=1e-6), key


@needs("trackio")
@pytest.mark.filterwarnings("ignore")  # of its packages' own
def test_trackio_runs_of_one_name_do_not_mix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    project = f"names-{tmp_path.name}"
    folders = [RunFolder(tmp_path / each / "same") for each in "ab"]
    for folder in folders:
        folder.path.mkdir(parents=True)
    for folder, step in zip(
        [*folders, folders[0]], (1, 2, 3), strict=True
    ):  # the last goes on with the first
        assert (
            part(folder, make_trackers(["trackio"], project=project), started(), stepped(step)).failures()
            == []
        )
    steps = [[step for step, _ in read_trackio(tmp_path / name, project)] for name in ("same", "same-2")]
    assert steps == [[1, 3], [2]]
    assert capsys.readouterr().out == ""


def test_unknown_missing_and_repeated_trackers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tracker_errors(("jsonl",)) == []
    (error,) = tracker_errors(("tensorbord",))
    assert error == "'tensorbord' is not a tracker (did you mean 'tensorboard'?)"
    assert tracker_errors(("jsonl", "jsonl")) == ["jsonl, jsonl: each tracker once"]
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert tracker_errors(("wandb",)) == ["'wandb': its package is not installed: pip install wandb"]
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    assert not is_installed("tensorboard")
    assert make_trackers(None) == {}
