"""An encoding that a ReLU writes along with its output, for the operation that reads this next.

    relu ──── output ──── conv        conv saves the output, whose encoding is there already
         └─── fp16

A ReLU whose output nobody saves (a pool keeps only positions) writes none: what was so the last time is taken
to be so again. An encoding that nobody has asked for lives no longer than the output.
"""

from typing import Any, final
from weakref import ref

from torch import Tensor

from echelon.memory.gist.floats import Parts
from echelon.memory.gist.marks import Memory


class Maker:
    """Who may write an encoding."""

    is_read = False  # whether somebody has saved its last output


@final
class Fresh:
    """The last output of a ReLU."""

    def __init__(self) -> None:
        self._memory: Memory | None = None
        self._maker: Maker | None = None
        self._parts: Parts | None = None
        self._num = 0
        self._output: ref[Tensor] | None = None

    def show(self, output: Tensor, maker: Maker, parts: Parts | None) -> None:
        """`parts`: its encoding, where one was written."""
        if self._maker is not None:
            self._maker.is_read = False  # nobody has asked for the one before
        self._memory, self._maker, self._parts = Memory(output), maker, parts
        self._num = output.numel()
        self._output = None if parts is None else ref(output, self._forget)

    def _forget(self, output: Any) -> None:
        if output is self._output:
            self._parts = self._output = None

    def take(self, tensor: Tensor, address: int) -> Parts | None:
        """The encoding of a tensor without gaps, if it is that output. It is given once."""
        memory, maker, parts = self._memory, self._maker, self._parts
        if memory is None or maker is None or memory.address != address or not memory.has(tensor):
            return None
        if tensor.numel() != self._num:  # a part of it
            return None
        maker.is_read = True
        self._memory = self._maker = self._parts = self._output = None
        return parts
