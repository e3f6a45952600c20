"""Every word of a plan has a cost here, or is refused by name."""

import pytest

from echelon.errors import UserError
from echelon.plan import FIELDS, Plan
from echelon.planner.foresight.settings import OPTIMIZERS, Settings, settings_of
from echelon.program.build import step_program

# A plan for each field that changes what is predicted.
COSTED = {
    "data": "data=2",
    "tensor": "tensor=2",
    "pipeline": "pipeline=2",
    "expert": "data=2 expert=2",
    "context": "context=2",
    "attention": "context=2 attention=all-to-all",
    "sync": "data=2 sync=parameter-server",
    "zero": "data=2 zero=1",
    "shard": "data=4 zero=1 shard=2",
    "schedule": "pipeline=2 schedule=gpipe",
    "microbatches": "microbatches=2",
    "chunks": "pipeline=2 schedule=interleaved chunks=2 microbatches=2",
    "sequence": "tensor=2 sequence=true",
    "compile": "compile=true",
    "precision": "precision=fp64",
    "gradients": "precision=bf16 microbatches=2 gradients=same",
    "recompute": "recompute=full",
    "checkpoints": "tensor=2 recompute=full checkpoints=split",
    "update": "update=backward",
    "masters": "precision=bf16 masters=false",
    "offload": "offload=optimizer",
    "delay": "offload=optimizer delay=1",
    "compress": "compress=gist-fp8",
    "graphs": "graphs=auto",
}
FREE = {"staleness", "contiguous"}  # how far ranks may be apart, where memory lies: neither bytes nor time
REFUSED = {
    "debug=true": "debug=true",
    "pipeline=auto": "pipeline=auto",
    "pipeline=3-1 microbatches=3": "pipeline=3-1",
    "schedule=order.txt": "order.txt",
}


def test_optimizers_have_states_of_their_own() -> None:
    plan = Plan.parse("precision=bf16")
    settings = {name: settings_of(plan, name) for name in OPTIMIZERS}
    assert [each.optimizer_bytes for each in settings.values()] == [12, 8, 8, 4]  # and masters
    assert [name for name, each in settings.items() if each.update_bytes] == ["sm3", "adafactor"]
    assert settings_of(Plan.parse("precision=bf16 masters=false"), "adafactor").optimizer_bytes == 0
    with pytest.raises(UserError, match=r"optimizer=adam: is unknown.*adamw"):
        settings_of(plan, "adam")


def test_every_field_is_costed_free_or_refused() -> None:
    assert set(FIELDS) == set(COSTED) | FREE | {"debug"}


@pytest.mark.parametrize("field", COSTED)
def test_a_field_changes_the_settings(field: str) -> None:
    assert settings_of(Plan.parse(COSTED[field])) != settings_of(Plan())


@pytest.mark.parametrize("words", REFUSED)
def test_a_word_without_a_cost_is_refused_by_name(words: str) -> None:
    with pytest.raises(UserError, match=REFUSED[words]):
        settings_of(Plan.parse(words))


def test_bytes_of_numbers() -> None:
    fp32 = settings_of(Plan())
    assert (fp32.weight_bytes, fp32.gradient_bytes, fp32.optimizer_bytes) == (4, 4, 8)
    bf16 = settings_of(Plan.parse("precision=bf16 microbatches=2"))
    assert (bf16.weight_bytes, bf16.gradient_bytes, bf16.optimizer_bytes) == (2, 4, 12)
    alone = settings_of(Plan.parse("precision=bf16"))
    assert alone.gradient_bytes == 2  # nothing is summed
    assert settings_of(Plan.parse("precision=fp64")).optimizer_bytes == 16


def test_ranks_and_copies() -> None:
    settings = Settings(data=4, tensor=2, pipeline=3, context=2)
    assert (settings.ranks, settings.copies, settings.shards) == (48, 8, 8)
    assert settings._replace(shard=2).shards == 2
    assert settings_of(Plan.parse("recompute=budget:2GiB")).budget == 2**31


@pytest.mark.parametrize(
    "words",
    [
        "data=2",
        "data=2 microbatches=2",
        *(
            f"pipeline=4 schedule={name} microbatches={count}"
            for name in ("naive", "gpipe", "1f1b", "zero-bubble")
            for count in (1, 2, 4, 8)
        ),
        "pipeline=2 schedule=interleaved chunks=2 microbatches=2",
        "pipeline=2 schedule=interleaved chunks=2 microbatches=4",
    ],
)
def test_which_plans_run_all_forwards_first(words: str) -> None:
    plan = Plan.parse(words)
    assert settings_of(plan).forwards_first == step_program(plan, ties=False).forwards_first
