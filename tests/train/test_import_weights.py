"""Checkpoints of other systems become folders that a job and transformers load."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import echelon
from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.models import load_hf
from echelon.state.checkpoint.saved import SavedState, summarize
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


SAVED, STEPS = 3, 6


class Network(nn.Module):
    """Has tied weights, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.body = nn.Linear(5, 5)
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.body(self.frozen(self.embedding(tokens)))))
        return out


def network() -> nn.Module:
    torch.manual_seed(0)
    return Network().double()


def groups(parameters: Any, **options: float) -> list[dict[str, Any]]:
    trained = [each for each in parameters if each.requires_grad]
    return [
        {"params": [each for each in trained if each.dim() > 1], "weight_decay": 0.1, **options},
        {"params": [each for each in trained if each.dim() == 1], "lr": 3e-2, **options},
    ]


def batch(step: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(100 * step + dist.get_rank())
    return torch.randint(11, (4,)), torch.randint(11, (4,))


def train_fsdp2(folder: str, flat: bool) -> list[float]:
    """The losses after the save, of the global batches."""
    model, mesh = network(), init_device_mesh("cpu", (2,))
    fully_shard(model.body, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(groups(model.parameters()), lr=1e-2)
    losses = []
    for step in range(STEPS):
        if step == SAVED:
            options = StateDictOptions(flatten_optimizer_state_dict=flat)
            weights, state = get_state_dict(model, optimizer, options=options)
            dcp.save({"model": weights, "optimizer": state, "step": step}, checkpoint_id=folder)
        inputs, targets = batch(step)
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / 2)
    return losses[SAVED:]


def train_ours(folder: str, plan: str) -> list[float]:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups(parameters, lr=1.0, weight_decay=0.5))

    loss = nn.functional.cross_entropy
    with echelon.parallelize(network(), plan, optimizer=make, loss=loss) as engine:
        assert engine.load(folder) == {"imported from": "torch DCP"}
        return [engine.step(batch(step)).loss for step in range(SAVED, STEPS)]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("flat", [False, True])
def test_an_engine_goes_on_as_fsdp2_does(
    tmp_path: Path, warm_ranks: Callable[[int], Ranks], flat: bool
) -> None:
    source, out = str(tmp_path / "dcp"), tmp_path / "out"
    theirs, _ = warm_ranks(2).run(train_fsdp2, source, flat)
    done = import_weights(Path(source), out, to="checkpoint", unsafe_pickle=True)
    # 4 weights, of which the second name of the tied one is left out, and three parts of each trained one
    assert (done.kind, done.prefix, done.tensors) == ("torch DCP", "model.", 5 + 3 * 3)
    assert done.skipped == ("model.head.weight", "step")
    for plan in ("data=2 precision=fp64", "data=2 zero=3 precision=fp64"):
        for losses in warm_ranks(2).run(train_ours, str(out), plan):
            assert losses == pytest.approx(theirs, abs=1e-12)
    assert len(set(theirs)) == 3


def save(folder: Path, state: dict[str, Any]) -> Path:
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def test_steps_and_options_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    weight = torch.arange(6.0).view(2, 3)
    state = {
        "state": {"a": {"step": 7, "exp_avg": weight + 1}},
        "param_groups": [{"lr": 0.25, "betas": (0.9, 0.95), "params": ["a"], "hook": object}],
    }
    source = save(tmp_path / "dcp", {"a": weight, "b": torch.ones(2), "optim": state})
    import_weights(source, tmp_path / "out", to="checkpoint", unsafe_pickle=True)
    saved = SavedState.open(tmp_path / "out")
    saved.verify()
    assert summarize(saved)["step"] == 7
    assert saved.manifest.groups == [{"lr": 0.25, "betas": [0.9, 0.95], "parameters": ["a"]}]
    assert {name: set(parts) for name, parts in saved.manifest.tensors.items()} == {
        "a": {"value", "step", "exp_avg"},
        "b": {"value"},
    }


def test_what_makes_no_checkpoint_is_refused(tmp_path: Path) -> None:
    alone = save(tmp_path / "alone", {"a": torch.ones(2)})
    strange = save(
        tmp_path / "strange", {"a": torch.ones(2), "optimizer": {"state": {"0": {"exp_avg": torch.ones(2)}}}}
    )
    arguments: dict[str, Any] = {"to": "checkpoint", "unsafe_pickle": True}
    with pytest.raises(UserError, match="has no state of an optimizer by names"):
        import_weights(alone, tmp_path / "out", **arguments)
    with pytest.raises(UserError, match="has state of what is no weight here: 0"):
        import_weights(strange, tmp_path / "out", **arguments)
    with pytest.raises(UserError, match=r"engine\.load converts them"):
        import_weights(alone, tmp_path / "out", dtype="bfloat16", **arguments)
    with pytest.raises(UserError, match="did you mean 'checkpoint'"):
        import_weights(alone, tmp_path / "out", to="checkpoints", unsafe_pickle=True)
    assert not (tmp_path / "out").exists()
