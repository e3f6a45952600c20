"""A small training on the ranks that run, to see how long its parts take: for rehearsals and benchmarks."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from echelon.engine import Engine, parallelize
from echelon.models import ModelConfig, Transformer, build, cross_entropy
from echelon.plan import Plan
from echelon.program import Span

Batch = tuple[Tensor, Tensor]


def make_batch(config: ModelConfig, samples: int, seed: int = 0) -> Batch:
    """Random tokens, equal in every rank with the same seed, and for each the next token."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(config.vocab, (samples, config.sequence + 1), generator=generator).to(_device())
    return tokens[:, :-1], tokens[:, 1:]


def make_model(config: ModelConfig) -> Transformer:
    """A model on this rank's device, with the same weights on every rank."""
    torch.manual_seed(0)
    return build(config).to(_device())


def make_engine(config: ModelConfig, plan: Plan) -> Engine:
    """`parallelize` over all ranks."""
    return parallelize(make_model(config), plan, optimizer=fused_adamw, loss=cross_entropy)


def fused_adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-4, fused=True)


def spans_of(engine: Engine) -> list[Span]:
    """When each instruction of the engine's last step ran on this rank."""
    return list(engine.spans)


def by_step(ranks: Sequence[Sequence[Sequence[Span]]]) -> list[list[Span]]:
    """The spans of all ranks together, step by step, from those of each rank."""
    return [[span for spans in step for span in spans] for step in zip(*ranks, strict=True)]


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
