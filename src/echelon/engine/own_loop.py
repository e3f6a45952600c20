"""The parts of a step, for loops of users' own: passes of one batch after the other, and then the update.

    forward_backward(batch)    as a step's passes; gradients add up over calls
    output = engine(x)         the model's forward on this replica's samples, with its graph
    engine.backward(loss)      from any scalar of such outputs; gradients add up too
    update()                   sums over ranks, norm, clip, optimizer, new weights: the rest of a step

Several batches add up as on one device: each loss is the mean over its own global batch, and their gradients
are added. So each batch has a tally of its own, and the update puts them together (update/numbers.py).
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from echelon.collectives.agreement import gather_rows
from echelon.engine.outputs import Observed
from echelon.engine.setup import Setup
from echelon.engine.step.feed import Upload, to_device
from echelon.engine.step.metrics import Metrics, StepTimer
from echelon.engine.step.side_effects import WithoutAutocastCache
from echelon.engine.step.step import FlushedRunner, Step
from echelon.engine.watch.watch import Watch
from echelon.errors import UserError, raise_errors
from echelon.nn.autograd.leaves import leaf_uses
from echelon.nn.batch import DTYPES, Batch, Inputs, call, cast, tensors_of
from echelon.nn.dropout.training_position import CountedSamples
from echelon.nn.losses import Loss, Sum, scalar_errors
from echelon.parallel.observer import BackwardPass, ForwardPass
from echelon.parallel.stage import Stage
from echelon.update.numbers import Number, Tally


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
            if (plan := self._setup.mesh.plan).sync == "async":
                raise UserError(
                    f"plan '{plan}': a worker tells the server of one batch with each update, and "
                    "forward_backward was called twice before update(); give all samples at once, in more "
                    "microbatches"
                )
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
        runner.tallies.add(Tally(tally if runner.losses.are_counted else torch.zeros_like(tally)))

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


# Passes that a user's own loop calls one by one, for plans without stages.
#
# A loss is the mean over this replica's samples. The global one weighs those of replicas by their counts,
# which replicas tell each other before the backward pass: so all gradients of an update can be added.
#
# A graph may lead through models of several engines (a generator, and the discriminator that judges it). The
# engine whose `backward` is called gets gradients, and those that are given beside it; others only lend their
# weights.

# Those of all engines of this process, in the order in which these were made, the same on every rank.
_alive: WeakKeyDictionary["OwnPasses", None] = WeakKeyDictionary()


@final
class OwnPasses:
    """The passes of one engine that its user calls."""

    def __init__(self, setup: Setup, loop: OwnLoop, watch: Watch) -> None:
        self._setup, self._loop, self._watch = setup, loop, watch
        self._samples = 0  # of the last forward pass
        self._num_forwards = 0  # since the last backward pass
        self._slots: list[tuple[int, int]] = []  # of forward passes since the last update
        self._opened = 0  # the update that they are of
        self._scale: Number | None = None  # of its losses so far: their gradients are added
        self._is_checked = False
        self._is_reached = False  # whether a backward pass came to an output of this engine
        _alive[self] = None

    @property
    def is_open(self) -> bool:
        """True if the engine was called since its last update, so that a backward pass may lead through it,
        and its ranks still talk."""
        is_called = self._loop.is_open and self._opened == self._loop.num_opened and bool(self._slots)
        return is_called and not self._setup.mesh.group("all").is_closed

    def close(self) -> None:
        _alive.pop(self, None)

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model. Without gradients that is a call between steps: it is no part of an update."""
        self._check()
        mesh, observers = self._setup.mesh, self._setup.observers
        inputs: Any = cast(to_device(Inputs(*args, **kwargs), mesh.device), DTYPES[mesh.plan.precision])
        upload = Upload(Inputs(*args, **kwargs), mesh.device)
        if not torch.is_grad_enabled():
            output = self._look(inputs)
            upload.wait()
            return output
        tensors = tensors_of(inputs)
        self._samples = len(tensors[0]) if tensors and tensors[0].dim() else 1
        with self._watch.own_work(), self._abandoned_if_failed():
            number, place = self._loop.next_call()
            if self._opened != self._loop.num_opened:
                self._opened, self._slots, self._scale = self._loop.num_opened, [], None
                self._num_forwards = 0
            slot = (0, place)
            forward = ForwardPass(slot, inputs, inputs, None, 1, trains=True)
            scope = self._setup.scopes.of_step(number, self._samples, place)
            self._stage.mark_run()
            self._stage.gather(backward=False)
            with (
                WithoutAutocastCache(),
                self._setup.layers.using(None, whole_logits=True),
                observers.around("around_pass", forward),
                CountedSamples(self._samples, lambda: scope(0)),
                observers.around("around_layers", forward),
            ):
                # The model's own forward, also where a step runs it layer by layer.
                output = call(self._setup.model, inputs)
            self._stage.free()
            observers.tell("store", slot)
        self._see_backward(inputs, output, number)
        self._slots.append(slot)
        self._num_forwards += 1
        upload.wait()
        return output

    def _see_backward(self, inputs: Any, output: Any, number: int) -> None:
        """Let a backward pass say that it comes by, and refuse it after the next update: torch sees that
        weights have changed by their versions, which tell nothing where weights are gathered."""

        def see(_: Any) -> None:
            self._is_reached = True
            if self._loop.counter.begun != number:
                raise UserError(
                    "a backward pass leads through a call of engine(x) that came before the last update of "
                    "this engine: the weights that its gradients need have other values now; call engine(x) "
                    "again after engine.update(). See docs/loops.md"
                )

        before = {tensor.grad_fn for tensor in tensors_of(inputs)}
        for node in dict.fromkeys(tensor.grad_fn for tensor in tensors_of(output)):
            if node is not None and node not in before:
                node.register_prehook(see)

    def _look(self, inputs: Any) -> Any:
        """Call the model without gradients."""
        with self._watch.own_work(), self._setup.layers.using(None, whole_logits=True):
            self._stage.gather(backward=False)
            try:
                return call(self._setup.model, inputs)
            finally:
                self._stage.free()

    def backward(
        self, loss: Tensor | Sum, number: float | None, others: Sequence["OwnPasses"], *, retain_graph: bool
    ) -> None:
        """Add the gradients of a mean over this `number` of samples, or of a sum."""
        self._check()
        total = loss.total if isinstance(loss, Sum) else loss
        engines, lending = [self, *others], [each for each in _alive if each.is_open]
        self._check_loss(total, engines)
        chosen = [each._scale for each in engines if each._scale is not None]
        scale = chosen[0] if chosen else self._setup.update.loss_scale
        with ExitStack() as stack:
            for each in lending:
                stack.enter_context(each._lent())
            means = [each._count(loss, number, scale) for each in engines]
            for each in engines:
                stack.enter_context(each._taking(means[0]))
            lent = {p for each in lending if each not in engines for p in each._trained}
            leaves = [leaf for leaf in leaf_uses([total.grad_fn]) if leaf not in lent] if lent else None
            self._is_reached = False
            if leaves != []:
                torch.autograd.backward(means[0], inputs=leaves, retain_graph=retain_graph or None)
            if not self._is_reached and leaf_uses([total.grad_fn]).keys().isdisjoint(self._trained):
                raise UserError(
                    "engine.backward(loss): the loss does not depend on what this engine has returned, and "
                    "would give it no gradients; call backward of the engine that the loss is to train. See "
                    "docs/loops.md"
                )

    def _count(self, loss: Tensor | Sum, samples: float | None, scale: Number) -> Tensor:
        """Enter a loss into the tally of the update; returns what its backward pass starts from. `scale`:
        that of one of the engines which the loss is for."""
        self._scale = scale
        mesh = self._setup.mesh
        number = (
            1 / mesh.plan.data if isinstance(loss, Sum) else self._samples if samples is None else samples
        )
        counts = torch.full((1,), number, dtype=torch.float64, device=mesh.device)
        if isinstance(loss, Sum):
            self._loop.add_tally(
                loss.total.detach().double().view(1), counts, torch.ones_like(counts) / scale
            )
            return torch.mul(loss.total, scale)
        over_all = counts
        if mesh.plan.data > 1:
            over_all = gather_rows(counts, mesh.group("data"), "loss counts").sum(0)
        self._loop.add_tally(loss.detach().double().view(1) * counts, counts, over_all / scale)
        weight = (counts * scale / over_all)[0]
        return torch.mul(loss, weight.to(torch.promote_types(loss.dtype, torch.float32)))

    @contextmanager
    def _abandoned_if_failed(self) -> Iterator[None]:
        """A pass that raises leaves nothing behind; what it has added cannot be taken back."""
        with self._loop.discarded_if_failed():
            try:
                yield
            except BaseException:
                self._setup.observers.tell("abandon")
                self._stage.abandon_pass()
                raise

    @contextmanager
    def _lent(self) -> Iterator[None]:
        """Around a backward pass that may need the weights of this engine."""
        with self._watch.own_work(), self._abandoned_if_failed():
            for slot in self._slots:
                self._setup.observers.tell("fetch", slot)
            self._stage.gather(backward=True)
            yield
            self._stage.free()

    @contextmanager
    def _taking(self, loss: Tensor) -> Iterator[None]:
        """Around a backward pass that adds to the gradients of this engine."""
        passes = BackwardPass(self._slots[-1], "both", has_work=True)
        self._setup.observers.tell("before_backward", passes)
        self._stage.start_backward(last=False)
        if self._num_forwards > 1:
            self._stage.convert_products()
        self._num_forwards = 0
        self._stage.see_graph([get_gradient_edge(loss)])
        yield
        self._stage.finish_backward()
        self._setup.observers.tell("after_backward", passes)

    @property
    def _stage(self) -> Stage:
        return self._setup.local.stages[0]

    @property
    def _trained(self) -> list[Any]:
        return self._setup.local.trained()

    def _check(self) -> None:
        """Refuse plans under which no rank can call the model by itself."""
        if self._is_checked:
            return
        setup, plan = self._setup, self._setup.mesh.plan
        reasons = {
            f"pipeline={plan.pipeline}": plan.stages > 1,
            f"context={plan.context} sequence={plan.sequence}": setup.layers.by_layers,
            f"microbatches={plan.microbatches}": plan.microbatches > 1,
            f"compress={plan.compress}": plan.compress != "none",
            "sync=async": plan.sync == "async",
            "gates of experts": bool(setup.gates.places),
        }
        found = [reason for reason, holds in reasons.items() if holds]
        if found:
            raise UserError(
                f"engine(x) with plan '{plan}': with {' and '.join(found)} the engine takes batches through "
                "the model by itself, in parts or on several ranks; call engine.forward_backward(batch, "
                "loss) and engine.update(), or change the plan. See docs/loops.md"
            )
        self._loop.check_split()
        self._is_checked = True

    def _check_loss(self, loss: Any, engines: Sequence["OwnPasses"]) -> None:
        with torch.enable_grad():
            raise_errors("engine.backward(loss)", scalar_errors("the loss", loss))
        for each in engines:
            each._loop.check_split().tallies.check_not_summed()
        if not all(each.is_open for each in engines):
            raise UserError(
                "engine.backward(loss): this engine, or one given beside it, was not called since its last "
                "update; call engine(x), not the module, and compute the loss of what it returns. See "
                "docs/loops.md"
            )
