"""Models of the project and foreign ones, small, for the equality contract."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from echelon.models import ModelConfig, build
from echelon.verify import Case
from tests.cases import adamw

SEQUENCE, VOCAB = 8, 17


def gpt() -> nn.Module:
    return build(ModelConfig("gpt", layers=2, width=16, heads=2, vocab=VOCAB, sequence=SEQUENCE, tied=True))


def llama() -> nn.Module:
    config = ModelConfig("llama", 2, 16, 4, vocab=VOCAB, sequence=SEQUENCE, kv_heads=2, ffn=24)
    return build(config)


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm2(self.second(F.relu(self.norm1(self.first(x))))))


class ResNet(nn.Module):
    """Normalises with fixed statistics: those of a batch would depend on how it is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.Sequential(Residual(8), Residual(8))
        self.head = nn.Linear(8, 5)

    def train(self, mode: bool = True) -> "ResNet":
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 12)
        self.lstm = nn.LSTM(12, 12, num_layers=2, batch_first=True)
        self.head = nn.Linear(12, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0])


class Encoder(nn.Module):
    """torch's own transformer, with parameters of the model itself beside its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 16)
        self.positions = nn.Parameter(torch.zeros(SEQUENCE, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(tokens) + self.positions))


class Twice(nn.Module):
    """Uses one layer twice, keeps one that it never uses, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 12)
        self.shared = nn.Sequential(nn.Linear(12, 12), nn.Tanh())
        self.frozen = nn.Linear(12, 12).requires_grad_(False)
        self.never = nn.Linear(12, 12)
        self.last = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(self.first(x))
        return self.last(self.shared(torch.tanh(self.frozen(x))))


def token_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total, (targets != -100).sum()


def class_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets)


def tokens(step: int) -> tuple[Tensor, Tensor]:
    """Thirteen samples, which few numbers of ranks divide; some targets do not count."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randint(VOCAB, (13, SEQUENCE), generator=generator)
    targets = torch.randint(VOCAB, (13, SEQUENCE), generator=generator)
    ignored = torch.rand(targets.shape, generator=generator) < 0.2
    return inputs, targets.masked_fill(ignored, -100)


def images(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(13, 3, 6, 6, generator=generator), torch.randint(5, (13,), generator=generator)


def vectors(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(13, 6, generator=generator), torch.randint(5, (13,), generator=generator)


CASES = {
    "gpt": Case(gpt, tokens, token_loss, adamw),
    "llama": Case(llama, tokens, token_loss, adamw),
    "resnet": Case(ResNet, images, class_loss, adamw),
    "lstm": Case(LSTM, tokens, token_loss, adamw),
    "encoder": Case(Encoder, tokens, token_loss, adamw),
    "twice": Case(Twice, vectors, class_loss, adamw),
}
