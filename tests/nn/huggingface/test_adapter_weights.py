"""Twins of models of peft: what peft would write of them, and what it merges."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon.errors import UserError
from echelon.nn.huggingface.adapters import (
    adapted_layers,
    adapter_files,
    merge_layer,
    merged_form,
)

peft = pytest.importorskip("peft")

from tests.foreign.adapters import ADAPTED, lora  # noqa: E402
from tests.foreign.language import LANGUAGE  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def meta_state(model: nn.Module) -> dict[str, Tensor]:
    """As an engine makes it: tied tensors are one."""
    twins: dict[int, Tensor] = {}
    state = model.state_dict(keep_vars=True)
    return {name: twins.setdefault(id(t), t.detach().to("meta")) for name, t in state.items()}


@pytest.mark.quick_cases(7)
@pytest.mark.parametrize("kind", sorted(ADAPTED))
def test_names_in_files_are_those_of_peft(kind: str) -> None:
    model = ADAPTED[kind]()
    state, whole = meta_state(model), model.state_dict()
    for adapter, files in adapter_files(model, state).items():
        expected = peft.get_peft_model_state_dict(model, adapter_name=adapter)
        assert files.keys() == expected.keys()
        assert all(torch.equal(whole[name], expected[stored]) for stored, name in files.items())


def test_adapters_of_a_model_without_peft_around_it_have_the_same_names() -> None:
    model: Any = ADAPTED["llama"]()
    around, inside = (adapter_files(each, meta_state(each)) for each in (model, model.get_base_model()))
    assert around["default"].keys() == inside["default"].keys()


@pytest.mark.quick_cases(7)
@pytest.mark.parametrize("kind", sorted(ADAPTED))
def test_merged_layers_are_those_of_peft(kind: str) -> None:
    model: Any = ADAPTED[kind]()
    whole, form = model.state_dict(), merged_form(model, meta_state(model))
    weights = {}
    for plain, name in adapted_layers(model).items():
        copies = {key: tensor.clone() for key, tensor in whole.items()}
        layer = merge_layer(model, name, copies)
        weights |= {f"{plain}.{key}": tensor for key, tensor in layer.state_dict().items()}
    assert all(torch.equal(whole[name], tensor) for name, tensor in model.state_dict().items()), "a copy"
    expected = model.merge_and_unload()
    stored = expected.state_dict()
    assert form.state_dict().keys() == stored.keys()
    assert weights
    assert all(torch.equal(stored[name], tensor) for name, tensor in weights.items())
    assert form.config.tie_word_embeddings == (kind == "gpt2")  # "tied" is no more


def test_what_peft_cannot_merge_is_refused_by_its_reason() -> None:
    model = lora("llama", ["q_proj"], lora_bias=True)
    with pytest.raises(UserError, match=r"peft cannot merge Linear: Impossible.*leave out merged=True"):
        merged_form(model, meta_state(model))


def test_a_model_without_adapted_layers_is_refused(tmp_path: Path) -> None:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    model = peft.get_peft_model(LANGUAGE["llama"].model(), config)
    with pytest.raises(UserError, match="has no layers whose adapters could be merged"):
        merged_form(model, meta_state(model))
    plain = LANGUAGE["llama"].model()
    with (
        echelon.parallelize(plain, "data=1", optimizer=torch.optim.SGD) as engine,
        pytest.raises(UserError, match=r"merged=True\): LlamaForCausalLM has no adapters of peft to merge"),
    ):
        engine.save_pretrained(tmp_path, merged=True)
