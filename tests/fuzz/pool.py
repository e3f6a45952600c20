"""Models that nobody here wrote, for random trainings: of transformers, peft and timm, and plain networks.

Each is tiny, and built as its users build it. What a plan word needs of a model is in `words`: a training
that is not `bold` does not draw the others, which the library refuses.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.fuzz.random_training import RandomTraining

VOCAB, SEQUENCE, CLASSES = 32, 8, 5
TOKENS, SEQUENCE_PAIRS, IMAGES = "tokens", "pairs of sequences", "images"
LAYERS, TENSOR, SEQUENCES, DROPOUT = "layers", "tensor", "sequences", "dropout"
_CAUSAL = frozenset({LAYERS, TENSOR, SEQUENCES})

Batch = tuple[Tensor, Tensor] | dict[str, Tensor]


class PoolModel(NamedTuple):
    make: Callable[[RandomTraining], nn.Module]
    data: str
    words: frozenset[str] = frozenset()
    package: str = "torch"


_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 16,
    "initializer_range": 0.2,  # large enough for every weight to show in the logits
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 1,
}
_GROUPED = _SIZES | {"num_key_value_heads": 2}
_EXPERTS = {"num_local_experts": 4, "experts_implementation": "eager"}  # grouped products have no float64
_GPT2 = {"vocab_size": VOCAB, "n_embd": 16, "n_head": 4, "n_positions": 16, "attn_pdrop": 0.0}
_GPT2 |= {"initializer_range": 0.2, "bos_token_id": 0, "eos_token_id": 0}
_BERT = _SIZES | {"attention_probs_dropout_prob": 0.0, "type_vocab_size": 2}
_VIT = {
    "hidden_size": 16,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "image_size": 8,
    "patch_size": 4,
}
_T5 = {"vocab_size": VOCAB, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_heads": 4, "decoder_start_token_id": 0}


def _transformer(training: RandomTraining, name: str, sizes: dict[str, Any], layers: str) -> nn.Module:
    """A model of transformers by the name of its class, with the training's layers and attention."""
    import transformers

    kind = getattr(transformers, name)
    attention = ("eager", "sdpa")[training.seed % 2]
    config = kind.config_class(**sizes, **{layers: training.layers}, attn_implementation=attention)
    model: nn.Module = kind(config)
    return model


def _causal(name: str, **sizes: Any) -> Callable[[RandomTraining], nn.Module]:
    return lambda training: _transformer(training, name, _GROUPED | sizes, "num_hidden_layers")


def _gpt2(training: RandomTraining) -> nn.Module:
    sizes = _GPT2 | {"resid_pdrop": training.dropout, "embd_pdrop": training.dropout}
    return _transformer(training, "GPT2LMHeadModel", sizes, "n_layer")


def _bert(training: RandomTraining) -> nn.Module:
    sizes = _BERT | {"hidden_dropout_prob": training.dropout}
    return _transformer(training, "BertForMaskedLM", sizes, "num_hidden_layers")


def _t5(training: RandomTraining) -> nn.Module:
    return _transformer(training, "T5ForConditionalGeneration", _T5 | {"dropout_rate": 0.0}, "num_layers")


def _vit(training: RandomTraining) -> nn.Module:
    sizes = _VIT | {"num_labels": CLASSES, "attention_probs_dropout_prob": 0.0}
    sizes |= {"hidden_dropout_prob": training.dropout}
    return _transformer(training, "ViTForImageClassification", sizes, "num_hidden_layers")


def _lora(training: RandomTraining) -> nn.Module:
    import peft

    config = peft.LoraConfig(r=2, lora_alpha=4, lora_dropout=0.0, target_modules=["q_proj", "v_proj"])
    return peft.get_peft_model(_causal("LlamaForCausalLM")(training), config)


def _timm_vit(training: RandomTraining) -> nn.Module:
    import tests.foreign.vision_packages  # noqa: F401, I001  (before timm and torchvision)
    import timm

    sizes = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": training.layers, "num_heads": 4}
    return timm.create_model("vit_tiny_patch16_224", num_classes=CLASSES, **sizes)


def _timm_mixer(training: RandomTraining) -> nn.Module:
    import tests.foreign.vision_packages  # noqa: F401, I001  (before timm and torchvision)
    from timm.models.mlp_mixer import MlpMixer

    sizes = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "num_blocks": training.layers}
    return MlpMixer(num_classes=CLASSES, **sizes)


def _plain_cnn(training: RandomTraining) -> nn.Module:
    """A Sequential: it lists its layers."""
    blocks = [nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.ReLU()) for _ in range(training.layers)]
    head = nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(6 * 16, CLASSES))
    return nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), *blocks, head)


class NormalizedCNN(nn.Module):
    """Batch norms between convolutions, in a forward of its own."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(6, 6, 3, padding=1, bias=False) for _ in range(num_blocks)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(6) for _ in range(num_blocks))
        self.head = nn.Linear(6, CLASSES)

    def forward(self, pixels: Tensor) -> Tensor:
        hidden = self.stem(pixels)
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            hidden = hidden + F.relu(norm(convolution(hidden)))
        output: Tensor = self.head(hidden.mean((2, 3)))
        return output


def _normalized_cnn(training: RandomTraining) -> nn.Module:
    return NormalizedCNN(training.layers)


_TRANSFORMERS = {
    "hf-llama": PoolModel(_causal("LlamaForCausalLM"), TOKENS, _CAUSAL),
    "hf-qwen2": PoolModel(_causal("Qwen2ForCausalLM"), TOKENS, _CAUSAL),
    "hf-qwen3": PoolModel(_causal("Qwen3ForCausalLM", head_dim=8), TOKENS, _CAUSAL),
    "hf-gpt2": PoolModel(_gpt2, TOKENS, _CAUSAL | {DROPOUT}),
    "hf-mixtral": PoolModel(_causal("MixtralForCausalLM", **_EXPERTS), TOKENS, _CAUSAL),
    "hf-gemma": PoolModel(_causal("GemmaForCausalLM", head_dim=4), TOKENS, _CAUSAL),
    "hf-bert": PoolModel(_bert, TOKENS, frozenset({LAYERS, TENSOR, DROPOUT})),
    "hf-t5": PoolModel(_t5, SEQUENCE_PAIRS, frozenset({TENSOR})),
    "hf-vit": PoolModel(_vit, IMAGES, frozenset({LAYERS, TENSOR, DROPOUT})),
}
ALL: dict[str, PoolModel] = {
    **{name: model._replace(package="transformers") for name, model in _TRANSFORMERS.items()},
    "lora-llama": PoolModel(_lora, TOKENS, package="peft"),
    "timm-vit": PoolModel(_timm_vit, IMAGES, frozenset({TENSOR}), "timm"),
    "timm-mixer": PoolModel(_timm_mixer, IMAGES, package="timm"),
    "cnn": PoolModel(_plain_cnn, IMAGES, frozenset({LAYERS})),
    "cnn-norm": PoolModel(_normalized_cnn, IMAGES),
}


def _is_installed(package: str) -> bool:
    if package == "timm":
        try:
            import tests.foreign.vision_packages  # noqa: F401
        except ImportError:
            return False
        return True
    return find_spec(package) is not None


_MISSING = {package for package in {model.package for model in ALL.values()} if not _is_installed(package)}
POOL = {name: model for name, model in ALL.items() if model.package not in _MISSING}
COUNTED_PADDING = 3  # the seed of batches whose padding has labels that count
LEFT_OUT = [name for name in ALL if name not in POOL]


def make_pool_batch(training: RandomTraining, ignored: Tensor | None, generator: torch.Generator) -> Batch:
    """The batch of a step; `ignored` says which targets of sequences do not count."""
    data, samples = POOL[training.model].data, training.samples
    if data == IMAGES:
        pixels = torch.randn(samples, 3, 8, 8, generator=generator)
        labels = torch.randint(CLASSES, (samples,), generator=generator)
        return (pixels, labels) if training.batch == "pair" else {"pixel_values": pixels, "labels": labels}
    shape = (samples, SEQUENCE)
    ids, labels = (torch.randint(2, VOCAB, shape, generator=generator) for _ in range(2))
    labels = labels if ignored is None else labels.masked_fill(ignored, -100)
    if training.batch == "pair":
        return ids, labels
    batch = {"input_ids": ids, "labels": labels}
    if training.seed % 2:  # padded at the end, as tokenizers do; with one seed padding counts
        lengths = torch.randint(SEQUENCE // 2, SEQUENCE + 1, (samples, 1), generator=generator)
        batch["attention_mask"] = (torch.arange(SEQUENCE) < lengths).long()
        if training.seed != COUNTED_PADDING:
            batch["labels"] = labels.masked_fill(batch["attention_mask"] == 0, -100)
    if data == SEQUENCE_PAIRS and training.batch == "dict":  # else the model makes them of its labels
        batch["decoder_input_ids"] = torch.randint(2, VOCAB, shape, generator=generator)
    return batch


def class_loss(output: Any, targets: Tensor) -> Tensor:
    """The mean over images."""
    return F.cross_entropy(getattr(output, "logits", output), targets)
