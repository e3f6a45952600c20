"""One rank's end of a communicator, as a Group."""

from collections.abc import Callable
from functools import reduce
from typing import final

import torch
from torch import Tensor

from echelon.collectives import Group, Ledger, Reduction, Work
from echelon.collectives.group import COMBINE
from tests.nccl_like.communicator import Communicator, Making, MemberTensors, Operation
from tests.nccl_like.rank_threads import RankThreads

CPU = torch.device("cpu")


@final
class NcclLikeGroup(Group):
    """Issues operations to the queue of one member. `member` is the rank in the world."""

    def __init__(
        self,
        threads: RankThreads,
        communicator: Communicator,
        member: int,
        ledger: Ledger,
        *,
        waits_for_sends: bool,
    ) -> None:
        members = communicator.members
        super().__init__(communicator.axis, members.index(member), len(members), ledger)
        self._threads, self.communicator, self._member = threads, communicator, member
        self._waits_for_sends = waits_for_sends

    def join(self) -> None:
        """Take part in the making of the communicator, without a wait for the others."""
        self.communicator.joined.add(self._member)

    def connect(self, device: torch.device) -> None:  # noqa: ARG002
        """Return when all members have come to make the communicator."""
        self.join()
        self._threads.wait(self._member, Making(self.communicator))

    def has_queue_per_peer(self, device: torch.device) -> bool:  # noqa: ARG002
        return False

    def waits_on_host(self, device: torch.device) -> bool:  # noqa: ARG002
        return False

    def _all_reduce(self, tensor: Tensor, op: Reduction) -> Work:
        def move(members: MemberTensors) -> None:
            total = _reduced([each for (each,) in members], op)
            for (each,) in members:
                each.copy_(total)

        return self._issue("all_reduce", (op, *_form(tensor)), move, tensor)

    def _reduce_scatter(self, output: Tensor, tensor: Tensor, op: Reduction) -> Work:
        def move(members: MemberTensors) -> None:
            total = _reduced([whole for _, whole in members], op)
            for (part, _), values in zip(members, total.view(len(members), -1), strict=True):
                part.view(-1).copy_(values)

        return self._issue("reduce_scatter", (op, *_form(tensor)), move, output, tensor)

    def _all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        def move(members: MemberTensors) -> None:
            values = torch.cat([part.view(-1) for _, part in members])
            for whole, _ in members:
                whole.view(-1).copy_(values)

        return self._issue("all_gather", _form(output), move, output, tensor)

    def _all_to_all(
        self, output: Tensor, tensor: Tensor, output_rows: list[int], input_rows: list[int]
    ) -> Work:
        def move(members: MemberTensors) -> None:
            size = len(members)
            for target, parts in enumerate(members):
                for source in range(size):
                    parts[source].copy_(members[source][size + target])

        parts = (*output.split(output_rows), *tensor.split(input_rows))
        return self._issue("all_to_all", (tensor.dtype,), move, *parts)

    def _broadcast(self, tensor: Tensor, source: int) -> Work:
        def move(members: MemberTensors) -> None:
            for (each,) in members:
                each.copy_(members[source][0])

        return self._issue("broadcast", ("from", source, *_form(tensor)), move, tensor)

    def _reduce(self, tensor: Tensor, target: int, op: Reduction) -> Work:
        def move(members: MemberTensors) -> None:
            members[target][0].copy_(_reduced([each for (each,) in members], op))

        return self._issue("reduce", (op, "to", target, *_form(tensor)), move, tensor)

    def _scatter(self, output: Tensor, tensor: Tensor | None, source: int) -> Work:
        def move(members: MemberTensors) -> None:
            for (part, *_), values in zip(members, members[source][1].view(len(members), -1), strict=True):
                part.view(-1).copy_(values)

        tensors = [output] if tensor is None else [output, tensor]
        return self._issue("scatter", ("from", source, *_form(output)), move, *tensors)

    def _gather(self, tensor: Tensor, output: Tensor | None, target: int) -> Work:
        def move(members: MemberTensors) -> None:
            members[target][1].view(-1).copy_(torch.cat([part.view(-1) for part, *_ in members]))

        tensors = [tensor] if output is None else [tensor, output]
        return self._issue("gather", ("to", target, *_form(tensor)), move, *tensors)

    def _send(self, tensor: Tensor, target: int) -> Work:
        return self._issue("send", _form(tensor), _move_out, tensor, peer=target)

    def _recv(self, tensor: Tensor, source: int) -> Work:
        return self._issue("recv", _form(tensor), _move_in, tensor, peer=source)

    def _barrier(self) -> Work:
        return self._issue("barrier", (), lambda _: None)

    def _issue(
        self,
        name: str,
        form: tuple[object, ...],
        move: Callable[[MemberTensors], None],
        *tensors: Tensor,
        peer: int | None = None,
    ) -> Work:
        if self._member not in self.communicator.joined:
            self.connect(CPU)
        tensors = tuple(tensor.detach() if tensor.requires_grad else tensor for tensor in tensors)
        operation = Operation(self.communicator, self.rank, name, form, peer, tensors, move, self._wait)
        self.communicator.issue(operation)
        return operation

    def _wait(self, operation: Operation) -> None:
        if operation.name == "send" and not self._waits_for_sends:
            operation.tensors = tuple(tensor.clone() for tensor in operation.tensors)
        else:
            self._threads.wait(self._member, operation)


def _form(tensor: Tensor) -> tuple[object, ...]:
    return tensor.numel(), tensor.dtype


def _move_out(members: MemberTensors) -> None:
    ((outgoing,), (incoming,)) = members
    incoming.copy_(outgoing.view(incoming.shape))


def _move_in(members: MemberTensors) -> None:
    ((incoming,), (outgoing,)) = members
    incoming.copy_(outgoing.view(incoming.shape))


def _reduced(tensors: list[Tensor], op: Reduction) -> Tensor:
    total = reduce(COMBINE[op], tensors)
    return total / len(tensors) if op == "mean" else total
