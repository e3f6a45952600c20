"""Small models whose heads, width and vocabulary 4 ranks divide; importable, so that ranks can build them."""

from functools import partial

import torch
from torch import Tensor, nn

from echelon.models import ModelConfig, build, cross_entropy
from echelon.verify import Case
from tests.cases import adamw

VOCAB, SEQUENCE = 32, 16


def gpt() -> nn.Module:
    return build(ModelConfig("gpt", layers=3, width=16, heads=4, vocab=VOCAB, sequence=SEQUENCE, tied=True))


def dropping() -> nn.Module:
    config = ModelConfig("gpt", layers=2, width=20, heads=4, vocab=VOCAB, sequence=SEQUENCE, dropout=0.2)
    return build(config)


def llama() -> nn.Module:
    config = ModelConfig("llama", 3, 32, 8, vocab=VOCAB, sequence=SEQUENCE, kv_heads=4, ffn=48)
    return build(config)


MODELS = {"gpt": gpt, "llama": llama, "dropping": dropping}


def tokens(step: int, samples: int = 6) -> tuple[Tensor, Tensor]:
    """Some targets of the first sample are left out."""
    generator = torch.Generator().manual_seed(step)
    inputs, targets = torch.randint(VOCAB, (2, samples, SEQUENCE), generator=generator)
    targets[0, : 3 + step % 3] = -100
    return inputs, targets


def language_case(name: str, steps: int = 20, clip: float | None = 1.0) -> Case:
    return Case(MODELS[name], partial(tokens, samples=7), cross_entropy, adamw, steps=steps, clip=clip)
