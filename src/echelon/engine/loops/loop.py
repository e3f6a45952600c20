"""The parts of a step, for loops of users' own: passes of one batch after the other, and then the update.

    forward_backward(batch)    as a step's passes; gradients add up over calls
    update()                   sums over ranks, norm, clip, optimizer, new weights: the rest of a step

Several batches add up as on one device: each loss is the mean over its own global batch, and their gradients
are added. So each batch has a tally of its own, and the update puts them together (update/numbers.py).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor

from echelon.engine.loops.outputs import Observed
from echelon.engine.step.metrics import Metrics, StepTimer
from echelon.engine.step.step import FlushedRunner, Step
from echelon.errors import UserError
from echelon.nn.batch import Batch
from echelon.nn.losses import Loss


@final
class OwnLoop(Step):
    """Steps, whole or in parts."""

    _timer: StepTimer | None = None  # of the update whose gradients add up now
    num_opened = 0  # updates that were begun in parts

    @property
    def is_open(self) -> bool:
        """True if gradients wait for an update."""
        return self._timer is not None

    def forward_backward(self, batch: Any, loss: Loss | None, observed: Observed, *, last: bool) -> Tensor:
        """Add the gradients of this replica's part of a batch; returns the tally of its losses here."""
        runner, reader = self.check_split(), self._setup.reader.for_loss(loss)
        if self.is_open:
            runner.tallies.check_not_summed()
            self._check_one_call()
        else:
            self._check_earlier_steps()
        pair = self._read(batch, reader)
        with (
            self.discarded_if_failed(),
            self._setup.layers.using(loss, whole_logits=observed.sees_output),
            self._watch.step(is_empty=True) as refusal,
        ):
            if not self.is_open:
                self._ask_audit(batch, pair, refusal, reader)
                self._open(pair if loss is None else None)
            with observed.by(self._setup.observers):  # and not around the audit, which runs passes too
                tally = runner.pass_through(pair, last=last, own_loss=loss is None)
                self._watch.hide_gradients(hidden=True)
                runner.wait_for_batch()
                return tally

    def _check_one_call(self) -> None:
        """Refuse a second batch for an update that can have one."""
        plan = self._setup.mesh.plan
        if plan.sync == "async":
            raise UserError(
                f"plan '{plan}': a worker tells the server of one batch with each update, and "
                "forward_backward was called twice before update(); give all samples at once, in more "
                "microbatches"
            )

    def _open(self, pair: Batch | None) -> None:
        runner = self.check_split()
        self.num_opened += 1
        self._timer = self._begin(pair)
        runner.begin(self.counter.begun)

    def next_call(self) -> tuple[int, int]:
        """Begin an update, if none is open; returns its number, and how many passes it had so far."""
        if not self.is_open:
            self._check_earlier_steps()
            self._open(None)
        return self.counter.begun, self.check_split().tallies.next_pass()

    def add_tally(self, total: Tensor, count: Tensor, normaliser: Tensor) -> None:
        """A backward pass follows, from a loss that was divided by `normaliser`."""
        self._watch.hide_gradients(hidden=True)
        runner, tally = self.check_split(), torch.cat([total, count, count * normaliser])
        runner.tallies.add(tally if runner.losses.are_counted else torch.zeros_like(tally))

    def update(self) -> Metrics:
        """Make the update of all gradients since the last one."""
        runner, timer = self.check_split(), self._timer
        if timer is None or not runner.tallies:
            raise UserError(
                "engine.update(): no gradients wait for it; call engine.forward_backward(batch), or "
                "engine.backward(loss) of what engine(x) returned, before it. See docs/loops.md"
            )
        with self.discarded_if_failed(), self._watch.step(is_empty=True):
            numbers = runner.finish()
            self._close()
            return self._finish(numbers, timer)

    def discard(self) -> None:
        """Let go of gradients that wait for an update. The next one begins without them."""
        if self.is_open:
            with self._watch.own_work():
                for parameter in self._setup.local.trained():
                    parameter.grad = None
        self._close()

    def _close(self) -> None:
        self._timer = None
        self._watch.hide_gradients(hidden=False)

    @contextmanager
    def discarded_if_failed(self) -> Iterator[None]:
        """What a pass that raises has added cannot be taken back: all of its update goes."""
        try:
            yield
        except BaseException:
            self.discard()
            raise

    def check_closed(self, call: str) -> None:
        """Refuse a call that would lose gradients; forward passes alone are forgotten."""
        if not self.is_open:
            return
        if not self.check_split().tallies:
            self._close()
        else:
            raise UserError(
                f"{call}: gradients of engine.forward_backward or engine.backward wait for their update; "
                "call engine.update() first, or engine.zero_grad() to drop them. See docs/loops.md"
            )

    def check_split(self) -> FlushedRunner:
        """Return the runner, if its steps have parts."""
        plan = self._setup.mesh.plan
        if not isinstance(self._runner, FlushedRunner) or plan.update != "step":
            inside = f"schedule={plan.schedule}" if plan.update == "step" else f"update={plan.update}"
            raise UserError(
                f"plan '{plan}': with {inside} weights are updated while passes run, so that there is no "
                "update apart from them; call engine.step(batch), or use a schedule that flushes (1f1b) and "
                "update=step. See docs/loops.md"
            )
        return self._runner
