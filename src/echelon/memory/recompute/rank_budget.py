"""The budget of a rank: the choice for all of its stages, from what steps with new shapes have measured."""

import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import final

from torch import nn

from echelon.errors import UserError
from echelon.memory.recompute.budget import choose, least_bytes
from echelon.memory.recompute.budget_model import Segments, StageCosts, evaluate
from echelon.memory.recompute.budget_stage import BudgetedStage, BudgetSettings
from echelon.parallel.observer import ForwardPass, StepObserver


@final
class RankBudget(StepObserver):
    """The budget of a rank, and its stages, each with its module."""

    def __init__(
        self, settings: BudgetSettings, stages: Mapping[int, tuple[BudgetedStage, nn.Module]], plan: str
    ) -> None:
        self._settings, self._by_number, self._plan = settings, stages, plan
        self._stages = [stage for stage, _ in stages.values()]
        self._costs: dict[BudgetedStage, StageCosts] = {}  # of the newest shapes
        self._measured: dict[BudgetedStage, Segments] = {}  # the segments in which they were measured
        self._error: UserError | None = None
        self._is_first = True

    def around_layers(self, forward: ForwardPass) -> AbstractContextManager[None]:
        stage, module = self._by_number[forward.slot[0]]
        return stage.during_forward(module, forward.value)

    def around_loss(self, forward: ForwardPass) -> AbstractContextManager[None]:
        stage, _ = self._by_number[forward.slot[0]]
        return stage.during_loss()

    def after_passes(self) -> None:
        """The passes of a step are over: choose for the shapes that it has measured. Ranks that run the same
        segments call this together."""
        measured = [(stage, each) for stage in self._stages for each in stage.measured.values()]
        for stage, each in measured:
            self._costs[stage], self._measured[stage] = stage.costs(each), tuple(each.segments)
        if measured and len(self._costs) == len(self._stages):
            chosen = dict(zip(self._costs, self._choose(), strict=True))
            for stage, each in measured:
                stage.choices[each.shapes] = chosen[stage]
        for stage in self._stages:
            stage.finish_step()
        self._is_first = False

    def _choose(self) -> Sequence[Segments]:
        costs, measured = list(self._costs.values()), list(self._measured.values())
        longest, budget = self._settings.longest, self._settings.num_bytes
        choice = choose(costs, budget, longest=longest)
        if choice is None:
            self._tell(least_bytes(costs, longest))
            return measured
        taken = evaluate(costs, measured).peak
        if taken > budget:  # the measurement itself
            self._tell(taken)
        return choice.segments

    def _tell(self, needed: int) -> None:
        """The budget is too small: for a training, or for a batch in the middle of one."""
        message = (
            f"plan '{self._plan}': recompute=budget:{self._settings.num_bytes} is less than what a rank must "
            f"keep for the backward pass even if layers are computed again, at least {needed} bytes; set "
            f"budget:{needed} or more, or make microbatches smaller"
        )
        if self._is_first:
            self._error = UserError(message)
        else:  # ranks of other stages go on, and would wait
            warnings.warn(f"{message}; this batch takes as little as it can", stacklevel=2)

    def check_first_step(self) -> None:
        """Raise if the first step has shown that the budget is too small."""
        error, self._error = self._error, None
        if error is not None:
            raise error
