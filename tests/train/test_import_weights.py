"""Checkpoints of other systems become folders that a job and transformers load."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from echelon.errors import UserError
from echelon.models import load_hf
from echelon.train.import_weights import import_weights
from tests.data.tiny_folders import llama, make_model
from tests.state.weight_files.foreign.test_restricted_pickle import Evil

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch: this is one process


def save_dcp(folder: Path, state: dict[str, Any]) -> Path:
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def trained() -> Any:
    model = llama()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.25
    return model


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_model_of_transformers_comes_back_with_its_tokenizer(tmp_path: Path, wrapped: bool) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, config = trained(), make_model(tmp_path / "base")
    state = {"model": model.state_dict(), "optimizer": {"step": torch.tensor(3.0)}, "note": "text"}
    source = save_dcp(tmp_path / "dcp", state if wrapped else model.state_dict())
    done = import_weights(source, tmp_path / "out", unsafe_pickle=True, config=config)
    assert (done.prefix, done.kind) == ("model." if wrapped else "", "torch DCP")
    assert set(done.skipped) == ({"optimizer.step", "note"} if wrapped else set())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("a").input_ids[0] == 0
    tokens = torch.arange(8)[None]
    torch.testing.assert_close(load_hf(tmp_path / "out")(tokens), model(tokens).logits, rtol=1e-4, atol=1e-5)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    state = {name: tensor for name, tensor in trained().state_dict().items() if "norm" not in name}
    source = save_dcp(tmp_path / "dcp", state)
    with pytest.raises(UserError, match="the weights are not those of") as refusal:
        import_weights(source, tmp_path / "out", unsafe_pickle=True, config=make_model(tmp_path / "base"))
    assert len(refusal.value.errors) == 5
    assert not (tmp_path / "out").exists()


def test_a_plain_file_of_torch_is_read_in_another_type(tmp_path: Path) -> None:
    state = {"state_dict": {"a": torch.randn(3), "b": {"c": torch.ones(2, dtype=torch.int64)}}, "epoch": 4}
    torch.save(state | {"evil": Evil(tmp_path / "evil")}, tmp_path / "model.pt")
    done = import_weights(tmp_path / "model.pt", tmp_path / "out", unsafe_pickle=True, dtype="bfloat16")
    assert (done.tensors, done.kind) == (2, "torch.save")
    assert not (tmp_path / "evil").exists()
    from safetensors.torch import load_file

    read = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(read["state_dict.a"], state["state_dict"]["a"].bfloat16())
    assert read["state_dict.b.c"].dtype == torch.int64


def test_pickle_is_read_only_if_the_caller_says_so(tmp_path: Path) -> None:
    source = save_dcp(tmp_path / "dcp", {"a": torch.ones(2)})
    with pytest.raises(UserError) as refusal:
        import_weights(source, tmp_path, unsafe_pickle=False, config=tmp_path / "nothing", dtype="float33")
    first, *others = refusal.value.errors
    assert "--unsafe-pickle reads it" in first
    assert [error.split()[0] for error in others] == ["--config", "--dtype", "--out"]


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="is no checkpoint that can be imported"):
        import_weights(tmp_path / "folder", tmp_path / "out", unsafe_pickle=True)
    with pytest.raises(UserError, match="there is no such file or folder"):
        import_weights(tmp_path / "nothing", tmp_path / "out", unsafe_pickle=True)
    torch.save([1], tmp_path / "a.pt")
    with pytest.raises(UserError, match="holds no state dict"):
        import_weights(tmp_path / "a.pt", tmp_path / "out", unsafe_pickle=True)
