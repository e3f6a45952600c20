"""The Trainer of transformers under a plan trains as the plain one on one device."""

import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.plan import Plan
from echelon.train.integrations.hf_trainer import EngineOptimizer, ModelInLoop, optimizer_maker, taken_over
from tests.train.integrations import packages

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

BATCH = 8  # of all replicas together
# Of different lengths. The last batch of an epoch has three, of which replicas get different numbers.
SAMPLES = [{"input_ids": [(start + step) % 32 for step in range(4 + start % 5)]} for start in range(27)]
Warm = Callable[[int], Ranks]


def collate(samples: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Ids padded to the longest, with labels that leave padding out."""
    rows = [torch.tensor(sample["input_ids"]) for sample in samples]
    labels = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
    return {"input_ids": labels.clamp(min=0), "attention_mask": (labels >= 0).long(), "labels": labels}


def loss_in_float64(logits: Tensor, labels: Tensor, num_items_in_batch: Any = None, **_: Any) -> Tensor:
    """That of causal models of transformers, which round logits to float32."""
    targets = torch.nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
    counted = (targets != -100).sum() if num_items_in_batch is None else num_items_in_batch
    flat = (logits.flatten(0, 1), targets.flatten())
    return torch.nn.functional.cross_entropy(*flat, reduction="sum") / counted


def tiny_model() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, **sizes)).double()
    model.loss_function = loss_in_float64
    return model


def arguments(folder: str, size: int, **options: Any) -> Any:
    settings = {"num_train_epochs": 2, "learning_rate": 1e-2, "weight_decay": 0.1, "logging_steps": 1}
    settings |= {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "use_cpu": True}
    settings |= {"warmup_steps": 2, "max_grad_norm": 0.5, "dataloader_pin_memory": False}
    settings |= {"per_device_train_batch_size": size, "per_device_eval_batch_size": size}
    return transformers.TrainingArguments(output_dir=folder, **settings | options)


def recording(kind: type) -> type:
    """A Trainer that keeps the loss and the norm of each step."""

    class Recording(kind):  # type: ignore[misc]
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            loss = super().training_step(*args, **kwargs)
            self.__dict__.setdefault("losses", []).append(loss.item())
            return loss

    return Recording


def train_plain(folder: Path, **options: Any) -> tuple[list[float], dict[str, Tensor], dict[str, float]]:
    accumulated = options.get("gradient_accumulation_steps", 1)
    args = arguments(str(folder), BATCH // accumulated, **options)
    data = {"train_dataset": SAMPLES, "eval_dataset": SAMPLES[:16], "data_collator": collate}
    trainer = recording(transformers.Trainer)(tiny_model(), args, **data)
    trainer.train()
    losses = torch.tensor(trainer.losses, dtype=torch.float64)
    if accumulated > 1:  # each is a part of the step's, and an epoch's last step has fewer of them
        epochs = losses.chunk(2)
        losses = torch.stack([part.sum() for epoch in epochs for part in epoch.split(accumulated)])
    return losses.tolist(), trainer.model.state_dict(), trainer.evaluate()


def reset_accelerate() -> None:
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


def train_under(plan: str, folder: str, options: dict[str, Any], resume: str | None = None) -> Any:
    from echelon.integrations import Trainer

    warnings.simplefilter("ignore")
    plan = echelon.Plan.parse(plan)
    accumulated = options.get("gradient_accumulation_steps", 1)
    args = arguments(folder, BATCH // accumulated // plan.data, **options)
    data = {"train_dataset": SAMPLES, "eval_dataset": SAMPLES[:16], "data_collator": collate}
    trainer = recording(Trainer)(tiny_model(), args, plan=plan, **data)
    try:
        trainer.train(resume_from_checkpoint=resume)
        metrics = trainer.evaluate()
        return trainer.losses, trainer.engine.full_state_dict(), metrics, trainer.state.log_history
    finally:
        trainer.close()
        reset_accelerate()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("plan", "options"),
    [
        ("data=2 precision=fp64", {}),
        ("data=2 zero=3 precision=fp64", {"gradient_accumulation_steps": 2}),
        ("pipeline=2 microbatches=2 precision=fp64", {}),
    ],
)
def test_a_plan_trains_as_the_plain_trainer(
    plan: str, options: dict[str, Any], warm_ranks: Warm, tmp_path: Path
) -> None:
    losses, weights, metrics = train_plain(tmp_path / "plain", **options)
    reset_accelerate()
    for own, whole, measured, logged in warm_ranks(2).run(train_under, plan, str(tmp_path / "ours"), options):
        assert own == pytest.approx(losses, abs=1e-9)
        assert measured["eval_loss"] == pytest.approx(metrics["eval_loss"], abs=1e-9)
        for name, value in weights.items():
            torch.testing.assert_close(whole[name], value, rtol=0, atol=1e-9)
        assert logged[0]["grad_norm"] > 0.5, "the norm before clipping"
    assert losses[-1] < losses[0]


def test_another_plan_goes_on_from_a_checkpoint(warm_ranks: Warm, tmp_path: Path) -> None:
    ranks, saving = warm_ranks(2), {"save_strategy": "steps", "save_steps": 3}
    losses, weights, *_ = ranks.run(train_under, "data=2 precision=fp64", str(tmp_path), saving)[0]
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "checkpoint-3",
        "checkpoint-6",
        "checkpoint-8",
    ]
    checkpoint = tmp_path / "checkpoint-3"
    others = ranks.run(train_under, "data=2 zero=3 precision=fp64", str(tmp_path / "b"), {}, str(checkpoint))
    for own, whole, *_ in others:
        assert own == pytest.approx(losses[3:], abs=1e-9)
        for name, value in weights.items():
            torch.testing.assert_close(whole[name], value, rtol=0, atol=1e-9)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    assert model.config.vocab_size == 32


def evaluate_under(plan: str, folder: str) -> Any:
    """The losses of a `compute_loss` of one's own, and what `predict` returns on this rank."""
    from echelon.integrations import Trainer

    class Halved(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(model, inputs, *args, **kwargs) / 2

    warnings.simplefilter("ignore")
    args = arguments(folder, BATCH // 2)
    trainer = recording(Halved)(tiny_model(), args, plan=plan, train_dataset=SAMPLES, data_collator=collate)
    try:
        trainer.train()
        return trainer.losses, trainer.predict(SAMPLES[:7]).predictions, trainer.engine.full_state_dict()
    finally:
        trainer.close()
        reset_accelerate()


def test_a_loss_of_ones_own_and_predictions_on_every_rank(warm_ranks: Warm, tmp_path: Path) -> None:
    results = warm_ranks(2).run(evaluate_under, "data=2 precision=fp64", str(tmp_path / "ours"))
    plain, *_ = train_plain(tmp_path / "plain")
    reset_accelerate()
    batch, model = collate(SAMPLES[:7]), tiny_model().eval()
    for losses, predictions, weights in results:
        assert losses[0] == pytest.approx(plain[0] / 2, abs=1e-9)
        model.load_state_dict(weights)
        with torch.no_grad():
            expected = model(**batch).logits
        torch.testing.assert_close(torch.tensor(predictions), expected, rtol=0, atol=1e-9)


def test_an_optimizer_with_whole_parameters_is_refused(tmp_path: Path) -> None:
    from echelon.integrations import Trainer

    model = tiny_model()
    optimizers = (torch.optim.SGD(model.parameters(), lr=0.1), None)
    trainer = Trainer(
        model,
        arguments(str(tmp_path), 4),
        train_dataset=SAMPLES,
        optimizers=optimizers,
        plan="precision=fp64",
    )
    with pytest.raises(UserError, match="optimizer_cls_and_kwargs"):
        trainer.create_optimizer()


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["data=2 precision=fp64", "pipeline=2 microbatches=2 precision=fp64"])
def test_the_sft_trainer_of_trl_trains_as_without_a_plan(plan: str) -> None:
    packages.need("trl", "datasets")
    plain, ours = packages.run_program("sft.py"), packages.run_program("sft.py", plan, ranks=2)
    assert ours["losses"] == pytest.approx(plain["losses"], abs=1e-6)
    assert plain["losses"][-1] < plain["losses"][0]


def arguments_like(**given: Any) -> Any:
    return SimpleNamespace(**{"gradient_accumulation_steps": 1, "n_gpu": 0, "_n_gpu": 0} | given)


def test_accumulation_becomes_microbatches() -> None:
    given = arguments_like(gradient_accumulation_steps=3, n_gpu=2)
    own, plan = taken_over(given, Plan.parse("pipeline=2 microbatches=2"))
    assert plan == Plan.parse("pipeline=2 microbatches=6")
    assert (own.gradient_accumulation_steps, own._n_gpu) == (1, 1)
    assert given.gradient_accumulation_steps == 3, "the user's own are as they were"


def test_all_that_a_plan_says_is_refused_at_once_with_its_word() -> None:
    with pytest.raises(UserError) as raised:
        taken_over(arguments_like(bf16=True, fsdp="full_shard", gradient_checkpointing=True), Plan())
    assert str(raised.value).startswith("3 errors in the arguments of a Trainer with a plan:")
    assert "bf16=True): the engine does this; write precision=bf16 in the plan" in str(raised.value)


def test_groups_follow_the_names_of_what_a_rank_holds() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    make = optimizer_maker(model, torch.optim.AdamW, {"lr": 0.5}, ["0.weight", "1.weight"], 0.25)
    first, second = make(model[1].parameters()).param_groups  # a stage's
    assert (first["params"], first["weight_decay"], first["lr"]) == ([model[1].weight], 0.25, 0.5)
    assert (second["params"], second["weight_decay"]) == ([model[1].bias], 0.0)
    (only,) = make([model[0].bias]).param_groups
    assert only["params"] == [model[0].bias]


@pytest.mark.parametrize(("kind", "options"), [(torch.optim.SGD, {"params": []}), (lambda: None, {})])
def test_an_optimizer_that_groups_parameters_itself_is_refused(kind: Any, options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="use an optimizer of torch"):
        optimizer_maker(nn.Linear(1, 1), kind, options, [], 0.0)


def test_the_loop_sees_groups_of_the_engine_and_whole_shapes() -> None:
    model = nn.Linear(2, 3).double()
    in_loop = ModelInLoop(model)
    sgd, loss = torch.optim.SGD, nn.functional.mse_loss
    with echelon.parallelize(
        model, "precision=fp64", optimizer=lambda p: sgd(p, lr=0.5), loss=loss
    ) as engine:
        optimizer = EngineOptimizer(engine)
        assert optimizer.param_groups is engine.optimizer.param_groups
        before = model.weight.clone()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(model.weight, before), "the engine has made the update"
        with pytest.raises(UserError, match="closure"):
            optimizer.step(lambda: None)  # type: ignore[arg-type]
    assert in_loop.count() == 9
    assert all(each.is_meta for each in in_loop.parameters())
