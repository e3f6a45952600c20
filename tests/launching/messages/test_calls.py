import functools
import subprocess
import sys
import threading

import pytest

from echelon.errors import UserError
from echelon.launching.messages import calls
from echelon.launching.messages.calls import pack_call
from echelon.launching.messages.transport import unpack
from tests.launching import tasks


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


@pytest.mark.parametrize("wrap", [lambda fn: fn, functools.partial])
def test_a_function_of_an_interactive_session_is_refused(wrap, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    main = type(sys)("__main__")
    main.work = tasks.nothing  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(tasks.nothing, "__module__", "__main__")
    with pytest.raises(UserError, match="interactive session"):
        pack_call(wrap(tasks.nothing), ())


def test_a_program_from_standard_input_is_refused() -> None:
    program = "from echelon.launching import launch\nlaunch(print, 2)\n"
    done = subprocess.run([sys.executable, "-"], input=program, text=True, capture_output=True, check=False)
    assert "UserError: The ranks import the main module" in done.stderr
    assert "<stdin>" in done.stderr


def test_arguments_are_packed_only_once_when_all_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = []
    monkeypatch.setattr(calls, "pack", lambda value: packed.append(value) or b"")
    pack_call(tasks.echo, (1,))
    assert packed == [(tasks.echo, (1,))]
