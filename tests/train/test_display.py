"""What a person sees, on a terminal and elsewhere."""

import io

import pytest
from rich.console import Console

from echelon.engine.audit import held, skipped
from echelon.train.display import Display, print_summary
from echelon.train.events import (
    Audited,
    Evaluated,
    Limited,
    Restarting,
    RolledBack,
    Sampled,
    Started,
    Starting,
    Stepped,
)
from echelon.train.jobs.job import Job


def stepped(step: int, loss: float = 2.5) -> Stepped:
    return Stepped(step, loss, 0.5, 1e-3, 4096, 0.25, 3_000_000, 0.02, 0.01, 80 * 2**20)


def shown(terminal: bool) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=120)
    with Display(Job(steps=3), console) as display:
        display.show(Starting("runs/a"))
        display.show(Started(842_496, 8_000_000, "stdlib", "cpu"))
        for step in (1, 2, 3):
            display.show(stepped(step))
        display.show(Evaluated(3, 2.25))
        display.show(Sampled("def f"))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_plain_lines_elsewhere() -> None:
    text = shown(terminal=False)
    assert "842,496 parameters on cpu; 8,000,000 tokens of stdlib" in text
    lines = [line for line in text.splitlines() if line.startswith("step ")]
    assert lines[0].split()[:4] == ["step", "1/3", "loss", "2.5000"]
    assert "16,384 tokens/s" in lines[0]
    assert "80.0 MiB per rank" in lines[0]
    assert lines[-1].endswith("validation loss 2.2500")
    assert "\x1b" not in text


@pytest.mark.parametrize("terminal", [True, False])
def test_one_line_for_so_many_steps(terminal: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=120, color_system=None)
    with Display(Job(steps=95), console, every=20) as display:
        display.show(Starting("runs/a"))
        for step in range(1, 96):
            display.show(stepped(step))
    assert isinstance(console.file, io.StringIO)
    lines = [line.split() for line in console.file.getvalue().splitlines() if line.startswith("step ")]
    assert [words[1] for words in lines] == [f"{step}/95" for step in (1, 20, 40, 60, 80, 95)]


def test_a_restart_says_once_where_its_state_is_from() -> None:
    console = Console(file=io.StringIO(), width=200)
    with Display(Job(), console) as display:
        display.show(Restarting("rank 1 was killed", 1, 3))
        display.show(Started(1, 2, "stdlib", "cpu", after_step=60, source="from memory"))
        display.show(Started(1, 2, "stdlib", "cpu", after_step=80))
        display.show(RolledBack(40, 90, "the loss has jumped", 40, 90, 1, 3))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert [line for line in lines if "parameters on" not in line] == [
        "rank 1 was killed; restarting (1 of 3 restarts since the last checkpoint)",
        "going on after step 60, from memory",
        "going on after step 80, from its checkpoint on disk",
        "the loss has jumped; going back to step 40, without batches 40 to 89 (1 of 3 rollbacks)",
    ]


def test_what_the_audit_skipped_is_said_once() -> None:
    console = Console(file=io.StringIO(), width=200)
    results = (held("weights"), skipped("layers", "no [memory]"), skipped("samples", "one sample"))
    with Display(Job(), console) as display:
        display.show(Audited(results))
        display.show(Audited((*results[:2], held("samples"))))
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines() == [
        "audit of layers: skipped (no [memory]); samples: skipped (one sample)"
    ]


def test_nothing_is_shown_before_there_is_a_run() -> None:
    # A refused job had a header, and under torchrun every rank printed one.
    console = Console(file=io.StringIO())
    with Display(Job(), console):
        pass
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == ""


def test_nothing_of_the_users_is_taken_for_markup() -> None:
    # `--set out='runs/[/x]'` ended in a MarkupError.
    console = Console(file=io.StringIO(), width=200)
    with Display(Job(plan="schedule=[/a].txt"), console) as display:
        display.show(Starting("runs/[/b]"))
        display.show(Started(1, 1, "[/c].txt", "cpu"))
    summary = {"run": "runs/[/d]", "first_loss": 1.0, "loss": 1.0, "validation_loss": None}
    summary |= {"unit": "tokens", "validation_accuracy": None}
    print_summary(summary | {"tokens": 1, "tokens_per_second": 1.0}, "[/e]", console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert all(f"[/{letter}]" in text for letter in "abcde")


def test_a_live_panel_on_a_terminal() -> None:
    text = shown(terminal=True)
    for word in (
        "loss",
        "gradient norm",
        "tokens/s",
        "memory per rank",
        "sent per step",
        "hidden behind compute",
    ):
        assert word in text


def test_the_summary_says_where_the_run_is() -> None:
    console = Console(file=io.StringIO(), width=200)
    summary = {
        "run": "runs/a",
        "first_loss": 5.5,
        "loss": 1.5,
        "validation_loss": 1.6,
        "tokens": 1000,
        "tokens_per_second": 10.0,
        "unit": "tokens",
        "validation_accuracy": None,
    }
    print_summary(summary, "[bold]not markup", console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "runs/a" in text
    assert "5.5000 → 1.5000" in text
    assert "[bold]not markup" in text


def test_steps_that_fit_into_the_time_are_shown() -> None:
    console = Console(file=io.StringIO(), width=120)
    with Display(Job(steps=600, minutes=1.5), console) as display:
        display.show(Starting("runs/a"))
        display.show(stepped(1))
        display.show(Limited(90, 600, 1.5, 20))
        display.show(stepped(90))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "600 steps, as many as fit into 1.5 minutes" in text
    assert "90 of 600 steps fit into 1.5 minutes" in text
    assert "step     90/90" in text
