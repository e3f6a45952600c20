"""The interpreter: runs any program, instruction by instruction. No schedule has a loop of its own."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol, final

import torch
from torch import Tensor

from echelon.engine.step.runtime.flight import (
    Flight,
    LossSums,
    Microbatch,
    MicrobatchLoss,
    StartGradients,
    Value,
    run_backward,
    wanted,
)
from echelon.engine.step.runtime.mailbox import Mailbox
from echelon.engine.step.runtime.message import TALLY, Gradients, Leaf
from echelon.engine.step.runtime.script import Script, Slot, microbatch_of, slot_of
from echelon.engine.step.runtime.span_timer import HostClock, SpanTimer, clock_of
from echelon.engine.step.runtime.split_backward import SplitBackward, watch_hooks
from echelon.engine.step.runtime.versions import Versions
from echelon.engine.step.runtime.wire import Wire
from echelon.errors import UserError
from echelon.launching import at_instruction
from echelon.nn.autograd.leaves import enter
from echelon.parallel.observer import BackwardPass, ForwardPass, Observers
from echelon.parallel.stage import Stage
from echelon.program import COMPUTE, RECEIVES, Instruction, Op

_NOTHING = nullcontext()

# After these the form of another message may be known, or the one before it taken.
_LETS_POST = {Op.FORWARD} | RECEIVES


class LossFunction(Protocol):
    """The loss of a microbatch, which the last stage computes."""

    are_counted: bool  # whether losses are this rank's to count: others may have computed the same

    def of(self, output: Any, microbatch: Microbatch, forward: ForwardPass) -> MicrobatchLoss: ...
    def deferring(self) -> AbstractContextManager[None] | None: ...


class UpdateRuntime(Protocol):
    """The last instructions of a program, when all gradients are summed."""

    def tie(self) -> None: ...
    def norm(self, tally: Tensor) -> None: ...
    def update(self) -> None: ...
    def publish(self) -> None: ...


class Interpreter:
    """Executes the instructions of one rank of a pipeline."""

    def __init__(
        self,
        stages: Mapping[int, Stage],
        losses: LossFunction,
        observers: Observers,
        runtime: UpdateRuntime,
        wire: Wire,
        device: torch.device,
        versions: Versions | None,
        *,
        deferred: bool = False,
    ) -> None:
        """`deferred`: the sums of losses stay on the device."""
        self._stages, self._losses, self._observers, self._runtime = stages, losses, observers, runtime
        self._device, self._versions, self._deferred = device, versions, deferred
        self._inputs: dict[Slot, Value] = {}
        self._outputs: dict[Slot, Value] = {}
        self._flights: dict[Slot, Flight] = {}
        self._gradients: dict[Slot, Gradients] = {}  # of a stage's outputs
        self._returning: dict[Slot, tuple[list[Leaf], Gradients]] = {}  # of its inputs, and their form
        self._mailbox = Mailbox(wire, self._flights, with_tally=versions is not None)
        self._start_gradients = StartGradients()
        self._sums = partial(LossSums, device, deferred=deferred)
        self._tally = self._sums()
        self.counted = self._tally.counted
        self._since_update = self._no_losses()  # where every update has losses of its own
        self.timer = SpanTimer(clock_of(device))
        self._do: dict[Op, Callable[[Instruction], None]] = {
            Op.FORWARD: self._forward,
            Op.BACKWARD: self._backward,
            Op.BACKWARD_INPUT: self._backward_input,
            Op.BACKWARD_WEIGHT: self._backward_weight,
            Op.SEND_ACTIVATION: self._send_activation,
            Op.RECV_ACTIVATION: self._recv_activation,
            Op.SEND_GRADIENT: self._send_gradient,
            Op.RECV_GRADIENT: self._recv_gradient,
            Op.STORE: lambda instruction: self._observers.tell("store", slot_of(instruction)),
            Op.FETCH: self._fetch,
            Op.GATHER: self._gather,
            Op.FREE: lambda instruction: self._stages[instruction.stage].free(),
            Op.REDUCE: self._reduce,
            Op.TIE: lambda _: self._runtime.tie(),
            Op.NORM: self._norm,
            Op.STASH: self._stash,
            Op.POP: self._pop,
            Op.UPDATE: self._update,
            Op.PUBLISH: lambda _: self._runtime.publish(),
        }

    def run(self, script: Script, feed: Mapping[int, Microbatch]) -> Tensor:
        """Execute; returns the tally of the microbatches whose loss was computed here: loss total, count, and
        count times what the losses were divided by before the backward pass; `counted` has what the host
        knows of it. `feed` is what the program takes in, by microbatch.
        """
        self._script, self._feed = script, feed
        self._splits = script.splits_backward
        if not script.continues:
            self._tally = self._sums()
        self.timer.start_step(script.rank, script.instructions, continues=script.continues)
        if not script.continues:
            self._mailbox.start_step(script, feed)
        with explain_second_order():
            self._execute(script)
        at_instruction("")  # a hang between steps is of no instruction
        if not script.continues:
            self._mailbox.finish_step()
        self._feed, self.counted = {}, self._tally.counted
        return self._tally.row()

    def _execute(self, script: Script) -> None:
        timer, pairs = self.timer, zip(script.instructions, script.labels, strict=True)
        for self._at, (instruction, label) in enumerate(pairs):
            at_instruction(label)
            if timer.ranges is not None:
                timer.start_instruction(label)
            if self._at == script.first_backward and self._observers.hears("before_backwards"):
                self._observers.tell("before_backwards", self._tally.row())
            self._do[instruction.op](instruction)
            if script.receives and instruction.op in _LETS_POST:
                self._mailbox.post_ahead()
            timer.finish_instruction()

    @property
    def instruction(self) -> Instruction:
        """The one that is executed now, or was last."""
        return self._script.instructions[self._at]

    def _no_losses(self) -> Tensor:
        return torch.zeros(TALLY.shape, dtype=TALLY.dtype, device=self._device)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, what runs is not timed, and uses no tensor that is kept between steps."""
        kept = self.timer, self._start_gradients
        self.timer, self._start_gradients = SpanTimer(HostClock()), StartGradients()
        try:
            yield
        finally:
            self.timer, self._start_gradients = kept

    def forget_losses(self) -> None:
        """No update is made of what has run since the last one."""
        self._tally, self._since_update = self._sums(), self._no_losses()

    def forget(self) -> None:
        """Let go of all that is in flight: a step has failed, or the pipeline starts again."""
        for kept in (self._inputs, self._outputs, self._flights, self._gradients, self._returning):
            kept.clear()
        self._mailbox.forget()

    # Compute.

    def _forward(self, instruction: Instruction) -> None:
        microbatch = self._feed[microbatch_of(instruction)]
        value, flight = self._enter(instruction, microbatch)
        inputs, targets, weight, *_ = microbatch
        trains = microbatch.normaliser is not None
        forward = ForwardPass(slot_of(instruction), value, inputs, targets, weight, trains)
        with (
            self._observers.around("around_pass", forward),
            microbatch.scope(),
            self._weights(instruction),
            self._watch_hooks(flight),
        ):
            last = instruction.stage == self._script.program.stages - 1
            defers = self._losses.deferring() if last else None
            with self._observers.around("around_layers", forward), defers or _NOTHING:
                output = self._stages[instruction.stage].forward(value)
            result = self._losses.of(output, microbatch, forward) if last else None
        if result is not None:
            flight.leave_with_loss(self._count(instruction, result))
        else:
            self._pass_on(instruction, flight.leave(output))
        if torch.is_grad_enabled():
            self._flights[slot_of(instruction)] = flight

    def _enter(self, instruction: Instruction, microbatch: Microbatch) -> tuple[Any, Flight]:
        """Return the input of a stage, and its flight so far."""
        if instruction.stage == 0:
            return microbatch.inputs, Flight()
        value = self._inputs.pop(slot_of(instruction))
        leaves = value.as_leaves()
        inputs = [leaf for leaf in leaves if leaf.requires_grad]
        return value.spec.rebuild([enter(leaf) for leaf in leaves]), Flight(inputs, wanted(value.spec.leaves))

    def _count(self, instruction: Instruction, loss: MicrobatchLoss) -> Tensor:
        """Enter a microbatch's loss; returns what the backward pass starts from."""
        normaliser = loss.normaliser
        # Weights of samples may be learned: what is counted has a gradient then.
        has_way = isinstance(normaliser, Tensor) and normaliser.requires_grad
        # Without flushes, stages update after different microbatches: a tally goes back with each gradient.
        tally = None if self._versions is None else self._sums()
        if self._losses.are_counted:
            sums = loss.sums(deferred=self._deferred)
            self._tally.add(*sums)
            if tally is not None:
                tally.add(*sums)
        # The backward pass of total / normaliser; a division that needs no gradient is no part of the graph.
        start = loss.root
        if has_way:
            total = loss.total(start)
            start = total / loss.divisor(total.dtype)
        if torch.is_grad_enabled():
            gradients: list[Tensor | None] = []
            if start.requires_grad:
                gradients = [torch.ones_like(start) if has_way else self._start_gradients.of(loss)]
            self._gradients[slot_of(instruction)] = Gradients(gradients, tally and tally.row())
        return start

    def _pass_on(self, instruction: Instruction, value: Value) -> None:
        if self._is_here(instruction.stage + 1, instruction):
            # A copy, as if it were sent: the next stage may change it.
            copies = [tensor.clone() for tensor in value.tensors]
            self._inputs[instruction.stage + 1, microbatch_of(instruction)] = Value(value.spec, copies)
        else:
            self._outputs[slot_of(instruction)] = value

    def _backward(self, instruction: Instruction) -> None:
        slot = slot_of(instruction)
        flight, gradients = self._flights.pop(slot), self._gradients.pop(slot)
        backward = BackwardPass(slot, "both", has_work=True)
        self._observers.tell("before_backward", backward)
        # What is computed again in the backward pass needs the weights of the forward.
        self._start_backward(instruction)
        with self._weights(instruction):
            outputs, known = flight.known(gradients)
            if outputs:
                self._stages[instruction.stage].see_graph(outputs)
                run_backward(outputs, known)
        self._stages[instruction.stage].finish_backward()
        self._observers.tell("after_backward", backward)
        self._pass_back(instruction, flight, Gradients(flight.take_gradients(), gradients.tally))
        self._add_up(gradients.tally)

    def _backward_input(self, instruction: Instruction) -> None:
        slot = slot_of(instruction)
        flight, gradients = self._flights[slot], self._gradients.pop(slot)  # the weights need the graph again
        backward = BackwardPass(slot, "inputs", has_work=bool(flight.inputs))
        self._observers.tell("before_backward", backward)
        flight.split = SplitBackward(*flight.known(gradients), flight.inputs, is_hooked=flight.is_hooked)
        self._stages[instruction.stage].start_early_backward()
        self._pass_back(instruction, flight, Gradients(flight.split.for_inputs(), gradients.tally))
        self._observers.tell("after_backward", backward)
        self._add_up(gradients.tally)

    def _backward_weight(self, instruction: Instruction) -> None:
        flight = self._flights.pop(slot_of(instruction))
        assert flight.split is not None
        backward = BackwardPass(slot_of(instruction), "weights", has_work=True)
        self._observers.tell("before_backward", backward)
        self._start_backward(instruction)
        flight.split.for_weights()
        self._stages[instruction.stage].finish_backward()
        self._observers.tell("after_backward", backward)

    def _watch_hooks(self, flight: Flight) -> AbstractContextManager[None]:
        """Around a forward pass whose backward pass is to be split: what has hooks is not."""
        if not self._splits or not torch.is_grad_enabled():
            return _NOTHING
        return self._note_hooks(flight)

    @contextmanager
    def _note_hooks(self, flight: Flight) -> Iterator[None]:
        with watch_hooks() as watch:
            yield
        flight.is_hooked = watch.is_hooked

    def _start_backward(self, instruction: Instruction) -> None:
        """A backward pass begins that adds to the gradients of weights."""
        stage = self._stages[instruction.stage]
        stage.start_backward(last=self._at in self._script.lasts and not self._rounds_to_make_up(stage))

    def _pass_back(self, instruction: Instruction, flight: Flight, gradients: Gradients) -> None:
        if instruction.stage == 0:
            return
        if self._is_here(instruction.stage - 1, instruction):
            self._gradients[instruction.stage - 1, microbatch_of(instruction)] = gradients
        else:
            self._returning[slot_of(instruction)] = (flight.input_leaves, gradients)

    # Messages.

    def _send_activation(self, instruction: Instruction) -> None:
        self._mailbox.send_activation(instruction, self._outputs.pop(slot_of(instruction)))

    def _recv_activation(self, instruction: Instruction) -> None:
        self._inputs[slot_of(instruction)] = self._mailbox.receive_activation(instruction)

    def _send_gradient(self, instruction: Instruction) -> None:
        self._mailbox.send_gradients(instruction, *self._returning.pop(slot_of(instruction)))

    def _recv_gradient(self, instruction: Instruction) -> None:
        self._gradients[slot_of(instruction)] = self._mailbox.receive_gradients(instruction)

    # Copies.

    def _fetch(self, instruction: Instruction) -> None:
        slot = slot_of(instruction)
        following = self._script.instructions[self._at :]
        use = next(later.op for later in following if later.op in COMPUTE and slot_of(later) == slot)
        if use is not Op.BACKWARD_INPUT or self._flights[slot].inputs:  # else nothing is computed
            self._observers.tell("fetch", slot)

    # Weights.

    def _weights(self, instruction: Instruction) -> AbstractContextManager[None]:
        if self._versions is None or instruction.version is None:
            return _NOTHING
        return self._versions.using(instruction.version)

    def _gather(self, instruction: Instruction) -> None:
        following = next(later for later in self._script.instructions[self._at :] if later.op in COMPUTE)
        self._stages[instruction.stage].gather(backward=following.op is not Op.FORWARD)

    def _reduce(self, instruction: Instruction) -> None:
        """Return when the stage's gradients are summed, if they are to be now.

        Where replicas talk in every backward pass, one that has had fewer of them makes up for it.
        """
        stage, sums = self._stages[instruction.stage], self._script.sums
        for left in reversed(range(self._rounds_to_make_up(stage))):
            stage.make_up_round(last=left == 0 and sums)
        if sums:
            self._observers.tell("before_reduce")
            stage.reduce()

    def _rounds_to_make_up(self, stage: Stage) -> int:
        return self._script.missing_rounds(stage.index) if stage.lockstep else 0

    def _stash(self, instruction: Instruction) -> None:
        assert self._versions is not None
        assert instruction.version is not None
        self._versions.stash(instruction.version)

    def _pop(self, instruction: Instruction) -> None:
        assert self._versions is not None
        assert instruction.version is not None
        self._versions.pop(instruction.version)

    def _norm(self, _: Instruction) -> None:
        """Without versions of weights, all of a step's losses are one update's."""
        self._runtime.norm(self._tally.row() if self._versions is None else self._since_update)

    def _update(self, _: Instruction) -> None:
        self._runtime.update()
        if self._versions is not None:
            self._versions.newest += 1
            self._since_update.zero_()

    def _add_up(self, tally: Tensor | None) -> None:
        """Count losses for the next update, where every update has losses of its own."""
        if tally is not None:
            self._since_update += tally

    def _is_here(self, stage: int, instruction: Instruction) -> bool:
        """Return whether this rank also does `stage` for the microbatch of an instruction."""
        return self._script.program.holder(stage, microbatch_of(instruction)) == self._script.rank


# Gradients of gradients: what cannot be differentiated twice is said in a sentence.

_TORCH_SAYS = "differentiate twice"


@final
class explain_second_order:  # noqa: N801 (read as `with explain_second_order():`)
    """Around forward and backward passes."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if isinstance(error, RuntimeError) and _TORCH_SAYS in str(error):
            raise UserError(
                "the model or loss differentiates a gradient (torch.autograd.grad with create_graph=True), "
                "and its way leads through an operation that can be differentiated once: ring attention "
                "(attention=all-to-all can be differentiated twice), echelon's own cross entropy, or a "
                "function of the model that is marked once_differentiable; keep it out of that gradient, or "
                "use a plan without context and tensor"
            ) from error
