"""Plain torch models with one oddity each, and adapters of peft and x-transformers around small models."""

import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.foreign.language import LANGUAGE, SEQUENCE, VOCAB, tokens
from tests.foreign.proof import Foreign

WIDTH, SAMPLES = 8, 4


def _token_batch(step: int) -> tuple[Tensor, Tensor]:
    batch = tokens(step)
    return batch["input_ids"], batch["labels"].clamp(min=0)


def _vectors(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(400 + step)
    values = torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    return values, torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64)


def _token_loss(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


class ReadsTheTable(nn.Module):
    """The head is `F.linear` with the embedding's weight, and the embedding is a unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(VOCAB, WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.body(self.tok(ids)), self.tok.weight)


class Graph(nn.Module):
    """A graph convolution: the neighbours of each node are a sparse buffer, and one that a forward makes."""

    def __init__(self) -> None:
        super().__init__()
        neighbours = torch.eye(WIDTH).roll(1, 0) + torch.eye(WIDTH)
        self.register_buffer("neighbours", neighbours.to_sparse(), persistent=False)
        self.register_buffer("degrees", neighbours.to_sparse(), persistent=False)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        self.degrees = (self.neighbours.to_dense() / 2).to_sparse()
        hidden = torch.relu(torch.sparse.mm(self.neighbours, self.first(values).T).T)
        return self.second(torch.sparse.mm(self.degrees, hidden.T).T)


class OtherMethod(nn.Module):
    """A frozen backbone that is called by another method than forward."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Backbone().requires_grad_(False)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        return self.head(self.backbone.encode(values))


class Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def encode(self, values: Tensor) -> Tensor:
        return F.linear(self.up(values).tanh(), self.down.weight)


class ListTie(nn.Module):
    """A ParameterList whose matrix is also the weight of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.matrices = nn.ParameterList([self.first.weight, nn.Parameter(torch.randn(WIDTH, WIDTH))])

    def forward(self, values: Tensor) -> Tensor:
        hidden = self.first(values)
        for matrix in self.matrices:
            hidden = torch.tanh(hidden @ matrix)
        return hidden


class ClampedGradient(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-0.01, 0.01)


class Clamps(nn.Module):
    """A nonlinear function of gradients inside of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        return self.down(ClampedGradient.apply(self.up(values).relu()))


class Complex(nn.Module):
    """Complex weights beside real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex128))

    def forward(self, values: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(self.first(values)) * self.filter, n=WIDTH)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.left(left) * torch.sigmoid(self.right(right))


def _pairs(step: int) -> tuple[Tensor, Tensor, Tensor]:
    left, right = _vectors(step)
    return left, right, left.roll(1, 1)


class Shared(nn.Module):
    """One block, called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        for _ in range(3):
            values = values + self.block(self.norm(values))
        return values


class NeverCalled(nn.Module):
    """A layer whose weights never get a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 512)

    def forward(self, values: Tensor) -> Tensor:
        return self.used(values)


class Normalised(nn.Module):
    """weight_norm, a parametrization."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 64))
        self.out = nn.Linear(64, WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        return self.out(self.layer(values).tanh())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok, self.lstm = nn.Embedding(VOCAB, WIDTH), nn.LSTM(WIDTH, 16, batch_first=True)
        self.head = nn.Linear(16, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.tok(ids))[0])


class TorchTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(VOCAB, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.encoder(self.tok(ids)))


class Mixes(nn.Module):
    """Subtracts the mean of the batch: no plan that cuts the batch can be equal."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        hidden = self.layer(values)
        return hidden - hidden.mean(0)


class BatchNormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.Linear(16, WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        return self.last(self.norm(self.first(values)).relu())


class MakesWeights(nn.Module):
    """A layer makes weights for another one, of each sample by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.layer, self.out = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, values: Tensor) -> Tensor:
        def one(value: Tensor, made: Tensor) -> Tensor:
            weights = {"weight": self.layer.weight * made, "bias": self.layer.bias + made}
            return torch.func.functional_call(self.layer, weights, (value,))

        return self.out(torch.vmap(one)(values, self.maker(values)).tanh())


def _contrastive(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output @ targets.T, torch.arange(len(output)))


def _weighted(output: Tensor, targets: Tensor) -> Tensor:
    weight = torch.arange(1, VOCAB + 1, dtype=torch.float64)
    return F.cross_entropy(output.flatten(0, 1), targets.flatten(), weight=weight)


def _bounded_embedding() -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCAB, WIDTH, max_norm=0.5), nn.Linear(WIDTH, VOCAB))


def _counted_embedding() -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCAB, WIDTH, scale_grad_by_freq=True), nn.Linear(WIDTH, VOCAB))


def _spectral() -> nn.Module:
    first = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
    return nn.Sequential(first, nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def _linear_stack() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH))


def _lora(kind: str, targets: list[str]) -> nn.Module:
    import peft

    is_transposed = kind == "gpt2"  # whose matrices are Conv1D
    config = peft.LoraConfig(
        r=2, lora_alpha=4, lora_dropout=0.0, target_modules=targets, fan_in_fan_out=is_transposed
    )
    return peft.get_peft_model(LANGUAGE[kind].model(), config)


def _x_transformer() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it scripts a function, which torch advises against
        import x_transformers

    layers = x_transformers.Decoder(dim=16, depth=2, heads=4, attn_dim_head=4)
    return x_transformers.TransformerWrapper(num_tokens=VOCAB, max_seq_len=SEQUENCE, attn_layers=layers)


PEFT: dict[str, Foreign] = {
    "lora llama": Foreign(partial(_lora, "llama", ["q_proj", "v_proj"]), tokens),
    "lora gpt2": Foreign(partial(_lora, "gpt2", ["c_attn"]), tokens),
}
X_TRANSFORMERS: dict[str, Foreign] = {"x-transformers": Foreign(_x_transformer, _token_batch, _token_loss)}

ODDITIES: dict[str, Foreign] = {
    "reads the table": Foreign(ReadsTheTable, _token_batch, _token_loss),
    "other method": Foreign(OtherMethod, _vectors, F.mse_loss),
    "list tie": Foreign(ListTie, _vectors, F.mse_loss),
    "clamps": Foreign(Clamps, _vectors, F.mse_loss),
    "complex": Foreign(Complex, _vectors, F.mse_loss),
    "makes weights": Foreign(MakesWeights, _vectors, F.mse_loss),
    "two inputs": Foreign(TwoInputs, _pairs, F.mse_loss),
    "shared": Foreign(Shared, _vectors, F.mse_loss),
    "never called": Foreign(NeverCalled, _vectors, F.mse_loss),
    "weight norm": Foreign(Normalised, _vectors, F.mse_loss),
    "recurrent": Foreign(Recurrent, _token_batch, _token_loss),
    "torch transformer": Foreign(TorchTransformer, _token_batch, _token_loss),
    "batch norm": Foreign(BatchNormed, _vectors, F.mse_loss),
    "mixes": Foreign(Mixes, _vectors, F.mse_loss),
    "contrastive": Foreign(_linear_stack, _vectors, _contrastive),
    "weighted": Foreign(ReadsTheTable, _token_batch, _weighted),
    "max norm": Foreign(_bounded_embedding, _token_batch, _token_loss),
    "scaled by frequency": Foreign(_counted_embedding, _token_batch, _token_loss),
    "spectral norm": Foreign(_spectral, _vectors, F.mse_loss),
    "sparse buffers": Foreign(Graph, _vectors, F.mse_loss),
    **PEFT,
    **X_TRANSFORMERS,
}
