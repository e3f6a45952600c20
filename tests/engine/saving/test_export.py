"""Weights from Hugging Face folders and back, part by part."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import echelon
from echelon.engine import parallelize
from echelon.engine.saving.export import _Stream
from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.models import build, cross_entropy, load_hf, save_hf
from echelon.state.ownership import StateNames
from tests.engine.test_deferred_start import CONFIG

transformers = pytest.importorskip("transformers")


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {"gpt": lambda: build(CONFIG), "llama": llama}


def token_loss(output: object, targets: Tensor) -> tuple[Tensor, int]:
    logits = output if isinstance(output, Tensor) else output.logits  # type: ignore[attr-defined]
    return nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="sum"
    ), targets.numel()


def there_and_back(kind: str, plan: str, source: Path, target: Path) -> dict[str, Tensor]:
    """Start from one folder, and write another; what rank 0 has in between."""
    model = echelon.deferred(MODELS[kind])
    loss = cross_entropy if kind == "gpt" else token_loss
    with parallelize(
        model,
        plan,
        optimizer=torch.optim.SGD,
        loss=loss,
        weights=source,  # type: ignore[arg-type]
    ) as engine:
        weights = engine.full_state_dict(to="rank0")
        engine.export(target, shard_bytes=20_000)
    return weights


@pytest.fixture(scope="module", params=list(MODELS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    torch.manual_seed(11)
    path, model = tmp_path_factory.mktemp(request.param), MODELS[request.param]()
    if request.param == "gpt":
        save_hf(model, path, shard_bytes=30_000)
    else:
        model.save_pretrained(path)  # type: ignore[operator]
    return request.param, path


PLANS = [
    ("data=2 zero=3", 2),
    ("data=2 zero=1", 2),
    ("tensor=2 pipeline=2", 4),
    ("data=2 tensor=2 zero=3", 4),
]


@pytest.mark.quick_cases(2)
@pytest.mark.slow_cases(
    "gpt-data=2 zero=1", "llama-data=2 tensor=2 zero=3", "llama-data=2 zero=3", "llama-tensor=2 pipeline=2"
)
@pytest.mark.parametrize(("plan", "ranks"), PLANS, ids=[plan for plan, _ in PLANS])
def test_a_folder_comes_back_bit_by_bit(
    plan: str,
    ranks: int,
    folder: tuple[str, Path],
    tmp_path: Path,
    warm_ranks: Callable[[int], Ranks],
) -> None:
    kind, source = folder
    target = tmp_path / "written"
    weights, *others = warm_ranks(ranks).run(there_and_back, kind, plan, source, target)
    assert not any(others)
    assert len(list(target.glob("*.safetensors"))) > 1, "in shards"
    before, after = _stored(source), _stored(target)
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    if kind == "gpt":
        expected = load_hf(source).state_dict()
        assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
    tokens = torch.arange(24).view(2, 12)
    logits = [
        transformers.AutoModelForCausalLM.from_pretrained(path)(tokens).logits for path in (source, target)
    ]
    assert torch.equal(*logits)


def _stored(path: Path) -> dict[str, Tensor]:
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


def refusals(source: Path, target: Path) -> list[list[str]]:
    """What the ranks say of a folder with errors, and of one that cannot be written."""
    said = []
    for weights in (source, None):
        try:
            with parallelize(
                echelon.deferred(MODELS["gpt"]),
                "data=2 zero=3",
                optimizer=torch.optim.SGD,
                loss=cross_entropy,
                weights=weights,
            ) as engine:
                engine.export(target)
        except UserError as error:
            said.append([error.title, *error.errors])
    return said


def test_errors_are_raised_on_every_rank(tmp_path: Path, warm_ranks: Callable[[int], Ranks]) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    save_hf(build(CONFIG), source)
    tensors = load_file(source / "model.safetensors")
    del tensors["transformer.ln_f.weight"]
    tensors["transformer.ln_f.bias"] = torch.zeros(3)
    save_file(tensors, source / "model.safetensors")
    target.write_text("a file")
    first, second = warm_ranks(2).run(refusals, source, target)
    assert first == second
    loading, writing = first
    assert loading[1:] == [
        "transformer.ln_f.weight: is missing",
        f"transformer.ln_f.bias: has shape [3], must be [{CONFIG.width}]",
    ]
    assert "target" in writing[0]


def test_a_folder_that_is_not_there_is_refused() -> None:
    with pytest.raises(UserError, match="there is no such folder"):
        parallelize(
            nn.Linear(2, 2), "data=1", optimizer=torch.optim.SGD, loss=cross_entropy, weights="nowhere"
        )
    with pytest.raises(UserError) as refusal:
        parallelize(
            nn.Linear(2, 2),
            "data=1",
            optimizer=torch.optim.SGD,
            loss=cross_entropy,
            weights=3,  # type: ignore[arg-type]
        )
    assert refusal.value.errors == (
        "weights is a int: must be a folder with a model in Hugging Face's files",
    )


def two_folders(folders: list[Path]) -> str:
    with pytest.raises(UserError) as refusal:
        parallelize(
            echelon.deferred(MODELS["gpt"]),
            "data=2",
            optimizer=torch.optim.SGD,
            loss=cross_entropy,
            weights=folders[torch.distributed.get_rank()],
        )
    return refusal.value.title


def test_copies_of_a_folder_that_differ_are_refused(
    tmp_path: Path, warm_ranks: Callable[[int], Ranks]
) -> None:
    folders = [tmp_path / "old", tmp_path / "new"]
    for folder in folders:
        save_hf(build(CONFIG), folder)
    first, second = warm_ranks(2).run(two_folders, folders)
    assert first == second
    assert "with values" in first


def test_a_model_with_values_takes_those_of_the_folder(tmp_path: Path) -> None:
    torch.manual_seed(1)
    expected = build(CONFIG)
    save_hf(expected, tmp_path)
    with parallelize(
        build(CONFIG), "data=1", optimizer=torch.optim.SGD, loss=cross_entropy, weights=tmp_path
    ) as engine:
        found = engine.full_state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.state_dict().items())


def test_a_folder_of_another_config_is_refused(tmp_path: Path) -> None:
    """All tensors fit, and the model would compute something else."""
    save_hf(build(CONFIG), tmp_path)
    model = build(dataclasses.replace(CONFIG, norm_epsilon=0.5))
    with pytest.raises(UserError, match=r"config.json says norm_epsilon=1e-05, the model has 0.5; build"):
        parallelize(model, "data=1", optimizer=torch.optim.SGD, loss=cross_entropy, weights=tmp_path)


class FailingAssembly:
    """Has memory for all tensors but one."""

    def __init__(self, too_large: str | None) -> None:
        self.too_large, self.names = too_large, list[str]()

    def tensor(self, key: tuple[str, str], to: int | None = None) -> Tensor:
        assert to == 0
        self.names.append(key[0])
        if key[0] == self.too_large:
            raise MemoryError(key[0])
        return torch.zeros(1)


def _abcd_stream(assembly: FailingAssembly) -> _Stream:
    names = StateNames({}, {name: name for name in "abcd"}, frozenset(), {})
    return _Stream(assembly, names, {name: [name] for name in "abcd"})  # type: ignore[arg-type]


def test_a_rank_that_fails_inside_a_tensor_brings_no_other() -> None:
    """Other ranks still wait for its part of that tensor, and once got the next one in its place."""
    assembly = FailingAssembly(too_large="b")
    stream = _abcd_stream(assembly)
    stream.fetch("a")
    with pytest.raises(MemoryError):
        stream.fetch("b")
    stream.finish()
    assert assembly.names == ["a", "b"]


def test_a_rank_that_cannot_write_brings_the_rest() -> None:
    assembly = FailingAssembly(too_large=None)
    stream = _abcd_stream(assembly)
    stream.fetch("a")
    stream.finish()
    assert assembly.names == ["a", "b", "c", "d"]


def written_pretrained(plan: str, target: Path) -> dict[str, Tensor]:
    torch.manual_seed(4)
    with parallelize(llama(), plan, optimizer=torch.optim.SGD) as engine:
        tokens = torch.arange(24).view(2, 12)
        engine.step(engine.local({"input_ids": tokens, "labels": tokens}))
        engine.save_pretrained(target)
        return engine.full_state_dict()


SAVED = ["pipeline=2", "data=2 zero=3", "tensor=2"]


@pytest.mark.parametrize(
    "plan", [SAVED[0], *(pytest.param(plan, marks=pytest.mark.slow) for plan in SAVED[1:])]
)
def test_save_pretrained_writes_what_transformers_writes(
    plan: str, tmp_path: Path, warm_ranks: Callable[[int], Ranks]
) -> None:
    weights, _ = warm_ranks(2).run(written_pretrained, plan, tmp_path / "ours")
    model = llama()
    model.load_state_dict(weights)
    model.save_pretrained(tmp_path / "theirs")  # type: ignore[operator]
    ours, theirs = ({path.name for path in (tmp_path / each).iterdir()} for each in ("ours", "theirs"))
    assert ours == theirs == {"config.json", "generation_config.json", "model.safetensors"}
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "ours" / name).read_text()) == json.loads(
            (tmp_path / "theirs" / name).read_text()
        )
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    tokens = torch.arange(24).view(2, 12)
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)


def test_save_pretrained_is_for_models_of_transformers(tmp_path: Path) -> None:
    with (
        parallelize(build(CONFIG), "data=1", optimizer=torch.optim.SGD, loss=cross_entropy) as engine,
        pytest.raises(UserError, match=r"GPT is not a model of transformers; engine.export\(folder\)"),
    ):
        engine.save_pretrained(tmp_path)
