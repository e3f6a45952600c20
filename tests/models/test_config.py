import ast
import dataclasses
import inspect

import pytest

import echelon.models.config
import echelon.models.experts_config
from echelon.errors import UserError
from echelon.models import ModelConfig, RopeScaling, build

GPT = ModelConfig("gpt", layers=2, width=16, heads=4, vocab=37, sequence=24)
LLAMA = ModelConfig("llama", layers=2, width=16, heads=4, kv_heads=2, ffn=24, vocab=37, sequence=24)


def errors_of(**values: object) -> tuple[str, ...]:
    with pytest.raises(UserError) as caught:
        ModelConfig(**values)
    return caught.value.errors


def test_number_of_parameters_is_that_of_the_built_model(any_config):
    assert any_config.num_parameters == sum(p.numel() for p in build(any_config).parameters())


def test_left_out_values_follow_the_family():
    assert (GPT.num_kv_heads, GPT.kv_width, GPT.ffn_width, GPT.bias) == (4, 16, 64, True)
    assert (LLAMA.num_kv_heads, LLAMA.kv_width, LLAMA.ffn_width, LLAMA.bias) == (2, 8, 24, False)


@pytest.mark.parametrize(("width", "ffn"), [(4096, 11008), (5120, 13824)])
def test_llama_feed_forward_rule_gives_the_published_widths(width, ffn):
    assert dataclasses.replace(LLAMA, width=width, ffn=None).ffn_width == ffn


def test_replace_moves_what_follows_from_the_replaced_value():
    wider = dataclasses.replace(GPT, width=32, heads=8)
    assert (wider.num_kv_heads, wider.ffn_width) == (8, 128)


def test_replace_is_checked():
    with pytest.raises(UserError, match="make width a multiple of 5"):
        dataclasses.replace(GPT, heads=5)


def test_all_errors_are_listed_at_once():
    errors = errors_of(
        family="lama", layers=0, width=16.0, heads=True, vocab=1, sequence=-3, ffn=0, norm_epsilon=0, tied=1
    )
    assert [error.split("=")[0] for error in errors] == [
        "family",
        "layers",
        "width",
        "heads",
        "sequence",
        "ffn",
        "norm_epsilon",
        "tied",
    ]
    assert "did you mean 'llama'?" in errors[0]


def test_values_that_do_not_fit_together_are_listed_at_once():
    errors = errors_of(family="llama", layers=1, width=17, heads=4, kv_heads=3, vocab=1, sequence=1)
    assert [error.split(":")[0] for error in errors] == ["width=17 heads=4", "heads=4 kv_heads=3"]


def test_rotary_heads_have_an_even_width():
    assert "make width / heads even" in errors_of(**vars(LLAMA) | {"width": 12})[0]


def test_gpt_has_neither_grouped_heads_nor_rotary_scaling():
    errors = errors_of(**vars(GPT) | {"kv_heads": 2, "rope_scaling": RopeScaling(8.0, 1.0, 4.0, 16)})
    assert [error.split(":")[0] for error in errors] == ["heads=4 kv_heads=2", "rope_scaling"]


@pytest.mark.parametrize("dropout", [-0.1, 1, 1.5, True, "0.1", float("nan")])
def test_dropout_is_a_part_below_the_whole(dropout):
    (error,) = errors_of(**vars(GPT) | {"dropout": dropout})
    assert error == f"dropout={dropout!r}: must be a number from 0 to below 1"


def test_rope_scaling_errors():
    with pytest.raises(UserError) as caught:
        RopeScaling(factor=0, low_freq_factor=float("nan"), high_freq_factor="4", original_sequence=1.5)
    assert len(caught.value.errors) == 4
    with pytest.raises(UserError, match="the low factor must be below the high one"):
        RopeScaling(8.0, 4.0, 4.0, 16)


@pytest.mark.parametrize("module", [echelon.models.config, echelon.models.experts_config])
def test_configs_need_no_torch(module):
    tree = ast.parse(inspect.getsource(module))
    froms = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    plain = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    ours = {"echelon.errors", "echelon.models.experts_config"}
    assert froms | plain <= {"collections.abc", "dataclasses", "math", "typing"} | ours
