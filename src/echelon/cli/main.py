"""The entry point: runs the command, and turns every failure into a message and an exit code.

0 done · 1 what was asked does not hold, or a rank failed · 2 bad input
75 SIGTERM, and the training is saved · 130 interrupted · 143 SIGTERM
"""

import codecs
import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import typer

from echelon import __version__
from echelon.cli import (
    checkpoint,
    doctor,
    partition,
    plan,
    report,
    schedule,
    signals,
    train,
    verify,
)
from echelon.cli.options import ReaderGoneError, is_first_rank, print_json
from echelon.errors import UserError
from echelon.launching import RankFailed
from echelon.launching.torchrun import report_failure
from echelon.train.runs import Preempted

_FAILURES = (1, 2)  # of this rank; a signal ends the other ranks too

# Newer versions of typer contain click; this is the UsageError of whichever is used.
_UsageError: Any = typer.BadParameter.__bases__[0]

app = typer.Typer(
    name="echelon",
    help="Train PyTorch models too large or too slow for one device: one short plan, proven equal.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("train")(train.train)
app.command("verify")(verify.verify)
app.command("schedule")(schedule.schedule)
app.command("partition")(partition.partition)
app.command("plan")(plan.plan)
app.command("report")(report.report)
app.command("watch")(report.watch)
app.command("doctor")(doctor.doctor)
app.command("generate")(report.generate)
app.command("import")(checkpoint.import_weights)
app.command("export")(checkpoint.export)
app.add_typer(checkpoint.app, name="checkpoint")


def _version(asked: bool) -> None:
    if asked:
        print(f"echelon {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version."
    ),
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> None:
    make_robust(sys.stdout, sys.stderr)
    words = list(sys.argv[1:] if arguments is None else arguments)
    code = run(words, process_ends=True)
    if code in _FAILURES:
        report_failure(f"ended with exit code {code}, for the error that it printed")
    sys.exit(code)


def run(
    arguments: list[str], *, process_ends: bool = False, app: typer.Typer = app, name: str = "echelon"
) -> int:
    """Run the command line; returns the exit code. If the process ends then, no signal changes that code."""
    command = typer.main.get_command(app)
    try:
        with signals.signals_raise(process_ends=process_ends):
            code = int(command.main(arguments, prog_name=name, standalone_mode=False) or 0)
    except UserError as error:
        return _fail(arguments, 2, str(error), error.errors)
    except _UsageError as error:
        return _fail(arguments, 2, f"{error.format_message()}\nsee: {name} --help")
    except RankFailed as error:
        return _fail(arguments, 1, str(error))
    except Preempted as error:
        if is_first_rank():
            _fail(arguments, error.exit_code, _with_notes(error))
        return error.exit_code
    except ReaderGoneError:  # its output was not wanted any more: that of a training is, to the end
        _drop_output()
        return 1 if "train" in arguments[:1] else 0
    except signals.Terminated as error:
        return _fail(arguments, signals.EXIT_CODE, _with_notes(error))
    except signals.Interrupted as error:
        return _fail(arguments, signals.INTERRUPTED, _with_notes(error))
    if code == signals.INTERRUPTED:  # how typer reports Ctrl-C
        return _fail(arguments, code, "interrupted")
    return code


def _drop_output() -> None:
    """Write nowhere what is left: Python would complain at its end."""
    with suppress(OSError, ValueError):  # a test has no such file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _with_notes(error: BaseException) -> str:
    """'terminated (SIGTERM): step 12 was the last; …'"""
    return ": ".join([str(error), *getattr(error, "__notes__", ())])


def _fail(arguments: list[str], code: int, message: str, errors: Sequence[str] = ()) -> int:
    if not is_first_rank():  # rank 0 has standard output, but only this rank may have failed
        print(f"error on rank {os.environ['RANK']}: {message}", file=sys.stderr)
    elif "--json" in arguments:
        print_json({"error": message, "errors": list(errors), "exit_code": code})
    else:
        print(f"error: {message}", file=sys.stderr)
    return code


# Output on streams that cannot show every character: an ASCII terminal, a file name that is not UTF-8.

_PLAIN = {"…": "...", "→": "->", "✓": "ok", "✗": "failed", "×": "x", "−": "-", "·": "-", "│": "|", "─": "-"}
_PLAIN |= dict(zip("▁▂▃▄▅▆▇█", "._-=+*%#", strict=True))


def make_robust(*streams: Any) -> None:
    """Let these streams write every character, in plain letters where they must."""
    codecs.register_error("echelon.plain", _in_plain_letters)
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="echelon.plain")


def _in_plain_letters(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    wrong = error.object[error.start : error.end]
    escaped = (_PLAIN.get(each) or each.encode("ascii", "backslashreplace").decode("ascii") for each in wrong)
    return "".join(escaped), error.end
