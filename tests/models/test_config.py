import ast
import dataclasses
import inspect
import math
from types import SimpleNamespace

import pytest
import torch

import echelon.models.config
from echelon.errors import UserError
from echelon.models import ExpertsConfig, ModelConfig, RopeScaling, build
from echelon.models.config import value_errors
from echelon.nn.experts import HierarchicalGate, SigmoidGate, gates_of
from tests.models.conftest import MIXTURES

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


def test_configs_need_no_torch():
    tree = ast.parse(inspect.getsource(echelon.models.config))
    froms = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    plain = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    ours = {"echelon.errors", "echelon.models.config"}
    assert froms | plain <= {"collections.abc", "dataclasses", "math", "typing"} | ours


VALID = {"num_experts": 8, "top_k": 2, "hidden": 16}


def expert_errors_of(**values: object) -> list[str]:
    with pytest.raises(UserError) as caught:
        ExpertsConfig(**VALID | values)
    return [error.split(":")[0] for error in caught.value.errors]


def test_all_errors_of_experts_are_listed_at_once():
    errors = expert_errors_of(
        gate="softmx", top_k=0, hidden=1.5, shared=-1, capacity=0, balance=-1, normalize=1
    )
    names = ["gate", "top_k", "hidden", "shared", "normalize", "balance", "capacity"]
    assert [error.split("=")[0] for error in errors] == names


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"top_k": 9}, "top_k=9 num_experts=8"),
        ({"top_k": 1}, "top_k=1 normalize=True"),
        ({"gate": "switch"}, "top_k=2 gate='switch'"),
        ({"gate": "gshard", "top_k": 1}, "top_k=1 gate='gshard'"),
        ({"gate": "sigmoid", "balance": 0.1}, "balance=0.1 gate='sigmoid'"),
        ({"scale": 2.0}, "scale=2.0 gate='softmax'"),
        ({"gate": "sigmoid", "groups": 3}, "num_experts=8 groups=3"),
        ({"gate": "sigmoid", "groups": 4, "group_top_k": 5}, "group_top_k=5 groups=4"),
        ({"gate": "sigmoid", "groups": 8, "group_top_k": 1}, "top_k=2 group_top_k=1"),
        ({"gate": "hierarchical", "groups": 4, "group_top_k": 3}, "top_k=2 group_top_k=3"),
        ({"shared_gate": True}, "shared_gate=True shared=0"),
    ],
)
def test_values_that_do_not_fit_together(values, error):
    assert expert_errors_of(**values) == [error]


def test_a_model_with_experts_has_them_in_a_layer_and_no_width_that_nothing_has():
    experts = ExpertsConfig(**VALID, first_dense=2)
    with pytest.raises(UserError, match=r"layers=2 experts\.first_dense=2: no layer is left"):
        ModelConfig("llama", 2, 16, 4, vocab=8, sequence=8, experts=experts)
    with pytest.raises(UserError, match=r"ffn=40 experts\.first_dense=0: no layer has a dense"):
        ModelConfig("llama", 2, 16, 4, vocab=8, sequence=8, ffn=40, experts=ExpertsConfig(**VALID))
    with pytest.raises(UserError, match="experts=8: must be an ExpertsConfig"):
        ModelConfig("llama", 2, 16, 4, vocab=8, sequence=8, experts=8)


@pytest.mark.parametrize("name", MIXTURES)
def test_active_parameters_are_those_that_a_token_is_computed_with(name):
    """Of the experts, those that get a gradient from one token."""
    config = MIXTURES[name]
    torch.manual_seed(0)
    model = build(config).double().eval()
    model(torch.zeros(1, 1, dtype=torch.int64)).sum().backward()
    used = 0
    for key, parameter in model.named_parameters():
        if ".experts." in key:
            assert parameter.grad is not None
            used += int((parameter.grad.flatten(1).abs().sum(1) > 0).sum()) * parameter[0].numel()
        else:
            used += parameter.numel()
    assert used == config.num_active_parameters


def test_fields_reach_the_gate():
    (first, _) = gates_of(build(MIXTURES["sigmoid"]))
    assert isinstance(first, SigmoidGate)
    assert (first.top_k, first.groups, first.top_groups, first.scale, first.bias_rate) == (3, 4, 2, 2.5, 0.01)
    (first, _) = gates_of(build(MIXTURES["hierarchical"]))
    assert isinstance(first, HierarchicalGate)
    assert (first.groups, first.top_groups, first.top_experts, first.load) == (4, 2, 2, 0.1)
    assert [gate.capacity for gate in gates_of(build(MIXTURES["gshard"]))] == [1.5, 1.5]


VALUES = {
    "count": [1, 2**62],
    "count or 0": [0, 1],
    "number": [1, 1e-9],
    "weight": [0, 0.0, 2.5],
    "fraction": [0, 0.999],
    "flag": [True, False],
}
WRONG = {
    "count": [0, -1, 1.0, True, None, "1"],
    "count or 0": [-1, 0.0, False],
    "number": [0, -1, math.inf, math.nan, True, "1"],
    "weight": [-0.1, math.inf, math.nan, True, None],
    "fraction": [1, 1.0, -0.1, math.nan, False],
    "flag": [0, 1, None, "true"],
}


@pytest.mark.parametrize("kind", VALUES)
def test_each_kind_has_its_borders(kind: str) -> None:
    for value in VALUES[kind]:
        assert value_errors(SimpleNamespace(a=value), kind, "a") == []
    for value in WRONG[kind]:
        (error,) = value_errors(SimpleNamespace(a=value, b=VALUES[kind][0]), kind, "a", "b")
        assert error.startswith(f"a={value!r}: must be ")
