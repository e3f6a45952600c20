"""The entries and exits of the split part of a layer, where the ranks of a group communicate.

        hidden states ──enter──> column · row ──leave──> hidden states

Without sequence parallelism, hidden states are whole on every rank:
    enter   forward: nothing                     backward: all-reduce of the gradients
    leave   forward: all-reduce                  backward: nothing
    total   forward: all-reduce                  backward: all-reduce, for sums inside the split part

With it, every rank has a part of the sequence (dim 1), and the same bytes are sent:
    enter   forward: all-gather                  backward: reduce-scatter
    leave   forward: reduce-scatter              backward: all-gather
    part    forward: take this rank's part       backward: all-gather
"""

from typing import final

import torch
from torch import Tensor

from echelon.collectives import Group
from echelon.nn.tracing import untraced
from echelon.parallel.tensor import in_graph
from echelon.parallel.tensor.columns import SharedInput
from echelon.parallel.tensor.entries import Entries, LastEntry
from echelon.parallel.tensor.in_graph import RecordedGroup
from echelon.parallel.tensor.moves import GroupMoves


@final
class Region:
    """The split parts of a model's layers. `sequence`: hidden states between them are split along it."""

    def __init__(self, group: Group, *, sequence: bool) -> None:
        self.group, self.sequence = group, sequence
        self.overlaps = False  # whether sums of gradients run while gradients of weights are computed
        self.shared_input = SharedInput()
        # What the module that runs now was given: it has entered before that module. torch.compile follows
        # this through the pieces of a layer that it cannot record as one graph.
        self.entered: Tensor | None = None
        self._entries = Entries(GroupMoves(group), LastEntry(), sequence=sequence)
        self._recorded_group: RecordedGroup | None = None

    def prepare_compiling(self) -> None:
        """Let torch.compile record what happens here, where it would stop."""
        if self._recorded_group is None:
            self._recorded_group = RecordedGroup.of(self.group)

    def enter(self, x: Tensor, *, dim: int | None = 1, to_matrices: bool = False) -> Tensor:
        """The input of a split module. `dim` counts positions; None: every rank has all of them.

        `to_matrices`: it is only multiplied by matrices. Their gradients are in new memory, so that the sum
        can be computed in place. Other operations may pass back memory that is used elsewhere too.
        """
        if x is self.entered:
            return x
        if self._recorded_group is not None and torch.compiler.is_compiling():
            return in_graph.enter(x, *self._recorded_group, self.sequence, dim, to_matrices)
        return self._enter(x, dim, to_matrices)

    @untraced
    def _enter(self, x: Tensor, dim: int | None, to_matrices: bool) -> Tensor:
        return self._entries.enter(x, dim, to_matrices)

    def leave(self, x: Tensor, *, dim: int | None = 1) -> Tensor:
        """The sum over ranks of the outputs of a split module. It may overwrite `x`."""
        if self._recorded_group is not None and torch.compiler.is_compiling():
            return in_graph.leave(x, *self._recorded_group, self.sequence, dim)
        return self._leave(x, dim)

    @untraced
    def _leave(self, x: Tensor, dim: int | None) -> Tensor:
        return self._entries.leave(x, dim)

    def total(self, x: Tensor) -> Tensor:
        """The sum over ranks of what each computes from its own part, for all of them to go on with."""
        if self._recorded_group is not None and torch.compiler.is_compiling():
            return in_graph.total(x, *self._recorded_group)
        return self._total(x)

    @untraced
    def _total(self, x: Tensor) -> Tensor:
        return self._entries.total(x)

    @untraced
    def part(self, x: Tensor) -> Tensor:
        """This rank's part of a sequence that every rank has whole."""
        return self._entries.part(x)

    def join_logits(self, logits: Tensor) -> Tensor:
        """All logits, from every rank's part of the vocabulary, for a loss that all ranks compute."""
        if self._recorded_group is not None and torch.compiler.is_compiling():
            return in_graph.join_logits(logits, *self._recorded_group)
        return self._join_logits(logits)

    @untraced
    def _join_logits(self, logits: Tensor) -> Tensor:
        return self._entries.join_logits(logits)

    def __getstate__(self) -> dict[str, object]:
        # a copy of the group has another number
        return self.__dict__ | {"_recorded_group": None, "entered": None}
