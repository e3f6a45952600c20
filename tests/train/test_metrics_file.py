"""Metrics that were written are events again."""

import json
import math
from pathlib import Path

from echelon.train.events import Evaluated, GateLoad, Started, Stepped
from echelon.train.logbook import Logbook
from echelon.train.metrics_file import METRICS, read_metrics
from echelon.train.run_folder import RunFolder

GATE = GateLoad("blocks.0.gate", (3.0, 1.0), 0.0, 0.5)


def stepped(step: int, loss: float = 1.0) -> Stepped:
    return Stepped(step, loss, 0.5, 1e-3, 1000, 0.1, 7, 0.2, 0.1, 100, experts=(GATE,))


def test_a_run_that_goes_on_has_each_step_once(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "a", {})
    logbook = Logbook(folder)
    logbook.take(Started(42, 9000, "stdlib", "cpu"))
    for event in (stepped(1), stepped(2), Evaluated(2, math.nan), stepped(3), stepped(4)):
        logbook.take(event)
    with (folder.path / METRICS).open("a", encoding="utf-8") as file:
        file.write('{"kind": "rollback", "step": 2}\n{"kind": "step", "st')  # the process was killed
    later = Logbook(folder)
    later.take(Started(42, 9000, "stdlib", "cpu", after_step=2))
    later.take(stepped(3, 0.5))
    lines = [json.loads(line) for line in (folder.path / METRICS).read_text(encoding="utf-8").splitlines()]
    assert [(line["kind"], line["step"]) for line in lines] == [
        ("step", 1),
        ("step", 2),
        ("evaluation", 2),
        ("rollback", 2),
        ("step", 3),
    ]
    summary = later.summary()
    assert (summary["steps"], summary["first_loss"], summary["loss"]) == (3, 1.0, 0.5)
    assert read_metrics(folder.path / METRICS)[0] == stepped(1)


def test_a_run_that_starts_from_the_beginning_again_forgets_all(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "a", {})
    logbook = Logbook(folder)
    for event in (Started(42, 9000, "stdlib", "cpu"), stepped(1), Started(42, 9000, "stdlib", "cpu")):
        logbook.take(event)
    assert (folder.path / METRICS).read_text(encoding="utf-8") == ""
    assert logbook.last_step == 0


def test_what_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    lines = ("[]", "{", '{"kind": "step"}', '{"kind": "step", "step": "x"}', '{"kind": []}', "\x00")
    (tmp_path / METRICS).write_text("\n".join(lines), encoding="utf-8")
    assert read_metrics(tmp_path / METRICS) == []
    assert read_metrics(tmp_path / "missing") == []
