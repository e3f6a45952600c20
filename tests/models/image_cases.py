"""Trainings of the small image networks, importable, for the equality contract."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from echelon.models import build_image, cross_entropy, image_preset
from echelon.verify import Case
from tests.cases import adamw

NETWORKS = ("alexnet", "nin", "overfeat", "vgg16", "inception-v1", "resnet-50")


def network(name: str, dropout: float = 0.0) -> nn.Module:
    return build_image(replace(image_preset(f"{name}-tiny"), divisor=32, dropout=dropout))


def images(step: int) -> tuple[Tensor, Tensor]:
    """Seven images, which no number of ranks divides."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(7, 3, 32, 32, generator=generator), torch.randint(8, (7,), generator=generator)


def image_case(name: str, *, dropout: float = 0.0, steps: int = 6) -> Case:
    return Case(partial(network, name, dropout), images, cross_entropy, adamw, steps=steps)
