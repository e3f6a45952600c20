"""What rank 0 writes, in a notebook: its parent passes it on, as it is written.

Elsewhere ranks write to the files of the launching process themselves. In a notebook only `sys.stdout` and
`sys.stderr` of that process write into the cell, and they are no files.
"""

import codecs
import io
import os
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, Pipe

from echelon.launching.packing import is_main_importable

_DESCRIPTORS = {"stdout": 1, "stderr": 2}
_READ_BYTES = 2**20  # more than a pipe holds: one read takes all that is there


def streams_without_file() -> list[str]:
    """Return which of stdout and stderr can be written to by this process alone."""
    if is_main_importable():
        return []
    streams = {name: getattr(sys, name) for name in _DESCRIPTORS}
    return [name for name, stream in streams.items() if stream and not isinstance(stream, io.TextIOWrapper)]


class RankOutput:
    """Pipes for the named streams of a rank: it writes to `writers`; `forward` passes on what has come."""

    def __init__(self, names: Sequence[str]) -> None:
        pipes = {name: Pipe(duplex=False) for name in names}
        self._readers = {name: reader for name, (reader, _) in pipes.items()}
        self.writers = {name: writer for name, (_, writer) in pipes.items()}
        self._decoders = {name: codecs.getincrementaldecoder("utf-8")("replace") for name in names}

    @property
    def sources(self) -> list[Connection]:
        """Return what becomes readable when `forward` has something to do."""
        return list(self._readers.values())

    def forward(self) -> None:
        """Write what the rank has written to the streams of the same names here."""
        for name, reader in list(self._readers.items()):
            if reader.poll():
                data = os.read(reader.fileno(), _READ_BYTES)
                getattr(sys, name).write(self._decoders[name].decode(data, final=not data))
                if not data:  # the rank has ended
                    self._readers.pop(name).close()

    def close_writers(self) -> None:
        """The rank has its own: only then does its end close the pipes."""
        for writer in self.writers.values():
            writer.close()

    def close(self) -> None:
        """Pass on the rest, and close the pipes."""
        self.forward()
        self.close_writers()
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()


def redirect_output(writers: Mapping[str, Connection]) -> None:
    """In a rank: write to these pipes instead, line by line; what the rank starts does so too."""
    for name, writer in writers.items():
        os.dup2(writer.fileno(), _DESCRIPTORS[name])
        writer.close()
        getattr(sys, name).reconfigure(line_buffering=True)
