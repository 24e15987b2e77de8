"""The suite `vllm` with a stand-in for vLLM."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks.rollout import plugin
from benchmarks.suite import Choice

BENCH = SimpleNamespace(device=torch.device("cpu"))

VLLM = """
import os
import time
from types import SimpleNamespace

ON = os.environ["RL_CONSISTENCY_VLLM"] == "1"


class SamplingParams(SimpleNamespace):
    pass


class LLM:
    def __init__(self, **settings):
        assert settings["enable_prefix_caching"] and settings["max_model_len"] == 2048
        assert os.path.exists(settings["model"] + "/model.safetensors")

    def generate(self, inputs, sampling, use_tqdm):
        time.sleep(0.01 if ON else 0.03)
        counts = [each.max_tokens for each in sampling]
        if not ON and max(counts) == 6 and len(inputs) == 4:
            raise RuntimeError("no kernel for this")
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[7] * n)]) for n in counts]

    def apply_model(self, function):
        return [2.0 if ON else 1.0]

    def reset_prefix_cache(self):
        pass
"""


def test_the_plugin_is_set_against_vllm_and_a_failure_hides_no_row(monkeypatch, tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(VLLM, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    modes = {name: plugin.MODES[name] for name in ("vllm", "ours")}  # without our own engine
    monkeypatch.setattr(plugin, "MODES", modes)
    (cases,) = plugin.plugin_suites(Choice(tiny=True)).values()
    assert [case.work for case in cases] == ["ready to serve", "prefill", "generate", "weights"]
    ready, prefill, generate, weights = (case.run(BENCH) for case in cases)
    assert ready["stock"] == prefill["stock"] == "vllm" and 1 < prefill["ratio"] < 5
    assert prefill["tokens_per_second"]["ours"] == pytest.approx(24e6 / prefill["ours_us"])
    assert "ratio" not in generate and "no kernel for this" in generate["unavailable"]["vllm"]
    assert weights["ours_us"] == 2e6 and not weights["peers"]
