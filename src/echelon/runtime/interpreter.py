"""The interpreter: runs any program, instruction by instruction. No schedule has a loop of its own.

Sends return at once. Receives are posted ahead, in the order in which they will be needed, as soon as the
form of what comes is known; the instruction itself only waits.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from echelon.launching import at_instruction
from echelon.program import COMPUTE, Instruction, Op, Span
from echelon.runtime.flight import Flight, Value, enter, wanted
from echelon.runtime.message import Gradients
from echelon.runtime.script import Script, peer_of
from echelon.runtime.split_backward import SplitBackward
from echelon.runtime.stage import Stage
from echelon.runtime.structure import Leaf
from echelon.runtime.versions import Versions
from echelon.runtime.wire import Posted, Wire

# Receives from one rank that are posted before they are needed. Not more: behind a message that is not as
# remembered come its description and the true one, which a second receive would take for the next.
_AHEAD = 1

Slot = tuple[int, int]  # stage, microbatch


class Microbatch(NamedTuple):
    """One microbatch as a stage may need it.

    `look` says what its inputs look like, the same on all ranks; `scope` opens its place in the training.
    """

    inputs: Any
    targets: Any
    weight: int
    look: str
    scope: Callable[[], AbstractContextManager[None]] = nullcontext


class StageRuntime(Protocol):
    """What instructions mean beyond a single stage: the loss, what is around a forward, and the update."""

    @property
    def counts_loss(self) -> bool:
        """Whether losses are this rank's to count: others may have computed the same."""

    def loss(self, output: Any, microbatch: Microbatch) -> tuple[Tensor, Tensor | float]: ...
    def around(self, microbatch: Microbatch) -> AbstractContextManager[None]: ...
    def reduce(self, stage: Stage) -> None: ...
    def tie(self) -> None: ...
    def norm(self, tally: Tensor) -> None: ...
    def update(self) -> None: ...
    def publish(self) -> None: ...


class Interpreter:
    """Executes the instructions of one rank of a pipeline."""

    def __init__(
        self,
        stages: Mapping[int, Stage],
        runtime: StageRuntime,
        wire: Wire,
        device: torch.device,
        versions: Versions | None,
    ) -> None:
        self._stages, self._runtime = stages, runtime
        self._wire, self._device, self._versions = wire, device, versions
        self._inputs: dict[Slot, Value] = {}
        self._outputs: dict[Slot, Value] = {}
        self._flights: dict[Slot, Flight] = {}
        self._gradients: dict[Slot, Gradients] = {}  # of a stage's outputs
        self._returning: dict[Slot, tuple[list[Leaf], Gradients]] = {}  # of its inputs, and their form
        self._since_update = self._no_losses()
        self.spans: list[Span] = []
        self._do: dict[Op, Callable[[Instruction], None]] = {
            Op.FORWARD: self._forward,
            Op.BACKWARD: self._backward,
            Op.BACKWARD_INPUT: self._backward_input,
            Op.BACKWARD_WEIGHT: self._backward_weight,
            Op.SEND_ACTIVATION: self._send_activation,
            Op.RECV_ACTIVATION: self._recv_activation,
            Op.SEND_GRADIENT: self._send_gradient,
            Op.RECV_GRADIENT: self._recv_gradient,
            Op.GATHER: self._gather,
            Op.FREE: lambda instruction: self._stages[instruction.stage].free(),
            Op.REDUCE: self._reduce,
            Op.TIE: lambda _: self._runtime.tie(),
            Op.NORM: lambda _: self._runtime.norm(self._since_update),
            Op.STASH: self._stash,
            Op.POP: self._pop,
            Op.UPDATE: self._update,
            Op.PUBLISH: lambda _: self._runtime.publish(),
        }

    def run(self, script: Script, feed: Mapping[int, Microbatch], normaliser: float | Tensor = 1.0) -> Tensor:
        """Execute; returns (loss total, count) of the microbatches whose loss was computed here.

        `feed` is what the program takes in, by microbatch; losses are divided by `normaliser` before the
        backward pass.
        """
        self._script, self._feed, self._normaliser = script, feed, normaliser
        self._tally = self._no_losses()
        if self._versions is None:  # all of a step's losses are one update's
            self._since_update = self._tally
        self._upcoming = {peer: deque(receives) for peer, receives in script.receives.items()}
        self._posted: dict[int, deque[Posted]] = {peer: deque() for peer in script.receives}
        self._num_received = dict.fromkeys(script.receives, 0)
        self.spans = []
        self._at = -1
        self._wire.start_step()
        self._post_ahead()
        for self._at, instruction in enumerate(script.instructions):
            at_instruction(script.labels[self._at])
            start = time.perf_counter()
            self._do[instruction.op](instruction)
            self.spans.append(Span(script.rank, start, time.perf_counter(), instruction))
        at_instruction("")
        self._wire.finish_step(emptied=script.empties)
        self._feed = {}
        return self._tally

    def _no_losses(self) -> Tensor:
        return torch.zeros(2, dtype=torch.float64, device=self._device)

    def forget(self) -> None:
        """Let go of all that is in flight: a step has failed, or the pipeline starts again."""
        for kept in (self._inputs, self._outputs, self._flights, self._gradients, self._returning):
            kept.clear()

    # Compute.

    def _forward(self, instruction: Instruction) -> None:
        microbatch = self._feed[_microbatch(instruction)]
        value, flight = self._enter(instruction, microbatch)
        with self._runtime.around(microbatch), self._weights(instruction):
            output = self._stages[instruction.stage].forward(value)
            last = instruction.stage == self._script.program.stages - 1
            result = self._runtime.loss(output, microbatch) if last else None
        if result is not None:
            flight.leave_with_loss(self._count(instruction, *result))
        else:
            self._pass_on(instruction, flight.leave(output))
        if torch.is_grad_enabled():
            self._flights[_slot(instruction)] = flight
            self._post_ahead()  # the form of this microbatch's gradient is known now

    def _enter(self, instruction: Instruction, microbatch: Microbatch) -> tuple[Any, Flight]:
        """What a stage is called with, and its flight so far."""
        if instruction.stage == 0:
            return microbatch.inputs, Flight()
        value = self._inputs.pop(_slot(instruction))
        leaves = value.as_leaves()
        inputs = [leaf for leaf in leaves if leaf.requires_grad]
        return value.spec.rebuild([enter(leaf) for leaf in leaves]), Flight(inputs, wanted(value.spec.leaves))

    def _count(self, instruction: Instruction, total: Tensor, count: Tensor | float) -> Tensor:
        """Enter a microbatch's loss; returns what the backward pass starts from."""
        tally = None if self._versions is None else self._no_losses()
        for counted in (self._tally, tally):
            if counted is not None and self._runtime.counts_loss:
                counted[0] += total.detach()
                counted[1] += count
        if torch.is_grad_enabled():
            ones = [torch.ones_like(total)] if total.requires_grad else []
            self._gradients[_slot(instruction)] = Gradients([*ones], tally)
        normaliser = self._normaliser
        if isinstance(normaliser, Tensor):  # float64, which would make the loss and the gradients so
            normaliser = normaliser.to(torch.promote_types(total.dtype, torch.float32))
        return total / normaliser

    def _pass_on(self, instruction: Instruction, value: Value) -> None:
        if self._is_here(instruction.stage + 1, instruction):
            # A copy, as if it were sent: the next stage may change it.
            copies = [tensor.clone() for tensor in value.tensors]
            self._inputs[instruction.stage + 1, _microbatch(instruction)] = Value(value.spec, copies)
        else:
            self._outputs[_slot(instruction)] = value

    def _backward(self, instruction: Instruction) -> None:
        slot = _slot(instruction)
        flight, gradients = self._flights.pop(slot), self._gradients.pop(slot)
        # What is computed again in the backward pass needs the weights of the forward.
        with self._accumulating(instruction), self._weights(instruction):
            outputs, known = flight.known(gradients)
            if outputs:
                torch.autograd.backward(outputs, known)
        self._pass_back(instruction, flight, Gradients(flight.take_gradients(), gradients.tally))
        self._add_up(gradients.tally)

    def _backward_input(self, instruction: Instruction) -> None:
        flight, gradients = self._flights[_slot(instruction)], self._gradients.pop(_slot(instruction))
        flight.split = SplitBackward(*flight.known(gradients), flight.inputs)
        self._pass_back(instruction, flight, Gradients(flight.split.for_inputs(), gradients.tally))
        self._add_up(gradients.tally)

    def _backward_weight(self, instruction: Instruction) -> None:
        flight = self._flights.pop(_slot(instruction))
        assert flight.split is not None
        with self._accumulating(instruction):
            flight.split.for_weights()

    @contextmanager
    def _accumulating(self, instruction: Instruction) -> Iterator[None]:
        """Around a backward pass that adds to the gradients of weights."""
        stage = self._stages[instruction.stage]
        stage.start_backward(last=self._at in self._script.lasts)
        yield
        stage.finish_backward()

    def _pass_back(self, instruction: Instruction, flight: Flight, gradients: Gradients) -> None:
        if instruction.stage == 0:
            return
        if self._is_here(instruction.stage - 1, instruction):
            self._gradients[instruction.stage - 1, _microbatch(instruction)] = gradients
        else:
            self._returning[_slot(instruction)] = (flight.input_leaves, gradients)

    # Messages.

    def _send_activation(self, instruction: Instruction) -> None:
        value = self._outputs.pop(_slot(instruction))
        key = (instruction.stage, self._feed[_microbatch(instruction)].look)
        self._wire.send(value.spec, value.tensors, peer_of(instruction), key)
        self._post_ahead()

    def _recv_activation(self, instruction: Instruction) -> None:
        peer, key = peer_of(instruction), self._activation_key(instruction)
        self._inputs[_slot(instruction)] = Value(*self._wire.receive(self._take_posted(peer), peer, key))
        self._acknowledge(peer)
        self._post_ahead()

    def _send_gradient(self, instruction: Instruction) -> None:
        self._wire.send_gradients(*self._returning.pop(_slot(instruction)), peer_of(instruction))
        self._post_ahead()

    def _recv_gradient(self, instruction: Instruction) -> None:
        posted = self._take_posted(peer_of(instruction))
        assert posted is not None, f"{instruction} before its forward"
        self._gradients[_slot(instruction)] = self._wire.receive_gradients(posted)
        self._acknowledge(peer_of(instruction))
        self._post_ahead()

    def _acknowledge(self, peer: int) -> None:
        """A message has come from `peer`: let go of what it must have received before."""
        if self._versions is None:  # else messages of earlier steps are on their way
            self._wire.acknowledge(peer, self._script.acknowledged[peer][self._num_received[peer]])
            self._num_received[peer] += 1

    def _take_posted(self, peer: int) -> Posted | None:
        """The receive that is posted for the next message of `peer`; None if its form is not known."""
        posted = self._posted[peer]
        return posted.popleft() if posted else self._post(self._upcoming[peer].popleft())

    def _post_ahead(self) -> None:
        """Post the next receives from every rank, as far as the form of what comes is known."""
        for peer, upcoming in self._upcoming.items():
            while upcoming and len(self._posted[peer]) < _AHEAD and self._may_post(peer):
                posted = self._post(upcoming[0])
                if posted is None:
                    break
                upcoming.popleft()
                self._posted[peer].append(posted)

    def _may_post(self, peer: int) -> bool:
        """Whether this rank has queued all that the next message of `peer` waits for."""
        if not self._wire.is_on_device:
            return True
        if self._versions is not None:  # what was sent in earlier steps is not counted
            return False
        number = len(self._script.receives[peer]) - len(self._upcoming[peer])
        return self._script.post_after[peer][number] <= self._at

    def _post(self, instruction: Instruction) -> Posted | None:
        if instruction.op is Op.RECV_ACTIVATION:
            return self._wire.post(peer_of(instruction), self._activation_key(instruction))
        flight = self._flights.get(_slot(instruction))
        if flight is None:
            return None
        tally = self._versions is not None
        return self._wire.post_gradients(flight.output_leaves, peer_of(instruction), tally=tally)

    def _activation_key(self, instruction: Instruction) -> tuple[int, str]:
        """What the form of an activation that is received follows from."""
        return instruction.stage - 1, self._feed[_microbatch(instruction)].look

    # Weights.

    def _weights(self, instruction: Instruction) -> AbstractContextManager[None]:
        if self._versions is None or instruction.version is None:
            return nullcontext()
        return self._versions.using(instruction.version)

    def _gather(self, instruction: Instruction) -> None:
        following = next(later for later in self._script.instructions[self._at :] if later.op in COMPUTE)
        self._stages[instruction.stage].gather(backward=following.op is not Op.FORWARD)

    def _reduce(self, instruction: Instruction) -> None:
        """Return when the stage's gradients are summed.

        Where replicas talk in every backward pass, one that has had fewer of them makes up for it.
        """
        stage = self._stages[instruction.stage]
        if stage.lockstep:
            for _ in range(self._script.missing_rounds(instruction.stage)):
                stage.make_up_round()
        self._runtime.reduce(stage)

    def _stash(self, instruction: Instruction) -> None:
        assert self._versions is not None
        assert instruction.version is not None
        self._versions.stash(instruction.version)

    def _pop(self, instruction: Instruction) -> None:
        assert self._versions is not None
        assert instruction.version is not None
        self._versions.pop(instruction.version)

    def _update(self, _: Instruction) -> None:
        self._runtime.update()
        if self._versions is not None:
            self._versions.newest += 1
            self._since_update.zero_()

    def _add_up(self, tally: Tensor | None) -> None:
        """What the next update is the mean of, where every update has losses of its own."""
        if tally is not None:
            self._since_update += tally

    def _is_here(self, stage: int, instruction: Instruction) -> bool:
        """Whether this rank also does `stage` for the microbatch of an instruction."""
        return self._script.program.holder(stage, _microbatch(instruction)) == self._script.rank


def _slot(instruction: Instruction) -> Slot:
    return instruction.stage, _microbatch(instruction)


def _microbatch(instruction: Instruction) -> int:
    assert instruction.microbatch is not None
    return instruction.microbatch
