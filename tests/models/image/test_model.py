import pytest
import torch

from echelon.errors import UserError
from echelon.models import build_image, image_preset
from echelon.nn.initialization.initial_values import deferred
from echelon.verify import assert_equal
from tests.models.image_cases import NETWORKS, image_case

PLANS = (
    "data=2",
    "data=2 zero=3",
    "pipeline=2 microbatches=2",
    "data=2 recompute=full",
)


pytestmark = pytest.mark.usefixtures("warm_contract")


@pytest.mark.slow
def test_a_network_with_branches_is_equal_to_one_device_under_zero() -> None:
    assert_equal(image_case("inception-v1", steps=2), "data=2 zero=3")


def test_a_network_with_dropout_is_equal_to_one_device_in_a_pipeline_that_recomputes() -> None:
    assert_equal(image_case("alexnet", dropout=0.3), "pipeline=2 microbatches=2 recompute=full")


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", NETWORKS)
def test_all_networks_are_equal_to_one_device(name: str, plan: str) -> None:
    if name == "resnet-50":  # normalises over the batch
        plan = plan.replace(" microbatches=2", "")
    assert_equal(image_case(name, dropout=0.3), plan)


def test_batch_norm_is_refused_with_microbatches() -> None:
    with pytest.raises(UserError, match="microbatches"):
        assert_equal(image_case("resnet-50", steps=1), "data=1 microbatches=2")


@pytest.mark.slow_cases("resnet-50")
@pytest.mark.parametrize("name", NETWORKS)
def test_initial_values_can_wait_for_memory(name: str) -> None:
    torch.manual_seed(3)
    model = build_image(f"{name}-tiny")
    with torch.device("meta"):
        late = build_image(f"{name}-tiny")
    late.to_empty(device="cpu")
    torch.manual_seed(3)
    late.reset_parameters()
    for (key, ours), theirs in zip(model.state_dict().items(), late.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), key


def test_a_deferred_network_has_no_memory() -> None:
    model = deferred(lambda: build_image("vgg16"))
    assert all(parameter.is_meta for parameter in model.parameters())


def test_images_of_another_size_are_refused() -> None:
    model = build_image("nin-tiny")
    with pytest.raises(UserError, match=r"takes images \[batch, 3, 32, 32\].*got \[2, 3, 28, 28\]"):
        model(torch.zeros(2, 3, 28, 28))
    with pytest.raises(UserError, match=r"of floating point numbers, got .* of torch.uint8"):
        model(torch.zeros(2, 3, 32, 32, dtype=torch.uint8))


def test_a_config_with_other_classes_is_not_that_of_the_model() -> None:
    model = build_image("nin-tiny")
    raw = model.config_json(torch.float32)
    assert model.config_errors(raw) == []
    (error,) = model.config_errors({**raw, "classes": 9})
    assert "says classes=9, the model has 8" in error
    (error,) = model.config_errors({"model_type": "gpt2"})
    assert "must be 'echelon-image'" in error
    assert image_preset("nin-tiny") == model.config
