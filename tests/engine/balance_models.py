"""Gates with losses that are not linear in the global batch, and language models of them."""

from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.models import cross_entropy
from echelon.nn.experts import Gate, Routing, record
from echelon.verify import Case
from tests.cases import adamw, random_tokens
from tests.nn.experts.models import EXPERTS, SEQUENCE, VOCAB, WIDTH, make_model


class CrowdedGate(Gate):
    """Balances twice: by CV² of the probabilities times that of the tokens, and by a bias of the choice."""

    rows: ClassVar[tuple[str, ...]] = (*Gate.rows, "probability")
    bias: Tensor

    def __init__(self, *, has_loss: bool = True, rate: float = 0.01) -> None:
        super().__init__(EXPERTS, 2)
        self._has_loss, self.rate, self.is_broken = has_loss, rate, False
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH))
        self.register_buffer("bias", torch.zeros(EXPERTS))

    @property
    def has_loss(self) -> bool:
        return self._has_loss

    def forward(self, x: Tensor) -> Routing:
        dtype = torch.promote_types(x.dtype, torch.float32)
        probabilities = F.linear(x.flatten(0, -2).to(dtype), self.weight.to(dtype)).softmax(-1)
        probabilities = probabilities * float("nan") if self.is_broken else probabilities
        _, indices = (probabilities + self.bias).topk(self.top_k)
        tokens = F.one_hot(indices, self.num_experts).sum((0, 1)).to(dtype)
        entropy = torch.special.entr(probabilities.detach()).sum(0)
        statistics = torch.stack([tokens, torch.zeros_like(tokens), entropy, probabilities.sum(0)])
        return Routing(indices, record(self, probabilities.gather(1, indices), statistics).to(x.dtype))

    def auxiliary_loss(self, statistics: Tensor) -> Tensor:
        if not self._has_loss:
            return statistics.new_zeros(())
        tokens, _, _, probability = statistics
        return _squared_variation(probability) * (1 + _squared_variation(tokens))

    @torch.no_grad()
    def after_step(self, statistics: Tensor) -> None:
        tokens = statistics[0]
        self.bias += self.rate * torch.sign(tokens.mean() - tokens).to(self.bias)


def _squared_variation(x: Tensor) -> Tensor:
    return x.var(unbiased=False) / x.mean() ** 2


def crowded_model(*, has_loss: bool = True, layers: int = 2) -> nn.Module:
    return make_model(partial(CrowdedGate, has_loss=has_loss), layers)


def tokens(step: int, samples: int = 7) -> tuple[Tensor, Tensor]:
    return random_tokens(step, (samples, SEQUENCE), VOCAB)


def mean_of_samples(output: Tensor, targets: Tensor) -> Tensor:
    """A plain mean, of all targets."""
    return F.cross_entropy(output.flatten(0, 1), targets.clamp(min=0).flatten())


def weighted_loss(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Counts what no normaliser can know before."""
    weights = (targets != -100) * (1 + targets.clamp(min=0) % 3)
    each = F.cross_entropy(output.flatten(0, 1), targets.clamp(min=0).flatten(), reduction="none")
    return (each * weights.flatten()).sum(), weights.sum()


def case(model: Any = crowded_model, loss: Any = cross_entropy, samples: int = 7, **changes: Any) -> Case:
    return Case(model, partial(tokens, samples=samples), loss, adamw, **{"steps": 3, **changes})
