"""The bench `gist-accuracy`: what rounding of stashed activations does to a trained network.

Each class of images is a pattern of waves, shown anywhere in the image and under noise. All contenders start
from the same weights and see the same images; seeds differ in all of them. On a GPU tensors of every size are
rounded, also those that a training would leave as they are.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from echelon.bench.compare import Row, compare
from echelon.bench.harness import timed
from echelon.engine import Engine, parallelize
from echelon.gist import any_size
from echelon.models import ImageConfig, build_image

_CONTENDERS = ("none", "gist", "gist-fp16", "gist-fp8")
_CLASSES = 10
_SIZE = 32  # pixels, of a side
_NOISE = 0.5  # of a pixel; that of a pattern is about 1
_CLIP = 1.0

Batch = tuple[Tensor, Tensor]


@dataclasses.dataclass(frozen=True)
class Training:
    """How long each network is trained."""

    steps: dict[str, int]  # by network
    seeds: int
    samples: int
    tested: int
    divisor: int  # of the channels


_FULL = Training({"vgg16": 200, "resnet50": 60}, 3, 128, 2048, 4)
_QUICK = Training({"vgg16": 2}, 1, 8, 32, 16)


def bench(quick: bool, only: str = "") -> tuple[dict[str, Any], list[Row]]:
    """Gist: accuracy of trained networks, by format and seed."""
    training = _QUICK if quick else _FULL
    cases = [(family, seed) for family in training.steps for seed in range(training.seeds)]
    with any_size():
        rows = [row for family, seed in cases for row in _rows(training, family, seed, only)]
    settings = dataclasses.asdict(training) | {
        "classes": _CLASSES,
        "noise": _NOISE,
        "optimizer": "SGD, momentum 0.9",
        "clip": _CLIP,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }
    return settings, rows


def _rows(training: Training, family: str, seed: int, only: str) -> Iterator[Row]:
    case = f"{family}, seed {seed}"
    contenders = [name for name in _CONTENDERS if name == "none" or only in f"{case}, {name}"]
    samples, accuracies = {}, {}
    batches = [_batch(training.samples, seed, step) for step in range(training.steps[family])]
    tested = _batch(training.tested, seed, len(batches))
    for compress in contenders:
        engine = _engine(training, family, seed, compress)
        samples[compress] = [timed(lambda: _train(engine, batches))()]  # noqa: B023
        accuracies[compress] = _accuracy(engine, tested)
        engine.close(restore=False)
    for row in compare(case, samples, "none"):
        yield dataclasses.replace(row, extras={"accuracy": accuracies[row.contender]})


def _engine(training: Training, family: str, seed: int, compress: str) -> Engine:
    torch.manual_seed(seed)
    config = ImageConfig(
        family,  # type: ignore[arg-type]
        classes=_CLASSES,
        image_size=_SIZE,
        divisor=training.divisor,
        stem="small",
    )
    plan = f"compress={compress}"
    return parallelize(
        build_image(config), plan, optimizer=_sgd, loss=F.cross_entropy, clip=_CLIP, audit="off"
    )


def _train(engine: Engine, batches: Iterable[Batch]) -> None:
    engine.module.train()
    for batch in batches:
        engine.step(batch)


def _accuracy(engine: Engine, batch: Batch) -> float:
    """Of images that were not trained on."""
    module = engine.module.eval()
    images, classes = batch
    with torch.no_grad():
        chosen = torch.cat([module(part).argmax(1) for part in images.split(512)])
    return float((chosen == classes).double().mean())


def _batch(samples: int, seed: int, step: int) -> Batch:
    """Patterns that are moved in their image, under noise."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    classes = torch.randint(_CLASSES, (samples,), generator=generator)
    moved = torch.randint(_SIZE, (samples, 2), generator=generator)
    places = (torch.arange(_SIZE)[None, :, None] + moved[:, None, :]) % _SIZE  # [samples, place, (y, x)]
    patterns = _patterns(seed)[classes]
    rows = places[:, None, :, None, 0].expand(-1, 3, -1, _SIZE)
    columns = places[:, None, None, :, 1].expand(-1, 3, _SIZE, -1)
    images = patterns.gather(2, rows).gather(3, columns)
    images = images + _NOISE * torch.randn(images.shape, generator=generator)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return images.to(device), classes.to(device)


def _patterns(seed: int) -> Tensor:
    """[classes, 3, size, size]: a few waves in each colour."""
    generator = torch.Generator().manual_seed(seed)
    spectrum = torch.zeros(_CLASSES, 3, _SIZE, _SIZE, dtype=torch.complex64)
    spectrum[..., :5, :5] = torch.randn(_CLASSES, 3, 5, 5, generator=generator, dtype=torch.complex64)
    waves: Tensor = torch.fft.ifft2(spectrum).real
    return waves / waves.std((1, 2, 3), keepdim=True)


def _sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)
