"""The model directory that the GPU recipe is run with."""

import pytest
import torch

from benchmarks.make_random_model import main
from benchmarks.models import build_model
from rl_consistency.parity.digest import parameter_digest
from rl_consistency.rollout.tokenizer import eos_token_ids
from rl_consistency.trainers.config.sections import PolicySection, TokenizerSection
from rl_consistency.trainers.policy import load_policy


def test_a_mixture_of_experts_loads_with_the_weights_it_was_given(tmp_path):
    assert main([str(tmp_path), "--preset", "tiny-olmoe", "--device", "cpu"]) == 0
    policy = PolicySection(path=tmp_path, dtype="bfloat16")
    model, _ = load_policy(policy, TokenizerSection(kind="auto"), seed=3)
    given = build_model("tiny-olmoe", torch.device("cpu"))
    assert parameter_digest(model) == parameter_digest(given)


def test_another_name_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path), "--preset", "gpt2"])
    assert "--preset: no model 'gpt2'; give tiny-qwen3, " in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_random_model_loads_as_a_policy_and_is_a_function_of_its_seed(tmp_path, capsys):
    loaded = []
    for name, seed in (("one", 0), ("same", 0), ("other", 1)):
        directory = tmp_path / name
        arguments = [str(directory), "--preset", "tiny-qwen3", "--seed", str(seed)]
        assert main([*arguments, "--device", "cpu"]) == 0
        policy = PolicySection(path=directory, dtype="bfloat16")
        loaded.append(load_policy(policy, TokenizerSection(kind="auto"), seed=3))
    model, tokenizer = loaded[0]
    assert model.dtype == torch.bfloat16
    assert eos_token_ids(model, tokenizer) == (tokenizer.eos_token_id,)
    one, same, other = (parameter_digest(policy) for policy, _ in loaded)
    assert one == same != other
    assert main([str(tmp_path / "one"), "--preset", "tiny-qwen3"]) == 2
    assert "already holds a model" in capsys.readouterr().out
