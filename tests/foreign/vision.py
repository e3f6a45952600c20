"""Models of images and sound: of transformers, and of timm and torchvision where these are installed."""

from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from tests.foreign.proof import Foreign

SAMPLES, CLASSES = 4, 5

_VIT: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "image_size": 16,
    "patch_size": 8,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_WHISPER: dict[str, Any] = {
    "vocab_size": 32,
    "num_mel_bins": 8,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_source_positions": 16,
    "max_target_positions": 16,
    "dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 1,
    "decoder_start_token_id": 0,
    "use_cache": False,
    "apply_spec_augment": False,
}

CLASSIFIERS: dict[str, dict[str, Any]] = {
    "vit": _VIT,
    "beit": _VIT | {"drop_path_rate": 0.0},
    "dinov2": _VIT | {"mlp_ratio": 2, "drop_path_rate": 0.0},
    "convnext": {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "drop_path_rate": 0.0},
    "swin": {"image_size": 16, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2]}
    | {"window_size": 2, "drop_path_rate": 0.0, "hidden_dropout_prob": 0.0}
    | {"attention_probs_dropout_prob": 0.0},
}


def _classifier(kind: str, sizes: dict[str, Any]) -> nn.Module:
    config = transformers.AutoConfig.for_model(kind, num_labels=CLASSES, **sizes)
    model: nn.Module = transformers.AutoModelForImageClassification.from_config(
        config, attn_implementation="eager"
    )
    return model


def images(step: int, size: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(200 + step)
    pixels = torch.randn(SAMPLES, 3, size, size, generator=generator, dtype=torch.float64)
    return pixels, torch.randint(0, CLASSES, (SAMPLES,), generator=generator)


def labelled_images(step: int) -> dict[str, Tensor]:
    pixels, labels = images(step)
    return {"pixel_values": pixels, "labels": labels}


def _whisper() -> nn.Module:
    config = transformers.WhisperConfig(**_WHISPER, attn_implementation="eager")
    return transformers.WhisperForConditionalGeneration(config)


def sounds(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(300 + step)
    return {
        "input_features": torch.randn(SAMPLES, 8, 32, generator=generator, dtype=torch.float64),
        "labels": torch.randint(2, 32, (SAMPLES, 6), generator=generator),
    }


def _timm(name: str, **options: Any) -> nn.Module:
    import tests.foreign.vision_packages  # noqa: F401, I001  (before timm and torchvision)
    import timm

    return timm.create_model(name, num_classes=CLASSES, **options)


def _mixer() -> nn.Module:
    import tests.foreign.vision_packages  # noqa: F401, I001  (before timm and torchvision)
    from timm.models.mlp_mixer import MlpMixer

    return MlpMixer(img_size=16, patch_size=8, num_classes=CLASSES, embed_dim=16, num_blocks=2)


def _torchvision(name: str, **options: Any) -> nn.Module:
    import tests.foreign.vision_packages  # noqa: F401, I001  (before timm and torchvision)
    from torchvision import models

    return models.get_model(name, num_classes=CLASSES, **options)


def _torchvision_vit() -> nn.Module:
    import tests.foreign.vision_packages  # noqa: F401, I001  (before timm and torchvision)
    from torchvision.models import VisionTransformer

    return VisionTransformer(16, 8, 2, 4, 16, 32, num_classes=CLASSES)


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


def _logits_loss(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output, targets)


_SMALL_VIT = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 4}

TIMM: dict[str, Foreign] = {
    "timm vit": Foreign(partial(_timm, "vit_tiny_patch16_224", **_SMALL_VIT), images, _logits_loss),
    "timm mixer": Foreign(_mixer, images, _logits_loss),
    "timm convnext": Foreign(
        partial(_timm, "convnext_atto", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16)),
        partial(images, size=32),
        _logits_loss,
    ),
}

TORCHVISION: dict[str, Foreign] = {
    "torchvision vit": Foreign(_torchvision_vit, images, _logits_loss),
    # AdamW would divide gradients of 1e-16, which are rounding, by their own size.
    "torchvision resnet": Foreign(
        partial(_torchvision, "resnet18"), partial(images, size=32), _logits_loss, _sgd
    ),
    "torchvision squeezenet": Foreign(
        partial(_torchvision, "squeezenet1_1", dropout=0.0), partial(images, size=32), _logits_loss
    ),
}

VISION: dict[str, Foreign] = {
    **{
        kind: Foreign(partial(_classifier, kind, sizes), labelled_images)
        for kind, sizes in CLASSIFIERS.items()
    },
    "whisper": Foreign(_whisper, sounds),
    **TIMM,
    **TORCHVISION,
}
