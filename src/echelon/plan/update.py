"""Updates of a plan: when and where weights change, and which state is kept in host memory."""

from dataclasses import dataclass
from typing import Any

from echelon.plan.field import Rule, choice, described, level, switch

_OFFLOADS = ("optimizer", "parameters", "activations")


def _read_offload(value: Any) -> tuple[str, ...]:
    words = value.split(",") if isinstance(value, str) else list(value)
    if words in (["none"], [""]):
        return ()
    if not set(words) <= set(_OFFLOADS):
        raise ValueError
    return tuple(word for word in _OFFLOADS if word in words)


@dataclass(frozen=True, kw_only=True)
class Update:
    """Time and place of updates."""

    update: str = choice(
        "step",
        ("step", "backward", "last-backward"),
        "when a unit is updated: at the end of the step; as soon as its gradient is complete; the same after "
        "several microbatches, whose gradients add up ([page](update-in-backward.md))",
        Rule(
            "`update=backward` with several microbatches",
            ("update", "microbatches"),
            lambda plan: plan.update == "backward" and plan.microbatches > 1,
            "a gradient that is used and freed in a backward pass cannot be added to that of the next "
            "microbatch",
            "use microbatches=1, or update=last-backward, which keeps gradients until the last microbatch",
        ),
        Rule(
            "`update=backward` or `last-backward` with an asynchronous schedule",
            ("update", "schedule"),
            lambda plan: plan.update != "step" and not plan.flushes,
            "each microbatch is an update of its own, with weights that other microbatches still need",
            "use update=step, or schedule=1f1b",
        ),
        Rule(
            "`update=backward` or `last-backward` with `sync=parameter-server` or `async`",
            ("update", "sync"),
            lambda plan: plan.update != "step" and plan.sync != "all-reduce",
            "the server updates all weights when it has all gradients",
            "use update=step, or sync=all-reduce",
        ),
        Rule(
            "`update=backward` or `last-backward` with `precision=fp16`",
            ("update", "precision"),
            lambda plan: plan.update != "step" and plan.precision == "fp16",
            "whether gradients have overflowed, and the step is skipped, is known when all of them are there",
            "use precision=bf16, or update=step",
        ),
    )
    masters: bool = switch(
        True,
        "with `bf16` and `fp8`: float32 masters; `false`: updates are "
        "[rounded stochastically](update-in-backward.md#bf16-weights-without-masters)",
        Rule(
            "`masters=false` with a precision other than `bf16` and `fp8`",
            ("masters", "precision"),
            lambda plan: not plan.masters and plan.precision not in ("bf16", "fp8"),
            "it rounds updates of bf16 weights stochastically",
            "use precision=bf16, or drop masters",
        ),
        Rule(
            "`masters=false` with `sync=parameter-server` or `async`",
            ("masters", "sync"),
            lambda plan: not plan.masters and plan.sync != "all-reduce",
            "only ranks that update their own weights round them",
            "use sync=all-reduce, or drop masters",
        ),
    )
    offload: tuple[str, ...] = described(
        (),
        f"any of {', '.join(_OFFLOADS)}, joined by commas",
        _read_offload,
        "what lives in [host memory](offload.md) while unused: [weights](offload-parameters.md), "
        "[activations](offload-activations.md)",
        Rule(
            "`offload=parameters` with an asynchronous schedule",
            ("offload", "schedule"),
            lambda plan: "parameters" in plan.offload and not plan.flushes,
            "a stashed weight version must stay until its backward pass, and offload=parameters drops "
            "weights after each use",
            "use schedule=1f1b, or drop offload",
        ),
        Rule(
            "`offload=parameters` with `schedule=zero-bubble`",
            ("offload", "schedule"),
            lambda plan: "parameters" in plan.offload and plan.schedule == "zero-bubble",
            "weights are dropped after the backward for inputs, and the backward for weights comes later",
            "use schedule=1f1b, or drop offload",
        ),
        Rule(
            "`offload=parameters` with `sync=parameter-server` or `async`",
            ("offload", "sync"),
            lambda plan: "parameters" in plan.offload and plan.sync != "all-reduce",
            "the server sends all weights to the device at once",
            "use sync=all-reduce, or drop offload",
        ),
        Rule(
            "`offload=optimizer` with an asynchronous schedule",
            ("offload", "schedule"),
            lambda plan: "optimizer" in plan.offload and not plan.flushes,
            "each microbatch is an update of its own, and its weights are needed at once, so nothing hides "
            "the way to the host",
            "use schedule=1f1b, or drop offload=optimizer",
        ),
        Rule(
            "`offload=optimizer` with `sync=parameter-server` or `async`",
            ("offload", "sync"),
            lambda plan: "optimizer" in plan.offload and plan.sync != "all-reduce",
            "a server updates the weights, and the optimizer is not on the ranks that train",
            "use sync=all-reduce, or drop offload=optimizer",
        ),
        options=_OFFLOADS,
        show=lambda value: ",".join(value) or "none",
    )
    delay: int = level(
        1,
        "with `offload=optimizer`: 1 updates the weights [one step late](offload.md#one-step-late), while "
        "the next step is computed",
        Rule(
            "`delay=1` without `offload=optimizer`",
            ("delay", "offload"),
            lambda plan: plan.delay > 0 and "optimizer" not in plan.offload,
            "delay=1 lets the host update weights while the device computes the next step",
            "add offload=optimizer, or drop delay",
        ),
        Rule(
            "`delay=1` with `update=backward` or `last-backward`",
            ("delay", "update"),
            lambda plan: plan.delay > 0 and plan.update != "step",
            "with delay=1 all weights change between two steps, and update=backward changes them within one",
            "use update=step, or drop delay",
        ),
    )
