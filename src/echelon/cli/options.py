"""Options that several commands share, and how results are printed."""

import os
from pathlib import Path
from typing import Annotated, Any, final

import typer
from rich.console import Console

from echelon.launching.torchrun import is_under_torchrun
from echelon.plan import FIELDS
from echelon.train import strict_json

JobFile = Annotated[
    Path | None, typer.Argument(metavar="[JOB.toml]", help="A job file; without one, the embedded default.")
]
PlanText = Annotated[
    str | None,
    typer.Option("--plan", help=f"The plan, like 'data=2 zero=1', of the fields {', '.join(FIELDS)}."),
]
NAMES = (  # importing the models would take a second of torch
    "model.preset: gpt-tiny, llama-tiny, moe-tiny, gpt-small, gpt-medium, gpt-large, gpt-xl, gpt-1.3b, "
    "gpt-2.7b, gpt-6.7b, gpt-13b, gpt-175b, llama2-7b, llama2-13b, llama2-70b, llama3-1b, llama3-8b, "
    "llama3-70b, llama3-405b, mixtral-8x7b, deepseek-moe-16b, qwen3-30b-a3b; of task=images: "
    "alexnet, nin, overfeat, vgg16, inception-v1, resnet-50, and each of these with -tiny; "
    "optimizer.name: adamw, sgd, adafactor, sm3; optimizer.schedule: constant, cosine, wsd"
)
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help=f"Change one value of the job, like model.layers=12; repeatable. {NAMES}."),
]
MOST_DIGITS = 6  # of a number of steps, stages or microbatches: beyond, it was a slip
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def read_count(option: str, text: str | None, errors: list[str]) -> int | None:
    """Read the number of an option; None if it is left out, or wrong: then its error is added."""
    if text is None:
        return None
    digits = text.strip()
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= MOST_DIGITS and int(digits) >= 1):
        errors.append(f"{option} {text}: must be an integer from 1 to {'9' * MOST_DIGITS}")
        return None
    return int(digits)


def is_first_rank() -> bool:
    """Return whether this process prints on standard output: under torchrun, only rank 0 does."""
    return not is_under_torchrun() or os.environ["RANK"] == "0"


class ReaderGoneError(BaseException):
    """The reader of standard output has closed it, as `head` does. No Exception: nothing has failed."""


@final
class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise ReaderGoneError


def console(as_json: bool) -> Console:
    """Return the console for a person; quiet if a program asked for JSON."""
    return _Console(quiet=as_json or not is_first_rank(), highlight=False)


def print_json(value: dict[str, Any]) -> None:
    if is_first_rank():
        try:
            print(strict_json.dump(value), flush=True)
        except BrokenPipeError:
            raise ReaderGoneError from None
