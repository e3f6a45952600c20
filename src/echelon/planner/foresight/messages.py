"""Bytes that ranks send each other in a step, as the ledger counts them: by axis, operation and subject.

messages(shape, "data=8 zero=1 precision=bf16", batch=16)
    ('data', 'reduce_scatter', 'gradients')    7/8 of 4 bytes for each parameter
    ('data', 'all_gather', 'parameters')       7/8 of 2 bytes

They are those of every step but the first, which also compares what ranks have. Not here: counts and flags,
some hundred bytes a step, and copies to the host. Weights of zero are padded as `parallel/data/zero/flat.py`
pads them, where each parameter is a multiple of 256 bytes, as those of usual widths are. Tokens are divided
evenly among experts; and where zero shards gradients that tensor ranks sum, ranks have parts of different
sizes, of which this is the mean.
"""

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from echelon.errors import raise_errors
from echelon.plan import Plan
from echelon.planner.foresight.checks import shape_errors
from echelon.planner.foresight.kernels import BYTES
from echelon.planner.foresight.layer import activation_bytes
from echelon.planner.foresight.memory import has_fused_head, layer_parameters
from echelon.planner.foresight.practice import ECHELON
from echelon.planner.foresight.schedules import ASYNCHRONOUS
from echelon.planner.foresight.settings import Settings, settings_of
from echelon.planner.foresight.stages import StageKind, stage_kinds
from echelon.planner.shape.shape import ModelShape

_HEADER = 16  # bytes before each message between stages: which one it is
_ALIGNMENT = 256  # bytes that each rank's part of a unit is a multiple of
_SMALLEST = 2**20  # bytes: smaller units share a message with zero=1 (`parallel/data/zero/units.py`)
_INDEX = 8  # bytes of the number of an expert
_LOSS = 8  # bytes of a token that tensor ranks exchange: its sum of exponentials, and the target's logit

Moved = dict[tuple[str, str, str], float]  # bytes by axis, operation and subject


class _Message(NamedTuple):
    """Operations on one axis. `payload`: bytes of all their buffers together, as the ledger has it."""

    axis: str
    operation: str
    subject: str
    payload: float
    ranks: int

    @property
    def sent(self) -> float:
        """The bytes that each rank sends: see `collectives/ledger.py`."""
        if self.operation == "send":
            return self.payload
        return (2 if self.operation == "all_reduce" else 1) * (self.ranks - 1) / self.ranks * self.payload


class _Work(NamedTuple):
    """What one rank of a stage does in a step. `tokens`: of a microbatch, those of a rank along `context`."""

    shape: ModelShape
    settings: Settings
    stage: StageKind
    tokens: int

    @property
    def hidden(self) -> float:
        """Bytes of the hidden states of a microbatch."""
        return activation_bytes(self.settings) * self.tokens * self.shape.hidden

    @property
    def forwards(self) -> int:
        """Forward passes of a microbatch: that of the step, and one that only records what gates do."""
        sums_gates = self.shape.experts is not None and self.shape.experts.has_loss
        return 1 + (sums_gates and not self.settings.forwards_first)


def messages(shape: ModelShape, plan: Plan | str, batch: int, stage: int = 0) -> Moved:
    """Return the bytes that a rank of a pipeline stage sends in a step of `batch` sequences."""
    settings = settings_of(Plan.parse(plan) if isinstance(plan, str) else plan)
    errors = [*shape_errors(shape, settings), *_unknown(settings)]
    if not 0 <= stage < settings.pipeline:
        errors.append(f"stage={stage}: must be from 0 to {settings.pipeline - 1}, the stages of the plan")
    raise_errors(f"messages of plan '{plan}'", errors)
    kind = next(
        each
        for each in stage_kinds(shape, settings.pipeline, settings.chunks)
        if each.first <= stage < each.first + each.number
    )
    kind = kind._replace(first=stage, number=1)
    tokens = batch // (settings.data * settings.microbatches) * shape.sequence // settings.context
    work = _Work(shape, settings, kind, tokens)
    moved: Moved = {}
    for each in chain(_weights(work), _tensor(work), _context(work), _experts(work), _stages(work)):
        if each.ranks > 1 and each.sent:
            key = each[:3]
            moved[key] = moved.get(key, 0.0) + each.sent
    return moved


def _unknown(settings: Settings) -> Iterator[str]:
    """What bytes depend on that is decided in a run."""
    if settings.sync != "all-reduce":
        yield f"sync={settings.sync}: who sends what depends on which rank is faster; use sync=all-reduce"
    if settings.schedule in ASYNCHRONOUS and settings.pipeline > 1:
        yield f"schedule={settings.schedule}: stages update at different times; use a schedule that flushes"
    divides_layers = settings.tensor * settings.context * settings.expert > 1
    if settings.recompute != "none" and divides_layers:
        yield (
            f"recompute={settings.recompute}: how much of a layer is made again decides what its ranks send "
            "again; use recompute=none, or tensor, context and expert of 1"
        )


# Gradients and weights: once in a step, but from zero=2 on for each microbatch.


class _Unit(NamedTuple):
    """Weights that are gathered together, and how often a step gathers them with zero=3."""

    parameters: float
    gathers: int


def _weights(work: _Work) -> Iterator[_Message]:
    shape, settings = work.shape, work.settings
    ranks = settings.copies
    usual = "data" if settings.context == 1 else "context" if settings.data == 1 else "weights"
    yield from _shared(settings, _dense_units(work), usual, ranks)
    if settings.expert > 1 and shape.experts is not None:
        routed = shape.experts.number / settings.expert * shape.expert_parameters / settings.tensor
        gathers = settings.microbatches * (1 + work.forwards)
        copies = ranks // settings.expert
        axis = "expert_data" if settings.context == 1 else "experts"
        yield from _shared(settings, [_Unit(routed, gathers)] * round(work.stage.sparse), axis, copies)


def _dense_units(work: _Work) -> list[_Unit]:
    """The layers of a stage, and what is before and after them."""
    shape, settings, stage = work.shape, work.settings, work.stage
    gathers = settings.microbatches * (1 + work.forwards)
    routed = 0.0
    if settings.expert == 1 and shape.experts is not None:
        routed = shape.experts.number * shape.expert_parameters / settings.tensor
    layers = [_Unit(layer_parameters(shape, settings.tensor, False), gathers)] * round(stage.dense)
    if stage.sparse:
        layer = layer_parameters(shape, settings.tensor, True) + routed
        layers += [_Unit(layer, gathers)] * round(stage.sparse)
    units: list[_Unit] = []
    table = shape.vocab * shape.hidden / settings.tensor
    positions = float(shape.learned_positions * shape.hidden)
    norm = float(shape.norm_vectors * shape.hidden + shape.other_parameters)
    is_both = stage.embedding and stage.head
    # A head that is computed with its loss reads its weights outside of a module: they stay until the end.
    is_held = has_fused_head(shape, ECHELON, settings)
    if stage.embedding:
        often = gathers
        if shape.tied and is_both:  # used by the first layer and by the head
            often = 2 if is_held else 2 * gathers
        parts = (table, positions) if shape.tied and not is_both else (table + positions,)
        units += [_Unit(part, often) for part in parts]
    units += layers
    if stage.head:
        often = 1 if is_held and not (shape.tied and is_both) else gathers
        units += [_Unit(norm if shape.tied else table + norm, often)]
        units += [_Unit(table, often)] if shape.tied and not is_both else []
    return [unit for unit in units if unit.parameters]


def _shared(settings: Settings, units: list[_Unit], axis: str, ranks: int) -> Iterator[_Message]:
    if not settings.zero:
        gradients = sum(unit.parameters for unit in units) * settings.message_bytes
        yield _Message(axis, "all_reduce", "gradients", gradients, ranks)
        return
    shards = min(ranks, settings.shards)
    own = axis if shards == ranks else "shard"
    if settings.zero == 1 and settings.update == "step" and not settings.offload:
        units = _joined(units, _SMALLEST / settings.weight_bytes)
    each = int(shards * _ALIGNMENT // settings.weight_bytes)
    padded = [unit._replace(parameters=-(-unit.parameters // each) * each) for unit in units]
    total, sums = sum(unit.parameters for unit in padded), settings.microbatches if settings.zero > 1 else 1
    yield _Message(own, "reduce_scatter", "gradients", sums * total * settings.message_bytes, shards)
    gathered = sum(unit.parameters * unit.gathers for unit in padded) if settings.zero == 3 else total
    yield _Message(own, "all_gather", "parameters", gathered * settings.weight_bytes, shards)
    copied = total / shards * settings.message_bytes
    yield _Message("copies", "all_reduce", "gradients", copied, ranks // shards)


def _joined(units: list[_Unit], most: float) -> list[_Unit]:
    """Neighbours as one unit, of at most so many parameters."""
    joined: list[_Unit] = []
    for unit in units:
        if joined and joined[-1].parameters + unit.parameters <= most:
            joined[-1] = joined[-1]._replace(parameters=joined[-1].parameters + unit.parameters)
        else:
            joined.append(unit)
    return joined


# Activations, in each microbatch.


def _tensor(work: _Work) -> Iterator[_Message]:
    """Sums of hidden states; with `sequence`, gathers and sums in parts: a forward pass's gather is a
    backward pass's sum, and the other way around."""
    shape, settings, stage = work.shape, work.settings, work.stage
    ranks, times, subject = settings.tensor, settings.microbatches, "tensor parallelism"
    loss = times * stage.head * work.forwards * work.tokens * _LOSS * ranks
    yield _Message("tensor", "all_gather", "loss", loss, ranks)
    slots = work.tokens * shape.experts.top_k if shape.experts is not None else 0
    slots_bytes = activation_bytes(settings) * slots * stage.sparse
    if not settings.sequence:
        passes = 2 * (work.forwards + 1) * stage.layers + stage.embedding * work.forwards + stage.head
        size = passes * work.hidden + slots_bytes
        yield _Message("tensor", "all_reduce", subject, times * size, ranks)
        return
    gathers = 2 * (work.forwards + 1) * stage.layers + stage.embedding + stage.head * work.forwards
    routing = work.forwards * (slots_bytes + _INDEX * slots * stage.sparse)
    yield _Message("tensor", "all_gather", subject, times * (gathers * work.hidden + routing), ranks)
    sums = 2 * (work.forwards + 1) * stage.layers + stage.head
    yield _Message("tensor", "reduce_scatter", subject, times * (sums * work.hidden + slots_bytes), ranks)
    embeddings = stage.embedding * work.forwards * work.hidden
    yield _Message("tensor", "all_reduce", subject, times * embeddings, ranks)
    numbers, count = _whole_parameters(shape, stage)
    shards = settings.shards if settings.zero else 1
    summed = _sum_bytes(settings) * numbers / shards + count
    yield _Message("tensor", "all_reduce", "tied gradients", summed, ranks)


def _whole_parameters(shape: ModelShape, stage: StageKind) -> tuple[float, float]:
    """Norms, gates and biases of rows, which tensor ranks hold whole and use on parts of a sequence: how many
    numbers, and how many parameters, each with a flag."""
    norms = 2 * shape.norm_vectors + 2 * shape.bias
    numbers = stage.layers * norms * shape.hidden + stage.head * shape.norm_vectors * shape.hidden
    count = stage.layers * norms + stage.head * shape.norm_vectors
    gates = stage.sparse * len(shape.gate)
    return numbers + gates * sum(matrix.size for matrix in shape.gate), count + gates


def _sum_bytes(settings: Settings) -> float:
    """Bytes of a gradient while ranks with the same weight sum it."""
    return max(BYTES["fp32"], settings.weight_bytes)


def _context(work: _Work) -> Iterator[_Message]:
    """Keys and values to all other ranks, and their gradients back; or heads for parts of the sequence."""
    shape, settings, stage = work.shape, work.settings, work.stage
    ranks, unit = settings.context, activation_bytes(settings)
    times = settings.microbatches * stage.layers * work.tokens / settings.tensor
    if settings.attention == "all-to-all":
        # Key/value heads are repeated where there are fewer than ranks.
        local = shape.kv_heads // settings.tensor
        repeated = max(1, ranks // local) * shape.kv_width
        widths = 2 * shape.query_width + 2 * repeated
        yield _Message("context", "all_to_all", "context", times * unit * widths * (work.forwards + 1), ranks)
        return
    passes = unit * (work.forwards + 1) + max(4.0, unit)  # gradients are summed in float32
    sent = times * 2 * shape.kv_width * passes * (ranks - 1)
    yield _Message("context", "all_to_all", "context", sent * ranks / (ranks - 1) if ranks > 1 else 0, ranks)


def _experts(work: _Work) -> Iterator[_Message]:
    """Tokens to their experts and back, both ways."""
    if work.settings.expert == 1 or work.shape.experts is None:
        return
    share = work.settings.tensor if work.settings.sequence else 1
    slots = work.shape.experts.top_k * work.hidden * work.stage.sparse / share
    size = work.settings.microbatches * 2 * (work.forwards + 1) * slots
    yield _Message("expert", "all_to_all", "experts", size, work.settings.expert)


def _stages(work: _Work) -> Iterator[_Message]:
    """Activations to the next stage, gradients to the one before; sums of a weight that both ends hold."""
    settings, stage, shape = work.settings, work.stage, work.shape
    ranks = settings.pipeline
    share = settings.tensor if settings.sequence else 1
    sends = (settings.chunks - stage.head) * work.forwards + settings.chunks - stage.embedding
    size = work.hidden / share + _HEADER
    yield _Message("pipeline", "send", "activations", settings.microbatches * sends * size, ranks)
    if shape.tied and stage.embedding != stage.head:
        shards = settings.shards if settings.zero else 1
        table = shape.vocab * shape.hidden / settings.tensor * _sum_bytes(settings) / shards
        yield _Message("tied", "all_reduce", "tied gradients", table + 1, 2)
