"""The example of an engine for verl: a training as verl's worker makes it, equal to plain torch.

verl is not among the tools of development: without it, the two modules that the example imports are stand-ins
that this file defines. Where verl is installed, the same tests run with its own.
"""

import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from echelon.launching import Ranks
from echelon.plan import Plan
from examples import verl_engine as example

Warm = Callable[[int], Ranks]
STEPS, CLIP, RATE = 3, 0.5, 0.1
LENGTHS = [5, 7, 4, 6]


class Batch(dict[str, Any]):
    """In the place of a TensorDict."""


class Base:
    """In the place of verl's BaseEngine: its order of calls."""

    def train_batch(self: Any, data: Any, loss_function: Callable[..., Any]) -> Any:
        self.optimizer_zero_grad()
        outputs = self.forward_backward_batch(data, loss_function, forward_only=False)
        norm = self.optimizer_step()
        if self.is_mp_src_rank_with_outputs():
            outputs["metrics"]["grad_norm"] = norm
        return outputs

    def infer_batch(self: Any, data: Any, loss_function: Callable[..., Any] | None = None) -> Any:
        with torch.no_grad():
            return self.forward_backward_batch(data, loss_function, forward_only=True)


class Registry:
    """In the place of verl's EngineRegistry."""

    @staticmethod
    def register(*_: Any, **__: Any) -> Callable[[type], type]:
        return lambda engine: engine


def stand_in(patch: pytest.MonkeyPatch) -> None:
    if find_spec("verl") is not None:
        return
    modules: dict[str, dict[str, Any]] = {
        **{key: {} for key in ("verl", "verl.workers", "verl.workers.engine", "verl.utils")},
        "verl.workers.engine.base": {"BaseEngine": Base, "EngineRegistry": Registry},
        "verl.utils.tensordict_utils": {
            "get": lambda data, name: data[name],
            "get_tensordict": lambda tensors, constants: Batch(**tensors, **constants),
        },
    }
    for name, members in modules.items():
        module = ModuleType(name)
        vars(module).update(members)
        patch.setitem(sys.modules, name, module)
    patch.setattr(
        sys.modules["verl.utils"], "tensordict_utils", sys.modules["verl.utils.tensordict_utils"], False
    )


def make_batch(step: int, samples: slice) -> Any:
    """Packed, as verl has it; the first two tokens of a sample are its prompt."""
    from verl.utils import tensordict_utils

    source = torch.Generator().manual_seed(step)
    ids = [torch.randint(1, 32, (length,), generator=source) for length in LENGTHS]
    advantages = [torch.randn(length, generator=source, dtype=torch.float64) for length in LENGTHS]
    masks = [(torch.arange(length) > 1).long() for length in LENGTHS]
    fields = {"input_ids": ids, "advantages": advantages, "loss_mask": masks}
    packed = {
        name: torch.nested.as_nested_tensor(each[samples], layout=torch.jagged)
        for name, each in fields.items()
    }
    weights = torch.rand(len(LENGTHS), generator=source, dtype=torch.float64)[samples]
    constants = {"temperature": 0.7, "calculate_entropy": True}
    return tensordict_utils.get_tensordict({**packed, "weight": weights}, constants)


def policy_loss(model_output: Any, data: Any, dp_group: Any = None) -> tuple[Tensor, dict[str, Any]]:
    """As verl's: adds up over microbatches, and is a mean over replicas."""
    total = torch.zeros((), dtype=torch.float64)
    scores, entropies = model_output["log_probs"].unbind(), model_output["entropy"].unbind()
    masks, advantages = data["loss_mask"].unbind(), data["advantages"].unbind()
    for sample, mask in enumerate(masks):
        gain = scores[sample] * advantages[sample] + 0.1 * entropies[sample]
        total = total - data["weight"][sample] * (gain[:-1] * mask[1:]).sum()
    return total / data["batch_num_tokens"] * data["dp_size"], {"tokens": int(sum(m.sum() for m in masks))}


def make_model(folder: Path) -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=32,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=8,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
    )
    transformers.GPT2LMHeadModel(config).double().save_pretrained(folder)


def train(folder: Path, checkpoint: Path, plan: str) -> tuple[Any, ...]:
    """As verl's worker does, on this rank."""
    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch)
        rates = {"lr": RATE, "lr_warmup_steps": 2, "betas": (0.9, 0.99), "weight_decay": 0.01}
        configs = {
            "model_config": SimpleNamespace(local_path=str(folder)),
            "engine_config": SimpleNamespace(plan=f"{plan} precision=fp64"),
            "optimizer_config": SimpleNamespace(**rates, clip_grad=CLIP),
            "checkpoint_config": None,
        }
        engine: Any = example.register(backend=f"echelon {plan}")(**configs)
        place = (engine.get_data_parallel_rank(), engine.is_mp_src_rank_with_outputs())
        engine.initialize()
        each = len(LENGTHS) // engine.get_data_parallel_size()
        own = slice(place[0] * each, (place[0] + 1) * each)
        outputs = []
        for step in range(STEPS):
            with engine.train_mode():
                outputs.append(engine.train_batch(make_batch(step, own), policy_loss))
            engine.lr_scheduler_step()
            if step == 0:
                engine.save_checkpoint(str(checkpoint), None, 1)
        weights = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}
        with engine.eval_mode():
            seen = engine.infer_batch(make_batch(9, own), policy_loss)
            bare = engine.infer_batch(make_batch(9, own))
        torch.testing.assert_close(
            seen["model_output"]["log_probs"].values(), bare["model_output"]["log_probs"].values()
        )
        engine.load_checkpoint(str(checkpoint))
        rate = engine.lr_scheduler_step()
        values = seen["model_output"]["log_probs"].unbind()
        return place, outputs_of(outputs), weights, (values, seen["loss"]), rate


def outputs_of(outputs: list[Any]) -> list[tuple[float, int, float]]:
    return [
        (sum(each["loss"]), sum(each["metrics"].get("tokens", [])), each["metrics"].get("grad_norm", 0.0))
        for each in outputs
    ]


def plain(folder: Path) -> tuple[list[tuple[float, int, float]], dict[str, Tensor], list[Tensor], float]:
    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.99), weight_decay=0.01)
        results = []

        def judge(step: int) -> tuple[Tensor, dict[str, Any], list[Tensor]]:
            data = make_batch(step, slice(None))
            rows, _constants = example.unpack(data)
            ids, lengths = rows["input_ids"], rows["input_ids/lengths"]
            mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
            scores = (model(ids, attention_mask=mask).logits / 0.7).log_softmax(-1)
            chosen = scores[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
            entropy = -(scores.exp() * scores).sum(-1)
            tokens = int(rows["loss_mask"].sum())
            total = torch.zeros((), dtype=torch.float64)
            for row, length in enumerate(LENGTHS):
                gain = chosen[row] * rows["advantages"][row, :-1] + 0.1 * entropy[row, :-1]
                counted = gain[: length - 1] * rows["loss_mask"][row, 1:length]
                total = total - rows["weight"][row] * counted.sum()
            return (
                total / tokens,
                {"tokens": tokens},
                [c[: n - 1] for c, n in zip(chosen, LENGTHS, strict=True)],
            )

        for step in range(STEPS):
            for group in optimizer.param_groups:
                group["lr"] = RATE * min(1.0, (step + 1) / 2)
            loss, metrics, _ = judge(step)
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            results.append((loss.item(), metrics["tokens"], float(norm)))
        state = {name: value.detach() for name, value in model.state_dict().items()}
        with torch.no_grad():
            model.eval()
            loss, _, scores = judge(9)
        return results, state, scores, loss.item()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "plan", ["data=2 zero=3", "pipeline=2 microbatches=2", "data=2 microbatches=2", "tensor=2"]
)
def test_a_training_of_verl_is_equal_to_plain_torch(tmp_path: Path, warm_ranks: Warm, plan: str) -> None:
    folder = tmp_path / "model"
    make_model(folder)
    steps, state, scores, evaluated = plain(folder)
    ranks = warm_ranks(Plan.parse(plan).ranks).run(train, folder, tmp_path / "saved", plan)
    sources = [rank for rank in ranks if rank[0][1]]
    assert [rank[0][0] for rank in sources] == list(range(Plan.parse(plan).data))
    for step, (loss, tokens, norm) in enumerate(steps):
        found = [rank[1][step] for rank in sources]
        assert sum(each[0] for each in found) / len(found) == pytest.approx(loss, abs=1e-9)
        assert sum(each[1] for each in found) == tokens
        assert [each[2] for each in found] == pytest.approx([norm] * len(found), abs=1e-9)
    for rank in ranks:
        weights = {name: value for name, value in rank[2].items() if name in state}
        torch.testing.assert_close(weights, state, rtol=0, atol=1e-9)
        assert rank[4] == pytest.approx(RATE)
    seen = [value[:-1] for rank in sources for value in rank[3][0]]
    torch.testing.assert_close(seen, scores, rtol=0, atol=1e-9)
    assert sum(sum(rank[3][1]) for rank in sources) / len(sources) == pytest.approx(evaluated, abs=1e-9)
