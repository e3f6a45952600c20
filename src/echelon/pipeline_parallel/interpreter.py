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
from torch import Tensor, nn

from echelon.pipeline_parallel.flight import Flight, Value, enter, wanted
from echelon.pipeline_parallel.message import Gradients, Tally
from echelon.pipeline_parallel.split_backward import SplitBackward
from echelon.pipeline_parallel.structure import Leaf
from echelon.pipeline_parallel.versions import Versions
from echelon.pipeline_parallel.wire import Posted, Wire
from echelon.program import COMPUTE, Instruction, Op, Program, Span

# Receives from one rank that are posted before they are needed. Not more: behind a message that is not as
# remembered come its description and the true one, which a second receive would take for the next.
_AHEAD = 1

Place = tuple[int, int]  # stage, microbatch


class Microbatch(NamedTuple):
    """One microbatch as a stage may need it.

    `look` says what its inputs look like, the same on all ranks; `scope` opens its place in the training.
    """

    inputs: Any
    targets: Any
    weight: int
    look: str
    scope: Callable[[], AbstractContextManager[None]] = nullcontext


class Replicas(Protocol):
    """What the interpreter asks of how a stage's replicas agree."""

    lockstep: bool

    def start_backward(self, *, last: bool) -> None: ...
    def finish_backward(self) -> None: ...
    def gather(self, *, backward: bool) -> None: ...
    def free(self) -> None: ...


class Task(NamedTuple):
    """What the stages of this rank compute, and with what around it."""

    stages: Mapping[int, nn.Module]
    replicas: Mapping[int, Replicas]
    loss: Callable[[Any, Microbatch], tuple[Tensor, Tensor | float]]
    around: Callable[[Microbatch], AbstractContextManager[None]]  # of every forward
    update: Callable[[Tensor], None]
    counts: bool = True  # whether the losses are this rank's to count: others may have computed the same


class Script:
    """One rank's part of a program, with what follows from it."""

    def __init__(self, program: Program, rank: int, *, empties: bool = True) -> None:
        """`empties`: when the program is over, no rank has anything on its way."""
        self.program, self.rank, self.empties = program, rank, empties
        self.instructions = program.ranks[rank]
        self.lasts = frozenset(self._last_backwards())
        self.receives: dict[int, list[Instruction]] = {}
        for its in self.instructions:
            if its.op in (Op.RECV_ACTIVATION, Op.RECV_GRADIENT):
                assert its.peer is not None
                self.receives.setdefault(its.peer, []).append(its)

    def missing_rounds(self, stage: int) -> int:
        """How many microbatches fewer than the busiest replica of `stage` this one has."""
        own = sum(its.op is Op.FORWARD and its.stage == stage for its in self.instructions)
        return -(-self.program.microbatches // len(self.program.placement[stage])) - own

    def _last_backwards(self) -> Iterator[int]:
        """Where the backward passes stand after which a stage's gradients are reduced."""
        latest: dict[int, int] = {}
        for place, its in enumerate(self.instructions):
            if its.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT):
                latest[its.stage] = place
            elif its.op is Op.REDUCE and its.stage in latest:
                yield latest.pop(its.stage)


class Interpreter:
    """Executes the instructions of one rank of a pipeline."""

    def __init__(self, task: Task, wire: Wire, device: torch.device, versions: Versions | None) -> None:
        self._task, self._wire, self._device, self._versions = task, wire, device, versions
        self._inputs: dict[Place, Value] = {}
        self._outputs: dict[Place, Value] = {}
        self._flights: dict[Place, Flight] = {}
        self._gradients: dict[Place, Gradients] = {}  # of a stage's outputs
        self._returning: dict[Place, tuple[list[Leaf], Gradients]] = {}  # of its inputs, and their form
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
            Op.FREE: lambda its: self._task.replicas[its.stage].free(),
            Op.REDUCE: self._reduce,
            Op.STASH: self._stash,
            Op.POP: self._pop,
            Op.UPDATE: self._update,
            Op.TIE: lambda _: None,  # the update does the work of these three
            Op.NORM: lambda _: None,
            Op.PUBLISH: lambda _: None,
        }

    def run(self, script: Script, feed: Mapping[int, Microbatch], normaliser: float = 1.0) -> Tensor:
        """Execute; returns (loss total, count) of the microbatches whose loss was computed here.

        `feed` is what the program takes in, by microbatch; losses are divided by `normaliser` before the
        backward pass.
        """
        self._now, self._feed, self._normaliser = script, feed, normaliser
        self._tally = self._no_losses()
        if self._versions is None:  # all of a step's losses are one update's
            self._since_update = self._tally
        self._upcoming = {peer: deque(receives) for peer, receives in script.receives.items()}
        self._posted: dict[int, deque[Posted]] = {peer: deque() for peer in script.receives}
        self.spans = []
        self._wire.start_step()
        self._post_ahead()
        for self._at, its in enumerate(script.instructions):
            start = time.perf_counter()
            self._do[its.op](its)
            self.spans.append(Span(script.rank, start, time.perf_counter(), its))
        self._wire.finish_step(emptied=script.empties)
        self._feed = {}
        return self._tally

    def _no_losses(self) -> Tensor:
        return torch.zeros(2, dtype=torch.float64, device=self._device)

    def forget(self) -> None:
        """Let go of all that is in flight: a step has failed, or the pipeline starts anew."""
        for held in (self._inputs, self._outputs, self._flights, self._gradients, self._returning):
            held.clear()

    # Compute.

    def _forward(self, its: Instruction) -> None:
        microbatch = self._feed[_microbatch(its)]
        value, flight = self._enter(its, microbatch)
        with self._task.around(microbatch), self._weights(its):
            output = self._task.stages[its.stage](value)
            last = its.stage == self._now.program.stages - 1
            result = self._task.loss(output, microbatch) if last else None
        if result is not None:
            flight.leave_with_loss(self._count(its, *result))
        else:
            self._pass_on(its, flight.leave(output))
        if torch.is_grad_enabled():
            self._flights[_place(its)] = flight
            self._post_ahead()  # the form of this microbatch's gradient is known now

    def _enter(self, its: Instruction, microbatch: Microbatch) -> tuple[Any, Flight]:
        """What a stage is called with, and its flight so far."""
        if its.stage == 0:
            return microbatch.inputs, Flight()
        value = self._inputs.pop(_place(its))
        leaves = value.as_leaves()
        inputs = [leaf for leaf in leaves if leaf.requires_grad]
        return value.spec.rebuild([enter(leaf) for leaf in leaves]), Flight(inputs, wanted(value.spec.leaves))

    def _count(self, its: Instruction, total: Tensor, count: Tensor | float) -> Tensor:
        """Enter a microbatch's loss; returns what the backward pass starts from."""
        tally = (0.0, 0.0)
        if self._task.counts:
            self._tally[0] += total.detach()
            self._tally[1] += count
            if self._versions is not None:
                tally = (float(total.detach()), float(count))
        if torch.is_grad_enabled():
            ones = [torch.ones_like(total)] if total.requires_grad else []
            self._gradients[_place(its)] = Gradients([*ones], tally)
        return total / self._normaliser

    def _pass_on(self, its: Instruction, value: Value) -> None:
        if self._is_here(its.stage + 1, its):  # a copy, as if it were sent: the next stage may change it
            copies = [tensor.clone() for tensor in value.tensors]
            self._inputs[its.stage + 1, _microbatch(its)] = Value(value.spec, copies)
        else:
            self._outputs[_place(its)] = value

    def _backward(self, its: Instruction) -> None:
        flight, gradients = self._flights.pop(_place(its)), self._gradients.pop(_place(its))
        # What is computed again in the backward pass needs the weights of the forward.
        with self._accumulating(its), self._weights(its):
            outputs, known = flight.known(gradients)
            if outputs:
                torch.autograd.backward(outputs, known)
        self._pass_back(its, flight, Gradients(flight.take_gradients(), gradients.tally))
        self._add_up(gradients.tally)

    def _backward_input(self, its: Instruction) -> None:
        flight, gradients = self._flights[_place(its)], self._gradients.pop(_place(its))
        flight.split = SplitBackward(*flight.known(gradients), flight.inputs)
        self._pass_back(its, flight, Gradients(flight.split.for_inputs(), gradients.tally))
        self._add_up(gradients.tally)

    def _backward_weight(self, its: Instruction) -> None:
        flight = self._flights.pop(_place(its))
        assert flight.split is not None
        with self._accumulating(its):
            flight.split.for_weights()

    @contextmanager
    def _accumulating(self, its: Instruction) -> Iterator[None]:
        """Around a backward pass that adds to the gradients of weights."""
        replicas = self._task.replicas[its.stage]
        replicas.start_backward(last=self._at in self._now.lasts)
        yield
        replicas.finish_backward()

    def _pass_back(self, its: Instruction, flight: Flight, gradients: Gradients) -> None:
        if its.stage == 0:
            return
        if self._is_here(its.stage - 1, its):
            self._gradients[its.stage - 1, _microbatch(its)] = gradients
        else:
            self._returning[_place(its)] = (flight.input_leaves, gradients)

    # Messages.

    def _send_activation(self, its: Instruction) -> None:
        value = self._outputs.pop(_place(its))
        key = (its.stage, self._feed[_microbatch(its)].look)
        self._wire.send(value.spec, value.tensors, _peer(its), key)

    def _recv_activation(self, its: Instruction) -> None:
        key = (its.stage - 1, self._feed[_microbatch(its)].look)
        self._inputs[_place(its)] = Value(*self._wire.receive(self._take_posted(its), _peer(its), key))
        self._post_ahead()

    def _send_gradient(self, its: Instruction) -> None:
        self._wire.send_gradients(*self._returning.pop(_place(its)), _peer(its))

    def _recv_gradient(self, its: Instruction) -> None:
        posted = self._take_posted(its)
        assert posted is not None, f"{its} before its forward"
        self._gradients[_place(its)] = self._wire.receive_gradients(posted)
        self._post_ahead()

    def _take_posted(self, its: Instruction) -> Posted | None:
        """The receive that was posted for an instruction, if one could be."""
        posted = self._posted[_peer(its)]
        if not posted:
            self._upcoming[_peer(its)].popleft()
            return None
        return posted.popleft()

    def _post_ahead(self) -> None:
        """Post the next receives from every rank, as far as the form of what comes is known."""
        for peer, upcoming in self._upcoming.items():
            while upcoming and len(self._posted[peer]) < _AHEAD:
                posted = self._post(upcoming[0])
                if posted is None:
                    break
                upcoming.popleft()
                self._posted[peer].append(posted)

    def _post(self, its: Instruction) -> Posted | None:
        if its.op is Op.RECV_ACTIVATION:
            return self._wire.post(_peer(its), (its.stage - 1, self._feed[_microbatch(its)].look))
        flight = self._flights.get(_place(its))
        return None if flight is None else self._wire.post_gradients(flight.output_leaves, _peer(its))

    # Weights.

    def _weights(self, its: Instruction) -> AbstractContextManager[None]:
        if self._versions is None or its.version is None:
            return nullcontext()
        return self._versions.using(its.version)

    def _gather(self, its: Instruction) -> None:
        following = next(later for later in self._now.instructions[self._at :] if later.op in COMPUTE)
        self._task.replicas[its.stage].gather(backward=following.op is not Op.FORWARD)

    def _reduce(self, its: Instruction) -> None:
        """The stage's gradients are complete: they are on their way, and the update waits for them.

        Where replicas talk in every backward pass, one that has had fewer of them makes up for it.
        """
        replicas = self._task.replicas[its.stage]
        if replicas.lockstep:
            for _ in range(self._now.missing_rounds(its.stage)):
                replicas.start_backward(last=True)
                replicas.finish_backward()

    def _stash(self, its: Instruction) -> None:
        assert self._versions is not None
        assert its.version is not None
        self._versions.stash(its.version)

    def _pop(self, its: Instruction) -> None:
        assert self._versions is not None
        assert its.version is not None
        self._versions.pop(its.version)

    def _update(self, _: Instruction) -> None:
        self._task.update(self._since_update)
        if self._versions is not None:
            self._versions.newest += 1
            self._since_update.zero_()

    def _add_up(self, tally: Tally) -> None:
        """What the next update is the mean of, where every update has losses of its own."""
        if self._versions is not None:
            self._since_update += torch.tensor(tally, dtype=torch.float64, device=self._device)

    def _is_here(self, stage: int, its: Instruction) -> bool:
        """Whether this rank also does `stage` for the microbatch of an instruction."""
        return self._now.program.holder(stage, _microbatch(its)) == self._now.rank


def _place(its: Instruction) -> Place:
    return its.stage, _microbatch(its)


def _microbatch(its: Instruction) -> int:
    assert its.microbatch is not None
    return its.microbatch


def _peer(its: Instruction) -> int:
    assert its.peer is not None
    return its.peer
