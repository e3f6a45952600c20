"""dry_run(): the real engine of one rank of any plan, in one process, without peers and without memory.

dry_run           refuse what has no answer → build the engine → run steps → read what it has counted
descriptions      what arrives from the stage before, learned from a pipeline that is cut there

The groups of the rank are of equal ranks: each holds what this one holds. So a sum is this rank's value times
their number, and what is gathered is this rank's part again and again; ranks agree, and what they count
together is counted.

A message between stages cannot be made up that way, because its receiver learns the form of what comes from
it. The text that describes an activation is taken from a run of the stage before; all tensors are there, and
have no values (`hollow.py`).
"""

import copy
import dataclasses
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from operator import sub
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.collectives import CompletedWork, Group, Ledger, RecordingGroup, Reduction, Work, current_content
from echelon.collectives.layout import Layout
from echelon.collectives.mesh import Mesh, pretending
from echelon.engine.dry_run.hollow import HollowMemory
from echelon.engine.engine import Engine
from echelon.engine.parallelize import parallelize
from echelon.engine.step.runtime.mailbox import content_of
from echelon.engine.step.runtime.message import CODE_BYTES, pack_code, write_bytes
from echelon.errors import UserError, raise_errors
from echelon.memory import Memory
from echelon.nn.batch import microbatches, num_samples
from echelon.plan import AUTO, Plan
from echelon.program import Op
from echelon.program.text import show_instruction
from echelon.update.optim.local import Make

_DONE = CompletedWork()
# The flags of up to 256 tensors: all are there. As float64 they are 1, which is a loss, and its count.
_ALL_THERE = bytes.fromhex("010101010101f03f") * 32
_MOST_TEXT = 2**16  # bytes of a description


class SilenceError(Exception):
    """Nothing comes: the rank has sent all that it sends before it receives."""


@final
class _Never(Work):
    def wait(self) -> None:
        raise SilenceError


class EqualRanks(RecordingGroup):
    """Pretends that all ranks of the group call this with the same tensors; counts bytes and moves none."""

    def _all_reduce(self, tensor: Tensor, op: Reduction) -> Work:
        return self._add_up(tensor, op)

    def _reduce(self, tensor: Tensor, target: int, op: Reduction) -> Work:  # noqa: ARG002
        return self._add_up(tensor, op)

    def _reduce_scatter(self, output: Tensor, tensor: Tensor, op: Reduction) -> Work:
        self._copy(output, self._own_part(tensor))
        return self._add_up(output, op)

    def _add_up(self, tensor: Tensor, op: Reduction) -> Work:
        if op == "sum":
            tensor.mul_(self.size)
        if self.ledger.subject == "metrics":  # of a rank that computes no loss: others do
            tensor[:3].clamp_(min=1)
        return _DONE

    def _all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        output.view(self.size, -1).copy_(tensor.reshape(1, -1).clone())  # it may lie in the output
        return _DONE

    def _gather(self, tensor: Tensor, output: Tensor | None, target: int) -> Work:  # noqa: ARG002
        return _DONE if output is None else self._all_gather(output, tensor)

    def _scatter(self, output: Tensor, tensor: Tensor | None, source: int) -> Work:  # noqa: ARG002
        return self._copy(
            output, output.new_zeros(output.shape) if tensor is None else self._own_part(tensor)
        )

    def _all_to_all(
        self, output: Tensor, tensor: Tensor, output_rows: list[int], input_rows: list[int]
    ) -> Work:
        own = tensor.split(input_rows)[self.rank]
        for part in output.split(output_rows):
            part.copy_(own[: len(part)] if len(part) <= len(own) else part.new_zeros(part.shape))
        return _DONE


@final
class EqualPipelines(EqualRanks):
    """The ranks of a pipeline, with the messages between its stages. `descriptions`: the texts that are
    received, by the content of the message. None: to wait for one raises `SilenceError`, and `sent` is what
    was sent until then."""

    def __init__(self, axis: str, rank: int = 0, size: int = 1, ledger: Ledger | None = None) -> None:
        super().__init__(axis, rank, size, ledger)
        self.descriptions: Mapping[str, bytes] | None = None
        self.sent: dict[str, list[bytes]] = {}
        self._follows: bytes | None = None  # the description whose length was received

    def _send(self, tensor: Tensor, target: int) -> Work:  # noqa: ARG002
        if self.descriptions is None:
            self.sent.setdefault(current_content(), []).append(tensor[:_MOST_TEXT].numpy().tobytes())
        return _DONE

    def _recv(self, tensor: Tensor, source: int) -> Work:  # noqa: ARG002
        if self.descriptions is None:
            return _Never()
        if self._follows is not None:
            write_bytes(tensor, self._follows)
            self._follows = None
        elif tensor.numel() == CODE_BYTES:
            text = self.descriptions[current_content()]
            self._follows = text if torch.is_grad_enabled() else _without_gradients(text)
            write_bytes(tensor, pack_code(len(self._follows)))
        else:  # what was described
            tensor.zero_()
            write_bytes(tensor, (pack_code(0) + _ALL_THERE)[: tensor.numel()])
        return _DONE


def _without_gradients(description: bytes) -> bytes:
    """Return how a pass that records no gradients describes the same."""
    tree, leaves = json.loads(description)
    return json.dumps([tree, [[shape, dtype, False] for shape, dtype, _ in leaves]]).encode()


@final
class EqualMesh(Mesh):
    """The mesh of one rank of a plan of any size, over `EqualRanks`."""

    @classmethod
    def pretended_group(cls, axis: str, number: int, size: int, ledger: Ledger) -> Group:
        return (EqualPipelines if axis == "pipeline" else EqualRanks)(axis, number, size, ledger)

    def group_of_stages(self, stages: Collection[int]) -> Group:
        column = self.layout.column(self.rank, stages)
        if self.rank not in column:
            return RecordingGroup("tied", ledger=self.ledger)
        return EqualRanks("tied", column.index(self.rank), len(column), self.ledger)

    def free_host_memory(self) -> None:
        """Its machine is not here."""

    @property
    def messages(self) -> EqualPipelines:
        """Return the group through which messages between stages go."""
        group = self.group("pipeline")
        assert isinstance(group, EqualPipelines)
        return group


Model = nn.Module | Callable[[], nn.Module]


class Operations(NamedTuple):
    """The operations of one step with one axis, operation and subject: how many, and their bytes."""

    calls: int
    payload: int
    sent: int
    received: int


Bytes = dict[tuple[str, str, str], Operations]  # by axis, operation and subject, as in the ledger


@final
@dataclasses.dataclass(frozen=True)
class DryRun:
    """What one rank of a plan would do, by the code that would do it.

    `moved`: the bytes of each step; the first has checks that later ones have not. `memory`: by category, at
    the end and at the peak. `program`: the instructions of this rank in a step.
    """

    plan: Plan
    rank: int
    moved: tuple[Bytes, ...]
    memory: Memory
    program: tuple[str, ...]

    def sent(self, axis: str | None = None, operation: str | None = None, subject: str | None = None) -> int:
        """Return the bytes that the rank sends in the last step; None matches all."""
        wanted = (axis, operation, subject)
        return sum(
            moved.sent
            for key, moved in self.moved[-1].items()
            if all(one in (None, other) for one, other in zip(wanted, key, strict=True))
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        names = ("axis", "operation", "subject")
        return {
            "plan": str(self.plan),
            "rank": self.rank,
            "ranks": self.plan.ranks,
            "moved": [
                [{**dict(zip(names, key, strict=True)), **moved._asdict()} for key, moved in step.items()]
                for step in self.moved
            ],
            "memory": self.memory._asdict(),
            "program": list(self.program),
        }


def dry_run(
    model: Model,
    plan: Plan | str,
    batch: Any,
    *,
    optimizer: Make,
    rank: int = 0,
    steps: int = 2,
    **options: Any,
) -> DryRun:
    """Run `steps` steps of rank `rank` of a plan with any number of ranks, here: without other ranks, and
    without memory for what is large.

        dry_run(lambda: build("llama3-8b"), "data=128 tensor=8 zero=3", batch, optimizer=adamw, rank=5)

    `model` is a module, which stays as it is, or a function that builds one. `batch` is what this replica's
    `engine.step` would be given. `options` are those of `parallelize`. No value is computed: losses and norms
    are 1, tokens are divided evenly among experts, no step is audited, and ranks compare no weights unless
    `check_every` says so.
    """
    plan = Plan.parse(plan) if isinstance(plan, str) else plan
    raise_errors("dry run", list(_errors(plan, rank, steps)))
    run = _Setting(model, batch, {"check_every": 0, **options, "optimizer": optimizer, "audit": "off"})
    with HollowMemory(), run.engine(plan, rank) as (engine, mesh):
        mesh.messages.descriptions = dict(_descriptions(run, engine, mesh))
        moved = tuple(bytes_of_step(engine, batch) for _ in range(steps))
        program, own = engine.program, mesh.messages.rank
        shown = tuple(show_instruction(each, program.stages_of(own)) for each in program.ranks[own])
        return DryRun(plan, rank, moved, engine.memory(), shown)


def _errors(plan: Plan, rank: int, steps: int) -> Iterator[str]:
    if dist.is_initialized():
        yield "this process has joined other ranks, and a dry run has none; call it in a process of its own"
    if steps < 1:
        yield f"steps={steps}: must be at least 1"
    if plan.pipeline == AUTO:
        yield "pipeline=auto: stages are divided by times that are measured; say how many, like pipeline=2"
        return
    if not 0 <= rank < plan.ranks:
        yield f"rank={rank}: must be from 0 to {plan.ranks - 1}, the ranks of plan '{plan}'"
    if plan.sync == "async":
        yield "sync=async: which bytes move when depends on which worker is faster; use sync=all-reduce"
    if plan.compress != "none":
        yield f"compress={plan.compress}: what is kept depends on how many values are zero; use compress=none"
    if plan.compile:
        yield "compile=true: what is compiled depends on the device; use compile=false"
    if plan.recompute.startswith("budget:"):
        yield (
            f"recompute={plan.recompute}: which layers run again depends on times that are measured; use "
            "recompute=full, selective or sqrt"
        )


class _Setting(NamedTuple):
    """What does not depend on the plan and the rank. `options`: of `parallelize`."""

    model: Model
    batch: Any
    options: Mapping[str, Any]

    @contextmanager
    def engine(self, plan: Plan, rank: int, **options: Any) -> Iterator[tuple[Engine, EqualMesh]]:
        """The engine of a rank, on a model of its own, and its mesh."""
        meshes: list[EqualMesh] = []

        def join(joined: Plan) -> EqualMesh:
            meshes.append(EqualMesh.pretend(joined, rank))
            return meshes[-1]

        with ExitStack() as stack:
            stack.enter_context(pretending(join))
            engine = parallelize(self._own_model(), plan, **{**self.options, **options})
            stack.callback(engine.close, restore=False)
            yield engine, meshes[0]

    def _own_model(self) -> nn.Module:
        if not isinstance(self.model, nn.Module):
            return self.model()
        try:
            model = copy.deepcopy(self.model)
        except (RuntimeError, TypeError) as error:
            raise UserError(
                f"dry run: the model cannot be copied ({error}); give a function that builds it"
            ) from error
        return model


def bytes_of_step(engine: Engine, batch: Any) -> Bytes:
    """Take a step; return what it moved."""
    before = _totals(engine.ledger)
    engine.step(batch)
    after, nothing = sorted(_totals(engine.ledger).items()), Operations(0, 0, 0, 0)
    moved = {key: Operations(*map(sub, total, before.get(key, nothing))) for key, total in after}
    return {key: each for key, each in moved.items() if each.calls}


def _totals(ledger: Ledger) -> Bytes:
    return {
        key: Operations(total.count, total.payload, total.sent, total.received)
        for key, total in ledger.totals.items()
    }


# What arrives from the stage before.


def _descriptions(run: _Setting, engine: Engine, mesh: EqualMesh) -> Iterator[tuple[str, bytes]]:
    """Yield the description of each activation that the rank receives, by the content of its message."""
    of_stage: dict[int, list[bytes]] = {}
    for receive in engine.program.ranks[mesh.messages.rank]:
        if receive.op is Op.RECV_ACTIVATION:
            stage, number = receive.stage, receive.microbatch
            assert number is not None
            if stage not in of_stage:
                of_stage[stage] = _sent_at(engine.boundaries[stage - 1], run, mesh)
            texts = of_stage[stage]
            yield content_of(receive), texts[number % len(texts)]


def _sent_at(boundary: int, run: _Setting, mesh: EqualMesh) -> list[bytes]:
    """Run the layers before `boundary` as the first of two stages, up to its first receive. Return how it
    describes what it sends, by microbatch; only the first one, if all have as many samples."""
    plan, position = mesh.plan, mesh.position
    batch, count = run.batch, plan.microbatches
    parts = microbatches(batch, count, always=True)
    if len({num_samples(part) for part, _ in parts}) == 1:
        batch, count = parts[0][0], 1
    cut = dataclasses.replace(plan, pipeline=2, chunks=1, schedule="gpipe", microbatches=count)
    rank = (position.replica * plan.context + position.context) * plan.tensor + position.tensor
    assert Layout(cut).position(rank).pipeline == 0
    with run.engine(cut, rank, boundaries=[boundary]) as (engine, of_probe):
        with suppress(SilenceError):
            engine.step(batch)
        return [sent[1] for sent in of_probe.messages.sent.values()]
