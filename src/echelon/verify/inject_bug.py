"""Known bugs, injected into the parallel training to prove that `verify` can fail: their names, and the plans
that can have them. What each breaks is in `bugs` and `sum_bugs`, where it was reported in docs/verify.md.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from echelon.engine import Engine
from echelon.errors import UserError, did_you_mean
from echelon.memory.recompute.second_run import SecondRunCheck
from echelon.plan import Plan
from echelon.verify import bugs, sum_bugs

Bug = Callable[[Engine], object]


class NamedBug(NamedTuple):
    """`inject` breaks an engine, and returns whether it could on this rank. `needs`: which plans have such
    code, in words; `model`: what the model must have."""

    inject: Callable[[Engine], bool]
    needs: str
    is_possible: Callable[[Plan], bool]
    model: str = "trained parameters"


def _several(axis: str) -> tuple[str, Callable[[Plan], bool]]:
    """Two or more along an axis, in words and as a test."""
    name = "stages" if axis == "pipeline" else axis
    return f"{axis}=2 or more", lambda plan: bool(getattr(plan, name) > 1)


def _one_loss(plan: Plan) -> bool:
    return plan.microbatches == 1


_TIED = "a weight that the first and the last stage share (model.tied=true)"
_GATES = "gates with an auxiliary loss (model.experts.balance)"
_DROPOUT = "dropout (model.dropout)"

BUGS: dict[str, NamedBug] = {
    "divide-twice": NamedBug(sum_bugs.divide_twice, *_several("data")),
    "skip-bucket": NamedBug(sum_bugs.skip_bucket, *_several("data")),
    "mean-of-microbatches": NamedBug(bugs.take_mean_of_means, *_several("microbatches")),
    "mean-of-replicas": NamedBug(
        bugs.take_mean_of_means,
        "data=2 or more, microbatches=1",
        lambda plan: plan.data > 1 and _one_loss(plan),
    ),
    "mean-of-context-ranks": NamedBug(
        bugs.take_mean_of_means,
        "context=2 or more, data=1, microbatches=1",
        lambda plan: plan.context > 1 and plan.data == 1 and _one_loss(plan),
    ),
    "rolled-targets": NamedBug(bugs.roll_targets, *_several("context")),
    "whole-logits-summed": NamedBug(bugs.sum_whole_logits, *_several("tensor"), "a vocabulary that is split"),
    "copies-not-summed": NamedBug(
        sum_bugs.keep_copies_apart,
        "zero=1 or more, and a shard that is smaller than data",
        lambda plan: plan.zero > 0 and 1 < plan.shard < plan.data,
    ),
    "context-not-summed": NamedBug(
        sum_bugs.keep_sequences_apart,
        "context=2 or more, data=1, zero=0",
        lambda plan: plan.context > 1 and plan.data == 1 and plan.zero == 0,
    ),
    "context-scaled": NamedBug(sum_bugs.multiply_by_context, *_several("context")),
    "positions-from-zero": NamedBug(bugs.count_positions_from_zero, *_several("context")),
    "ring-gradients-lost": NamedBug(
        sum_bugs.lose_key_gradients,
        "context=2 and attention=ring",
        lambda plan: plan.context == 2 and plan.attention == "ring",
    ),
    "ring-own-keys": NamedBug(
        sum_bugs.attend_to_own_keys,
        "context=2 and attention=ring",
        lambda plan: plan.context == 2 and plan.attention == "ring",
    ),
    "column-inputs-not-summed": NamedBug(
        sum_bugs.keep_inputs_apart,
        "tensor=2 or more, sequence=false",
        lambda plan: plan.tensor > 1 and not plan.sequence,
    ),
    "sequence-norms-not-summed": NamedBug(
        sum_bugs.keep_norms_apart,
        "tensor=2 or more, sequence=true",
        lambda plan: plan.tensor > 1 and plan.sequence,
    ),
    "tied-not-summed": NamedBug(sum_bugs.keep_ties_apart, *_several("pipeline"), _TIED),
    "tied-parts-mixed": NamedBug(sum_bugs.mix_tied_parts, *_several("pipeline"), _TIED),
    "last-microbatch-only": NamedBug(
        sum_bugs.keep_last_microbatch,
        "microbatches=2 or more, zero=0 or zero=1",
        lambda plan: plan.microbatches > 1 and plan.zero < 2,
    ),
    "used-here-only": NamedBug(sum_bugs.keep_uses_apart, *_several("data")),
    "old-weights": NamedBug(
        sum_bugs.keep_old_weights,
        "data=2 or more, zero=1 or zero=2",
        lambda plan: plan.data > 1 and plan.zero in (1, 2),
    ),
    "experts-scaled": NamedBug(sum_bugs.multiply_experts, *_several("expert")),
    "experts-not-summed": NamedBug(
        sum_bugs.keep_experts_apart,
        "expert=2 or more, and more data, zero=0",
        lambda plan: plan.zero == 0 and 1 < plan.expert < plan.data,
    ),
    "expert-rows-lost": NamedBug(sum_bugs.lose_expert_rows, *_several("expert")),
    "auxiliary-loss-local": NamedBug(bugs.keep_statistics, *_several("data"), _GATES),
    "auxiliary-loss-scaled": NamedBug(bugs.multiply_auxiliary, *_several("data"), _GATES),
    "padding-routed": NamedBug(
        bugs.route_padding,
        "context=2 or more, or sequence=true",
        lambda plan: plan.context > 1 or plan.sequence,
        _GATES,
    ),
    "norm-not-summed": NamedBug(
        bugs.keep_norms_apart,
        "pipeline, tensor or zero of more than one rank",
        lambda plan: plan.stages > 1 or plan.tensor > 1 or (plan.zero > 0 and plan.data > 1),
    ),
    "norm-of-first-shard": NamedBug(
        bugs.count_first_shard,
        "tensor=2 or expert=2, or more",
        lambda plan: plan.tensor > 1 or plan.expert > 1,
    ),
    "norm-counts-copies": NamedBug(
        bugs.count_copies,
        "tensor=2 or pipeline=2, or more",
        lambda plan: plan.tensor > 1 or plan.stages > 1,
        "weights that tensor ranks hold alike, or stages share",
    ),
    "dropout-alike": NamedBug(bugs.drop_alike, *_several("data"), _DROPOUT),
    "dropout-again": NamedBug(
        bugs.drop_again,
        "recompute=full, sqrt or a budget",
        lambda plan: plan.recompute not in ("none", "selective"),
        "layers that run again",
    ),
    "kept-parts-mixed": NamedBug(
        bugs.mix_kept_parts,
        "tensor=2 or more and checkpoints=split",
        lambda plan: plan.tensor > 1 and plan.checkpoints == "split",
    ),
    "batch-norm-unweighted": NamedBug(
        bugs.weigh_norms_alike,
        *_several("data"),
        "batch norm (task=images model.preset=resnet-50-tiny)",
    ),
}


def check_bug(name: str, plan: Plan) -> None:
    """Refuse a bug that has no such name, or that a training with this plan has no code for."""
    if name not in BUGS:
        raise UserError(unknown_bug(name))
    is_synchronous = plan.sync == "all-reduce" and plan.flushes
    if not is_synchronous or plan.update != "step":
        raise UserError(
            f"--inject-bug needs sync=all-reduce, update=step and a schedule that flushes, but the plan is "
            f"'{plan}'; change these"
        )
    if not BUGS[name].is_possible(plan):
        raise UserError(
            f"--inject-bug {name} with '{plan}': no code of this plan could have the bug; it needs "
            f"{BUGS[name].needs}"
        )


def unknown_bug(name: str) -> str:
    """Return the error of an unknown name, with all known ones."""
    guess, names = did_you_mean(name, BUGS), f"; known: {', '.join(BUGS)}"
    return f"--inject-bug {name}: there is no such bug{guess.removesuffix(names)}{names}"


def inject(bug: str | Bug, engine: Engine, *, silently: bool = False) -> None:
    """Break an engine; all ranks must call this. A bug by name is refused where it has broken nothing.

    `silently`: the engine does not compare what ranks hold in its first step, which may find the bug too.
    """
    if not isinstance(bug, str):
        bug(engine)
        return
    check_bug(bug, engine.plan)
    found = torch.tensor(float(BUGS[bug].inject(engine)), device=engine.mesh.device)
    with engine.ledger.about("checks"):
        engine.mesh.group("all").all_reduce(found, "max")
    if not found:
        raise UserError(
            f"--inject-bug {bug} with '{engine.plan}': the model has nothing to break; it needs "
            f"{BUGS[bug].model}"
        )
    if silently:
        engine._runner._same_gradients = True
        engine._setup.observers.remove_kind(SecondRunCheck)
