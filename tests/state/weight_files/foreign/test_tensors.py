"""Which tensors of a checkpoint are the model's."""

import pytest
import torch

from echelon.errors import UserError
from echelon.state.weight_files.foreign.tensors import ForeignTensors


def foreign(*names: str, skipped: tuple[str, ...] = ()) -> ForeignTensors:
    return ForeignTensors(
        "test", dict.fromkeys(names, ((2,), torch.float32)), lambda _: torch.ones(2), skipped
    )


@pytest.mark.parametrize(
    ("names", "prefix", "chosen"),
    [
        (("a.weight", "b"), "", ["a.weight", "b"]),
        (("model.a", "model.b", "optimizer.state.a.exp_avg"), "model.", ["model.a", "model.b"]),
        (("model.a", "model.b"), "", ["model.a", "model.b"]),  # as transformers names its own
        (("app.model.a", "app.optim.state.a"), "app.model.", ["app.model.a"]),
        (("module.a", "module.b"), "module.", ["module.a", "module.b"]),
    ],
)
def test_the_prefix_is_found(names: tuple[str, ...], prefix: str, chosen: list[str]) -> None:
    assert foreign(*names).weights(None) == (prefix, chosen)


def test_entries_that_are_no_tensors_tell_too() -> None:
    assert foreign("model.a", skipped=("optimizer.param_groups",)).weights(None) == ("model.", ["model.a"])


def test_a_prefix_may_be_given_and_must_be_there() -> None:
    assert foreign("model.a", "ema.a").weights("ema.") == ("ema.", ["ema.a"])
    with pytest.raises(UserError, match="names begin with ema, model: set --prefix"):
        foreign("model.a", "ema.a").weights("net.")


def test_entries_have_the_wanted_type_where_they_are_real() -> None:
    tensors = ForeignTensors(
        "test", {"m.a": ((2,), torch.float32), "m.n": ((), torch.int64)}, lambda _: torch.ones(2)
    )
    entries = tensors.entries(["m.a", "m.n"], torch.bfloat16, "m.")
    assert [(each.name, each.dtype) for each in entries] == [("a", torch.bfloat16), ("n", torch.int64)]
