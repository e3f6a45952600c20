"""Models as people write them, which list no layers: of public scripts, small, for the equality contract."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from echelon.verify import Case
from tests.cases import adamw

SEQUENCE, VOCAB, WIDTH = 8, 17, 16


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        query, key, value = (
            each.view(samples, length, 2, width // 2).transpose(1, 2)
            for each in self.c_attn(self.ln_1(x)).split(width, dim=2)
        )
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.c_proj(y.transpose(1, 2).reshape(x.shape)))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """As in nanoGPT: a ModuleDict of modules, tied embeddings, positions made in the forward."""

    def __init__(self, layers: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCAB, WIDTH),
                "wpe": nn.Embedding(SEQUENCE, WIDTH),
                "drop": nn.Dropout(dropout),
                "h": nn.ModuleList([Block(dropout) for _ in range(layers)]),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight

    def forward(self, tokens: Tensor) -> Tensor:
        parts: Any = self.transformer
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = parts.drop(parts.wte(tokens) + parts.wpe(positions))
        for block in parts.h:
            x = block(x)
        return self.lm_head(parts.ln_f(x))  # type: ignore[no-any-return]


class Lightning(nn.Module):
    """A module around a model of transformers, as in lightning, with more than the model in it."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=VOCAB,
            n_positions=SEQUENCE,
            n_embd=WIDTH,
            n_layer=2,
            n_head=2,
            resid_pdrop=0.1,
            attn_pdrop=0.0,
            bos_token_id=None,
            eos_token_id=None,
        )
        self.model = GPT2LMHeadModel(config)
        self.scale = nn.Parameter(torch.ones(VOCAB))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens, use_cache=False).logits * self.scale  # type: ignore[no-any-return]


class VAE(nn.Module):
    """Draws in its forward, and returns three tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(24, 16), nn.Linear(16, 4), nn.Linear(16, 4)
        self.fc3, self.fc4 = nn.Linear(4, 16), nn.Linear(16, 24)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = F.relu(self.fc1(x))
        mean, log_variance = self.fc21(hidden), self.fc22(hidden)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        return self.fc4(F.relu(self.fc3(z))), mean, log_variance


class CNN(nn.Module):
    """A stem, stages of blocks with batch norm, a head: as in torchvision and timm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.layer1 = nn.Sequential(Residual(8), Residual(8))
        self.layer2 = nn.Sequential(nn.Conv2d(8, 12, 3, stride=2), Residual(12))
        self.fc = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x)))))
        return self.fc(x.mean((2, 3)))  # type: ignore[no-any-return]


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.bn = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.bn(self.conv(x)))


class Diffusion(nn.Module):
    """As a diffusion transformer: every block takes a condition beside the hidden states, as does the end."""

    def __init__(self) -> None:
        super().__init__()
        self.x_embedder, self.t_embedder = nn.Linear(6, WIDTH), nn.Linear(1, WIDTH)
        self.blocks = nn.ModuleList([ConditionedBlock() for _ in range(4)])
        self.final_layer = nn.Linear(WIDTH, 6)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        x, condition = self.x_embedder(x), F.silu(self.t_embedder(t[:, None]))
        for block in self.blocks:
            x = block(x, condition)
        return self.final_layer(x + condition[:, None])  # type: ignore[no-any-return]


class ConditionedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.modulation = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale = self.modulation(condition)[:, None].chunk(2, dim=-1)
        return x + F.gelu(self.up(self.norm(x) * (1 + scale) + shift))


def token_loss(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def vae_loss(output: tuple[Tensor, Tensor, Tensor], x: Tensor) -> Tensor:
    made, mean, log_variance = output
    divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1)
    return (((made - x) ** 2).sum(1) + divergence).mean()


def squared_error(output: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(output, targets)


def tokens(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    rows = torch.randint(VOCAB, (8, SEQUENCE + 1), generator=generator)
    return rows[:, :-1], rows[:, 1:]


def images(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 3, 6, 6, generator=generator), torch.randint(5, (8,), generator=generator)


def vectors(step: int) -> tuple[Tensor, Tensor]:
    x = torch.rand(8, 24, generator=torch.Generator().manual_seed(step))
    return x, x


def noisy(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, noise = torch.randn(2, 8, 5, 6, generator=generator)
    t = torch.rand(8, generator=generator)
    return {"x": x + t[:, None, None] * noise, "t": t, "labels": noise}


def case(make: Any, **options: Any) -> Case:
    """One of the models above, or of tests.contract_models, with its batches and loss."""
    batch, loss = {
        CNN: (images, F.cross_entropy),
        VAE: (vectors, vae_loss),
        Diffusion: (noisy, squared_error),
    }.get(make, (tokens, token_loss))
    return Case(make, batch, loss, adamw, steps=4, options=options)
