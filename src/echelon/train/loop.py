"""The training loop, as every rank runs it."""

import platform
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple, cast

import torch

from echelon.audit import AuditResult, Mode
from echelon.collectives import StepMoves
from echelon.data import Batches, Corpus, open_corpus
from echelon.engine import Engine, Metrics, parallelize
from echelon.initialization import deferred
from echelon.mesh import this_device
from echelon.models import ModelConfig, Transformer, build, cross_entropy, generate, load_hf
from echelon.optim.optimizers import make_optimizer
from echelon.plan import AUTO, Plan
from echelon.train.batches import make_batches
from echelon.train.divergence import refuse_divergence
from echelon.train.events import Audited, Evaluated, Event, Sampled, Started, Stepped
from echelon.train.job import Job
from echelon.train.memory_fit import refuse_small_device

SAMPLE_TOKENS = 300
LARGEST_TO_SAMPLE = 300 * 10**6  # parameters: to write text, one rank holds the whole model


def train_rank(job: Job, folder: Path, report: Callable[[Event], None]) -> None:
    """Train as one rank of the job's plan; rank 0 reports events and writes the model into `folder`."""
    torch.manual_seed(job.seed)
    config, measures = job.model.config(), Plan.parse(job.plan).pipeline == AUTO
    refuse_small_device(job, config, this_device())
    model = _whole(job, config) if measures else deferred(lambda: build(config))
    corpus = open_corpus(job.data.source, vocab=model.config.vocab, dtype=job.data.dtype)
    batches, validation = make_batches(job, corpus)
    engine = parallelize(
        model,
        job.plan,
        optimizer=partial(make_optimizer, job.optimizer),
        loss=cross_entropy,
        clip=job.optimizer.clip,
        loss_scale=job.loss_scale,
        schedule=_rates(job),
        seed=job.seed,
        sample_batch=batches.at(0, (0, 1)) if measures else None,
        weights=None if measures else job.model.weights,
        audit=cast(Mode, job.audit),
    )
    first = engine.mesh.rank == 0
    part = (engine.replica, engine.replicas)
    if first:
        report(Started(model.config.num_parameters, batches.tokens, corpus.name, _device_name(engine)))
    unread: deque[_Unread] = deque()
    audit: list[AuditResult] = []
    for step in range(1, job.steps + 1):
        metrics = engine.step(batches.at(step - 1, part))
        if first and engine.audit != audit:
            audit = engine.audit
            report(Audited(tuple(audit)))
        unread.append(_Unread(step, metrics, _record(engine) if first else None))
        # A look at a step that is not done would leave a GPU idle until the next one is begun.
        while unread and (len(unread) > 1 or metrics.is_ready or _due(step, job)):
            _look(unread.popleft(), job, report)
        if validation is not None and _due(step, job):
            loss = evaluate(engine, validation, job.evaluate_batches)
            if first:
                report(Evaluated(step, loss))
            refuse_divergence(job, step, validation_loss=loss)
    engine.export(folder / "model")
    engine.close(restore=False)
    if first and config.num_parameters <= LARGEST_TO_SAMPLE:
        report(Sampled(sample(load_hf(folder / "model"), corpus)))


def _whole(job: Job, config: ModelConfig) -> Transformer:
    """The model with all of its weights, for pipeline=auto to measure."""
    return build(config) if job.model.weights is None else load_hf(job.model.weights)


def _rates(job: Job) -> Callable[[int], float]:
    """The schedule of the learning rate. If every push makes a version, `data` versions count as one step."""
    schedule, plan = job.schedule(), Plan.parse(job.plan)
    if plan.sync == "async" and plan.staleness > 0:
        return lambda version: schedule(version // plan.data)
    return schedule


def evaluate(engine: Engine, batches: Batches, count: int) -> float:
    """The mean loss over the first `count` batches of the split (or all it has): the same ones each time."""
    part = (engine.replica, engine.replicas)
    available = min(count, batches.windows // batches.batch)
    results = [engine.evaluate(batches.at(index, part)) for index in range(available)]
    return sum(r.loss * r.tokens for r in results) / sum(r.tokens for r in results)


def sample(model: Transformer, corpus: Corpus) -> str:
    """What the model writes after the first tokens of the corpus."""
    prompt = torch.from_numpy(corpus.tokens[:16].astype("int64"))
    tokens = generate(model, prompt, SAMPLE_TOKENS).numpy()
    return corpus.decode(tokens) if corpus.decode is not None else " ".join(map(str, tokens.tolist()))


def _due(step: int, job: Job) -> bool:
    return step == job.steps or (job.evaluate_every > 0 and step % job.evaluate_every == 0)


class _Record(NamedTuple):
    """What rank 0 tells of a step beside its metrics; times are read with these."""

    learning_rate: float
    memory_bytes: int
    moves: StepMoves


class _Unread(NamedTuple):
    """A step whose numbers nobody has looked at; `record` is for rank 0, which reports it."""

    step: int
    metrics: Metrics
    record: _Record | None


def _record(engine: Engine) -> _Record:
    """Of the step that was queued last. Waits for nothing."""
    return _Record(engine.learning_rate, engine.memory().peak_total, engine.ledger.step_moves())


def _look(unread: _Unread, job: Job, report: Callable[[Event], None]) -> None:
    """Report a step on rank 0, and end the training if it diverged. Waits for that step."""
    step, metrics, record = unread
    if record is not None:
        report(_stepped(step, metrics, record))
    if not metrics.skipped:  # fp16: the next loss scale may do
        refuse_divergence(job, step, loss=metrics.loss, gradient_norm=metrics.grad_norm)


def _stepped(step: int, metrics: Metrics, record: _Record) -> Stepped:
    return Stepped(
        step=step,
        loss=metrics.loss,
        grad_norm=metrics.grad_norm,
        learning_rate=record.learning_rate,
        tokens=metrics.tokens,
        seconds=metrics.seconds,
        moved_bytes=record.moves.sent,
        comm_seconds=record.moves.busy(),
        comm_hidden_seconds=record.moves.hidden(),
        memory_bytes=record.memory_bytes,
        skipped=metrics.skipped,
        loss_scale=metrics.loss_scale,
    )


def _device_name(engine: Engine) -> str:
    device = engine.mesh.device
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()
