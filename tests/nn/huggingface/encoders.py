"""Small encoders, and an encoder with a decoder, with random weights, which ranks can build."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from echelon.models import cross_entropy
from echelon.verify import Case
from tests.cases import adamw
from tests.nn.huggingface.models import tokens

_BERT = {
    "vocab_size": 17,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 16,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.0,
    "num_labels": 3,
}
_VIT = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "image_size": 8,
    "patch_size": 4,
    "attention_probs_dropout_prob": 0.0,
    "hidden_dropout_prob": 0.1,
    "num_labels": 3,
}
_T5 = {
    "vocab_size": 17,
    "d_model": 16,
    "d_kv": 6,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "dropout_rate": 0.0,
    "feed_forward_proj": "gated-gelu",
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}


class Translator(transformers.T5ForConditionalGeneration):
    """Takes one sequence, which is read by the encoder, and by the decoder from its end."""

    def forward(self, sequence: Tensor) -> Any:
        return super().forward(input_ids=sequence, decoder_input_ids=sequence.flip(1), use_cache=False)


def make(kind: str, **changes: Any) -> nn.Module:
    options, config, model = KINDS[kind]
    made: nn.Module = model(config(**(options | {"attn_implementation": "sdpa"} | changes)))
    for parameter in made.parameters():
        nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.2)
    return made


def double(kind: str, **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    return make(kind, **changes).double()


KINDS: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "bert": (_BERT, transformers.BertConfig, transformers.BertForMaskedLM),
    "bert-classes": (_BERT, transformers.BertConfig, transformers.BertForSequenceClassification),
    "bert-tokens": (_BERT, transformers.BertConfig, transformers.BertForTokenClassification),
    "vit": (_VIT, transformers.ViTConfig, transformers.ViTForImageClassification),
    "t5": (_T5, transformers.T5Config, Translator),
}


def batch(kind: str, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(3, (5,), generator=generator)
    if kind == "vit":
        return torch.randn(5, 3, 8, 8, generator=generator), labels
    inputs, targets = tokens(step)
    if kind == "bert-tokens":
        return inputs, targets.clamp(max=2)
    return inputs, labels if kind == "bert-classes" else targets


def label_loss(output: Any, labels: Tensor) -> Tensor:
    return F.cross_entropy(getattr(output, "logits", output), labels)


def case(kind: str, steps: int = 3, **changes: Any) -> Case:
    loss = label_loss if kind in ("vit", "bert-classes") else cross_entropy
    return Case(partial(make, kind, **changes), partial(batch, kind), loss, adamw, steps=steps)
