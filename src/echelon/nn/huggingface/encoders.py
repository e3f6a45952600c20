"""Encoders of transformers as lists of layers: every position attends to all others.

No layer has a view, so that plans that split a sequence over ranks refuse these models.
"""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from torch import Tensor, nn

Hidden = Tensor | tuple[Tensor, Tensor]  # hidden states, or these and the padding mask


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


class TextEmbedding(nn.Module):
    """Tokens to hidden states. A padding mask goes on with them, from layer to layer."""

    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Hidden:
        hidden: Tensor = self.embeddings(input_ids, token_type_ids=token_type_ids, position_ids=position_ids)
        return hidden if attention_mask is None else (hidden, attention_mask)


class ImageEmbedding(nn.Module):
    """Images to hidden states, in the type of the weights."""

    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings

    def forward(self, pixel_values: Tensor) -> Tensor:
        hidden: Tensor = self.embeddings(pixel_values.to(next(self.embeddings.parameters()).dtype))
        return hidden


class EncoderLayer(nn.Module):
    """One encoder layer: hidden states to hidden states."""

    def __init__(self, block: nn.Module, config: Any) -> None:
        super().__init__()
        self.block, self.config = block, config

    def forward(self, value: Hidden) -> Hidden:
        if isinstance(value, Tensor):
            output: Tensor = self.block(value, attention_mask=None)
            return output
        from transformers.masking_utils import create_bidirectional_mask

        x, padding = value
        # To look whether there is padding would stop the host.
        mask = create_bidirectional_mask(self.config, x, padding, allow_is_bidirectional_skip=False)
        return self.block(x, attention_mask=mask), padding


class EncoderHead(nn.Module):
    """Hidden states to what the model returns."""

    def __init__(
        self, modules: Sequence[nn.Module], output: Callable[..., Any], *, takes_first: bool
    ) -> None:
        super().__init__()
        self.chain, self.output, self.takes_first = nn.ModuleList(modules), output, takes_first

    def forward(self, value: Hidden) -> Any:
        first, *others = self.chain
        x = first(value if isinstance(value, Tensor) else value[0])
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
        (ImageEmbedding if model.main_input_name == "pixel_values" else TextEmbedding)(trunk.embeddings),
        *(EncoderLayer(block, model.config) for block in attrgetter(encoder.blocks)(trunk)),
        EncoderHead(head, output, takes_first=encoder.takes_first),
    ]
