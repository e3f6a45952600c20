"""The verification case of a random training: functions that ranks can import."""

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from echelon.data_parallel import adding
from echelon.models import ModelConfig, build, cross_entropy
from echelon.verify import Case
from tests.contract_models import CASES, SEQUENCE, VOCAB
from tests.fuzz.drawn import Drawn
from tests.fuzz.values import OF_TOKENS, TRANSFORMERS

_RATES = {"sgd": 0.1, "adam": 1e-2, "adamw": 1e-2}
_IGNORED = -100
_PAYS = adding.SMALLEST


def case_of(drawn: Drawn) -> Case:
    """What `verify` is to train."""
    foreign = CASES.get(drawn.model)
    known = drawn.model in TRANSFORMERS
    options = {"prefetch": drawn.prefetch}
    if drawn.smallest_unit == 0:
        options["smallest_unit"] = 0
    return Case(
        partial(make_model, drawn) if known or foreign is None else foreign.make_model,
        partial(make_batch, drawn),
        cross_entropy if known or foreign is None else foreign.loss,
        partial(make_optimizer, drawn),
        steps=drawn.steps,
        clip=drawn.clip or None,
        seed=drawn.seed,
        options=options,
    )


def make_model(drawn: Drawn) -> nn.Module:
    if drawn.plan.compile:
        _run_as_recorded()
    adding.SMALLEST = 0 if drawn.seed % 2 else _PAYS  # else no matrix here is large enough
    config = ModelConfig(
        drawn.model,  # type: ignore[arg-type]
        drawn.layers,
        width=8,
        heads=drawn.heads,
        vocab=drawn.vocab,
        sequence=drawn.tokens,
        kv_heads=drawn.kv_heads or None,
        ffn=12 if drawn.model == "llama" else 16,
        tied=drawn.tied,
        dropout=drawn.dropout,
    )
    return build(config)


@cache
def _run_as_recorded() -> None:
    """In this process from now on, layers are recorded and differentiated as torch.compile always does, and
    what was recorded runs as it stands: making C++ of it takes minutes, and is torch's own affair."""
    torch.compile = partial(torch.compile, backend="aot_eager")


def make_batch(drawn: Drawn, step: int) -> tuple[Tensor, Tensor]:
    """Random tokens, images or vectors, with other targets that count in every step."""
    generator = torch.Generator().manual_seed(1000 * drawn.seed + step)
    if drawn.model not in OF_TOKENS:
        shape = {"resnet": (3, 6, 6), "twice": (6,)}[drawn.model]
        inputs = torch.randn(drawn.samples, *shape, generator=generator)
        return inputs, torch.randint(5, (drawn.samples,), generator=generator)
    known = drawn.model in TRANSFORMERS
    shape = (drawn.samples, drawn.tokens if known else SEQUENCE)
    vocab = drawn.vocab if known else VOCAB
    inputs = torch.randint(vocab, shape, generator=generator)
    targets = torch.randint(vocab, shape, generator=generator)
    return inputs, targets.masked_fill(_ignored(drawn, step, targets, generator), _IGNORED)


def _ignored(drawn: Drawn, step: int, targets: Tensor, generator: torch.Generator) -> Tensor:
    """Which targets do not count: none, some of every sample, or every target of most samples."""
    if drawn.targets == "all":
        return torch.zeros_like(targets, dtype=torch.bool)
    if drawn.targets == "some":
        ignored = torch.rand(targets.shape, generator=generator) < 0.3
        ignored[:, step % targets.shape[1]] = False
        return ignored
    ignored = torch.ones_like(targets, dtype=torch.bool)
    ignored[step % drawn.samples :: 3] = False
    return ignored


def make_optimizer(drawn: Drawn, parameters: Any) -> torch.optim.Optimizer:
    # Adam divides by the size of gradients. That of an attention's key bias is nothing but rounding, which
    # decay inside the gradient would blow up within 3 steps: a larger eps keeps it small.
    kinds = {"sgd": partial(torch.optim.SGD, momentum=0.9), "adam": partial(torch.optim.Adam, eps=1e-3)}
    make: Any = kinds.get(drawn.optimizer, torch.optim.AdamW)
    given = list(parameters)
    rate, decay = _RATES[drawn.optimizer], 0.0 if drawn.decay == "none" else 0.1
    if drawn.decay != "matrices":
        return make(given, lr=rate, weight_decay=decay)  # type: ignore[no-any-return]
    matrices, others = [p for p in given if p.dim() >= 2], [p for p in given if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    return make(groups, lr=rate)  # type: ignore[no-any-return]
