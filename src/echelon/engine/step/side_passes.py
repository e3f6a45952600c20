"""Passes of a flushed step beside its own: a rehearsal, the statistics of gates, a replay."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from echelon.engine.step.agreement import measure_gradient
from echelon.engine.step.runner import StepRunner
from echelon.engine.step.runtime.flight import Microbatch
from echelon.engine.step.runtime.script import Script
from echelon.engine.step.side_effects import restored_weights, without_side_effects
from echelon.nn.batch import Batch
from echelon.state.ownership import LocalParameter
from echelon.update.numbers import Number, StepNumbers, Tally


class SidePasses(StepRunner):
    """A runner whose steps begin and end with an empty pipeline, so that other passes fit in between."""

    _is_rehearsed: bool
    _count_before: Number | None = None  # what the last update was the mean of

    @property
    def _enters_other_nodes(self) -> bool:
        """Return whether the last passes were recorded or replayed."""
        return self.graphs is not None and self.graphs.enters_other_nodes

    def run_as_is(self, script: Script, feed: Mapping[int, Microbatch]) -> Tally:
        """Run passes by their instructions."""
        row = self._run(script, feed)
        return Tally(row, self._interpreter.counted)

    def aside(self) -> AbstractContextManager[None]:
        """Around passes of which nothing is kept between steps."""
        return self._interpreter.aside()

    def close(self) -> None:
        if self.graphs is not None:
            self.graphs.close()
        super().close()

    @abstractmethod
    def _start(self) -> None:
        """Clear what the last step has left."""

    @abstractmethod
    def _train_step(self, batch: Batch, step: int) -> StepNumbers: ...

    @abstractmethod
    def _step_feed(self, batch: Batch, step: int) -> dict[int, Microbatch]: ...

    def _rehearse(self, batch: Batch, step: int) -> StepNumbers:
        """Run a step without updates, where these come before its end: it may be refused, and shows what
        losses count."""
        units = self._update.units
        assert units is not None
        try:
            kept = restored_weights(self._local.modules, self._mesh.plan)
            with self._no_side_effects(), kept, units.rehearse(self._measure):
                numbers = self._train_step(batch, step)
        finally:
            self._measured.clear()
        if numbers.error() is None:
            self._normaliser.learn(numbers.outcome.counted)
            self._is_rehearsed = True
        return numbers

    def _measure(self, local: Sequence[LocalParameter]) -> None:
        """Ranks compare the gradients of some parameters, when all of them are there."""
        compared = set() if self._layers.sharded is None else set(self._layers.sharded.replicated)
        self._measured |= {p.tensor: measure_gradient(p.tensor) for p in local if p.parameter in compared}

    def _record_statistics(self, feed: Mapping[int, Microbatch]) -> None:
        """Take all microbatches forward once, without a trace, where the gradient of an auxiliary loss is
        asked for before the last of them has passed the gates."""
        assert self._balance is not None
        # Their messages have another form: nothing wants a gradient. A model may change its inputs.
        copies = {
            number: each._replace(
                form="statistics " + each.form, inputs=tree_map_only(Tensor, torch.clone, each.inputs)
            )
            for number, each in feed.items()
        }
        with torch.no_grad(), self._no_side_effects():
            tally = self._run(self.forward_script(len(copies)), copies)
        self._balance.exchange(tally)
        for stage in self._local.stages.values():
            stage.start_step()

    def replay(self, batch: Batch, step: int) -> None:
        """Run the passes of a step again, without its update, on all ranks together. The next step clears
        the gradients that this leaves."""
        self._start()
        for stage in self._local.stages.values():
            stage.start_step()
        feed = self._step_feed(batch, step)
        self._run(self._passes_script(len(feed)), feed)

    def _no_side_effects(self) -> AbstractContextManager[None]:
        modules = [each for module in self._local.modules for each in module.modules()]
        return without_side_effects(self._local.modules, modules, self._mesh.device, self.user_loss)
