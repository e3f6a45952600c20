"""Small models, and data that a number makes: what the loops beside this file train."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def numbers(step: int, *shape: int) -> Tensor:
    """Random numbers that depend on the step alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def classes(step: int, most: int, *shape: int) -> Tensor:
    return torch.randint(most, shape, generator=torch.Generator().manual_seed(step))


class Classifier(nn.Module):
    """A convolutional network for images of 8 by 8."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.head = nn.Linear(4 * 3 * 3, 5)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(F.max_pool2d(self.conv(images).relu(), 2).flatten(1))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, 2, batch_first=True)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.down(F.gelu(self.up(x)))


class GPT(nn.Module):
    """A language model that returns logits and, given targets, its loss."""

    def __init__(self, vocabulary: int = 16, width: int = 16, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        length = tokens.shape[1]
        mask = torch.full((length, length), -torch.inf, dtype=self.embed.weight.dtype).triu(1)
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, mask)
        logits = self.head(x)
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


class VAE(nn.Module):
    """A variational autoencoder; the noise is an input."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(12, 8), nn.Linear(4, 12)

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, 1)
        return self.decoder(mean + noise * (log_variance / 2).exp()), mean, log_variance


def vae_loss(x: Tensor, decoded: Tensor, mean: Tensor, log_variance: Tensor) -> Tensor:
    """The sum over samples, as the authors of the method write it."""
    divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum()
    return F.mse_loss(decoded, x, reduction="sum") + divergence


def generator() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))


def discriminator() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))


def judge(output: Tensor, real: float) -> Tensor:
    return F.binary_cross_entropy_with_logits(output, torch.full_like(output, real))


class Language(nn.Module):
    """A recurrent language model, which takes and returns its state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(12, 8), nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 12)

    def forward(self, tokens: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        output, (h, c) = self.lstm(
            self.embed(tokens), (hidden.transpose(0, 1).contiguous(), cell.transpose(0, 1).contiguous())
        )
        return self.head(output), h.transpose(0, 1), c.transpose(0, 1)


class Policy(nn.Module):
    """Actions and the value of a state."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.action, self.value = nn.Linear(6, 16), nn.Linear(16, 3), nn.Linear(16, 1)

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(state).relu()
        return F.log_softmax(self.action(x), -1), self.value(x)[:, 0]


def log_probability(logits: Tensor, tokens: Tensor) -> Tensor:
    """Of each sequence."""
    chosen = F.log_softmax(logits[:, :-1], -1).gather(-1, tokens[:, 1:, None])
    return chosen[..., 0].sum(1)
