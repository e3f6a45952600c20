"""Functions that no rank can import: of a notebook, a REPL, `python -c` and a program from standard input."""

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launching.kernels import Kernel, kernel
from tests.launching.processes import descendants, needs_proc, still_alive, wait_until

pytestmark = needs_proc

IMPORTS = """
import contextlib, io, os, sys, time
from dataclasses import dataclass
from multiprocessing.util import get_temp_dir
from pathlib import Path
import echelon

class OwnError(echelon.UserError):
    pass
"""

PROGRAM = """
import functools
import torch
from torch import nn
import echelon
from echelon.launching import send_message

SIZE = 4

@functools.cache
def inputs():
    return torch.arange(8 * SIZE, dtype=torch.float64).reshape(8, SIZE) / 10

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(SIZE, 1, dtype=torch.float64)
        self.activation = activation
    def forward(self, x):
        return self.activation(self.linear(x))

def activation(x):
    return torch.tanh(x) * 2

def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)

def train(model, steps):
    losses = []
    plan = "data=2 precision=fp64"
    with echelon.parallelize(model, plan, optimizer=sgd, loss=nn.functional.mse_loss) as engine:
        for _ in range(steps):
            batch = (inputs(), inputs().sum(1, keepdim=True))
            losses.append(engine.step(engine.local(batch)).loss)
    return losses, model

def plain(model, steps):
    optimizer, losses = sgd(model.parameters()), []
    for _ in range(steps):
        loss = nn.functional.mse_loss(model(inputs()), inputs().sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses

def compare():
    model = Model()
    (losses, trained), (others, _) = echelon.launch(train, 2, model, 5)
    assert losses == others
    assert max(abs(a - b) for a, b in zip(losses, plain(model, 5), strict=True)) < 1e-9
    assert type(trained) is Model and trained.activation is activation
    assert torch.allclose(trained.linear.weight, model.linear.weight, rtol=0, atol=1e-9)
    return "equal"

"""


def python(*options: str, program: str = "") -> str:
    done = subprocess.run(
        [sys.executable, *options], input=program, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_a_program_from_standard_input_trains_and_launches_again() -> None:
    end = """
print(compare())
print(echelon.launch(lambda: SIZE, 2))
def fail():
    raise KeyError(SIZE)
try:
    echelon.launch(fail, 2)
except echelon.RankFailed as error:
    print(error.traceback)
print(__file__)
"""
    shown = python("-", program=PROGRAM + end)
    assert shown.startswith("equal\n[4, 4]\nTraceback")
    line = (PROGRAM + end).splitlines().index("    raise KeyError(SIZE)") + 1
    assert f'File "<stdin>", line {line}, in fail' in shown
    assert shown.endswith("<stdin>\n")


@pytest.mark.slow
def test_the_program_of_a_command_line_trains() -> None:
    assert python("-c", PROGRAM + "print(compare())") == "equal\n"


class Terminal:
    """A Python REPL with a terminal of its own."""

    def __init__(self) -> None:
        self.ours, theirs = pty.openpty()
        # A process that leads a session takes the first terminal that it opens: Ctrl-C then reaches it.
        take = "import os, sys; os.open(os.ttyname(0), os.O_RDWR); os.execv(sys.argv[1], [sys.argv[1], '-q'])"
        self.process = subprocess.Popen(
            [sys.executable, "-c", take, sys.executable],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        self.text = ""

    def type(self, line: str) -> None:
        os.write(self.ours, line.encode())

    def wait_for(self, words: str) -> str:
        """Return what was shown until these words, which are forgotten then."""
        give_up = time.monotonic() + 300
        while words not in self.text:
            assert time.monotonic() < give_up, self.text
            if select.select([self.ours], [], [], 1.0)[0]:
                self.text += os.read(self.ours, 2**16).decode()
        before, _, self.text = self.text.partition(words)
        return before


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    terminal = Terminal()
    yield terminal
    terminal.process.kill()
    terminal.process.wait()
    os.close(terminal.ours)


def test_a_repl_launches_is_interrupted_and_launches_again(terminal: Terminal, tmp_path: Path) -> None:
    (tmp_path / "session.py").write_text(PROGRAM)
    terminal.wait_for(">>> ")
    terminal.type(f"exec(open({str(tmp_path / 'session.py')!r}).read())\r")
    terminal.type("import os, time\r")
    terminal.type("work = lambda: print('pid', os.getpid(), 'here', flush=True) or time.sleep(600)\r")
    terminal.type("echelon.launch(work, 2)\r")
    pids = []
    for _ in range(2):
        terminal.wait_for("\npid ")
        pids.append(int(terminal.wait_for(" here")))
    terminal.type("\x03")
    shown = terminal.wait_for("KeyboardInterrupt\r\n")
    assert "During handling" not in shown
    assert still_alive(pids) == []
    terminal.type("print('the plans are', compare())\r")
    terminal.wait_for("the plans are equal")
    terminal.type("exit()\r")
    assert terminal.process.wait(timeout=300) == 0


@pytest.fixture(scope="module")
def notebook() -> Iterator[Kernel]:
    """A notebook that has run a cell with the programs above."""
    with kernel() as notebook:
        assert notebook.run(IMPORTS + PROGRAM).error == ""
        yield notebook


def check(notebook: Kernel, code: str) -> str:
    """Run a cell that must not fail; return what it prints."""
    cell = notebook.run(code)
    assert (cell.error, cell.message) == ("", "")
    return cell.text("stdout")


def launch_folders(notebook: Kernel) -> str:
    return check(notebook, "print(sorted(Path(get_temp_dir()).glob('echelon-*')))").strip()


def test_a_notebook_trains_a_model_of_a_cell(notebook: Kernel) -> None:
    assert check(notebook, "print(compare())") == "equal\n"
    assert check(notebook, "print(compare(), Model.forward.__globals__ is globals())") == "equal True\n"


def test_a_cell_shows_what_rank_0_writes_while_it_writes(notebook: Kernel, tmp_path: Path) -> None:
    """Rank 0 goes on only after its first line was shown."""
    cell = f"""
def work():
    if torch.distributed.get_rank() == 0:
        print("first: é")
        while not Path({str(tmp_path / "shown")!r}).exists():
            time.sleep(0.01)
        os.system("echo second")
        print("third", file=sys.stderr)
echelon.launch(work, 2)
"""

    def see(text: str) -> None:
        if "first: é\n" in text:
            (tmp_path / "shown").touch()

    shown = notebook.run(cell, see)
    assert shown.error == ""
    assert shown.text("stdout") == "first: é\nsecond\n"
    assert shown.text("stderr") == "third\n"


def test_what_a_cell_captures_has_the_output_of_rank_0(notebook: Kernel) -> None:
    cell = """
with contextlib.redirect_stdout(io.StringIO()) as captured:
    echelon.launch(lambda: print("rank", torch.distributed.get_rank()), 1)
captured.getvalue()
"""
    assert check(notebook, cell) == ""
    assert check(notebook, "print(repr(captured.getvalue()))") == "'rank 0\\n'\n"


def test_the_stop_button_ends_the_ranks_and_the_next_launch_works(notebook: Kernel) -> None:
    check(notebook, "echelon.launch(lambda: None, 2)")
    servers = descendants(notebook.pid)
    pressed = []

    def press(text: str) -> None:
        if "pid" in text and not pressed:
            pressed.append(True)
            for _ in range(3):
                notebook.interrupt()

    cell = notebook.run("echelon.launch(lambda: print('pid', os.getpid()) or time.sleep(600), 2)", press)
    assert cell.error in ("KeyboardInterrupt", "")  # IPython shows none if it is interrupted once more
    assert pressed
    assert wait_until(lambda: descendants(notebook.pid) == servers, 60)
    assert launch_folders(notebook) == "[]"
    assert check(notebook, "print(compare())") == "equal\n"


def test_the_error_of_a_rank_shows_the_line_of_the_cell_and_the_next_launch_works(notebook: Kernel) -> None:
    cell = notebook.run("def fail():\n    raise KeyError(SIZE)  # of this cell\nechelon.launch(fail, 2)")
    assert cell.error == "RankFailed"
    assert cell.message.startswith("rank ")
    assert "    raise KeyError(SIZE)  # of this cell\n" in cell.message
    assert cell.message.rstrip().endswith("KeyError: 4")
    refused = notebook.run(
        "def refuse():\n    raise OwnError('lr=-1: must be positive')\nechelon.launch(refuse, 2)"
    )
    assert (refused.error, refused.message) == ("OwnError", "lr=-1: must be positive")
    assert launch_folders(notebook) == "[]"
    assert check(notebook, "print(compare())") == "equal\n"


def test_a_class_of_a_later_cell_replaces_that_of_ranks_that_run(notebook: Kernel) -> None:
    check(notebook, "class Version:\n    def number(self): return 1\ndef ask(): return Version().number()")
    check(notebook, "ranks = echelon.Ranks(2)\nassert ranks.run(ask) == [1, 1]")
    check(notebook, "class Version:\n    def number(self): return 2")
    assert check(notebook, "print(ranks.run(ask), echelon.launch(ask, 2))") == "[2, 2] [2, 2]\n"
    check(notebook, "Version.number = lambda self: 3")
    assert check(notebook, "print(ranks.run(ask), echelon.launch(ask, 2))") == "[3, 3] [3, 3]\n"
    check(notebook, "def ask(): return 4")
    assert check(notebook, "print(ranks.run(ask)); ranks.close()") == "[4, 4]\n"


def test_messages_and_results_of_a_class_of_a_cell_are_of_this_class(notebook: Kernel) -> None:
    cell = """
@dataclass
class Progress:
    step: int
    loss: torch.Tensor
def report():
    send_message(Progress(1, torch.ones(2)))
    return Progress(2, torch.zeros(1))
received = []
with echelon.Ranks(2) as ranks:
    received += ranks.run(report, on_message=lambda rank, content: received.append(content))
print({type(each) is Progress for each in received}, [each.step for each in received])
"""
    assert check(notebook, cell) == "{True} [1, 1, 2, 2]\n"


def test_a_button_pressed_while_the_first_ranks_start_leaves_nothing() -> None:
    """The fork server still imports torch: the process ids of the ranks are unknown."""
    with kernel() as notebook:
        # Interrupted in its import, Python leaves half of multiprocessing behind.
        start = "import echelon, multiprocessing\nprint('now', flush=True)\nechelon.launch(print, 2)"
        cell = notebook.run(start, lambda text: notebook.interrupt() if "now" in text else None)
        assert cell.error == "KeyboardInterrupt"
        check(notebook, IMPORTS)
        assert launch_folders(notebook) == "[]"
        check(notebook, "echelon.launch(os.getpid, 2)")
        assert wait_until(lambda: len(descendants(notebook.pid)) == 2, 60)  # the server, the tracker


def test_a_kernel_that_is_killed_takes_its_ranks_along() -> None:
    with kernel() as notebook:
        check(notebook, IMPORTS)
        pids = check(notebook, "ranks = echelon.Ranks(2)\nprint(*ranks.run(os.getpid))")
        notebook.kill()
        assert still_alive([int(pid) for pid in pids.split()]) == []
