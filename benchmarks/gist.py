"""The bench `gist`: what is stashed for the backward pass, and a training step, with each `compress`.

Six image networks in float32 at batch 64 against plain torch, which keeps what autograd saves, with and
without graphs=auto; and two transformers in bf16 against compress=none. All contenders of a case take turns.
`stashed_bytes` is what is held for the backward pass when the forward pass is over.
"""

import dataclasses
import gc
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.compare import Row, compare
from benchmarks.harness import Contender, alternate, timed
from echelon.engine import parallelize
from echelon.models import ModelConfig, build, build_image, cross_entropy, preset

NETWORKS = ("alexnet", "nin", "overfeat", "vgg16", "inception-v1", "resnet-50")
_NONE, _TORCH = "none", "torch"
_FORMATS = (_NONE, "gist", "gist-fp16", "gist-fp8")
_REPLAYED = tuple(f"{name} graphs=auto" for name in _FORMATS)
_STEPS = 5  # in a round: the host may run ahead of the GPU within it
_WARMUP = 5  # rounds: the engine meters activations in its first steps, and graphs=auto decides in these
_NETWORK, _TRANSFORMER = "image network", "transformer"  # kinds of subjects
_ROUNDS = {_NETWORK: 8, _TRANSFORMER: 4}

Batch = tuple[Tensor, Tensor]
Loss = Callable[[Tensor, Tensor], Any]


@dataclasses.dataclass(frozen=True)
class Subject:
    """One model, its batch, and the contenders; the first one is the baseline."""

    kind: str
    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss: Loss
    precision: str
    contenders: tuple[str, ...]


def bench(quick: bool, only: str = "") -> tuple[dict[str, Any], list[Row]]:
    """Gist: bytes that are stashed for the backward pass, and step time."""
    subjects = [*_networks(quick), *_transformers(quick)]
    rows = [row for subject in subjects for row in _rows(subject, quick, only)]
    settings = {
        "samples": 4 if quick else 64,
        "optimizer": "SGD",
        "steps_per_round": 1 if quick else _STEPS,
        "rounds": {kind: 1 if quick else rounds for kind, rounds in _ROUNDS.items()},
        "precision": {subject.name: subject.precision for subject in subjects},
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }
    return settings, rows


def _networks(quick: bool) -> Iterator[Subject]:
    for name in NETWORKS:
        make = partial(build_image, f"{name}-tiny" if quick else name)
        size, samples = (32, 4) if quick else (231 if name == "overfeat" else 224, 64)
        batch = partial(_images, samples, size, 8 if quick else 1000)
        yield Subject(_NETWORK, name, make, batch, F.cross_entropy, "fp32", (_TORCH, *_FORMATS, *_REPLAYED))


def _transformers(quick: bool) -> Iterator[Subject]:
    """A GPT-2 of 124 million parameters, and eight layers of Llama 3.2 1B."""
    gpt = dataclasses.replace(preset("gpt-small"), sequence=1024)
    llama = dataclasses.replace(preset("llama3-1b"), layers=8, sequence=2048, rope_scaling=None)
    if quick:
        gpt, llama = (ModelConfig(name, 2, 32, 2, vocab=64, sequence=16, ffn=64) for name in ("gpt", "llama"))
    for name, config, samples in (("GPT-2 124M", gpt, 32), ("Llama 3.2, 8 layers", llama, 8)):
        batch = partial(_tokens, config, 4 if quick else samples)
        contenders = (_NONE, "gist-fp10", "gist-fp8")
        make = partial(build, config)
        yield Subject(_TRANSFORMER, name, make, batch, cross_entropy, "bf16", contenders)


def _rows(subject: Subject, quick: bool, only: str) -> Iterator[Row]:
    """`only`: contenders of cases whose name has this text, beside the baseline: 'image network', 'vgg16',
    'vgg16, gist-fp8', …"""
    baseline, *others = subject.contenders
    others = [other for other in others if only in f"{subject.kind} {subject.name}, {other}"]
    if not others:
        return
    trainers: dict[str, Trainer] = {}
    for contender in [baseline, *others]:
        trainers[contender] = (TorchTrainer if contender == _TORCH else EngineTrainer)(subject, contender)
    steps, rounds = (1, 1) if quick else (_STEPS, _ROUNDS[subject.kind])
    contenders: dict[str, Contender] = {
        name: timed(partial(_repeat, trainer.step, steps)) for name, trainer in trainers.items()
    }
    samples = alternate(contenders, rounds, warmup=_WARMUP)
    stashed = {name: trainer.stashed_bytes() for name, trainer in trainers.items()}
    to_none = (
        {row.contender: row.ratio.median for row in compare("", samples, _NONE)} if _NONE in samples else {}
    )
    for row in compare(subject.name, samples, baseline):
        own = stashed[row.contender]
        extras = {
            "stashed_bytes": float(own),
            "times_smaller": stashed[baseline] / own,
            "step_seconds": row.seconds.median / steps,
        }
        if baseline != _NONE and to_none:
            extras["time_of_none"] = to_none[row.contender]
        yield dataclasses.replace(row, extras=extras)
    for trainer in trainers.values():
        trainer.close()
    del contenders, trainers
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Trainer:
    """Trains on one batch."""

    def __init__(self, subject: Subject, compress: str) -> None:
        raise NotImplementedError

    def step(self) -> None:
        raise NotImplementedError

    def stashed_bytes(self) -> int:
        """What the forward pass leaves for the backward pass, without weights."""
        raise NotImplementedError

    def close(self) -> None:
        pass


class EngineTrainer(Trainer):
    """A plan with one rank."""

    def __init__(self, subject: Subject, compress: str) -> None:
        plan = f"precision={subject.precision} compress={compress}"
        self._batch = subject.batch()
        self._engine = parallelize(_made(subject), plan, optimizer=_sgd, loss=subject.loss, audit="off")

    def step(self) -> None:
        self._engine.step(self._batch)

    def stashed_bytes(self) -> int:
        return self._engine.memory().peak["activations"]

    def close(self) -> None:
        self._engine.close(restore=False)


class TorchTrainer(Trainer):
    """The usual loop."""

    def __init__(self, subject: Subject, compress: str) -> None:  # noqa: ARG002
        self._model, self._loss, self._batch = _made(subject), subject.loss, subject.batch()
        self._optimizer = _sgd(self._model.parameters())

    def step(self) -> None:
        inputs, targets = self._batch
        self._optimizer.zero_grad()
        self._loss(self._model(inputs), targets).backward()
        self._optimizer.step()

    def stashed_bytes(self) -> int:
        """As the engine's meter counts: every storage once, and none of weights or buffers."""
        tensors = [*self._model.parameters(), *self._model.buffers()]
        weights = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        held: dict[int, torch.UntypedStorage] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                held[storage.data_ptr()] = storage
            return tensor

        inputs, targets = self._batch
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = self._loss(self._model(inputs), targets)
        stashed = sum(storage.nbytes() for storage in held.values())
        del loss
        return stashed


def _repeat(step: Callable[[], None], times: int) -> None:
    for _ in range(times):
        step()


def _made(subject: Subject) -> nn.Module:
    torch.manual_seed(0)
    with _device():
        return subject.build()


def _images(samples: int, size: int, classes: int) -> Batch:
    """On the device: what is measured is not the way there."""
    torch.manual_seed(0)
    return (
        torch.randn(samples, 3, size, size, device=_device()),
        torch.randint(classes, (samples,), device=_device()),
    )


def _tokens(config: ModelConfig, samples: int) -> Batch:
    torch.manual_seed(0)
    tokens = torch.randint(config.vocab, (samples, config.sequence + 1), device=_device())
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
