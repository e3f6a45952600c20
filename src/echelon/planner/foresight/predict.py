"""`predict`: what a step of a plan would take, in bytes and seconds, on a cluster.

    forecast = Forecast(shape, cluster)              # keeps what plans have in common
    forecast.predict(settings_of(plan), batch)       # more than 10,000 a second

A step is, on the slowest rank:

    m microbatches · (forward + recompute + backward)    `layer`, `passes`
    + messages between stages, filling and draining      `schedules`
    + gradients and weights along data, the update       `sharing`
    + what the slowest of many nodes adds
"""

from dataclasses import replace
from functools import lru_cache
from math import log2
from typing import NamedTuple, final

from echelon.errors import raise_errors
from echelon.plan import Plan
from echelon.planner.cluster.cluster import Cluster
from echelon.planner.cluster.read import CPU
from echelon.planner.foresight.checks import fit_errors
from echelon.planner.foresight.collectives import hop_seconds
from echelon.planner.foresight.host import step_waiting_seconds
from echelon.planner.foresight.layer import LayerCosts, activation_bytes, layer_costs
from echelon.planner.foresight.memory import (
    HeadBytes,
    SavedBytes,
    StageMemory,
    fixed_memory,
    head_bytes,
    saved_by_stage,
    stage_parameters,
)
from echelon.planner.foresight.passes import Pass, head_pass, stage_passes
from echelon.planner.foresight.practice import ECHELON, ECHELON_CPU, Practice
from echelon.planner.foresight.prediction import Memory, Prediction, Seconds
from echelon.planner.foresight.schedules import step_seconds
from echelon.planner.foresight.settings import ADAM, Settings, settings_of
from echelon.planner.foresight.sharing import StepEnd, step_end
from echelon.planner.foresight.stages import StageKind, stage_kinds
from echelon.planner.shape.shape import ModelShape

_BEHIND_BACKWARD = 0.8  # of a microbatch, that updates of the host can hide behind


class _Once(NamedTuple):
    """What does not depend on microbatches: kinds of stages, the end of a step, bytes of states."""

    kinds: tuple[StageKind, ...]
    end: StepEnd
    memory: tuple[StageMemory, ...]
    passes: dict[int, "_Passes"]  # by the sequences of a microbatch


class _Microbatch(NamedTuple):
    """A microbatch on a layer, and on the head with its loss."""

    costs: LayerCosts
    head: Pass
    logits: HeadBytes


class _Passes(NamedTuple):
    """A microbatch on each kind of stage."""

    saved: tuple[SavedBytes, ...]
    totals: tuple[float, ...]  # seconds of each stage, not of each kind
    slowest: Pass
    hop: float
    logits: HeadBytes


def predict(
    shape: ModelShape,
    plan: Plan | str,
    cluster: Cluster,
    batch: int,
    sequence: int | None = None,
    optimizer: str = ADAM,
) -> Prediction:
    """Predict a step of `batch` sequences, with one of the optimizers that `echelon train` has.

    For example `predict(read_shape("llama3-8b"), "data=8 zero=3", read_cluster("h100:8"), batch=64)`.
    """
    settings = settings_of(Plan.parse(plan) if isinstance(plan, str) else plan, optimizer)
    if sequence is not None and sequence != shape.sequence:
        shape = replace(shape, sequence=sequence)
    if errors := fit_errors(shape, settings, cluster, batch):
        raise_errors(f"foresight of plan '{plan}'", errors)
    return forecast_of(shape, cluster).predict(settings, batch)


@lru_cache(maxsize=64)
def forecast_of(shape: ModelShape, cluster: Cluster, practice: Practice | None = None) -> "Forecast":
    """Return the forecast of a model on a cluster, the same one each time; by default of echelon."""
    own = ECHELON_CPU if cluster.device.name == CPU else ECHELON
    return Forecast(shape, cluster, practice or own)


@final
class Forecast:
    """Predicts plans of one model on one cluster, and keeps what they share."""

    def __init__(self, shape: ModelShape, cluster: Cluster, practice: Practice = ECHELON) -> None:
        self.shape, self.cluster, self.practice = shape, cluster, practice
        self._once: dict[Settings, _Once] = {}
        self._microbatches: dict[tuple[object, ...], _Microbatch] = {}
        self._sums_gates = practice.sums_gates and shape.experts is not None and shape.experts.has_loss
        self._flops: float = shape.step_flops(shape.sequence, shape.sequence)  # of one sequence

    def predict(self, settings: Settings, batch: int) -> Prediction:
        """Predict a step of `batch` sequences over all ranks."""
        size = -(-batch // (settings.data * settings.microbatches))
        records = self._sums_gates and not settings.forwards_first
        key = settings._replace(microbatches=1, schedule="", records_first=records)
        once = self._once.get(key) or self._compute_once(key)
        passes = once.passes.get(size) or self._compute_passes(key, once, size)
        seconds = self._seconds(settings, once.end, passes)
        memory = tuple(
            fixed.at_peak(settings, stage, saved, passes.logits)
            for fixed, stage, saved in zip(once.memory, once.kinds, passes.saved, strict=True)
        )
        return self._prediction(settings, once.kinds, memory, seconds, batch)

    def _compute_once(self, key: Settings) -> _Once:
        kinds = stage_kinds(self.shape, key.pipeline, key.chunks)
        parameters = [stage_parameters(self.shape, key, stage) for stage in kinds]
        layers = max(stage.layers for stage in kinds)
        end = step_end(self.cluster, self.practice, key, parameters, layers)
        memory = tuple(
            fixed_memory(self.shape, self.practice, key, stage, counts)
            for stage, counts in zip(kinds, parameters, strict=True)
        )
        once = self._once[key] = _Once(kinds, end, memory, {})
        return once

    def _compute_passes(self, key: Settings, once: _Once, size: int) -> _Passes:
        costs, head, logits = self._microbatch(key, size)
        each = stage_passes(self.shape, self.cluster, self.practice, key, once.kinds, costs, head)
        seconds = [part.total for part in each]
        totals = tuple(
            total for total, stage in zip(seconds, once.kinds, strict=True) for _ in range(stage.number)
        )
        slowest = each[seconds.index(max(seconds))]
        saved = tuple(saved_by_stage(key, stage, costs) for stage in once.kinds)
        passes = once.passes[size] = _Passes(saved, totals, slowest, self._hop(key, size), logits)
        return passes

    def _microbatch(self, key: Settings, size: int) -> _Microbatch:
        read = (
            size, key.tensor, key.context, key.expert, key.expert_tensor, key.sequence, key.attention,
            key.precision, key.split_checkpoints, key.frozen, key.compiled,
        )  # fmt: skip
        known = self._microbatches.get(read)
        if known is None:
            known = self._microbatches[read] = _Microbatch(
                layer_costs(self.shape, self.cluster, self.practice, key, size),
                head_pass(self.shape, self.cluster, self.practice, key, size),
                head_bytes(self.shape, self.practice, key, self._tokens(key, size)),
            )
        return known

    def _tokens(self, key: Settings, size: int) -> int:
        """Of a microbatch of `size` sequences, those of one rank along `context`."""
        return -(-size * self.shape.sequence // key.context)

    def _hop(self, key: Settings, size: int) -> float:
        """Seconds of one message between stages."""
        if key.pipeline == 1:
            return 0.0
        share = key.tensor if key.sequence or self.practice.splits_transfers else 1
        message = activation_bytes(key) * self._tokens(key, size) * self.shape.hidden / share
        return hop_seconds(self.cluster, message, key.tensor * key.context * key.data)

    def _seconds(self, settings: Settings, end: StepEnd, passes: _Passes) -> Seconds:
        m, slowest, practice = settings.microbatches, passes.slowest, self.practice
        pipeline = step_seconds(settings.schedule, passes.totals, m, settings.chunks, slowest.weights)
        steady = 2 * passes.hop * m * settings.chunks
        transfers_hidden = practice.hide_transfers * steady
        transfers = steady - transfers_hidden + 2 * passes.hop * (settings.pipeline - 1)
        exchange_hidden = practice.hide_gradients * min(end.exchange, slowest.total)
        if settings.sync == "async":  # no rank waits for another
            exchange_hidden = min(end.exchange, m * slowest.total)
        data = end.exchange - exchange_hidden
        copies = end.copies
        if settings.update != "step":  # units are updated behind the backward pass
            copies = max(0.0, copies - _BEHIND_BACKWARD * slowest.total)
        host = step_waiting_seconds(practice, self.cluster.device, settings)
        total = pipeline + transfers + end.update + copies + data + host
        loader = max(0.0, (m + 1) * practice.read_microbatch - total)
        host, total = host + loader, total + loader
        nodes = max(1.0, settings.ranks / self.cluster.per_node)
        return Seconds(
            m * slowest.compute,
            m * slowest.recompute,
            m * slowest.host + host,
            m * slowest.tensor,
            m * slowest.context,
            m * slowest.expert,
            transfers,
            data + m * slowest.data,
            pipeline - m * slowest.total,
            end.update,
            copies + m * slowest.offload,
            self.cluster.stragglers * log2(nodes) * total,
            m * slowest.hidden + transfers_hidden + exchange_hidden,
        )

    def _prediction(
        self,
        settings: Settings,
        kinds: tuple[StageKind, ...],
        memory: tuple[Memory, ...],
        seconds: Seconds,
        batch: int,
    ) -> Prediction:
        ranks = settings.ranks
        flops = batch * self._flops * (2 / 3 if settings.frozen else 1)
        again = seconds.recompute / max(seconds.compute, 1e-30) * flops
        capacity = seconds.step * self.cluster.device.rate(settings.precision) * ranks
        return Prediction(
            ranks,
            memory,
            tuple(stage.first for stage in kinds),
            seconds,
            batch * self.shape.sequence,
            flops,
            flops / capacity,
            (flops + again) / capacity,
            self.cluster.device.memory,
            self.cluster.host_memory / self.cluster.per_node,
            self.cluster.price,
            self.cluster.device.reserve,
        )
