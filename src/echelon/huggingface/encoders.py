"""Encoders of transformers as lists of layers: every position attends to all others.

Layers are made for training without padding, as those of causal models are. No layer has a view, so that
plans that split a sequence over ranks refuse these models.
"""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from torch import Tensor, nn


class Encoder(NamedTuple):
    """How one architecture differs from another: names of modules."""

    trunk: str  # the attribute that holds everything but the head
    blocks: str  # of the trunk
    head: tuple[str, ...]  # of the model: modules that are called one after the other
    output: str  # the class that its forward returns
    takes_first: bool = False  # behind the first module of the head only the first position is used


ENCODERS = {
    "BertForMaskedLM": Encoder("bert", "encoder.layer", ("cls",), "MaskedLMOutput"),
    "BertForSequenceClassification": Encoder(
        "bert", "encoder.layer", ("bert.pooler", "dropout", "classifier"), "SequenceClassifierOutput"
    ),
    "BertForTokenClassification": Encoder(
        "bert", "encoder.layer", ("dropout", "classifier"), "TokenClassifierOutput"
    ),
    "ViTForImageClassification": Encoder(
        "vit", "layers", ("vit.layernorm", "classifier"), "ImageClassifierOutput", takes_first=True
    ),
}


class EncoderEmbedding(nn.Module):
    """Tokens or images to hidden states. Images are cast to the type of the weights."""

    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings

    def forward(self, inputs: Tensor) -> Tensor:
        if inputs.is_floating_point():
            inputs = inputs.to(next(self.embeddings.parameters()).dtype)
        hidden: Tensor = self.embeddings(inputs)
        return hidden


class EncoderLayer(nn.Module):
    """One encoder layer: hidden states to hidden states, without a mask."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.block(x, attention_mask=None)
        return hidden


class EncoderHead(nn.Module):
    """Hidden states to what the model returns."""

    def __init__(
        self, modules: Sequence[nn.Module], output: Callable[..., Any], *, takes_first: bool
    ) -> None:
        super().__init__()
        self.chain, self.output, self.takes_first = nn.ModuleList(modules), output, takes_first

    def forward(self, x: Tensor) -> Any:
        first, *others = self.chain
        x = first(x)
        x = x[:, 0] if self.takes_first else x
        for module in others:
            x = module(x)
        return self.output(logits=x)


def encoder_layers(model: Any, encoder: Encoder) -> list[nn.Module]:
    """The embedding, every layer, the head."""
    from transformers import modeling_outputs

    trunk = getattr(model, encoder.trunk)
    head = [attrgetter(name)(model) for name in encoder.head]
    output = getattr(modeling_outputs, encoder.output)
    return [
        EncoderEmbedding(trunk.embeddings),
        *(EncoderLayer(block) for block in attrgetter(encoder.blocks)(trunk)),
        EncoderHead(head, output, takes_first=encoder.takes_first),
    ]
