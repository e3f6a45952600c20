"""A rank without its peers: groups whose other ranks hold what this rank holds, and messages nobody sent.

Every collective is right for a world of equal ranks: a sum is this rank's value times their number, and what
is gathered is this rank's part again and again. So ranks agree, and what they count together is counted.

A message between stages cannot be made up that way, because its receiver learns the form of what comes from
it. The text that describes an activation is taken from a run of the stage before; all tensors are there, and
have no values (`hollow.py`).
"""

import json
from collections.abc import Collection, Mapping
from typing import final

import torch
from torch import Tensor

from echelon.collectives import CompletedWork, Group, Ledger, RecordingGroup, Reduction, Work, current_content
from echelon.collectives.mesh import Mesh
from echelon.engine.step.runtime.message import CODE_BYTES, pack_code, write_bytes

_DONE = CompletedWork()
# The flags of up to 256 tensors: all are there. As float64 they are 1, which is a loss, and its count.
_ALL_THERE = bytes.fromhex("010101010101f03f") * 32
_MOST_TEXT = 2**16  # bytes of a description


class SilenceError(Exception):
    """Nothing comes: the rank has sent all that it sends before it receives."""


@final
class _Never(Work):
    def wait(self) -> None:
        raise SilenceError


class EqualRanks(RecordingGroup):
    """Pretends that all ranks of the group call this with the same tensors; counts bytes and moves none."""

    def _all_reduce(self, tensor: Tensor, op: Reduction) -> Work:
        return self._add_up(tensor, op)

    def _reduce(self, tensor: Tensor, target: int, op: Reduction) -> Work:  # noqa: ARG002
        return self._add_up(tensor, op)

    def _reduce_scatter(self, output: Tensor, tensor: Tensor, op: Reduction) -> Work:
        self._copy(output, self._own_part(tensor))
        return self._add_up(output, op)

    def _add_up(self, tensor: Tensor, op: Reduction) -> Work:
        if op == "sum":
            tensor.mul_(self.size)
        if self.ledger.subject == "metrics":  # of a rank that computes no loss: others do
            tensor[:3].clamp_(min=1)
        return _DONE

    def _all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        output.view(self.size, -1).copy_(tensor.reshape(1, -1).clone())  # it may lie in the output
        return _DONE

    def _gather(self, tensor: Tensor, output: Tensor | None, target: int) -> Work:  # noqa: ARG002
        return _DONE if output is None else self._all_gather(output, tensor)

    def _scatter(self, output: Tensor, tensor: Tensor | None, source: int) -> Work:  # noqa: ARG002
        return self._copy(
            output, output.new_zeros(output.shape) if tensor is None else self._own_part(tensor)
        )

    def _all_to_all(
        self, output: Tensor, tensor: Tensor, output_rows: list[int], input_rows: list[int]
    ) -> Work:
        own = tensor.split(input_rows)[self.rank]
        for part in output.split(output_rows):
            part.copy_(own[: len(part)] if len(part) <= len(own) else part.new_zeros(part.shape))
        return _DONE


@final
class EqualPipelines(EqualRanks):
    """The ranks of a pipeline, with the messages between its stages.

    `descriptions`: the texts that are received, by the content of the message. None: to wait for one raises
    `SilenceError`, and `sent` is what was sent until then.
    """

    def __init__(self, axis: str, rank: int = 0, size: int = 1, ledger: Ledger | None = None) -> None:
        super().__init__(axis, rank, size, ledger)
        self.descriptions: Mapping[str, bytes] | None = None
        self.sent: dict[str, list[bytes]] = {}
        self._follows: bytes | None = None  # the description whose length was received

    def _send(self, tensor: Tensor, target: int) -> Work:  # noqa: ARG002
        if self.descriptions is None:
            self.sent.setdefault(current_content(), []).append(tensor[:_MOST_TEXT].numpy().tobytes())
        return _DONE

    def _recv(self, tensor: Tensor, source: int) -> Work:  # noqa: ARG002
        if self.descriptions is None:
            return _Never()
        if self._follows is not None:
            write_bytes(tensor, self._follows)
            self._follows = None
        elif tensor.numel() == CODE_BYTES:
            text = self.descriptions[current_content()]
            self._follows = text if torch.is_grad_enabled() else _without_gradients(text)
            write_bytes(tensor, pack_code(len(self._follows)))
        else:  # what was described
            tensor.zero_()
            write_bytes(tensor, (pack_code(0) + _ALL_THERE)[: tensor.numel()])
        return _DONE


def _without_gradients(description: bytes) -> bytes:
    """Return how a pass that records no gradients describes the same."""
    tree, leaves = json.loads(description)
    return json.dumps([tree, [[shape, dtype, False] for shape, dtype, _ in leaves]]).encode()


@final
class EqualMesh(Mesh):
    """The mesh of one rank of a plan of any size, over `EqualRanks`."""

    @classmethod
    def pretended_group(cls, axis: str, number: int, size: int, ledger: Ledger) -> Group:
        return (EqualPipelines if axis == "pipeline" else EqualRanks)(axis, number, size, ledger)

    def group_of_stages(self, stages: Collection[int]) -> Group:
        column = self.layout.column(self.rank, stages)
        if self.rank not in column:
            return RecordingGroup("tied", ledger=self.ledger)
        return EqualRanks("tied", column.index(self.rank), len(column), self.ledger)

    def free_host_memory(self) -> None:
        """Its machine is not here."""

    @property
    def messages(self) -> EqualPipelines:
        """Return the group through which messages between stages go."""
        group = self.group("pipeline")
        assert isinstance(group, EqualPipelines)
        return group
