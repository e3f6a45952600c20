import io
import os
import subprocess
import sys
import threading
from collections import defaultdict
from multiprocessing.connection import wait

import pytest

from echelon.errors import UserError
from echelon.launching import RankFailed, Ranks, channel, is_launched_rank, packing, send_message
from echelon.launching.channel import RankOutput, pack_call, streams_without_file
from echelon.launching.packing import unpack
from tests.launching import tasks


def test_outside_a_rank_nothing_is_sent() -> None:
    assert not is_launched_rank()
    send_message("nobody listens")


def test_messages_arrive_in_order_while_the_run_waits() -> None:
    received: dict[int, list[tuple[int, float]]] = defaultdict(list)
    with Ranks(2) as ranks:
        ranks.run(
            tasks.send_counts,
            50,
            on_message=lambda rank, content: received[rank].append((content[0], content[1].item())),
        )
    assert received == {rank: [(step, float(step)) for step in range(50)] for rank in range(2)}


def test_messages_without_a_listener_are_dropped() -> None:
    with Ranks(1) as ranks:
        assert ranks.run(tasks.send_counts, 3) == [3]


def test_what_a_rank_says_after_another_has_failed_is_heard() -> None:
    received = []
    with Ranks(2) as ranks, pytest.raises(RankFailed, match="rank 1"):
        ranks.run(tasks.fail_after_a_message, (0.1, 0.0), on_message=lambda *event: received.append(event))
    assert sorted(received) == [(0, 0), (1, 1)]


def test_threads_of_a_rank_do_not_mix_their_messages() -> None:
    received = []
    with Ranks(1) as ranks:
        ranks.run(tasks.send_from_threads, 4, 50, on_message=lambda *event: received.append(event))
    assert sorted(received) == [(0, (thread, word)) for thread in range(4) for word in range(50)]


def test_a_forked_data_worker_does_not_send_in_the_name_of_its_rank() -> None:
    received = []
    with Ranks(1) as ranks:
        results = ranks.run(tasks.send_from_a_fork, on_message=lambda *event: received.append(event))
    assert results == [(0, True)]
    assert received == []


def test_a_function_of_a_module_is_packed_with_its_arguments() -> None:
    assert unpack(pack_call(tasks.echo, (1, "two"))) == (tasks.echo, (1, "two"))


def test_every_part_that_cannot_be_sent_is_named() -> None:
    with pytest.raises(UserError) as caught:
        pack_call(lambda: 0, (1, threading.Lock(), tasks.NotForSending()))
    function, lock, stubborn = caught.value.errors
    assert "<lambda>" in function
    assert "top level of a module" in function
    assert "argument 1 of type lock" in lock
    assert "argument 2 of type NotForSending" in stubborn
    assert "I cannot be sent" in stubborn


def test_a_local_function_is_refused() -> None:
    def local() -> None:
        pass

    with pytest.raises(UserError, match="local cannot be sent"):
        pack_call(local, ())


def test_arguments_are_packed_only_once_when_all_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = []
    monkeypatch.setattr(channel, "pack", lambda value: packed.append(value) or b"")
    pack_call(tasks.echo, (1,))
    assert packed == [(tasks.echo, (1,))]


def test_each_name_of_a_notebook_that_cannot_be_sent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "is_main_importable", lambda: False)
    notebook = {"__name__": "__main__", "lock": threading.Lock(), "rate": 0.1}
    exec("def make(door):\n  def train(): return lock, rate, door\n  return train", notebook)
    with pytest.raises(UserError) as caught:
        pack_call(notebook["make"](threading.Lock()), (threading.Lock(),))  # type: ignore[operator]
    lock, door, argument = caught.value.errors
    assert lock.startswith("make.<locals>.train uses lock, which cannot be sent (TypeError: cannot pickle")
    assert door.startswith("make.<locals>.train uses door, which cannot be sent")
    assert argument.startswith("argument 0 of type lock cannot be sent")


@pytest.mark.parametrize("importable", [True, False])
def test_only_a_session_has_streams_without_a_file(importable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "is_main_importable", lambda: importable)
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


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_rank_writes_each_line_at_once_and_so_does_what_it_starts(unbuffered: str) -> None:
    program = """
import os, sys
from multiprocessing import Pipe
from echelon.launching.channel import redirect_output, write_whole_lines
reader, writer = Pipe(duplex=False)
redirect_output({"stdout": writer})
write_whole_lines()
print("a", "line")
first = os.read(reader.fileno(), 100)
os.system("echo a child")
sys.stderr.write(repr([first, os.read(reader.fileno(), 100)]))
"""
    env = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env=env
    )
    assert (done.stdout, done.stderr) == ("", repr([b"a line\n", b"a child\n"]))
