import pytest

from echelon.errors import UserError
from echelon.models import GPT, Llama, build, preset


def test_a_config_or_a_name_gives_the_model_of_its_family(config):
    assert type(build(config)) is {"gpt": GPT, "llama": Llama}[config.family]
    assert type(build("llama-tiny")) is Llama
    assert build("gpt-tiny").config == preset("gpt-tiny")


def test_unknown_name():
    with pytest.raises(UserError, match="did you mean 'gpt-small'"):
        build("gpt-smal")
