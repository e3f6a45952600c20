"""echelon schedule: the options, and the program that they ask for."""

import os
import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from echelon.cli.options import Json, console, print_json, read_count
from echelon.errors import UserError, did_you_mean, raise_errors
from echelon.plan import SCHEDULES

if TYPE_CHECKING:
    from echelon.cli.schedule_view import ScheduleRequest

_BATCHES = 3  # of a pipeline that never drains: enough to show all weight versions
_MOST_WORK = 1_000_000
_SECONDS = re.compile(r"\d{1,9}(\.\d{1,9})?(e-?\d{1,2})?", re.ASCII)
_DEFAULTS = {"forward": "1", "backward": "1", "transfer": "0", "reduce": "0", "update": "0"}
_COPIES = ("store", "fetch")
_COST = "Seconds, or one for each stage: 1,2,1."

Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME|FILE", help=f"A schedule: {', '.join(SCHEDULES)}; or a file (.txt) that holds one."
    ),
]
Stages = Annotated[str | None, typer.Option(metavar="INTEGER", help="How many stages the pipeline has.")]
Microbatches = Annotated[
    str | None, typer.Option(metavar="INTEGER", help="How many microbatches a step has.")
]
Chunks = Annotated[str | None, typer.Option(metavar="INTEGER", help="Stages per rank, if interleaved.")]
Replicas = Annotated[str | None, typer.Option(help="Replicas of each stage, like 3-1.")]
Forward = Annotated[str, typer.Option(help=f"A forward. {_COST}")]
Backward = Annotated[str, typer.Option(help=f"A whole backward. {_COST}")]
Half = "half of --backward"
Inputs = Annotated[str | None, typer.Option(show_default=Half, help="Its part for inputs.")]
Weights = Annotated[str | None, typer.Option(show_default=Half, help="Its part for weights.")]
Transfer = Annotated[str, typer.Option(help="Seconds from a rank to the next.")]
Reduce = Annotated[str, typer.Option(help=f"The sum over replicas. {_COST}")]
Update = Annotated[str, typer.Option(help=f"The optimizer's step. {_COST}")]
Store = Annotated[
    str | None, typer.Option(help=f"With offload=activations: what a forward saves goes out. {_COST}")
]
Fetch = Annotated[str | None, typer.Option(help=f"It comes back for the backward. {_COST}")]
Out = Annotated[
    Path | None, typer.Option(help="Write a picture (.svg, .png) or the program (.txt) to this file.")
]
Measure = Annotated[
    bool,
    typer.Option("--measure", help="Run it here, and show the measured timeline beside the simulated one."),
]
AsText = Annotated[bool, typer.Option("--text", help="Print the program itself.")]


def schedule(
    name: Name,
    stages: Stages = None,
    microbatches: Microbatches = None,
    chunks: Chunks = None,
    replicas: Replicas = None,
    forward: Forward = _DEFAULTS["forward"],
    backward: Backward = _DEFAULTS["backward"],
    backward_input: Inputs = None,
    backward_weight: Weights = None,
    transfer: Transfer = _DEFAULTS["transfer"],
    reduce: Reduce = _DEFAULTS["reduce"],
    update: Update = _DEFAULTS["update"],
    store: Store = None,
    fetch: Fetch = None,
    measure: Measure = False,
    out: Out = None,
    as_text: AsText = False,
    as_json: Json = False,
) -> None:
    """Draw and check a pipeline schedule: its bubble, microbatches in flight, versions of the weights."""
    from echelon.cli.schedule_view import MeasuredSchedule, SimulatedSchedule, write
    from echelon.program import Costs, add_copies, check, show, simulate
    from echelon.state.bounded_json import paused_collector

    texts = {
        "forward": forward,
        "backward": backward,
        "backward_input": backward_input,
        "backward_weight": backward_weight,
        "transfer": transfer,
        "reduce": reduce,
        "update": update,
        "store": store,
        "fetch": fetch,
    }
    costs, errors = _read_costs({key: text for key, text in texts.items() if text is not None})
    errors += [] if out is None else out_errors(out)
    errors += _unused_with_measure(texts, as_text) if measure else []
    sizes = _read_sizes(name, {"stages": stages, "microbatches": microbatches, "chunks": chunks}, errors)
    make = _from_file if _is_file(name) else _from_name
    with paused_collector():  # a program may be a million tuples
        request = make(name, {**sizes, "replicas": replicas}, errors)
        raise_errors(f"schedule '{name}'", _wrong_counts(costs, request.program.stages))
        if not costs.keys().isdisjoint(_COPIES):
            request = replace(request, program=add_copies(request.program))
        check(request.program)
    view = (
        MeasuredSchedule.run(console(as_json), request)
        if measure
        else SimulatedSchedule(request, simulate(request.program, Costs(**costs)))
    )
    if out is not None:
        write(out, request.program, view.panels())
    if as_json:
        print_json(view.summary() | ({"text": show(request.program)} if as_text else {}))
    elif as_text:
        print(show(request.program), end="")
    else:
        view.display(console(as_json))


def _read_sizes(name: str, texts: dict[str, str | None], errors: list[str]) -> dict[str, int | None]:
    """Read the numbers of these options. If one is wrong, no schedule can be made: all errors are raised."""
    wrong: list[str] = []
    sizes = {option: read_count(_option(option), text, wrong) for option, text in texts.items()}
    if wrong:
        raise_errors(f"schedule '{name}'", [*errors, *_name_errors(name), *wrong])
    return sizes


def _name_errors(name: str) -> list[str]:
    if name in SCHEDULES or _is_file(name):
        return []
    return [f"there is no schedule '{name}'{did_you_mean(name, SCHEDULES)}; a file ends in .txt"]


def _unused_with_measure(texts: dict[str, str | None], as_text: bool) -> list[str]:
    costs = [name for name, text in texts.items() if text != _DEFAULTS.get(name)]
    errors = [f"{_option(name)} with --measure: costs are measured; leave one of them out" for name in costs]
    if as_text:
        errors.append("--text with --measure: --text prints the program, not a measurement; use one of them")
    return errors


def _is_file(name: str) -> bool:
    return name not in SCHEDULES and ("/" in name or name.endswith(".txt") or Path(name).is_file())


def _from_file(name: str, sizes: dict[str, Any], errors: list[str]) -> "ScheduleRequest":
    """Read the program of a file, which options may only repeat. `errors` are those of other options."""
    from echelon.cli.schedule_view import ScheduleRequest
    from echelon.program import load_schedule

    raise_errors(f"schedule '{name}'", errors)
    program = load_schedule(name)
    most_stages = max(len(program.stages_of(rank)) for rank in range(len(program.ranks)))
    in_file = {
        "stages": program.stages,
        "microbatches": program.microbatches,
        "chunks": most_stages,
        "replicas": "-".join(str(len(ranks)) for ranks in program.placement),
    }
    differing = [
        f"--{option} {size}: the file says {in_file[option]}; leave the option out"
        for option, size in sizes.items()
        if size not in (None, in_file[option])
    ]
    raise_errors(f"schedule '{name}'", differing)
    return ScheduleRequest(
        program, program.name, program.stages, program.microbatches, most_stages, file=name
    )


def _from_name(name: str, sizes: dict[str, Any], errors: list[str]) -> "ScheduleRequest":
    """Build a schedule that a plan can name, by the rules of plans. `errors`: see `_from_file`."""
    from echelon.cli.schedule_view import ScheduleRequest
    from echelon.plan import Plan
    from echelon.program import add_transfers, asynchronous, build

    stages, microbatches, replicas = sizes["stages"], sizes["microbatches"], sizes["replicas"]
    errors += _name_errors(name)
    if stages is None and replicas is None:
        errors.append("--stages is missing: how many stages the pipeline has")
    if microbatches is None:
        errors.append("--microbatches is missing: how many microbatches a step has")
    if stages is not None and replicas is not None and len(replicas.split("-")) != stages:
        errors.append(f"--replicas {replicas} --stages {stages}: give one number of replicas for each stage")
    # If --microbatches is missing, as many as stages break no further rule.
    number = stages if microbatches is None else microbatches
    fields = {"pipeline": replicas or stages, "microbatches": number, "chunks": sizes["chunks"]}
    known: dict[str, Any] = {key: value for key, value in fields.items() if value is not None}
    try:
        plan = Plan(schedule=name if name in SCHEDULES else "1f1b", **known)
    except UserError as error:
        plan = None
        errors += error.errors
    size = 0 if plan is None else plan.stages * plan.chunks * plan.microbatches
    if size > _MOST_WORK:
        errors.append(f"{size} forwards are too many to show: at most {_MOST_WORK}")
    raise_errors(f"schedule '{name}'", errors)
    assert plan is not None
    if not plan.flushes:
        taken = _BATCHES * plan.microbatches
        program = add_transfers(asynchronous(name, plan.stages, plan.microbatches, taken=taken))
        return ScheduleRequest(program, name, plan.stages, plan.microbatches, 1, batches=_BATCHES)
    program = build(name, plan.replicas, plan.microbatches, plan.chunks)
    return ScheduleRequest(program, name, plan.stages, plan.microbatches, plan.chunks)


def _read_costs(texts: dict[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Read the seconds of each option, one or several; and the errors of those that are no numbers."""
    read: dict[str, Any] = {}
    errors = []
    for name, text in texts.items():
        words = [word.strip() for word in text.split(",")]
        if not all(_SECONDS.fullmatch(word) for word in words):
            errors.append(f"{_option(name)} {text}: must be seconds, 0 or more, like 1.5")
        elif len(words) == 1:
            read[name] = _exact(words[0])
        elif name == "transfer":
            errors.append(f"{_option(name)} {text}: must be one number, the seconds of every hop")
        else:
            read[name] = [_exact(word) for word in words]
    return read, errors


def _wrong_counts(costs: dict[str, Any], stages: int) -> list[str]:
    return [
        f"{_option(name)}: {len(cost)} numbers for {stages} stages; give one, or one for each stage"
        for name, cost in costs.items()
        if isinstance(cost, list) and len(cost) != stages
    ]


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _exact(text: str) -> Fraction | int:
    """Read the number as written: 0.1 is a tenth, not the float next to it."""
    value = Fraction(text)
    return int(value) if value.denominator == 1 else value


_SUFFIXES = (".svg", ".png", ".txt")


def out_errors(out: Path) -> list[str]:
    """List why a picture or a program cannot be written to this file; before a schedule is simulated."""
    errors = []
    if out.suffix not in _SUFFIXES:
        errors.append(f"--out {out}: must end in .svg or .png for a picture, or .txt for the program")
    target = out if out.exists() else out.parent
    if out.is_dir():
        errors.append(f"--out {out}: is a folder; give a file in it")
    elif not target.exists():
        errors.append(f"--out {out}: there is no folder {out.parent}; make it, or choose another file")
    elif not os.access(target, os.W_OK) or not out.parent.is_dir():
        errors.append(f"--out {out}: cannot be written; choose another file")
    return errors
