"""The bench `gist-accuracy`: what rounding of stashed activations does to a trained network.

Each seed has its own initial weights and its own order of images; all contenders start from the same weights
and see the same images. Kernels add in one order, so that what is kept without loss trains the very weights
of compress=none: this is checked. On a GPU tensors of every size are encoded, also those that a training
would leave as they are.
"""

import dataclasses
import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from statistics import mean
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.compare import Row, compare
from benchmarks.harness import tell, timed
from echelon.data.image_batches import CLASS_NAMES, draw, to_numbers
from echelon.engine import Engine, parallelize
from echelon.memory.gist.compression import any_size
from echelon.models import ImageConfig, build_image
from echelon.update.optim.learning_rate import by_name

_NONE, _LOSSLESS = "none", "gist"
_CONTENDERS = (_NONE, _LOSSLESS, "gist-fp16", "gist-fp8")
_SIZE = 32  # pixels, of a side
_CLIP, _RATE, _DECAY = 1.0, 3e-3, 0.1

Images = tuple[Tensor, Tensor]  # and their classes
State = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Training:
    """How a network is trained: `images` are drawn, and each step sees `samples` of them."""

    network: str
    divisor: int  # of the channels
    seeds: int
    steps: int
    samples: int
    images: int
    tested: int

    @property
    def warmup(self) -> int:
        return min(100, self.steps // 10)


# The windows of its pools do not overlap: no gradient is a sum of several, in any order.
_FULL = Training("overfeat", 8, 3, 600, 64, 8192, 2048)
_QUICK = Training("overfeat", 16, 1, 2, 8, 64, 32)


def bench(quick: bool, only: str = "") -> tuple[dict[str, Any], list[Row]]:
    """Gist: accuracy of trained networks by format, over seeds."""
    training = _QUICK if quick else _FULL
    with any_size(), _in_one_order():
        rows = list(_rows(training, only))
    settings = dataclasses.asdict(training) | {
        "classes": len(CLASS_NAMES),
        "optimizer": f"AdamW, learning rate {_RATE}, cosine after {training.warmup} steps",
        "clip": _CLIP,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }
    return settings, rows


def _rows(training: Training, only: str) -> Iterator[Row]:
    case = f"{training.network}, {training.steps} steps"
    contenders = [name for name in _CONTENDERS if name == _NONE or only in f"{case}, {name}"]
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    accuracies: dict[str, list[float]] = {name: [] for name in contenders}
    shown, tested = (
        _images(training.images, is_validation=False),
        _images(training.tested, is_validation=True),
    )
    for seed in range(training.seeds):
        batches = list(_batches(training, shown, seed))
        weights: State = {}
        for compress in contenders:
            engine = _engine(training, seed, compress)
            seconds[compress].append(timed(lambda: _train(engine, batches))())  # noqa: B023
            accuracies[compress].append(_accuracy(engine, tested))
            trained = engine.full_state_dict()
            engine.close(restore=False)
            weights = trained if compress == _NONE else weights
            if compress == _LOSSLESS:
                _require_same(weights, trained, seed)
            tell("gist-accuracy", f"seed {seed}, {compress}: {accuracies[compress][-1]:.2%}")
    for row in compare(case, seconds, _NONE):
        yield dataclasses.replace(row, extras=_figures(accuracies[row.contender], accuracies[_NONE]))


def _figures(own: list[float], of_none: list[float]) -> dict[str, float]:
    """Over seeds: the mean, the lowest and the highest accuracy, and the same of what it differs by from
    that of compress=none and the same seed."""
    points = [100 * (one - other) for one, other in zip(own, of_none, strict=True)]
    return {
        "accuracy": mean(own),
        "lowest": min(own),
        "highest": max(own),
        "to_none_points": mean(points),
        "to_none_lowest_points": min(points),
        "to_none_highest_points": max(points),
    }


def _require_same(expected: State, found: State, seed: int) -> None:
    wrong = [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])]
    if wrong or not expected:
        raise RuntimeError(
            f"seed {seed}: compress={_LOSSLESS} trained other weights than compress={_NONE}, and must not: "
            f"{len(wrong)} of {len(expected)} tensors differ, the first is {next(iter(wrong), 'none')}"
        )


@contextmanager
def _in_one_order() -> Iterator[None]:
    """Inside, kernels add in one order.

    Torch warns of every max pool on a CUDA device. Its kernels add in any order only where windows overlap.
    """
    cudnn: Any = torch.backends.cudnn
    memory: Any = torch.utils.deterministic
    before = cudnn.deterministic, cudnn.benchmark, memory.fill_uninitialized_memory
    was_on = torch.are_deterministic_algorithms_enabled()
    was_warning = torch.is_deterministic_algorithms_warn_only_enabled()
    with patch.dict(os.environ, CUBLAS_WORKSPACE_CONFIG=":4096:8"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*deterministic")
        torch.use_deterministic_algorithms(True, warn_only=True)
        # To fill new memory costs time, and changes nothing.
        cudnn.deterministic, cudnn.benchmark, memory.fill_uninitialized_memory = True, False, False
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(was_on, warn_only=was_warning)
            cudnn.deterministic, cudnn.benchmark, memory.fill_uninitialized_memory = before


def _engine(training: Training, seed: int, compress: str) -> Engine:
    torch.manual_seed(seed)
    config = ImageConfig(
        training.network,  # type: ignore[arg-type]
        classes=len(CLASS_NAMES),
        image_size=_SIZE,
        divisor=training.divisor,
        stem="small",
    )
    return parallelize(
        build_image(config),
        f"precision=fp32 compress={compress}",
        optimizer=_adamw,
        loss=F.cross_entropy,
        clip=_CLIP,
        schedule=by_name("cosine", training.steps, training.warmup),
        audit="off",
    )


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=_RATE, betas=(0.9, 0.95), weight_decay=_DECAY)


def _train(engine: Engine, batches: Iterable[Images]) -> None:
    engine.module.train()
    for batch in batches:
        engine.step(batch)


def _accuracy(engine: Engine, tested: Images) -> float:
    """Of images that were not trained on."""
    module = engine.module.eval()
    images, classes = tested
    with torch.no_grad():
        chosen = torch.cat([module(part).argmax(1) for part in images.split(512)])
    return float((chosen == classes).double().mean())


def _images(count: int, *, is_validation: bool) -> Images:
    """On the device."""
    classes = np.arange(count) % len(CLASS_NAMES)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pixels = draw(range(count), classes, is_validation, _SIZE)
    return to_numbers(pixels).to(device), torch.from_numpy(classes).to(device)


def _batches(training: Training, shown: Images, seed: int) -> Iterator[Images]:
    """Of images in the order of a seed, which mirrors half of them."""
    generator = torch.Generator().manual_seed(seed)
    images, classes = shown
    for _ in range(training.steps):
        chosen = torch.randint(training.images, (training.samples,), generator=generator).to(images.device)
        mirrored = torch.rand(training.samples, 1, 1, 1, generator=generator).to(images.device) < 0.5
        batch = images[chosen]
        yield torch.where(mirrored, batch.flip(-1), batch), classes[chosen]
