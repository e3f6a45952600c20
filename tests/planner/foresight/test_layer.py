"""The cost of a layer. What it saves is held to Korthikanti et al. 2022 (arXiv:2205.05198), exactly."""

import pytest

from echelon.planner.cluster.read import read_cluster
from echelon.planner.foresight.layer import layer_cost, layer_costs, saved_bytes
from echelon.planner.foresight.practice import ECHELON, MEGATRON_2022
from echelon.planner.foresight.settings import Settings
from echelon.planner.shape.presets import preset_shape

CLUSTER = read_cluster("a100-80:64")
GPT = preset_shape("gpt-1t")
S, B, H, A = 2048, 2, GPT.hidden, GPT.heads


@pytest.mark.parametrize("t", [1, 2, 4, 8])
def test_a_gpt_layer_saves_what_the_formulas_say(t: int) -> None:
    plain = Settings(tensor=t, precision="fp16")
    split = plain._replace(sequence=t > 1)
    saved, kept, checkpoint = saved_bytes(GPT, MEGATRON_2022, plain, S, B * S, False)
    assert saved == S * B * H * (10 + 24 / t + 5 * A * S / (H * t))
    assert kept == S * B * H * (10 + 24 / t)
    assert checkpoint == 2 * S * B * H
    saved, kept, _ = saved_bytes(GPT, MEGATRON_2022, split, S, B * S, False)
    assert saved == pytest.approx(S * B * H / t * (34 + 5 * A * S / H), rel=1e-12)
    assert kept == pytest.approx(34 * S * B * H / t, rel=1e-12)


def test_without_weight_gradients_inputs_of_products_are_not_saved() -> None:
    plain = saved_bytes(GPT, ECHELON, Settings(), S, S, False)[0]
    frozen = saved_bytes(GPT, ECHELON, Settings(frozen=True), S, S, False)[0]
    assert plain - frozen == 2 * S * (2 * GPT.hidden + GPT.ffn)


def test_split_checkpoints_are_a_part_of_the_input() -> None:
    settings = Settings(tensor=4, split_checkpoints=True)
    assert saved_bytes(GPT, ECHELON, settings, S, S, False)[2] == 2 * S * H / 4


def test_tensor_ranks_share_the_work_and_pay_messages() -> None:
    one, four = (layer_cost(GPT, CLUSTER, ECHELON, Settings(tensor=t), 1, S, False) for t in (1, 4))
    assert 3 < one.forward / four.forward < 5
    assert one.tensor == 0 < four.tensor
    assert one.backward == pytest.approx(2 * one.forward, rel=0.1)


def test_context_ranks_share_a_sequence() -> None:
    one, four = (layer_cost(GPT, CLUSTER, ECHELON, Settings(context=c), 1, S, False) for c in (1, 4))
    assert four.forward < one.forward / 2
    assert four.context > 0
    spread = layer_cost(GPT, CLUSTER, ECHELON, Settings(context=4, attention="all-to-all"), 1, S, False)
    assert spread.context != four.context


def test_only_layers_with_experts_send_tokens() -> None:
    shape = preset_shape("deepseek-v3")
    costs = layer_costs(shape, CLUSTER, ECHELON, Settings(data=64, expert=64), 1)
    assert costs.dense.expert == 0 < costs.sparse.expert
    dense = layer_costs(GPT, CLUSTER, ECHELON, Settings(), 1)
    assert dense.dense is dense.sparse


def test_heads_that_are_not_aligned_are_slow_without_fused_attention() -> None:
    from dataclasses import replace

    odd = replace(GPT, heads=128, kv_heads=128, head_width=108, hidden=13824, ffn=4 * 13824)
    even = replace(odd, heads=108, kv_heads=108, head_width=128)
    slow, fast = (
        layer_cost(shape, CLUSTER, MEGATRON_2022, Settings(precision="fp16"), 1, S, False).attention
        for shape in (odd, even)
    )
    assert slow > 1.5 * fast


def test_a_compiled_layer_moves_less() -> None:
    eager, compiled = (
        layer_cost(GPT, CLUSTER, ECHELON, Settings(compiled=each), 1, S, False) for each in (False, True)
    )
    assert compiled.forward < eager.forward


def test_models_of_plain_torch_move_and_save_more_unless_compiled() -> None:
    from dataclasses import replace

    own = preset_shape("llama3-8b")
    plain = replace(own, plain=True)
    for compiled in (False, True):
        settings = Settings(compiled=compiled)
        ours, theirs = (layer_cost(each, CLUSTER, ECHELON, settings, 1, S, False) for each in (own, plain))
        assert (theirs.forward > ours.forward) is not compiled
        norms = 0 if compiled else 4 * 2 * own.hidden
        assert theirs.saved - ours.saved == pytest.approx(S * norms)
    gelu = replace(GPT, plain=True)
    settings = Settings(sequence=True, tensor=2)
    ours, theirs = (layer_cost(each, CLUSTER, ECHELON, settings, 1, S, False) for each in (GPT, gelu))
    assert theirs.forward > ours.forward
    assert theirs.saved - ours.saved == pytest.approx(S * 6 * GPT.ffn / 2)
