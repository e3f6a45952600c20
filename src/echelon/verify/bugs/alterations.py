"""How bugs get into an engine: its methods are replaced, and messages of its groups altered or lost."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from echelon.collectives import CompletedWork, Group, Handle, Ledger, Work


class Message(NamedTuple):
    """A message that is about to be sent. `rows`: of an all-to-all, how many come from each rank, and how
    many go there."""

    group: Group
    begin: Callable[[], Work]
    tensors: Sequence[Tensor]  # where the result comes, and what is sent, if that is elsewhere
    rows: tuple[list[int], list[int]] | None


Change = Callable[[Message], Work]  # takes the place of the message's `begin`


def replace_method(owner: object, name: str, make: Callable[[Any], Any]) -> None:
    """`make` is given the method, and returns what is called instead."""
    setattr(owner, name, make(getattr(owner, name)))


def is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def alter(
    group: Group, subject: str, change: Change, *, operation: str | None = None, in_backward: bool = False
) -> bool:
    """Let `change` act in place of the group's messages of floating-point numbers about `subject`; of one
    operation, or of backward passes, if so asked. Returns whether the group has others to talk to."""
    if group.size == 1:
        return False
    asked = _asked_subjects(group.ledger)

    def make(do: Callable[..., Handle]) -> Callable[..., Handle]:
        def do_altered(
            name: str, traffic: Any, wait: bool, begin: Any, *tensors: Tensor, **options: Any
        ) -> Handle:
            is_meant = asked[-1:] == [subject] and operation in (None, name)
            if is_meant and tensors[0].is_floating_point() and (is_in_backward() or not in_backward):
                message = Message(group, begin, tensors, options.get("rows"))
                return do(name, traffic, wait, lambda: change(message), *tensors, **options)
            return do(name, traffic, wait, begin, *tensors, **options)

        return do_altered

    replace_method(group, "_do", make)
    return True


def _asked_subjects(ledger: Ledger) -> list[str]:
    """The subjects that the code around a message names, the innermost last. The ledger itself may be told to
    enter all of them under another one, as audits do."""
    asked: list[str] = []

    def make(about: Callable[[str], Any]) -> Callable[[str], Any]:
        @contextmanager
        def remember(subject: str) -> Iterator[None]:
            asked.append(subject)
            try:
                with about(subject):
                    yield
            finally:
                asked.pop()

        return remember

    replace_method(ledger, "about", make)
    return asked


def lose(message: Message) -> Work:
    """Nothing is sent. Each rank goes on with its own part of a sum; what was to be gathered stays as it was,
    and of rows only this rank's own come."""
    if message.rows is not None:
        _take_own_rows(message, *message.rows)
    elif len(message.tensors) == 2 and message.tensors[0].numel() < message.tensors[1].numel():
        part, whole = message.tensors
        part.copy_(whole.view(message.group.size, -1)[message.group.rank].view_as(part))
    return CompletedWork()


def _take_own_rows(message: Message, coming: list[int], sent: list[int]) -> None:
    """A rank's rows to itself lie behind those to earlier ranks, and come behind those from them."""
    (incoming, outgoing), rank = message.tensors, message.group.rank
    to, start = sum(coming[:rank]), sum(sent[:rank])
    incoming.zero_()
    incoming[to : to + coming[rank]] = outgoing[start : start + sent[rank]]


def then(act: Callable[[Message], None]) -> Change:
    """The message is sent, and `act` alters what has come."""

    def change(message: Message) -> Work:
        message.begin().wait()
        act(message)
        return CompletedWork()

    return change
