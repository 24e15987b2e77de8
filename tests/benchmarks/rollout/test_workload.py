"""What the rollout benches ask of an engine, and the bytes it holds a decode step against."""

import pytest
from transformers import AutoModelForCausalLM

from benchmarks.rollout.workload import (
    TOKENS_BEYOND,
    DecodeBytes,
    Workload,
    requests,
    tokens_attended,
)
from rl_consistency.models.families import num_experts
from rl_consistency.verify.presets import build_preset, preset_config

GRPO = Workload(groups=32, group_size=8, prompt_len=512, longest=1024)


def test_lengths_are_spread_clipped_and_the_same_every_time():
    lengths = GRPO.lengths()
    assert lengths == GRPO.lengths() and len(lengths) == 256
    assert min(lengths) >= 32 and max(lengths) == 1024
    assert 380 < sum(lengths) / 256 < 460
    assert len(set(lengths)) > 150
    equal = Workload(groups=1, group_size=3, prompt_len=4, longest=9, shortest=9)
    assert equal.lengths() == [9, 9, 9]


def test_prompts_are_shared_within_a_group_and_fresh_in_every_run():
    workload = Workload(groups=3, group_size=2, prompt_len=16, longest=32)
    prompts = workload.prompts("a", 1000)
    assert prompts[0] == prompts[1] != prompts[2] and len(prompts) == 6
    assert prompts == workload.prompts("a", 1000) != workload.prompts("b", 1000)
    assert all(0 <= token < 1000 for prompt in prompts for token in prompt)
    assert {len(p) for p in workload.prompts("a", 1000, 40)} == {40}


def test_a_warm_up_takes_the_batch_through_its_sizes():
    lengths = GRPO.warm_up_lengths()
    sizes = [sum(n > step for n in lengths) for step in range(max(lengths))]
    assert sizes[0] == 256 and sizes[-1] == 1
    assert set(range(8, 257, 8)) | set(range(1, 9)) == set(sizes)
    assert max(lengths) < 90


def test_a_warm_up_of_stock_meets_every_context_bucket():
    assert GRPO.warm_up_prompt_lens() == [512, 1024]
    long = Workload(groups=1, group_size=1, prompt_len=500, longest=4000)
    assert long.warm_up_prompt_lens() == [500, 512, 1024, 2048, 4096]


def test_the_cache_has_room_for_everything_at_a_time():
    workload = Workload(groups=2, group_size=1, prompt_len=20, longest=100, shortest=100)
    assert workload.kv_blocks(16) == 2 * 8
    assert 2 * (20 + 100 + TOKENS_BEYOND) == 2 * 8 * 16


def test_requests_run_to_their_length_whatever_is_drawn():
    first, second = requests([3, 5], speculation=7)
    assert (first.max_tokens, second.max_tokens) == (3, 5)
    assert first.ignore_eos and first.speculation == 7 and first.temperature == 1.0


def test_a_step_reads_every_weight_once_but_an_embedding_of_its_own():
    tied = build_preset("tiny-qwen3")
    whole = sum(p.numel() * 4 for p in tied.parameters())
    table = 331 * 96 * 4
    assert DecodeBytes.of(tied) == DecodeBytes(whole, 2 * 2 * 2 * 32 * 4)
    config = preset_config("tiny-qwen3")
    config.tie_word_embeddings = False
    untied = AutoModelForCausalLM.from_config(config)
    assert DecodeBytes.of(untied).weights == whole
    assert sum(p.numel() * 4 for p in untied.parameters()) == whole + table


@pytest.mark.parametrize("name", ["tiny-qwen3-moe", "tiny-olmoe", "tiny-mixtral"])
def test_a_step_of_a_mixture_of_experts_reads_the_experts_hit(name):
    model = build_preset(name)
    config, needed = model.config, DecodeBytes.of(model)
    width = getattr(config, "moe_intermediate_size", config.intermediate_size)
    assert needed.per_expert == 3 * width * config.hidden_size * 4
    held = sum(p.nbytes for p in model.parameters())
    held -= model.get_input_embeddings().weight.nbytes
    dense_layers = len(getattr(config, "mlp_only_layers", None) or [])
    experts = (config.num_hidden_layers - dense_layers) * num_experts(config)
    assert needed.weights == held - experts * needed.per_expert
    assert needed.read(2, 0, 5.5) == 2 * (needed.weights + 5.5 * needed.per_expert)
    with pytest.raises(ValueError, match="depend on the experts hit"):
        needed.read(2, 0)


def test_bytes_of_steps_are_weights_and_attended_tokens():
    needed = DecodeBytes(weights=1000, per_token=10)
    assert needed.read(3, 50) == 3500
    # Steps give tokens 2, 3 and 4 behind 6, 7 and 8 tokens.
    assert tokens_attended(5, 4) == 6 + 7 + 8
    assert tokens_attended(5, 1) == 0
