"""The calls of an engine that a training loop makes."""

from typing import Any

import torch

from echelon.engine.core import EngineCore
from echelon.engine.step.batch_reader import to_plain
from echelon.engine.step.metrics import Evaluation, Measure, Metrics, check_measure
from echelon.launching import beat
from echelon.nn.batch import take_part


class LoopCalls(EngineCore):
    """All ranks must make these calls, in the same order."""

    def local(self, batch: Any) -> Any:
        """This replica's part of a global batch."""
        return take_part(to_plain(batch), self.replica, self.replicas)

    def step(self, batch: Any) -> Metrics:
        """Train on this replica's part of the batch. Replicas may hold different numbers of samples.

        `batch` is (inputs, targets), (a, b, targets), or a dict of the arguments of the model's forward with
        the targets as "labels": docs/data.md.

        A step that must be refused (no sample that the loss counts) raises, and changes no weight, no
        optimizer state and no buffer; it keeps its number. On a CUDA device a look at its metrics raises, and
        so does the second step after it, on every rank; that call trains nothing and can be repeated.

        A step whose gradients are not finite is skipped under fp16, and in every precision with
        nonfinite="skip": `skipped` of its metrics is true. Many in a row are an error. See docs/a-step.md.
        """
        self._check_open()
        return self._step.train(batch)

    @torch.no_grad()
    def evaluate(self, batch: Any, measure: Measure | None = None) -> Evaluation:
        """The mean loss over the global batch with the newest weights, without training.

        `measure(output, targets)` is computed from the same forward, of each microbatch. It returns a mean
        over its samples, or (total, count), or a dict of these by name; `measured` of the result is the mean
        over the global batch, or means by name, the same under every plan. All ranks must give one, or none.
        """
        self._check_open()
        check_measure(measure, self.plan)
        pair = self._reader.read(batch)
        with self._watch.own_work():
            self.ledger.start_step()
            self._show_newest()
            evaluation = self._runner.evaluate(pair, measure, self._state.modules)
            beat()
            return evaluation
