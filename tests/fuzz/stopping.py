"""A random training that stops, and goes on from a checkpoint under another plan: functions of ranks."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from echelon.nn.batch import DTYPES
from echelon.plan import Plan
from echelon.state.ownership import OwnedSlice
from echelon.verify import Case
from echelon.verify.contract import make_engine, result_of
from echelon.verify.reference import TrainingResult
from tests.fuzz.ownership import list_owned

Numbers = list[dict[str, Any]]  # of each step


def train_and_save(path: str, stop: int, case: Case, plan: Plan) -> Numbers:
    """Train the first steps, and save; returns their numbers."""
    engine, dtype = make_engine(case, plan), DTYPES[plan.precision]
    with case.without_casts(dtype):
        metrics = [engine.step(engine.local(batch)) for batch in case.batches(dtype)[:stop]]
    engine.save(path, extra={"stop": stop})
    numbers = [
        {"loss": m.loss, "grad_norm": m.grad_norm, "skipped": m.skipped, "loss_scale": m.loss_scale}
        for m in metrics
    ]
    engine.close(restore=False)
    return numbers


def go_on_and_list(
    path: str, earlier: Numbers, case: Case, plan: Plan, _: Any
) -> tuple[TrainingResult, list[OwnedSlice]]:
    """Go on to the end; the result is that of all steps."""
    engine, dtype = make_engine(case, plan), DTYPES[plan.precision]
    stop: int = engine.load(path)["stop"]
    with case.without_casts(dtype):
        rest = [engine.step(engine.local(batch)) for batch in case.batches(dtype)[stop:]]
        metrics: Sequence[Any] = [*(SimpleNamespace(**each) for each in earlier), *rest]
        return list_owned(engine, result_of(engine, case, metrics))
