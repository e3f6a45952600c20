"""The training loop, as every rank runs it."""

import platform
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from echelon.data import Batches, Corpus, open_corpus
from echelon.engine import Engine, Metrics, parallelize
from echelon.models import ModelConfig, Transformer, build, cross_entropy, generate, load_hf, save_hf
from echelon.optim.optimizers import make_optimizer
from echelon.train.events import Evaluated, Event, Sampled, Started, Stepped
from echelon.train.job import Job

SAMPLE_TOKENS = 300


def train_rank(job: Job, folder: Path, tell: Callable[[Event], None]) -> None:
    """Train as one rank of the job's plan; rank 0 tells what happens and writes the model into `folder`."""
    torch.manual_seed(job.seed)
    model = load_hf(Path(job.model.weights)) if job.model.weights else build(job.model.config())
    corpus = open_corpus(job.data.source, vocab=model.config.vocab, dtype=job.data.dtype)
    batches, validation = make_batches(job, corpus)
    engine = parallelize(
        model,
        job.plan,
        optimizer=partial(make_optimizer, job.optimizer),
        loss=cross_entropy,
        clip=job.optimizer.clip,
        schedule=job.schedule(),
    )
    first = engine.mesh.rank == 0
    tell = tell if first else _say_nothing
    part = (engine.replica, engine.replicas)
    tell(Started(model.config.num_parameters, batches.tokens, corpus.name, _device_name(engine)))
    for step in range(job.steps):
        metrics = engine.step(batches.at(step, part))
        tell(_stepped(engine, metrics))
        if _due(step + 1, job):
            tell(Evaluated(step + 1, evaluate(engine, validation, job.evaluate_batches)))
    weights = engine.full_state_dict()
    if first:
        finish(model.config, weights, corpus, folder, tell)


def make_batches(job: Job, corpus: Corpus) -> tuple[Batches, Batches]:
    """The batches to train on, and those to validate on."""
    make = partial(
        Batches,
        corpus,
        job.batch,
        job.sequence_length,
        job.seed,
        validation_fraction=job.data.validation_fraction,
    )
    return make(split="train"), make(split="validation")


def evaluate(engine: Engine, batches: Batches, count: int) -> float:
    """The mean loss over the first `count` batches of the split, always the same ones."""
    part = (engine.replica, engine.replicas)
    results = [engine.evaluate(batches.at(index, part)) for index in range(count)]
    return sum(r.loss * r.tokens for r in results) / sum(r.tokens for r in results)


def finish(
    config: ModelConfig,
    weights: dict[str, torch.Tensor],
    corpus: Corpus,
    folder: Path,
    tell: Callable[[Event], None],
) -> None:
    """Put the whole model together once more, whatever the plan was: save it, and let it write."""
    model = build(config)
    model.load_state_dict(weights)
    save_hf(model, folder / "model")
    tell(Sampled(sample(model, corpus)))


def sample(model: Transformer, corpus: Corpus) -> str:
    """What the model writes after the first tokens of the corpus."""
    prompt = torch.from_numpy(corpus.tokens[:16].astype("int64"))
    tokens = generate(model, prompt, SAMPLE_TOKENS).numpy()
    return corpus.decode(tokens) if corpus.decode is not None else " ".join(map(str, tokens.tolist()))


def _due(step: int, job: Job) -> bool:
    return step == job.steps or (job.evaluate_every > 0 and step % job.evaluate_every == 0)


def _stepped(engine: Engine, metrics: Metrics) -> Stepped:
    moves = engine.ledger.moves
    return Stepped(
        step=engine.steps,
        loss=metrics.loss,
        grad_norm=metrics.grad_norm,
        learning_rate=engine.learning_rate,
        tokens=metrics.tokens,
        seconds=metrics.seconds,
        moved_bytes=sum(move.traffic.sent for move in moves),
        comm_seconds=sum(move.seconds for move in moves),
        comm_hidden_seconds=sum(move.hidden for move in moves),
        memory_bytes=sum(engine.memory().peak.values()),
    )


def _say_nothing(event: Event) -> None:
    pass


def _device_name(engine: Engine) -> str:
    device = engine.mesh.device
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()
