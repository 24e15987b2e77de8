"""What `attach` relies on in TRL, by signature and behaviour; a version that changes it is red."""

import inspect
import re
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="trl is an optional extra")

import torch
from accelerate import Accelerator
from packaging.version import Version
from trl import DPOTrainer, GRPOConfig, GRPOTrainer, RLOOTrainer, SFTTrainer
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer.utils import FusedCausalLMOutput, add_fused_lm_head

from rl_consistency.integrations.generation import EngineGeneration
from tests.integrations.trainers import loaded


@pytest.mark.parametrize("trainer", [GRPOTrainer, RLOOTrainer])
def test_the_backend_is_called_by_these_names_and_only_where_it_generates(trainer):
    source = inspect.getsource(trainer)
    used = set(re.findall(r"self\.vllm_generation\.(\w+)", source))
    assert used <= {"sync_weights", "generate", "llm", "vllm_client"}
    turn = inspect.getsource(trainer._generate_single_turn)
    assert "if self.use_vllm:" in turn and "self._last_loaded_step" in turn
    (call,) = re.findall(r"self\.vllm_generation\.generate\(([^#]*?)\n\s*\)", turn, re.S)
    given = set(re.findall(r"(\w+)=", call))
    assert given <= inspect.signature(EngineGeneration.generate).parameters.keys()
    # Read in colocate mode only, or while the trainer is built.
    for name in ("llm", "vllm_client"):
        for use in re.finditer(rf"self\.vllm_generation\.{name}\b", source):
            assert re.search(r'vllm_mode == "(colocate|server)"', source[: use.start()][-400:])


def test_the_engine_s_seam_has_the_signature_of_the_backend():
    theirs = inspect.signature(VLLMGeneration.generate).parameters
    ours = inspect.signature(EngineGeneration.generate).parameters
    assert list(theirs) == list(ours)
    assert not inspect.signature(VLLMGeneration.sync_weights).parameters.keys() - {"self"}


def test_the_backend_gives_the_logprobs_it_was_asked_for_beside_the_ids_they_are_of():
    source = inspect.getsource(VLLMGeneration.generate)
    assert source.count('"logprobs": self.logprobs') == 2
    assert source.endswith("return prompt_ids, completion_ids, logprobs, logprob_token_ids\n")


def test_the_backend_syncs_and_is_asked_by_these_names():
    made = inspect.getsource(VLLMGeneration)
    for name in ("mode", "llm", "vllm_client", "server_timeout", "logprobs", "_weight_metadata"):
        assert re.search(rf"self\.{name} = ", made), name
    sync = inspect.getsource(VLLMGeneration.sync_weights)
    assert "self.vllm_client.reset_prefix_cache()" in sync and "self.llm.reset_prefix" in sync
    assert "if self._weight_metadata is None:" in sync
    assert "self.sync_weights()" in inspect.getsource(VLLMGeneration.generate)  # after sleep
    assert "self.base_url = " in inspect.getsource(VLLMClient)


@pytest.mark.parametrize("trainer", [GRPOTrainer, RLOOTrainer])
def test_training_scores_by_the_fused_head_with_labels(trainer):
    scoring = inspect.getsource(trainer._get_per_token_logps_and_entropies)
    assert "model(**model_inputs, labels=labels, fused_lm_head=True)" in scoring
    assert 'model_inputs = {"input_ids": input_ids_batch, "attention_mask"' in scoring
    assert set(re.findall(r"outputs\.(\w+)", scoring)) <= {"log_probs", "entropy", "aux_loss"}


def test_sft_reads_these_fields_of_the_fused_output():
    source = inspect.getsource(SFTTrainer.compute_loss)
    read = set(re.findall(r"outputs\.(\w+)", source)) - {"aux_loss"}
    assert read == {"log_probs", "label_mask", "entropy", "is_top1"}
    assert read <= {field.name for field in fields(FusedCausalLMOutput)}


def test_dpo_scores_by_the_fused_head_and_reads_these_fields_of_it():
    source = inspect.getsource(DPOTrainer._compute_loss)
    assert "outputs = model(**model_kwargs, labels=labels, fused_lm_head=True)" in source
    assert "ref_outputs = self.ref_model(**ref_model_kwargs, labels=labels, fused" in source
    read = set(re.findall(r"\boutputs\.(\w+)", source)) - {"aux_loss", "log_sum_sq_probs"}
    assert read == {"log_probs", "entropy", "mean_logits", "is_top1"}
    assert "self._compute_loss(model, inputs" in inspect.getsource(DPOTrainer.compute_loss)


def test_all_autocast_of_accelerate_is_under_one_attribute():
    for method in (Accelerator.autocast, Accelerator.prepare_model):
        asked = re.findall(
            r"get_mixed_precision_context_manager\((\S+),", inspect.getsource(method)
        )
        assert asked == ["self.native_amp"]


def test_the_fused_head_is_a_forward_on_the_instance(directory):
    model = loaded(directory)
    add_fused_lm_head(model, temperature=2.0, outputs=("log_probs", "entropy", "is_top1"))
    assert "forward" in vars(model)
    ids = torch.tensor([[1, 2, 3, 4]])
    out = model(input_ids=ids, labels=ids, fused_lm_head=True)
    for name in ("log_probs", "entropy", "is_top1", "label_mask"):
        assert getattr(out, name).shape == (1, 3), name
    assert out.label_mask.dtype == out.is_top1.dtype == torch.bool


@pytest.mark.parametrize("trainer", [GRPOTrainer, RLOOTrainer, SFTTrainer])
def test_logging_takes_a_dictionary_that_may_be_added_to(trainer):
    assert list(inspect.signature(trainer.log).parameters) == ["self", "logs", "start_time"]
    assert "logs.update(metrics)" in inspect.getsource(trainer.log)


def test_the_page_about_trl_names_its_defaults():
    page = (Path(__file__).parents[2] / "docs" / "coming_from_trl.md").read_text()
    table = page[: page.index("| vLLM |")]
    named = dict(re.findall(r"`(\w+)` \((\w[\w.-]*)(?: in TRL 1\.16)?\)", table))
    defaults = {field.name: field.default for field in fields(GRPOConfig)}
    assert len(named) >= 6
    # The length is of the newest version that is covered.
    newer = Version(version("trl")) >= Version("1.16")
    checked = named if newer else {k: v for k, v in named.items() if k != "max_completion_length"}
    for name, value in checked.items():
        shown = str(getattr(defaults[name], "value", defaults[name]))
        assert shown == value or float(shown) == float(value), name
