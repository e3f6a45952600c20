"""The trackers that there are: a file of JSON lines, TensorBoard, wandb, MLflow and trackio.

A package is imported when its tracker starts, never before. Settings of wandb, MLflow and trackio are those
of their environment variables (WANDB_MODE, WANDB_PROJECT, MLFLOW_TRACKING_URI, TRACKIO_DIR, …);
`options` come first.
"""

import contextlib
import importlib.util
import itertools
import json
import os
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any, TextIO, final

from echelon.errors import did_you_mean
from echelon.train import strict_json
from echelon.train.jobs.job import flat
from echelon.train.trackers import TrackedRun, Tracker

PROJECT = "echelon"


@final
class JsonLines(Tracker):
    """One line per call, in `tracked.jsonl` of the run folder or in the file `path`."""

    _file: TextIO

    def __init__(self, path: str | None = None) -> None:
        self._path = path

    def on_start(self, run: TrackedRun) -> dict[str, str]:
        self._file = open(self._path or run.folder / "tracked.jsonl", "a", encoding="utf-8")  # noqa: SIM115
        return {}

    def on_step(self, step: int, values: Mapping[str, float]) -> None:
        self._line("step", step, values)

    def on_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        self._line("evaluation", step, values)

    def on_checkpoint(self, step: int) -> None:
        self._line("checkpoint", step, {})

    def on_end(self, state: str) -> None:  # noqa: ARG002
        self._file.close()

    def _line(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        self._file.write(strict_json.dump({"kind": kind, "step": step, **values}) + "\n")
        self._file.flush()


@final
class TensorBoard(Tracker):
    """In `tensorboard/` of the run folder."""

    def __init__(self, **options: Any) -> None:
        self._options = options

    def on_start(self, run: TrackedRun) -> dict[str, str]:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(**{"log_dir": str(run.folder / "tensorboard"), **self._options})
        return {}

    def on_step(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    on_evaluation = on_step

    def on_end(self, state: str) -> None:  # noqa: ARG002
        self._writer.close()


@final
class Wandb(Tracker):
    """A run of wandb, in `wandb/` of the run folder; offline with WANDB_MODE=offline."""

    def __init__(self, **options: Any) -> None:
        self._options = options

    def on_start(self, run: TrackedRun) -> dict[str, str]:
        import wandb

        earlier = {"id": run.state["id"]} if "id" in run.state else {}
        settings = {
            "project": os.environ.get("WANDB_PROJECT", PROJECT),
            "name": run.name,
            "dir": str(run.folder),
            "config": dict(run.settings),
            "resume": "allow",
            **earlier,
            **self._options,
        }
        self._run: Any = wandb.init(**settings)
        # Validations and steps share their numbers, which wandb's own counter does not allow.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        return {"id": str(self._run.id)}

    def on_step(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    on_evaluation = on_step

    def on_end(self, state: str) -> None:
        self._run.finish(exit_code=0 if state == "finished" else 1)


@final
class MLflow(Tracker):
    """A run of MLflow; without MLFLOW_TRACKING_URI in `mlflow/` of the run folder."""

    def __init__(self, experiment: str = PROJECT, tracking_uri: str | None = None, **options: Any) -> None:
        self._experiment, self._uri, self._options = experiment, tracking_uri, options

    def on_start(self, run: TrackedRun) -> dict[str, str]:
        from mlflow.tracking import MlflowClient

        uri = self._uri or os.environ.get("MLFLOW_TRACKING_URI") or f"file:{run.folder.absolute() / 'mlflow'}"
        if uri.startswith("file:"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        client: Any = MlflowClient(uri)
        self._client = client
        if "run" in run.state:
            self._id = run.state["run"]
            client.update_run(self._id, status="RUNNING")
            return run.state
        found = client.get_experiment_by_name(self._experiment)
        experiment = client.create_experiment(self._experiment) if found is None else found.experiment_id
        self._id = str(client.create_run(experiment, run_name=run.name, **self._options).info.run_id)
        for name, value in flat(run.settings).items():
            client.log_param(self._id, name, (value if isinstance(value, str) else json.dumps(value))[:500])
        return {"run": self._id}

    def on_step(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric
        from mlflow.utils.time import get_current_time_millis

        now = get_current_time_millis()
        metrics = [Metric(name.replace(":", "."), float(value), now, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    on_evaluation = on_step

    def on_end(self, state: str) -> None:
        status = {"finished": "FINISHED", "preempted": "KILLED"}.get(state, "FAILED")
        self._client.set_terminated(self._id, status)


@final
class Trackio(Tracker):
    """A run of trackio, in trackio's folder on this machine, or where TRACKIO_SPACE_ID and the like say."""

    def __init__(self, project: str = PROJECT, **options: Any) -> None:
        self._project, self._options = project, options

    def on_start(self, run: TrackedRun) -> dict[str, str]:
        import trackio

        name = run.state.get("name") or self._unused_name(run.name)
        settings = {
            "name": name,
            "config": dict(run.settings),
            "resume": "allow" if "name" in run.state else "never",
            "embed": False,  # in a notebook it would start a server
            **self._options,
        }
        with contextlib.redirect_stdout(sys.stderr):  # where it greets, `echelon train --json` has its answer
            self._run: Any = trackio.init(self._project, **settings)
        return {"name": str(self._run.name)}

    def _unused_name(self, name: str) -> str:
        """trackio finds a run that goes on by its name: no other run may have it."""
        import trackio

        try:
            known = {str(each.name) for each in trackio.Api().runs(self._project)}
        except ValueError:  # the project is new
            return name
        names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
        return next(each for each in names if each not in known)

    def on_step(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    on_evaluation = on_step

    def on_end(self, state: str) -> None:  # noqa: ARG002
        with contextlib.redirect_stdout(sys.stderr):
            self._run.finish()


KINDS: dict[str, Callable[..., Tracker]] = {
    "jsonl": JsonLines,
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "mlflow": MLflow,
    "trackio": Trackio,
}
_PACKAGES = ("tensorboard", "wandb", "mlflow", "trackio")


def tracker_errors(names: Collection[str]) -> list[str]:
    errors = []
    for name in names:
        if name not in KINDS:
            errors.append(f"'{name}' is not a tracker{did_you_mean(name, tuple(KINDS))}")
        elif not is_installed(name):
            errors.append(f"'{name}': its package is not installed: pip install {name}")
    if len(set(names)) < len(names):
        errors.append(f"{', '.join(names)}: each tracker once")
    return errors


def make_trackers(names: Collection[str] | None, **options: Any) -> dict[str, Tracker]:
    """Trackers by name; of None TensorBoard, if it is installed. `options` are those of each."""
    if names is None:
        names = ("tensorboard",) if is_installed("tensorboard") else ()
    return {name: KINDS[name](**options) for name in names}


def is_installed(name: str) -> bool:
    try:
        return name not in _PACKAGES or importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # hidden, or half removed
        return False
