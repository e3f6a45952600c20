"""Shapes of echelon's own models."""

import pytest

from echelon.errors import UserError
from echelon.models import preset
from echelon.models.build import presets
from echelon.models.config import ExpertsConfig, ModelConfig
from echelon.planner.shape.presets import PUBLISHED, preset_shape, shape_of


@pytest.mark.parametrize("name", presets())
def test_parameters_are_those_of_the_config(name: str) -> None:
    shape, config = preset_shape(name), preset(name)
    assert shape.num_parameters == config.num_parameters
    assert shape.num_active_parameters == config.num_active_parameters
    assert shape.num_routed_parameters == config.num_routed_parameters


def test_gates_with_more_rows_are_counted() -> None:
    experts = ExpertsConfig(8, 2, 64, gate="noisy-top-k", shared=32, shared_gate=True, first_dense=1)
    config = ModelConfig("llama", 4, 64, 4, 256, 128, experts=experts)
    assert shape_of(config).num_parameters == config.num_parameters


@pytest.mark.parametrize(("name", "billions"), [("gpt-530b", 530), ("gpt-1t", 1008), ("deepseek-v3", 671)])
def test_published_models_have_their_size(name: str, billions: float) -> None:
    assert PUBLISHED[name].num_parameters == pytest.approx(billions * 1e9, rel=0.005)


def test_a_name_that_is_wrong_is_guessed() -> None:
    with pytest.raises(UserError, match="did you mean 'llama3-8b'"):
        preset_shape("llama3-8x")
