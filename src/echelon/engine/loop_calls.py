"""The calls of an engine that a training loop makes."""

from typing import Any

import torch
from torch import Tensor

from echelon.engine.core import EngineCore
from echelon.engine.loops.outputs import Collect, Observed, PassResult, no_loss, whole_output
from echelon.engine.step.batch_reader import to_plain
from echelon.engine.step.metrics import Evaluation, Measure, Metrics, check_measure
from echelon.launching import beat
from echelon.nn.batch import take_part
from echelon.nn.losses import Loss, Sum


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
        self._check_hidden()
        self._step.check_closed("engine.step(batch)")
        return self._step.train(batch)

    # A loop of your own: docs/loops.md.

    def forward_backward(
        self,
        batch: Any,
        loss: Loss | None = None,
        *,
        measure: Measure | None = None,
        collect: Collect | None = None,
        last: bool = False,
    ) -> PassResult:
        """Take this replica's part of a batch forward and back. Gradients add up until `update`.

        `loss` is that of this call, if not the engine's own. The result has the mean loss over the global
        batch; `measured`, as `evaluate` does; and in `outputs` what `collect(output, targets)` makes of each
        microbatch, put together for all samples of this replica, on all of its ranks. `last=True`: no other
        call follows before `update`, so that sums over ranks begin behind the backward pass.
        """
        self._check_open()
        self._check_hidden()
        check_measure(measure, self.plan)
        observed = self._observed(measure, collect)
        return observed.result(self._step.forward_backward(batch, loss, observed, last=last))

    def update(self) -> Metrics:
        """Sum the gradients over ranks, clip, update the weights and bring them to all ranks."""
        self._check_open()
        self._check_hidden()
        return self._step.update()

    def zero_grad(self) -> None:
        """Drop the gradients that wait for an update; all ranks must call this."""
        self._step.discard()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model on this replica's samples, under plans without stages; `backward` follows."""
        self._check_open()
        if torch.is_grad_enabled():
            self._check_hidden()
        return self._own_passes.forward(args, kwargs)

    def backward(
        self,
        loss: Tensor | Sum,
        *others: "LoopCalls",
        count: float | None = None,
        retain_graph: bool = False,
    ) -> None:
        """Add the gradients of a loss of what this engine, and others, have returned.

        `loss` is a mean over this replica's samples, of which there are `count`: if not given, as many as the
        last call of this engine had. The gradient is that of the mean over all replicas. echelon.Sum(total)
        is summed over them. Only this engine and `others` get gradients.
        """
        self._check_open()
        self._check_hidden()
        own = [each._own_passes for each in others]
        self._own_passes.backward(loss, count, own, retain_graph=retain_graph)

    @torch.no_grad()
    def forward(self, batch: Any, collect: Collect | None = None) -> Any:
        """The outputs of the model for this replica's part of a batch, with the newest weights, in the mode
        (train or eval) that the model has, without gradients; on all ranks of the replica.

        `collect(output, targets)` chooses what to hand back of each microbatch.
        """
        self._check_open()
        pair = self._reader.for_loss(no_loss).read(batch)
        observed = self._observed(None, collect or whole_output)
        using = self._setup.layers.using(no_loss)
        with self._watch.own_work(), using, observed.by(self._setup.observers):
            self.ledger.start_step()
            self._show_newest()
            self._runner.forward(pair)
            beat()
        return observed.outputs()

    def _observed(self, measure: Measure | None, collect: Collect | None) -> Observed:
        return Observed(self.mesh, self._local.program, measure, collect)

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
        using = self._setup.layers.using(None, whole_logits=measure is not None)
        with self._watch.own_work(), using:
            self.ledger.start_step()
            self._show_newest()
            evaluation = self._runner.evaluate(pair, measure, self._state.modules)
            beat()
            return evaluation
