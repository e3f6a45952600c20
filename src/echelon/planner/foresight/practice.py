"""How a program runs a plan, where programs differ: which kernels are fused, and what hides behind what.

A plan says what is shared among ranks; two programs with the same plan still differ in these. `ECHELON` is
this library; the others describe the programs whose published runs the calibration is checked with.
"""

from dataclasses import dataclass, replace
from functools import lru_cache


@dataclass(frozen=True)
class Practice:
    """One program's way to run a step.

    flash            attention never writes the scores
    skips_masked     causal attention leaves out the half that is masked
    traffic          bytes that kernels between products move, as a multiple of those that they must
    attention        rate of fused attention, as a share of the device's best
    turn_bytes       bytes moved per number of queries and keys that is turned by its position
    host_layer       seconds in which the host issues the kernels of a layer's forward pass
    host_turn        the same of a layer that turns queries and keys, and has gates, as a multiple
    host_sparse      the same of a layer with experts, as a multiple
    host_expert      what each expert of a rank adds to that, where they run one after the other
    host_context     what messages of context ranks add
    host_step        seconds of a step in which the device waits: data, logging, the optimizer's start
    host_microbatch  seconds in which a stage waits for its host, per microbatch
    host_chunk       the same, per microbatch on each of its chunks
    read_microbatch  seconds in which a loader reads a microbatch, beside all else; a step reads one more
    runs_ahead       while a device computes the head, its host issues what comes after it
    hide_gradients   share of the backward pass of the last microbatch that hides gradients
    hide_tensor      share of the messages of tensor ranks that is hidden behind products
    hide_expert      share of the messages of experts that is hidden
    hide_gathers     share of the computation of a layer that hides the gathers of zero=3
    hide_transfers   share of the messages between stages that is hidden
    exchange_starts  how often an all-to-all takes the start of an all-reduce
    sorts_arrivals   tokens are sorted a second time where they arrive; how many come is told before
    gradient_bytes   bytes of a gradient that ranks exchange; 0: as the plan says
    splits_transfers tensor ranks send each a part of what goes to the next stage
    gather_share     share of a link's rate that gathers of zero=3 reach
    remakes          share of a layer that recompute=selective makes again, beside scores
    frees            share of a layer's saved bytes that recompute=selective frees, beside scores
    gated_inputs     numbers saved per hidden number of a gated feed-forward part, beside its product
    fused_experts    experts read tokens where they lie, and their activation function saves its inputs alone
    sums_at_once     a layer's gradient is whole only until its activations are gone, and summed before others
    norm_bytes       bytes per hidden number that RMSNorm saves beside its input, where it is not one kernel
    keeps_gathered   zero=3 with a pipeline gathers weights once in a step, and sums gradients whole
    fills_first      interleaved schedules with as many microbatches as stages run all forwards first
    sums_gates       losses of gates are functions of the whole batch: forwards that only record come first
    sums_by_layer    messages of each layer (zero) or bucket (all-reduce) start one after the other
    saves_scores     bytes per score that the backward pass needs, without flash
    logit_bytes      bytes per logit at the peak
    logit_traffic    bytes per logit that the loss reads and writes, both ways
    most_logits      bytes of logits at once, where the loss is computed in chunks; 0: all
    """

    name: str
    flash: bool = True
    skips_masked: bool = True
    traffic: float = 1.0
    attention: float = 1.0
    turn_bytes: float = 4.0
    host_layer: float = 0.0
    host_step: float = 0.0
    host_microbatch: float = 0.0
    host_chunk: float = 0.0
    read_microbatch: float = 0.0
    runs_ahead: bool = True
    host_turn: float = 1.0
    hide_gradients: float = 0.0
    hide_tensor: float = 0.0
    hide_expert: float = 0.0
    host_sparse: float = 2.0
    host_expert: float = 0.0
    host_context: float = 0.0
    hide_gathers: float = 0.0
    hide_transfers: float = 0.0
    exchange_starts: float = 1.0
    sorts_arrivals: bool = False
    gradient_bytes: int = 0
    splits_transfers: bool = True
    gather_share: float = 1.0
    remakes: float = 0.0
    frees: float = 0.0
    gated_inputs: float = 2.0
    fused_experts: bool = False
    sums_at_once: bool = False
    norm_bytes: float = 0.0
    keeps_gathered: bool = False
    fills_first: bool = False
    sums_gates: bool = False
    sums_by_layer: bool = False
    saves_scores: float = 5.0
    logit_bytes: float = 6.6
    logit_traffic: float = 13.0
    most_logits: float = 0.0

    def __hash__(self) -> int:
        return hash(self.name)


# Kernels and their launch as profiled on one H200, in steps of five models (GPT-2 124M and 1.5B, Llama 1.1B,
# 3B, Qwen 0.6B) and of layers too small to keep it busy. Turns are in float32.
ECHELON = Practice(
    "echelon",
    traffic=1.85,
    turn_bytes=26.0,
    host_layer=1.3e-3,
    host_turn=2.1,
    host_step=2e-3,
    logit_traffic=50.0,
    hide_gradients=0.8,
    hide_gathers=0.8,
    splits_transfers=False,
    remakes=0.1,
    frees=0.5,
    gated_inputs=3.0,
    fused_experts=True,
    sums_at_once=True,
    most_logits=2 * 2**30,
    fills_first=True,
    sums_gates=True,
    sorts_arrivals=True,
)
# On a processor, RMSNorm is several kernels of torch, and each saves what it was given. The cores
# that compute also move what ranks send, so nothing is hidden: not even the start of a message. Gloo's
# all-to-all takes three times as long to start as its all-reduce, and a layer with experts has 1.7 times the
# kernels of another, and 0.045 times for each expert (2 to 16 of them were measured, with one to 64 tokens).
ECHELON_CPU = replace(
    ECHELON,
    name="echelon on a processor",
    host_layer=0.5e-3,
    host_turn=1.0,
    host_sparse=1.7,
    host_expert=0.045,
    exchange_starts=3.0,
    norm_bytes=6.0,
    hide_gradients=0.0,
    hide_gathers=0.0,
    sums_by_layer=True,
)
MEGATRON_2021 = Practice(
    "Megatron-LM of 2021, Megatron-DeepSpeed",
    flash=False,
    skips_masked=False,
    traffic=1.26,
    host_layer=1.12e-3,
    host_step=5.4e-3,
    host_microbatch=2e-3,
    runs_ahead=False,
    gradient_bytes=2,
)
DEEPSPEED_2021 = replace(MEGATRON_2021, name="DeepSpeed ZeRO-3 of 2021", gather_share=0.15)
MEGATRON_2022 = Practice(
    "Megatron-LM of 2022, with sequence parallelism",
    flash=False,
    skips_masked=False,
    traffic=0.8,
    host_layer=0.5e-3,
    host_step=5e-3,
    gradient_bytes=4,
)
MEGATRON = Practice(
    "Megatron Core",
    traffic=2.4,
    host_layer=0.3e-3,
    host_sparse=3.0,
    host_step=76e-3,
    hide_gradients=0.86,
    hide_tensor=0.9,
    hide_expert=0.4,
    hide_gathers=0.8,
)
# Later releases on NVL72: fewer kernels around experts, and their messages behind other work.
MEGATRON_2026 = replace(MEGATRON, name="Megatron Core of mid-2026 on NVL72", traffic=1.3, hide_expert=0.8)
MLPERF = replace(MEGATRON, name="NVIDIA's MLPerf submissions (CUDA graphs)", host_layer=0.0, host_step=50e-3)
TORCHTITAN = Practice(
    "torchtitan",
    traffic=0.86,
    attention=0.64,
    remakes=0.8,
    frees=0.55,
    keeps_gathered=True,
    logit_bytes=14.0,
    logit_traffic=28.0,
    host_layer=0.3e-3,
    host_step=10e-3,
    hide_gradients=0.8,
    hide_gathers=0.8,
)
FOUNDRY = Practice(
    "llm-foundry (FSDP)",
    traffic=2.23,
    attention=0.70,
    host_layer=0.6e-3,
    host_step=10e-3,
    hide_gradients=0.8,
    hide_gathers=0.8,
)
# Its attention in Triton was written for Ampere, and reaches less of what Hopper can do.
FOUNDRY_HOPPER = replace(FOUNDRY, name="llm-foundry (FSDP) on Hopper", traffic=2.69, attention=0.45)
# Megatron's own tests: tiny models, deterministic kernels, and a host that checks and logs each step.
MEGATRON_TESTS = replace(
    MEGATRON,
    name="Megatron Core's tests",
    host_layer=2.85e-3,
    host_sparse=1.0,
    host_expert=0.32,
    host_context=0.2,
    host_chunk=5e-3,
    host_step=17e-3,
    logit_bytes=6.0,  # in 16 bits and in 32, which the loss overwrites with its gradient
)
MEGATRON_UNFUSED = replace(
    MEGATRON_TESTS, name="Megatron Core's tests with unfused attention", flash=False, skips_masked=False
)


@lru_cache
def with_slow_samples(practice: Practice) -> Practice:
    """Megatron's tests on one node of GB200 run in containers of its repository's runners, whose samples are
    on a mounted drive (`.github/actions/action.yml`), and not on the cluster of the other tests. Steps there
    take what their microbatches say, whatever the model and its layers: they wait for the loader."""
    return replace(practice, name=f"{practice.name}, slow samples", read_microbatch=0.205)


@lru_cache
def with_fused_loss(practice: Practice) -> Practice:
    """Megatron's `--cross-entropy-loss-fusion`: as torch compiles it, it holds logits in 32 bits twice."""
    return replace(practice, name=f"{practice.name}, its fused loss", logit_bytes=practice.logit_bytes + 4)
