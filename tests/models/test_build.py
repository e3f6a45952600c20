import time

import pytest
import torch

from echelon.errors import UserError
from echelon.models import GPT, Llama, build, preset, presets


def test_a_config_or_a_name_gives_the_model_of_its_family(config):
    assert type(build(config)) is {"gpt": GPT, "llama": Llama}[config.family]
    assert type(build("llama-tiny")) is Llama
    assert build("gpt-tiny").config == preset("gpt-tiny")


def test_unknown_name():
    with pytest.raises(UserError, match="did you mean 'gpt-small'"):
        build("gpt-smal")


# The published counts, where there is one: GPT-2 and Llama exactly, as their files hold.
PUBLISHED = {
    "gpt-small": 124_439_808,
    "gpt-medium": 354_823_168,
    "gpt-large": 774_030_080,
    "gpt-xl": 1_557_611_200,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-1b": 1_235_814_400,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
    "deepseek-moe-16b": 16_375_728_128,
    "qwen3-30b-a3b": 30_532_122_624,
}
ACTIVE = {"mixtral-8x7b": 12.9e9, "deepseek-moe-16b": 2.8e9, "qwen3-30b-a3b": 3.35e9}
ROUNDED = {"gpt-1.3b": 1.3e9, "gpt-2.7b": 2.65e9, "gpt-6.7b": 6.65e9, "gpt-13b": 12.85e9, "gpt-175b": 174.6e9}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes_are_exact(name):
    assert preset(name).num_parameters == PUBLISHED[name]


@pytest.mark.parametrize("name", ROUNDED)
def test_gpt3_sizes_are_within_two_percent(name):
    assert preset(name).num_parameters == pytest.approx(ROUNDED[name], rel=0.02)


@pytest.mark.parametrize("name", ACTIVE)
def test_a_token_of_a_mixture_is_computed_with_a_part_of_it(name):
    assert preset(name).num_active_parameters == pytest.approx(ACTIVE[name], rel=0.02)


def test_175b_is_within_one_percent_of_its_name():
    assert preset("gpt-175b").num_parameters == pytest.approx(175e9, rel=0.01)


def test_every_preset_has_a_checked_size():
    assert set(presets()) == {*PUBLISHED, *ROUNDED, "gpt-tiny", "llama-tiny", "moe-tiny"}


@pytest.mark.slow_cases("deepseek-moe-16b", "gpt-175b", "mixtral-8x7b")
@pytest.mark.parametrize("name", ["gpt-175b", "llama3-405b", *ACTIVE])
def test_the_largest_models_build_without_memory(name):
    start = time.process_time()
    with torch.device("meta"):
        model = build(name)
    assert time.process_time() - start < 10
    assert all(p.is_meta for p in model.parameters())
    assert sum(p.numel() for p in model.parameters()) == preset(name).num_parameters


@pytest.mark.slow_cases("gpt-tiny", "llama-tiny")
@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", pytest.param("moe-tiny", marks=pytest.mark.slow)])
def test_tiny_models_are_byte_models_that_learn(name):
    torch.manual_seed(0)
    model = build(name)
    assert model.config.vocab == 256
    text = torch.frombuffer(bytearray(b"the quick brown fox " * 4), dtype=torch.uint8).long()[None]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(30):
        loss = torch.nn.functional.cross_entropy(model(text[:, :-1])[0], text[0, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(5.5, abs=0.3)  # ln 256: nothing is known yet
    assert losses[-1] < 1.0


def test_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(UserError, match=r"'llama3-8B' is not a model preset \(did you mean 'llama3-8b'\?\)"):
        preset("llama3-8B")
    with pytest.raises(UserError, match="known: gpt-tiny, "):
        build("resnet")
