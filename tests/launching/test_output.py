import io
import os
import subprocess
import sys
from multiprocessing.connection import wait

import pytest

from echelon.launching import output
from echelon.launching.output import RankOutput, streams_without_file


@pytest.mark.parametrize("importable", [True, False])
def test_only_a_session_has_streams_without_a_file(importable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "is_main_importable", lambda: importable)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO()))
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert streams_without_file() == ([] if importable else ["stderr"])
    monkeypatch.setattr(sys, "stderr", None)
    assert streams_without_file() == []


def test_text_is_passed_on_as_it_comes_to_the_stream_of_that_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = RankOutput(["stdout", "stderr"])
    writers = {name: writer.fileno() for name, writer in rank.writers.items()}
    for moment in range(2):
        streams = {name: io.StringIO() for name in writers}
        for name, stream in streams.items():
            monkeypatch.setattr(sys, name, stream)
        os.write(writers["stdout"], f"step {moment}\n".encode())
        os.write(writers["stderr"], b"careful")
        assert set(wait(rank.sources, timeout=60)) == set(rank.sources)
        rank.forward()
        assert [stream.getvalue() for stream in streams.values()] == [f"step {moment}\n", "careful"]
    rank.forward()  # nothing has come: this waits for nothing
    rank.close()


def test_a_letter_may_come_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = RankOutput(["stdout"])
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    for byte in "5 µs\n".encode():
        os.write(rank.writers["stdout"].fileno(), bytes([byte]))
        rank.forward()
    assert sys.stdout.getvalue() == "5 µs\n"  # type: ignore[attr-defined]
    os.write(rank.writers["stdout"].fileno(), b"\xc2")  # and then the rank dies
    rank.close_writers()
    rank.forward()
    rank.forward()
    assert sys.stdout.getvalue() == "5 µs\n\ufffd"  # type: ignore[attr-defined]
    assert rank.sources == []


def test_one_call_takes_a_full_pipe_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that always writes must not keep its parent from the answers of others."""
    rank = RankOutput(["stdout"])
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    descriptor = rank.writers["stdout"].fileno()
    os.set_blocking(descriptor, False)
    written = os.write(descriptor, b"x" * 2**21)
    rank.forward()
    assert len(sys.stdout.getvalue()) == written  # type: ignore[attr-defined]
    rank.close()


def test_the_rest_is_passed_on_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = RankOutput(["stdout"])
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    os.write(rank.writers["stdout"].fileno(), b"bye")
    rank.close()
    assert sys.stdout.getvalue() == "bye"  # type: ignore[attr-defined]


def test_a_rank_writes_each_line_at_once_and_so_does_what_it_starts() -> None:
    program = """
import os, sys
from multiprocessing import Pipe
from echelon.launching.output import redirect_output
reader, writer = Pipe(duplex=False)
redirect_output({"stdout": writer})
print("a line")
first = os.read(reader.fileno(), 100)
os.system("echo a child")
sys.stderr.write(repr([first, os.read(reader.fileno(), 100)]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("", repr([b"a line\n", b"a child\n"]))
