"""Plan "auto": chosen for the model, the batch and the ranks that are here; all ranks agree on it."""

import io
from collections.abc import Callable
from contextlib import redirect_stderr

import pytest
import torch
from torch import nn

import echelon
from echelon.engine.choosing import Task, chosen, refusal, shape_of_sample, without_memory
from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.models import build, cross_entropy, preset
from echelon.plan import Plan

Warm = Callable[[int], Ranks]
TOKENS = torch.zeros(8, 64, dtype=torch.int64)
BATCH = (TOKENS, TOKENS)


def task(model: nn.Module) -> Task:
    return Task(model, cross_entropy, None, None, None)


class Block(nn.Module):
    """A layer of a model that nobody has listed."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.mix(self.norm(x)).chunk(3, -1)
        )
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(torch.relu(self.up(self.norm(x))))


class OwnModel(nn.Module):
    def __init__(self, width: int = 32, vocab: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_a_plan_that_says_its_words_stays() -> None:
    assert chosen("data=2", task(OwnModel()), None) == "data=2"


def test_the_shape_is_that_of_the_batch() -> None:
    shape, batch = shape_of_sample(task(build("gpt-tiny")), BATCH)
    assert (shape.sequence, batch, shape.layers) == (64, 8, preset("gpt-tiny").layers)


def test_a_model_of_ones_own_has_a_shape_from_a_trace() -> None:
    model = OwnModel()
    shape, _ = shape_of_sample(task(model), BATCH)
    assert (shape.layers, shape.hidden, shape.heads, shape.sequence) == (3, 32, 4, 64)
    assert shape.num_parameters == sum(each.numel() for each in model.parameters())


def test_a_copy_has_shapes_and_no_memory_and_the_model_stays() -> None:
    model = OwnModel()
    copy = without_memory(model)
    assert {each.device.type for each in copy.parameters()} == {"meta"}
    assert [each.shape for each in copy.parameters()] == [each.shape for each in model.parameters()]
    assert {each.device.type for each in model.parameters()} == {"cpu"}


def test_what_a_model_cannot_be_divided_by_is_said() -> None:
    own = task(OwnModel())
    assert refusal(own, "data=2 zero=3") is None
    assert refusal(own, "tensor=2") is not None
    assert refusal(task(build("gpt-tiny")), "tensor=2 sequence=true") is None
    assert "heads" in str(refusal(task(build("gpt-tiny")), "tensor=8"))


def test_a_batch_is_needed() -> None:
    with pytest.raises(UserError, match=r"plan 'auto': .*sample_batch="):
        chosen("auto", task(OwnModel()), None)
    with pytest.raises(UserError, match="is for 3 ranks, and 1 are running"):
        chosen("auto ranks=3", task(OwnModel()), BATCH)


def test_a_model_without_attention_is_told_what_it_can_have() -> None:
    with pytest.raises(UserError, match="no stack of transformer layers"):
        chosen(
            "auto", Task(nn.Linear(4, 4), nn.functional.mse_loss, None, None, None), (torch.ones(8, 4),) * 2
        )


def train(plan: str, own: bool) -> tuple[str, float, float, str]:
    torch.manual_seed(0)
    model, printed = OwnModel() if own else build("gpt-tiny"), io.StringIO()
    with (
        redirect_stderr(printed),
        echelon.parallelize(
            model,
            plan,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
            loss=cross_entropy,
            sample_batch=BATCH,
        ) as engine,
    ):
        for _ in range(2):
            loss = engine.step(engine.local(BATCH)).loss
        return str(engine.mesh.plan), float(loss), sum(engine.memory().peak.values()), printed.getvalue()


@pytest.mark.parametrize("own", [False, True])
def test_ranks_agree_and_the_printed_plan_gives_the_same(warm_ranks: Warm, own: bool) -> None:
    first, second = warm_ranks(2).run(train, "auto", own)
    assert first[:2] == second[:2]
    assert (first[3].count(f'plan="{first[0]}"'), second[3]) == (1, "")
    again = warm_ranks(2).run(train, first[0], own)[0]
    assert again[1] == first[1]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "words"), [(2, " data=2"), (2, ""), (4, "")])
def test_a_limit_of_memory_is_kept_where_the_unsharded_plan_does_not_fit(
    warm_ranks: Warm, ranks: int, words: str
) -> None:
    plain = warm_ranks(ranks).run(train, f"data={ranks}", False)
    limit = int(0.8 * max(each[2] for each in plain))
    limited = warm_ranks(ranks).run(train, f"auto memory={limit}{words}", False)
    plan = Plan.parse(limited[0][0])
    assert plan.ranks == ranks
    assert plan.zero or plan.tensor > 1 or plan.stages > 1
    assert max(each[2] for each in limited) < limit
    assert limited[0][1] == pytest.approx(plain[0][1], rel=1e-4)  # the loss after an update
