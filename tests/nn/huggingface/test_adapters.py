"""Models of peft train as on one device, and what the engine writes is what plain peft loads."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon.collectives import RecordingGroup
from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.nn.huggingface.adapters import Place, find_places, reason_not_passed_on
from echelon.nn.layering import how_to_list, listed_layers
from echelon.nn.wrapping import Wrapping
from echelon.parallel.tensor.split import split_over
from echelon.verify import Case, assert_equal
from echelon.verify.case import patch_float64

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

from tests.foreign.adapters import ADAPTED, adamw, batch, lora, loss  # noqa: E402
from tests.foreign.language import LANGUAGE, tokens  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
BOUND, STEPS = 1e-9, 3


def case(kind: str) -> Case:
    return Case(ADAPTED[kind], batch, loss, adamw, steps=STEPS)


def logits(model: Any) -> Tensor:
    """Of a batch that was never trained on."""
    patch_float64(model)
    with torch.no_grad():
        output: Tensor = model.eval()(input_ids=batch(99)[0]).logits
    return output


def one_device(kind: str) -> Tensor:
    """The logits after the same steps in plain torch."""
    model = case(kind).build()
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    for step in range(STEPS):
        inputs, targets = batch(step)
        total, count = loss(model(inputs), targets)
        (total / count).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return logits(model)


def train_and_save(kind: str, plan: str, folder: Path) -> dict[str, int]:
    model = case(kind).build()
    with echelon.parallelize(model, plan, optimizer=adamw, loss=loss, clip=1.0) as engine:
        for step in range(STEPS):
            engine.step(engine.local(batch(step)))
        engine.save_pretrained(folder / "adapters")
        engine.save_pretrained(folder / "merged", merged=True, shard_bytes=20_000)
        return engine.memory().now


def load_adapters(base: nn.Module, folder: Path) -> nn.Module:
    model: Any = peft.PeftModel.from_pretrained(base.double(), folder)
    for other in (path for path in folder.iterdir() if path.is_dir()):
        model.load_adapter(other, other.name)
        model.base_model.set_adapter(["default", other.name])
    return model  # type: ignore[no-any-return]


def check_saved(kind: str, plan: str, ranks: Ranks, folder: Path) -> list[dict[str, int]]:
    """Train on ranks, and load what they wrote with peft and transformers alone."""
    memory: list[dict[str, int]] = ranks.run(train_and_save, kind, f"{plan} precision=fp64", folder)
    expected = one_device(kind)
    torch.manual_seed(0)
    family = {"mixtral": "mixtral", "gpt2": "gpt2", "tied": "gpt2"}.get(kind, "llama")
    loaded = load_adapters(LANGUAGE[family].model(), folder / "adapters")
    eager = {"experts_implementation": "eager"} if family == "mixtral" else {}  # in float64
    load = transformers.AutoModelForCausalLM.from_pretrained
    merged = load(folder / "merged", dtype=torch.float64, **eager)
    assert not any("lora" in name or "modules_to_save" in name for name in merged.state_dict())
    for model in (loaded, merged):
        assert (logits(model) - expected).abs().max() < BOUND
    return memory


PLANS = [
    ("llama", "data=2", 2),
    ("llama", "data=2 zero=1", 2),
    ("llama", "data=2 zero=2", 2),
    ("llama", "data=2 zero=3", 2),
    ("llama", "tensor=2", 2),
    ("llama", "pipeline=2 microbatches=2", 2),
    ("llama", "data=2 tensor=2 zero=3", 4),
    ("llama", "data=2 recompute=full offload=optimizer zero=1", 2),
    ("llama", "tensor=2 sequence=true recompute=full", 2),
    ("mixtral", "expert=2 data=2", 2),
    ("modules to save", "pipeline=2 tensor=2", 4),
    ("embedding", "tensor=2", 2),
    ("dora", "data=2 zero=3", 2),
    ("patterns", "tensor=2", 2),
    ("two", "tensor=2", 2),
    ("tied", "pipeline=2", 2),
    ("last layer", "pipeline=2", 2),
]
IDS = [f"{kind}-{plan}" for kind, plan, _ in PLANS]
FAST = (
    "llama-data=2 zero=3",
    "llama-tensor=2",
    "mixtral-expert=2 data=2",
    "modules to save-pipeline=2 tensor=2",
)


@pytest.mark.quick_cases(1)
@pytest.mark.slow_cases(*(each for each in IDS if each not in FAST))
@pytest.mark.parametrize(("kind", "plan", "ranks"), PLANS, ids=IDS)
def test_adapters_are_those_of_one_device_in_plain_peft(
    kind: str, plan: str, ranks: int, warm_ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    memory = check_saved(kind, plan, warm_ranks(ranks), tmp_path)
    if "tensor" in plan or "pipeline" in plan or "expert" in plan:
        return
    parameters = list(ADAPTED[kind]().parameters())
    whole = sum(p.numel() * 8 for p in parameters)
    trained = sum(p.numel() * 8 for p in parameters if p.requires_grad)
    for rank in memory:  # frozen weights have no gradients and no state
        assert rank["gradients"] < 1.5 * trained < 0.3 * whole
        assert rank["optimizer"] < 3 * trained
    if plan == "data=2 zero=3" and kind == "llama":
        assert all(rank["parameters"] < 0.6 * whole for rank in memory)


@pytest.mark.slow_cases("dropout-tensor=2 sequence=true", "dropout-data=2 pipeline=2", "deepseek-tensor=2")
@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("gpt2", "tensor=2"),
        ("dropout", "tensor=2 sequence=true"),
        ("dropout", "data=2 pipeline=2"),
        ("deepseek", "tensor=2"),
    ],
    ids=lambda value: value,
)
def test_masks_of_adapters_are_those_of_one_device(kind: str, plan: str) -> None:
    assert_equal(case(kind), plan)


# Where modules of adapters are.


def test_places_have_the_names_of_the_model_without_adapters() -> None:
    model: Any = lora("llama", ["q_proj"], modules_to_save=["lm_head"])
    places = find_places(model)
    path = "base_model.model.model.layers.0.self_attn"
    plain = "model.layers.0.self_attn"
    assert places["base_model.model"] == Place("")
    assert places[path] == Place(plain)
    assert places[f"{path}.k_proj"] == Place(f"{plain}.k_proj")
    assert places[f"{path}.q_proj"] == Place(f"{plain}.q_proj", "layer")
    assert places[f"{path}.q_proj.base_layer"] == Place(f"{plain}.q_proj", "base")
    assert places[f"{path}.q_proj.lora_A.default"] == Place(f"{plain}.q_proj", "lora_A")
    assert places["base_model.model.lm_head.original_module"] == Place("lm_head", "base")
    assert places["base_model.model.lm_head.modules_to_save.default"] == Place("lm_head", "base")
    inside = find_places(model.get_base_model())
    assert inside[f"{plain}.q_proj.lora_B.default"] == Place(f"{plain}.q_proj", "lora_B")


def test_layers_of_adapters_around_layers_are_those_of_the_model_inside() -> None:
    model: Any = ADAPTED["experts"]()
    assert len(listed_layers(model)) == len(listed_layers(model.get_base_model())) == 4
    assert not reason_not_passed_on(model)


def _prompted() -> Any:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    return peft.get_peft_model(LANGUAGE["llama"].model(), config)


def _weighted() -> Any:
    config = peft.AdaLoraConfig(init_r=2, target_r=1, total_step=9, target_modules=["q_proj"])
    return peft.get_peft_model(LANGUAGE["llama"].model(), config)


@pytest.mark.parametrize(
    ("make", "name"),
    [(_prompted, "PromptTuningConfig"), (_weighted, "AdaLoraConfig")],
    ids=["prompt tuning", "AdaLoRA"],
)
@pytest.mark.parametrize("plan", ["pipeline=2", "tensor=2"])
def test_adapters_with_a_forward_of_their_own_are_refused_where_layers_run(
    make: Callable[[], nn.Module], name: str, plan: str
) -> None:
    """Their tokens, or their term of the loss, would be lost."""
    model = make()
    assert not listed_layers(model)
    assert name in how_to_list(model)
    with pytest.raises(UserError, match=f"what {name} adds is in its own forward.*use adapters that replace"):
        echelon.parallelize(model, plan, optimizer=adamw)


@pytest.mark.parametrize("plan", ["data=2", "data=2 expert=2", "pipeline=2"])
def test_adapters_of_single_parameters_are_refused(plan: str) -> None:
    """With expert=2 they ended in an error of torch about sizes."""
    with pytest.raises(UserError, match=r"experts: peft puts another tensor.*\(target_modules\)"):
        echelon.parallelize(ADAPTED["experts"](), plan, optimizer=adamw, loss=loss)


@pytest.mark.slow_cases("_prompted")
@pytest.mark.parametrize("make", [_prompted, _weighted], ids=lambda make: make.__name__)
def test_adapters_with_a_forward_of_their_own_have_their_own_loss(make: Callable[[], nn.Module]) -> None:
    """AdaLoRA's term was left out, and logits of added tokens had no labels."""
    assert_equal(Case(make, tokens, None, adamw, steps=2), "data=2")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("dora", "q_proj is 'column' in the table, and DoraLinearVariant of peft needs its whole matrix"),
        ("head", "lm_head is 'vocabulary' in the table, and logits of an adapter cannot be split"),
        (
            "experts",
            "mlp.experts is 'experts' in the table, and lora.ParamWrapper of peft adapts it; only LoRA",
        ),
    ],
)
def test_adapters_that_cannot_be_split_are_refused_by_name(kind: str, message: str) -> None:
    group = RecordingGroup("tensor", 0, 2)
    with pytest.raises(UserError) as caught:
        split_over(
            ADAPTED[kind](), group, None, Wrapping(), sequence=False, whole_sequence=[], join_logits=True
        )
    errors = caught.value.errors
    assert any(message in error for error in errors), errors
    assert all(error.endswith("or use data, zero and pipeline instead of tensor") for error in errors)


def test_a_users_table_has_the_names_of_the_model_without_adapters() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = ADAPTED["head"]()
    group, table = RecordingGroup("tensor", 0, 2), {"lm_head": "replicated"}
    sharded = split_over(model, group, table, Wrapping(), sequence=False, whole_sequence=[], join_logits=True)
    assert not any("lm_head" in name for name in sharded.shards)
    assert any(name.endswith("q_proj.lora_B.default.weight") for name in sharded.shards)


# Quantised weights under adapters.


class Scales:
    """As bitsandbytes keeps them, out of sight of torch."""

    def __init__(self, rows: int) -> None:
        self.absmax = torch.rand(rows, 1) / 255


class Packed(nn.Parameter):
    quant_state: Scales


Scales.__module__ = Packed.__module__ = "bitsandbytes.nn"


class PackedLinear(nn.Module):
    """A frozen matrix of bytes, with its scales in a buffer, or as bitsandbytes has them."""

    def __init__(self, inputs: int, outputs: int, *, hidden_scales: bool) -> None:
        super().__init__()
        packed = torch.randint(0, 255, (outputs, inputs), dtype=torch.uint8)
        self.down, self.up = nn.Linear(inputs, 2, bias=False), nn.Linear(2, outputs, bias=False)
        if hidden_scales:
            self.weight: nn.Parameter = Packed(packed, requires_grad=False)
            self.weight.quant_state = Scales(outputs)
        else:
            self.weight = nn.Parameter(packed, requires_grad=False)
            self.register_buffer("scales", torch.rand(outputs, 1) / 255)

    def forward(self, x: Tensor) -> Tensor:
        scales = self.weight.quant_state.absmax if isinstance(self.weight, Packed) else self.scales
        return x @ ((self.weight.to(x.dtype) - 127) * scales).T + self.up(self.down(x))


def packed_model(*, hidden_scales: bool = False) -> nn.Module:
    sizes = [(8, 16), (16, 16), (16, 4)]
    return nn.Sequential(*(PackedLinear(*size, hidden_scales=hidden_scales) for size in sizes))


def vectors(step: int) -> tuple[Tensor, Tensor]:
    values = torch.randn(8, 12, generator=torch.Generator().manual_seed(step))
    return values[:, :8], values[:, 8:]


@pytest.mark.slow_cases("data=2 zero=1", "pipeline=2")
@pytest.mark.parametrize("plan", ["data=2 zero=3", "data=2 zero=1", "pipeline=2"])
def test_frozen_bytes_are_weights_like_others(plan: str) -> None:
    assert_equal(Case(packed_model, vectors, nn.functional.mse_loss, adamw, steps=STEPS), plan)


def trained_over_scales(seed: int | None) -> tuple[list[float], str]:
    """Losses, or what is said of ranks with different scales."""
    torch.manual_seed(torch.distributed.get_rank() if seed is None else seed)
    model, losses = packed_model(hidden_scales=True), []
    try:
        with echelon.parallelize(
            model, "data=2 zero=1", optimizer=adamw, loss=nn.functional.mse_loss
        ) as engine:
            losses = [float(engine.step(engine.local(vectors(step))).loss) for step in range(STEPS)]
    except UserError as error:
        return [], str(error)
    return losses, ""


def test_scales_that_torch_does_not_list_must_be_the_same_on_every_rank(
    warm_ranks: Callable[[int], Ranks],
) -> None:
    ranks = warm_ranks(2)
    for _, error in ranks.run(trained_over_scales, None):
        assert "0.weight with scales of bits" in error
        assert "give parallelize the same model on every rank" in error
    torch.manual_seed(3)
    model, expected = packed_model(hidden_scales=True), []
    with echelon.parallelize(model, "data=1", optimizer=adamw, loss=nn.functional.mse_loss) as engine:
        expected = [float(engine.step(vectors(step)).loss) for step in range(STEPS)]
    for losses, _ in ranks.run(trained_over_scales, 3):
        assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("plan", ["data=2 zero=3", "tensor=2", "pipeline=2", "offload=parameters"])
def test_weights_with_hidden_scales_are_refused_where_ranks_have_parts(plan: str) -> None:
    with pytest.raises(UserError, match=r"0.weight and 2 others are Packed.*use data with zero=0, 1 or 2"):
        echelon.parallelize(packed_model(hidden_scales=True), plan, optimizer=adamw)


class TwoTensors(nn.Parameter):
    """As the weights of torchao say what they are made of."""

    def __tensor_flatten__(self) -> None: ...


def test_weights_that_are_several_tensors_are_refused() -> None:
    model = nn.Linear(2, 2)
    model.bias = TwoTensors(torch.zeros(2), requires_grad=False)
    with pytest.raises(UserError, match=r"bias and 0 others are TwoTensors.*quantise with bitsandbytes"):
        echelon.parallelize(model, "data=2", optimizer=adamw, loss=nn.functional.mse_loss)
