"""Which model type of transformers a model has, and what is refused."""

import dataclasses
import json

import pytest

from echelon.errors import UserError
from echelon.models import build, preset, read_hf_config, save_hf
from echelon.models.hf.config import config_from_hf, config_to_hf
from echelon.models.hf.dialects import dialect_of
from tests.models.conftest import MIXTURES
from tests.models.hf.test_experts import IN_TRANSFORMERS


@pytest.mark.parametrize("name", MIXTURES)
def test_every_mixture_has_its_model_type(name):
    assert dialect_of(MIXTURES[name]) == (name if name in ("deepseek", *IN_TRANSFORMERS) else "echelon")
    for big, wanted in (("mixtral-8x7b", "mixtral"), ("qwen3-30b-a3b", "qwen3_moe")):
        assert dialect_of(preset(big)) == wanted
    assert dialect_of(preset("deepseek-moe-16b")) == "deepseek"
    assert dialect_of(preset("moe-tiny")) == "mixtral"


def test_what_our_models_cannot_do_is_refused():
    raw = config_to_hf(MIXTURES["qwen3_moe"], "float32")
    with pytest.raises(UserError) as caught:
        config_from_hf(raw | {"mlp_only_layers": [1], "decoder_sparse_step": 2, "num_experts_per_tok": 9})
    starts = ["decoder_sparse_step=2", "mlp_only_layers=[1]", "top_k=9 num_experts=5"]
    assert [error.split(":")[0] for error in caught.value.errors] == starts
    mixtral = config_to_hf(MIXTURES["mixtral"], "float32")
    with pytest.raises(UserError, match="sliding_window=4: is not supported"):
        config_from_hf(mixtral | {"sliding_window": 4})


def test_our_own_type_lists_all_errors(tmp_path):
    config = MIXTURES["echelon"]
    raw = config_to_hf(config, "float32")
    assert config_from_hf(json.loads(json.dumps(raw))) == config
    del raw["layers"]
    raw["experts"] |= {"top_k": 5}
    with pytest.raises(UserError) as caught:
        config_from_hf(raw)
    assert [error.split(":")[0] for error in caught.value.errors][:2] == ["layers", "top_k=5 num_experts=4"]
    stretched = dataclasses.replace(config, rope_scaling=None, tied=False)
    save_hf(build(stretched), tmp_path)
    assert read_hf_config(tmp_path) == stretched
