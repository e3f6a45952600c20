"""Models that draw in their forward by functions of torch, in small."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from echelon.verify import Case
from tests.cases import adamw

WIDTH = 6


class Vae(nn.Module):
    """The loss needs what was drawn: mean and variance go along."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(WIDTH, 8), nn.Linear(4, WIDTH)

    def sample(self, mean: Tensor, log_variance: Tensor) -> Tensor:
        return mean + torch.randn_like(mean) * (log_variance / 2).exp()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, -1)
        return self.decoder(self.sample(mean, log_variance)), mean, log_variance


def vae_loss(output: tuple[Tensor, Tensor, Tensor], targets: Tensor) -> Tensor:
    decoded, mean, log_variance = output
    divergence = (mean**2 + log_variance.exp() - 1 - log_variance).sum(-1) / 2
    return ((decoded - targets) ** 2).sum(-1).mean() + divergence.mean()


class Diffusion(nn.Module):
    """Its loss is its own: it predicts the noise that it has drawn, at a time that it has drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.net = nn.Embedding(10, WIDTH), nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh())
        self.last = nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        times = torch.randint(0, 10, (len(x),), device=x.device)
        share = (times.to(x.dtype) / 10)[:, None]
        noise = torch.randn(x.shape, dtype=x.dtype, device=x.device)
        noisy = (1 - share).sqrt() * x + share.sqrt() * noise
        predicted = self.last(self.net(noisy) + 0 * self.time(times).sum(-1, keepdim=True))
        return (predicted + self.time(times) - noise) ** 2


def mean_of(output: Tensor, targets: Tensor) -> Tensor:
    return output.mean() + 0 * targets.sum()


class Dropping(nn.Module):
    """By functions, two of them in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.linear(x), 0.3, self.training)
        return x + F.dropout(x.tanh(), 0.4, self.training)


class Choosing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gumbel_softmax(self.linear(x), tau=0.7)


class Skipping(nn.Module):
    """Stochastic depth: one number for all samples of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x if torch.rand(1) < 0.5 else x + self.linear(x).tanh()


class NoisyWeights(nn.Module):
    """One noise for all samples; its shape is that of a weight, or a factor of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4), nn.Parameter(torch.zeros(WIDTH))
        self.deviation = nn.Parameter(torch.full((WIDTH, WIDTH), -2.0))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight + torch.randn_like(self.weight) * self.deviation.exp()
        noise = torch.randn(WIDTH, dtype=x.dtype)
        return x + F.linear(x, weight, self.bias * noise) * torch.rand(WIDTH, WIDTH).diag()


class Sampling(nn.Module):
    """By torch.distributions, several draws of each sample, and one that rejects."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mean = self.linear(x)
        several = torch.distributions.Normal(mean, 0.5).rsample((5,)).mean(0)
        gamma = torch.distributions.Gamma(mean.abs() + 1, 1.0).rsample()
        kept = x.new_empty(len(x), 1).bernoulli_(0.7)
        return several.tanh() * kept + gamma.log()


class Attending(nn.Module):
    """A sample's numbers as positions of a sequence, in torch's own attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(2, 2, dropout=0.3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        positions = x.view(len(x), -1, 2)
        by_weights, _ = self.attention(positions, positions, positions)
        fused, _ = self.attention(positions, positions, positions, need_weights=False)
        return x + (by_weights + fused).reshape(x.shape)


def layers() -> nn.Module:
    """All of them, each a layer."""
    kinds: list[Callable[[], nn.Module]] = [
        Dropping, Choosing, Skipping, NoisyWeights, Sampling, Attending, Dropping
    ]  # fmt: skip
    return nn.Sequential(*(kind() for kind in kinds), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH))


def noisy_loss(output: Tensor, targets: Tensor) -> Tensor:
    """Draws too: one number for each sample."""
    return (((output - targets) ** 2).sum(-1) * torch.rand(len(output))).mean()


def samples(step: int) -> tuple[Tensor, Tensor]:
    """Twelve, which most plans share unequally with the widths above."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(12, WIDTH, generator=generator)
    return x, x.roll(1, -1)


def square(output: Tensor, targets: Tensor) -> Tensor:
    return ((output - targets) ** 2).mean()


def case(name: str, **changes: Any) -> Case:
    makers = {"vae": (Vae, vae_loss), "diffusion": (Diffusion, mean_of), "layers": (layers, noisy_loss)}
    return Case(
        makers[name][0], samples, makers[name][1], **({"make_optimizer": adamw, "steps": 4} | changes)
    )
