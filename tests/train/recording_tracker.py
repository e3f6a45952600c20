"""A tracker that writes down its calls, and events to track."""

from collections.abc import Mapping
from typing import Any

from echelon.train.events import Evaluated, GateLoad, Stepped
from echelon.train.trackers import TrackedRun, Tracker


class Recording(Tracker):
    def __init__(self, fails_at: int | None = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._fails_at = fails_at

    def on_start(self, run: TrackedRun) -> dict[str, str]:
        self.calls.append(("start", run.name, dict(run.state)))
        return {"id": run.state.get("id", "first")}

    def on_step(self, step: int, values: Mapping[str, float]) -> None:
        if step == self._fails_at:
            raise SystemExit("no network")
        self.calls.append(("step", step, values["loss"]))

    def on_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        self.calls.append(("evaluation", step, values["validation_loss"]))

    def on_checkpoint(self, step: int) -> None:
        self.calls.append(("checkpoint", step))

    def on_end(self, state: str) -> None:
        self.calls.append(("end", state))

    def steps(self) -> list[int]:
        return [call[1] for call in self.calls if call[0] == "step"]


def stepped(step: int) -> Stepped:
    gates = (GateLoad("blocks.0.gate", (3.0, 1.0), 0.0, 0.5),)
    return Stepped(step, 5.0 / step, 0.5, 1e-3, 1000, 0.25, 7, 0.2, 0.1, 300, experts=gates)


def evaluated(step: int) -> Evaluated:
    return Evaluated(step, 6.0 / step)
