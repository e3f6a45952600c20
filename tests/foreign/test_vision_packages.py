"""timm and torchvision from their folder, beside transformers."""

import torch


def test_models_of_timm_and_torchvision_can_be_used_beside_transformers() -> None:
    import tests.foreign.vision_packages  # noqa: F401, I001  (before timm and torchvision)
    import timm
    import torchvision
    from transformers import LlamaForCausalLM

    models = [
        torchvision.models.resnet18(num_classes=3),
        timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=3),
    ]
    assert [model(torch.zeros(2, 3, 32, 32)).shape for model in models] == [(2, 3), (2, 3)]
    assert issubclass(LlamaForCausalLM, torch.nn.Module)
