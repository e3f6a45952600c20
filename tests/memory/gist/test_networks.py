"""The six networks of the paper, small: gradients are the same to the last bit, and less is kept."""

import copy

import pytest
import torch

from echelon.models.build import build_image
from tests.memory.gist.nets import compress, gradients, is_same, saved_bytes

NETWORKS = ["alexnet", "nin", "overfeat", "vgg16", "inception-v1", "resnet-50"]


@pytest.mark.slow_cases("nin", "overfeat", "resnet-50")
@pytest.mark.parametrize("network", NETWORKS)
def test_gradients_are_bit_identical(network: str) -> None:
    torch.manual_seed(0)
    plain = build_image(f"{network}-tiny")
    plain.eval()  # no dropout: a generator's masks are not what is compared here
    model = copy.deepcopy(plain)
    found = compress(model, "gist").found
    x = torch.randn(3, 3, 32, 32)
    assert is_same(gradients(plain, x), gradients(model, x))
    assert {"relu", "sparse"} <= found
    assert saved_bytes(model, x) < saved_bytes(plain, x)


@pytest.mark.slow_cases("inception-v1", "nin", "overfeat", "resnet-50")
@pytest.mark.parametrize("network", NETWORKS)
def test_lossy_formats_keep_less_and_change_no_output(network: str) -> None:
    torch.manual_seed(0)
    plain = build_image(f"{network}-tiny")
    plain.eval()
    x = torch.randn(3, 3, 32, 32)
    sizes = [saved_bytes(plain, x)]
    for name in ("gist-fp16", "gist-fp10", "gist-fp8"):
        model = copy.deepcopy(plain)
        compress(model, name)
        assert torch.equal(model(x), plain(x))
        sizes.append(saved_bytes(model, x))
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == len(sizes)
