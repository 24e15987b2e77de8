"""The calls that kernels are compiled by, before vLLM's first step."""

import pytest
import torch

import rl_consistency
from rl_consistency.verify.presets import build_preset
from tests.integrations.vllm.fake_vllm import vllm_config


class Graphs:
    has_piecewise_cudagraphs = staticmethod(lambda: True)


def calls_of(model, sizes, **sections):
    from rl_consistency.integrations.vllm import start

    sections |= {
        "compilation_config__cudagraph_capture_sizes": sizes,
        "compilation_config__cudagraph_mode": Graphs,
        "scheduler_config__max_num_seqs": 4,
    }
    given = vllm_config(model.config, torch.float32, max_num_batched_tokens=48, **sections)
    calls = list(start.kernel_calls(model, given))
    assert start.compile_kernels(model, given) == 0  # on a CPU
    return [(call.func.__name__, *call.args[1:]) for call in calls[:-1]], calls


@pytest.mark.parametrize("preset", ["tiny-qwen3", "tiny-mixtral"])
def test_every_call_runs_on_padding_alone(preset):
    model = build_preset(preset)
    with rl_consistency.patch(model, cuda_graphs=False), torch.no_grad():
        _, calls = calls_of(model, [1, 4, 16])
        for call in calls:
            call()


def test_captured_numbers_of_rows_and_larger_ones_are_run():
    model = build_preset("tiny-llama")
    with rl_consistency.patch(model, cuda_graphs=False):
        found, _ = calls_of(model, [1, 2, 16])
        eager, _ = calls_of(model, [])
    layouts = [layout for name, layout in found if name == "_run"]
    rows = [len(layout.slot_mapping) for layout in layouts if layout.attend is not None]
    assert rows == [1, 2, 16, 17, 32, 33, 48]
    assert [len(x.slot_mapping) for x in layouts if x.attend is None] == [1, 2]  # decode steps
    assert {len(hidden) for name, hidden in found if name == "next_token_logits"} == {1, 2, 4}
    rows = [len(layout.slot_mapping) for name, layout in eager if name == "_run"]
    assert rows == [1, 2, 4, 8, 16, 17, 32, 33, 48]


def test_attention_is_run_for_prompts_and_for_chunks_behind_a_past():
    model = build_preset("tiny-llama")
    with rl_consistency.patch(model, cuda_graphs=False):
        found, _ = calls_of(model, [])
    attended = [layout for name, layout in found if name == "attend_to_anything"]
    whole = [x for x in attended if x.by_past()[1] is None]
    assert len(whole) > 5 and {max(x.query_lens) for x in attended if x not in whole} >= {1, 2, 4}
