"""From a plan to the program of its step: of its schedule by name, or from a file that must fit the plan."""

import errno
from collections.abc import Callable, Sequence
from pathlib import Path

from echelon.errors import UserError, raise_errors
from echelon.plan import ASYNCHRONOUS_SCHEDULES, Plan
from echelon.program.check import check, excerpt
from echelon.program.instruction import COPIES, RANK_LEVEL, RECEIVES, SENDS, Op, Program
from echelon.program.lower import add_copies, add_gathers, add_transfers, add_update, fill_update
from echelon.program.schedules import asynchronous, flushed
from echelon.program.text import Parsed, draw_words, parse
from echelon.quantities import counted

MOST_CHARACTERS = 2**25


def read_text_file(path: Path) -> str:
    """All of it, as UTF-8. One without an end is an OSError, as others that cannot be read."""
    with path.open(encoding="utf-8") as file:
        text = file.read(MOST_CHARACTERS + 1)
    if len(text) > MOST_CHARACTERS:
        raise OSError(errno.EFBIG, f"it has more than {MOST_CHARACTERS} characters")
    return text


def load_schedule(path: str | Path, *, ties: bool = False) -> Program:
    """The whole program of a schedule file, checked. Every error names its line. What the file leaves out is
    added (`complete`). `ties`: several stages hold the same weights."""
    parsed = parse(read_user_text(path, f"schedule '{path}'"), name=str(path))
    if parsed.program is None:
        raise UserError(_title(parsed, path), list(parsed.errors))
    program = complete(parsed.program, ties=ties)
    check(program, lines=parsed.lines)
    return program


def _title(parsed: Parsed, path: str | Path) -> str:
    """The title of the errors of a text, with a grid of its words if some cannot be read."""
    count = counted(len(parsed.errors), "error")
    marked = [rank for rank, words in parsed.words.items() if any(invalid for _, invalid in words)]
    if not marked:
        return f"{count} in schedule '{path}':"
    grid = excerpt(draw_words(sorted(parsed.words.items())), marked)
    return f"{count} in schedule '{path}', marked [ ] in the grid:\n\n{grid}\n"


def complete(program: Program, *, ties: bool = False) -> Program:
    """Add what a program leaves out.

    A program without any instruction of an update gets all of them. One with some of them gets NORM, TIE
    (where `ties`) and PUBLISH, each if it has none of that kind. A program without any send or receive gets
    all of them.
    """
    ops = {instruction.op for instructions in program.ranks for instruction in instructions}
    if ops.isdisjoint(RANK_LEVEL | {Op.REDUCE}):
        program = add_update(program, ties=ties)
    else:
        wanted = {Op.NORM, Op.PUBLISH, *((Op.TIE,) if ties else ())}
        program = fill_update(program, wanted - ops)
    return add_transfers(program) if ops.isdisjoint(SENDS | RECEIVES) else program


def read_user_text(path: str | Path, subject: str) -> str:
    """All of a text file, or a UserError that names the subject."""
    try:
        return read_text_file(Path(path))
    except UnicodeDecodeError:
        raise UserError(f"{subject} is not UTF-8 text") from None
    except OSError as error:
        raise UserError(f"{subject} cannot be read: {error.strerror or error}") from None


def build(
    name: str,
    replicas: Sequence[int],
    microbatches: int,
    chunks: int = 1,
    *,
    gather: bool = False,
    copies: bool = False,
    ties: bool = False,
) -> Program:
    """The program of one step that starts and ends with an empty pipeline.

    `gather`: the weights are sharded and gathered for each use (zero=3). `copies`: what forwards save is in
    host memory until the backward (offload=activations). `ties`: several stages hold the same weights and sum
    their gradients.
    """
    if name in ASYNCHRONOUS_SCHEDULES:
        if ties:
            raise UserError(
                f"schedule={name}: tied stages would update at different times; use schedule=1f1b"
            )
        program = asynchronous(name, len(replicas), microbatches)
    else:
        program = add_update(flushed(name, replicas, microbatches, chunks), ties=ties)
    program = add_transfers(program)
    program = add_copies(program) if copies else program
    return add_gathers(program) if gather else program


def step_program(plan: Plan, *, ties: bool, microbatches: int | None = None) -> Program:
    """Return the program of the plan's schedule, checked. `ties`: stages share weights. `microbatches`: those
    that a replica with few samples has, if not the plan's."""
    gather, copies = plan.frees_weights, "activations" in plan.offload
    if plan.schedule_is_file:
        program = load_schedule(plan.schedule, ties=ties)
        raise_errors(f"schedule={plan.schedule}", _file_errors(program, plan))
        own = {instruction.op for rank in program.ranks for instruction in rank}
        program = add_copies(program) if copies else program
        program = add_gathers(program) if gather and Op.GATHER not in own else program
    else:
        number = plan.microbatches if microbatches is None else microbatches
        program = build(
            plan.schedule, plan.replicas, number, plan.chunks, gather=gather, copies=copies, ties=ties
        )
    check(program)
    return program


def continuous_steps(plan: Plan) -> Callable[[int, int | None], Program]:
    """For a pipeline that is never empty between steps: its program of a step that begins with so many
    microbatches taken in; of a drain, where it takes in 0 more.

    A step begins and ends with microbatches in flight, so the check is of all steps from an empty pipeline to
    a full one and back: every later step is one of these with higher numbers.
    """
    until_full = -(-2 * plan.stages // plan.microbatches) + 1
    check(_continuous(plan, taken=until_full * plan.microbatches))

    def program(begin: int, taken: int | None) -> Program:
        return _continuous(plan, begin=begin, taken=taken, drain=taken == 0)

    return program


def _continuous(plan: Plan, *, begin: int = 0, taken: int | None, drain: bool = True) -> Program:
    program = asynchronous(
        plan.schedule, plan.stages, plan.microbatches, begin=begin, taken=taken, drain=drain
    )
    program = add_transfers(program)
    return add_copies(program) if "activations" in plan.offload else program


def _file_errors(program: Program, plan: Plan) -> list[str]:
    """Why a schedule from a file does not fit the plan."""
    errors = []
    replicas = _replicas(program)
    if replicas != plan.replicas:
        errors.append(
            f"its ranks hold the stages with replicas {'-'.join(map(str, replicas))}, and the plan has "
            f"pipeline={'-'.join(map(str, plan.replicas))}; set pipeline={'-'.join(map(str, replicas))}"
        )
    if program.microbatches != plan.microbatches:
        errors.append(
            f"it is for {program.microbatches} microbatches, and the plan has {plan.microbatches}; set "
            f"microbatches={program.microbatches}"
        )
    instructions = [instruction for rank in program.ranks for instruction in rank]
    if any(i.op is Op.STASH or i.version is not None for i in instructions):
        errors.append("it keeps weight versions, which only the schedules by name do; leave them out")
    if "activations" not in plan.offload and any(i.op in COPIES for i in instructions):
        errors.append("it stores activations in host memory; set offload=activations, or leave S and T out")
    if plan.zero == 3 and program.halves:
        errors.append("it splits backwards in two, and zero=3 frees the weights between; use zero=2")
    if "parameters" in plan.offload and program.halves:
        errors.append("it splits backwards in two, and offload=parameters drops the weights between; drop it")
    if plan.compile and program.halves:
        errors.append("it splits backwards in two, and those of compiled layers are one piece; drop compile")
    if any(not _ends_once(program, rank) for rank in range(len(program.ranks))):
        errors.append("a step has one REDUCE for each stage and then one UPDATE, at the end; leave them out")
    return errors


def _replicas(program: Program) -> tuple[int, ...]:
    """The replicas of each position of the pipeline; a rank with several stages is one position."""
    if all(len(holders) == 1 for holders in program.placement):
        return (1,) * len(program.ranks)
    return tuple(len(holders) for holders in program.placement)


def _ends_once(program: Program, rank: int) -> bool:
    """Return whether a rank sums each stage's gradients once, after its last backward, and then updates
    once."""
    ops = [instruction.op for instruction in program.ranks[rank]]
    stages = program.stages_of(rank)
    if ops.count(Op.REDUCE) != len(stages) or ops.count(Op.UPDATE) != 1:
        return False
    backwards = (Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
    if any(op in (*backwards, Op.FORWARD) for op in ops[ops.index(Op.UPDATE) :]):
        return False
    for stage in stages:
        own = [instruction.op for instruction in program.ranks[rank] if instruction.stage == stage]
        if any(op in backwards for op in own[own.index(Op.REDUCE) :]):
            return False
    return True
