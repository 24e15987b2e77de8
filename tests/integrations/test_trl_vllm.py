"""`attach(trainer, rollout="vllm")`: TRL's own vLLM generates, with our plug-in."""

import sys

import pytest

pytest.importorskip("trl", reason="trl is an optional extra")

from types import SimpleNamespace

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from trl import RLOOConfig, RLOOTrainer
from trl.generation import vllm_client, vllm_generation

from rl_consistency.integrations.vllm import calls
from rl_consistency.models.modules import CanonicalModule
from rl_consistency.numerics.errors import ConsistencyError
from tests.integrations import trl_fakes
from tests.integrations.trainers import loaded, logged, sft
from tests.integrations.trl_fakes import LLM, Client, Served, StockWorker

MODES = ["colocate", "server"]


@pytest.fixture
def over_vllm(make, directory, monkeypatch):
    """Trainers with a fake vLLM, at most one of them with a server."""
    for module in (vllm_generation, vllm_client):
        monkeypatch.setattr(module, "is_vllm_available", lambda **_: True)
    monkeypatch.setattr(vllm_generation, "SamplingParams", SimpleNamespace, raising=False)
    monkeypatch.setattr(vllm_generation, "VLLMClient", Client)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")  # TRL sets them: they are put back
        monkeypatch.delenv(name)
    with pytest.MonkeyPatch.context() as patched:
        servers = []

        def made(mode="colocate", llm=LLM, path=directory, **options):
            patched.setattr(vllm_generation, "LLM", llm, raising=False)
            if mode == "server":
                served = llm(model=path, seed=0, logprobs_mode=llm.server_logprobs)
                patched.setattr(Client, "served", served)
                servers.append(trl_fakes.server(served))
                options["vllm_server_base_url"] = servers[-1].__enter__()
            return make(use_vllm=True, vllm_mode=mode, model=loaded(path), **options)

        yield made
        for each in servers:
            each.__exit__(None, None, None)


@pytest.mark.parametrize("mode", MODES)
def test_no_token_differs_and_trl_s_importance_ratio_is_1(mode, attach, over_vllm):
    trainer = over_vllm(mode, temperature=0.7, top_p=0.9, vllm_enable_sleep_mode=True)
    found = dict(vars(trainer.vllm_generation))
    attachment = attach(trainer, rollout="vllm", sampling_metrics=True)
    trainer.train()
    assert attachment.drift.tokens == sum(logged(trainer, "consistency/tokens")) > 0
    assert logged(trainer, "consistency/mismatched_tokens") == [0, 0]
    assert logged(trainer, "sampling/sampling_logp_difference/max") == [0, 0]
    for which in ("min", "mean", "max"):
        assert logged(trainer, f"sampling/importance_sampling_ratio/{which}") == [1, 1]
    attachment.detach()
    assert vars(trainer.vllm_generation) == found
    assert trainer._last_loaded_step == -1  # the next rollout gets the weights of training


def test_rloo_asks_vllm_for_logprobs(attach, over_vllm):
    trainer = over_vllm(config=RLOOConfig, trainer=RLOOTrainer, beta=0.0, max_steps=1)
    attachment = attach(trainer, rollout="vllm")
    trainer.train()
    assert attachment.drift.tokens > 0 and attachment.drift.passed


def test_a_mixture_s_tokens_are_compared_without_the_routing_that_vllm_does_not_tell(
    attach, over_vllm, tmp_path
):
    config = Qwen3MoeConfig(
        **{"vocab_size": 259, "hidden_size": 32, "num_hidden_layers": 1, "head_dim": 16},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32},
        **{"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
        **{"max_position_embeddings": 64, "eos_token_id": 258, "pad_token_id": 256},
    )
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    trainer = over_vllm(path=tmp_path, max_steps=1, router_aux_loss_coef=0.0)
    attachment = attach(trainer, rollout="vllm")
    trainer.train()
    assert attachment.drift.passed and attachment.drift.rerouted_tokens is None


class OneBit(LLM):
    """The first logprob of all is one ULP off."""

    is_wrong = True

    def told(self, tokens, logprobs):
        if self.is_wrong:
            near = torch.nextafter(torch.tensor(logprobs[0]), torch.tensor(0.0))
            logprobs[0], self.is_wrong = near.item(), False
        return super().told(tokens, logprobs)


def test_one_wrong_bit_of_one_logprob_is_counted_and_told(attach, over_vllm):
    trainer = over_vllm("server", OneBit, max_steps=1)
    attachment = attach(trainer, rollout="vllm")
    with pytest.warns(UserWarning, match=r"step 1, process 0: .*replay"):
        trainer.train()
    assert attachment.drift.mismatched_tokens == 1


class Deaf(Served):
    """A model that takes no new values of one parameter."""

    def load_weights(self, sent):
        super().load_weights((n, t) for n, t in sent if n != "model.norm.weight")


class DeafLLM(LLM):
    served = Deaf


class FullLLM(LLM):
    resets = False


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "llm, message",
    [
        (DeafLLM, r"serves other weights .* first in model\.norm\.weight"),
        (FullLLM, "kept cached keys of the old"),
    ],
    ids=["a parameter was passed over", "running requests"],
)
def test_a_sync_that_left_other_weights_or_cached_keys_is_an_error(
    mode, llm, message, attach, over_vllm
):
    trainer = over_vllm(mode, llm)
    attach(trainer, rollout="vllm")
    with pytest.raises(ConsistencyError, match=message):
        trainer.train()


class StockLLM(LLM):
    worker = StockWorker


class HalfLLM(LLM):
    dtype = torch.bfloat16


class RawLLM(LLM):
    def __init__(self, **options):
        super().__init__(**options | {"logprobs_mode": "raw_logprobs"})


class OtherVersion(Served):
    def fingerprint(self):
        return super().fingerprint() | {"torch": "0.1"}


class OtherLLM(LLM):
    served = OtherVersion


@pytest.mark.parametrize(
    "mode, llm, error, message",
    [
        ("colocate", StockLLM, ValueError, "colocated vLLM does not run .*before the trainer is"),
        ("server", StockLLM, ValueError, "server does not run .* 501 .*RL_CONSISTENCY_VLLM=1 and"),
        ("server", RawLLM, ValueError, "logprobs_mode=raw_logprobs; set processed_logprobs"),
        ("colocate", HalfLLM, ValueError, "dtype=torch.bfloat16; set torch.float32"),
        ("server", OtherLLM, ConsistencyError, r"trainer first: torch: \S+ != 0\.1"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_vllm_that_cannot_give_training_s_bits_is_refused_by_name(
    mode, llm, error, message, attach, over_vllm
):
    trainer = over_vllm(mode, llm)
    found = dict(vars(trainer))
    with pytest.raises(error, match=message):
        attach(trainer, rollout="vllm")
    assert vars(trainer) == found and not isinstance(trainer.model, CanonicalModule)


REFUSED = {
    "use_vllm": (False, "use_vllm=False; .*set it to True"),
    "vllm_tensor_parallel_size": (2, "vllm_tensor_parallel_size=2; .*set it to 1"),
    "vllm_structured_outputs_regex": ("a*", "vllm_structured_outputs_regex"),
    "generation_kwargs": ({"min_tokens": 3, "seed": 1}, "generation_kwargs=min_tokens; .*seed"),
}


def test_what_breaks_exactness_is_refused_before_vllm_is_asked(attach, make):
    trainer = make()
    trainer.args.use_vllm = True
    for name, (value, message) in REFUSED.items():
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(trainer.args, name, value)
            with pytest.raises(ValueError, match=message):
                attach(trainer, rollout="vllm")
    trainer.repetition_penalty = 1.1
    with pytest.raises(ValueError, match="repetition_penalty=1.1"):
        attach(trainer, rollout="vllm")


def test_options_that_do_not_go_with_vllm_are_refused(attach, make):
    with pytest.raises(ValueError, match="rollout='sglang'; allowed"):
        attach(make(), rollout="sglang")
    with pytest.raises(TypeError, match="SFTTrainer does not generate; leave out .*rollout"):
        attach(make(sft), rollout="vllm")
    trainer = make()
    trainer.args.use_vllm = True
    with pytest.raises(TypeError, match="num_kv_blocks is of our engine"):
        attach(trainer, rollout="vllm", num_kv_blocks=9)
    with pytest.raises(TypeError, match="measure_only=True leaves"):
        attach(trainer, rollout="vllm", measure_only=True)


def test_the_plug_in_gives_every_worker_of_vllm_its_calls(monkeypatch):
    stub = SimpleNamespace(WorkerBase=type("WorkerBase", (StockWorker,), {}))
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.worker_base", stub)
    calls.add_calls()
    worker = stub.WorkerBase(SimpleNamespace(digest=lambda: "d", fingerprint=dict))
    assert getattr(worker, calls.DIGEST)() == "d" and getattr(worker, calls.FINGERPRINT)() == {}
