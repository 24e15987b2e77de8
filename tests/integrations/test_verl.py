"""The seams of verl, on modules with its names: same bytes, and refusals by name."""

import importlib
import os
import re
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rl_consistency.integrations.verl_weights import (
    DIGESTS,
    compare_digests,
    take_digests,
    with_digests,
)
from rl_consistency.models.patch import patch
from rl_consistency.models.scoring.token_logprobs import token_logprobs
from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.parity.digest import each_digest
from rl_consistency.rollout.sampling_params import SamplingParams
from tests.integrations import fake_verl
from tests.integrations.fake_verl import Batch, nested

PROMPTS, RESPONSES = (5, 3, 9, 2), (7, 4, 0, 11)


@pytest.fixture
def ours(monkeypatch):
    """The integration, imported again over the fakes."""
    fake_verl.install(monkeypatch)
    yield importlib.import_module("rl_consistency.integrations.verl")
    for name in fake_verl.OURS:
        sys.modules.pop(f"rl_consistency.integrations.{name}", None)


def configs(directory=None, *, model=(), engine=()):
    config = None if directory is None else AutoConfig.from_pretrained(directory)
    found = {"local_path": directory, "hf_config": config, "use_fused_kernels": False, "lora": {}}
    return (
        SimpleNamespace(**{**found, **dict(model)}),
        SimpleNamespace(**{"strategy": "fsdp2", "forward_only": False, **dict(engine)}),
    )


@pytest.fixture
def engine(ours, directory):
    found = ours.Engine(*configs(directory), None, None)
    found.initialize()
    yield found
    found.session.restore()


@pytest.fixture
def plain(directory):
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    with patch(model):
        yield model


def batch(**options):
    draw = torch.Generator().manual_seed(1)
    prompts, responses = (
        [torch.randint(0, 256, (n,), generator=draw) for n in lens] for lens in (PROMPTS, RESPONSES)
    )
    ids = [torch.cat(pair) for pair in zip(prompts, responses)]
    data = {
        "input_ids": nested(ids),
        "position_ids": nested([torch.arange(len(i)) for i in ids]),
        "responses": nested(responses),
    }
    given = {"micro_batch_size_per_gpu": 4, "temperature": 1.0, "calculate_entropy": True}
    return [i.tolist() for i in ids], Batch(data | given | options)


def of_responses(jagged):
    """As verl takes them: the columns before those of the response's tokens."""
    rows = zip(jagged.unbind(), RESPONSES)
    return torch.cat([row[len(row) - n - 1 : len(row) - 1] for row, n in rows])


def test_every_backend_and_rollout_is_taken(ours):
    backends = {name for _, name, device, _ in fake_verl.EngineRegistry.engines if device == "cpu"}
    assert backends >= {"fsdp", "fsdp2", "megatron", "veomni"}
    assert set(fake_verl.EngineRegistry.engines.values()) == {ours.Engine}
    assert set(fake_verl.NAMES["verl.workers.rollout.base"]["_ROLLOUT_REGISTRY"].values()) == {
        "rl_consistency.integrations.verl_rollout.Adapter"
    }
    assert fake_verl.RolloutReplicaRegistry.loaders["vllm"]().__name__ == "Replica"


@pytest.mark.parametrize("temperature", [1.0, 0.7, torch.tensor([0.7, 1.0, 1.3, 0.5])])
def test_logprobs_and_entropies_are_those_of_token_logprobs(engine, plain, temperature):
    sequences, data = batch(temperature=temperature)
    given = temperature.tolist() if isinstance(temperature, torch.Tensor) else [temperature] * 4
    sampling = [SamplingParams(temperature=each) for each in given]
    with torch.no_grad():
        expected = token_logprobs(plain, sequences, prompt_lengths=PROMPTS, sampling=sampling)
    (output,) = engine.forward_backward_batch(data, None, forward_only=True)
    found = output["model_output"]
    assert torch.equal(of_responses(found["log_probs"]), expected.logprobs)
    assert torch.equal(of_responses(found["entropy"]), expected.entropy)
    assert found["log_probs"].values().count_nonzero() == sum(RESPONSES)


def test_a_micro_batch_of_empty_responses_is_zeros(engine):
    _, data = batch()
    *_, empty, _ = data.parts(1)
    found = engine.prepare_model_outputs(None, None, empty, None)
    assert found["log_probs"].shape[0] == 1 and not found["log_probs"].values().any()
    found["log_probs"].values().sum().backward()
    assert not any(p.grad.any() for p in engine.module.parameters())


def test_stock_logprobs_differ(engine, plain):
    sequences, data = batch()
    with torch.no_grad(), engine.session.stock() as stock:
        rows = [stock(torch.tensor([i])).logits[0].float().log_softmax(-1) for i in sequences]
        taken = [
            row[:-1].gather(1, torch.tensor(i[1:])[:, None]) for row, i in zip(rows, sequences)
        ]
    stock = torch.cat([t[p - 1 :, 0] for t, p in zip(taken, PROMPTS)])
    (output,) = engine.forward_backward_batch(data, None, forward_only=True)
    assert not torch.equal(of_responses(output["model_output"]["log_probs"]), stock)


def test_padded_responses_and_data_without_them_are_scored(engine, plain):
    sequences, data = batch(calculate_entropy=False)
    padded = torch.zeros(4, 11, dtype=torch.long)
    mask = torch.arange(11) < torch.tensor(RESPONSES)[:, None]
    whole = torch.cat([torch.ones(4, 9), mask], dim=1).long()
    (first,) = engine.forward_backward_batch(data, None, forward_only=True)
    again = Batch(data | {"responses": padded, "attention_mask": whole})
    assert torch.equal(
        engine.prepare_model_outputs(None, None, again, None)["log_probs"].values(),
        first["model_output"]["log_probs"].values(),
    )
    del data["responses"]
    with torch.no_grad():
        found = engine.prepare_model_outputs(None, None, data, None)
        expected = token_logprobs(plain, sequences, prompt_lengths=[1] * 4).split()
    assert list(found) == ["log_probs"]
    for row, each in zip(found["log_probs"].unbind(), expected):
        assert torch.equal(row, torch.cat([each, torch.zeros(1)]))


def gradients(engine, size):
    engine.module.zero_grad()
    _, data = batch(micro_batch_size_per_gpu=size, temperature=0.8)

    def loss(model_output, data, dp_group):
        scores = model_output["log_probs"].values() + 0.1 * model_output["entropy"].values()
        return -(scores * torch.sin(scores.detach())).sum() / sum(RESPONSES), {"seen": 1}

    outputs = engine.forward_backward_batch(data, loss)
    assert all(output["metrics"] == {"seen": 1} for output in outputs)
    return {name: p.grad.clone() for name, p in engine.module.named_parameters()}


def test_gradients_do_not_depend_on_micro_batches(engine):
    whole = gradients(engine, 4)
    assert any(gradient.any() for gradient in whole.values())
    for size in (1, 2):
        parts = gradients(engine, size)
        assert all(torch.equal(parts[name], whole[name]) for name in whole)


@pytest.mark.parametrize("name", ["calculate_sum_pi_squared", "distillation_use_topk"])
def test_sums_over_the_vocabulary_are_refused(engine, name):
    with pytest.raises(ValueError, match=f"no order for {name}"):
        engine.forward_backward_batch(batch(**{name: True})[1], None, forward_only=True)


def test_other_positions_are_refused(engine):
    sequences, data = batch()
    data["position_ids"] = nested([torch.arange(len(i)) + 1 for i in sequences])
    with pytest.raises(ValueError, match="count each sequence from 0"):
        engine.forward_backward_batch(data, None, forward_only=True)


def test_an_engine_whose_patch_was_undone_scores_nothing(engine):
    engine.session.restore()
    with pytest.raises(ValueError, match="not patched"):
        engine.forward_backward_batch(batch()[1], None, forward_only=True)


@pytest.mark.parametrize(
    ("side", "options", "what"),
    [
        ("engine", {"strategy": "fsdp"}, "engine.strategy='fsdp'"),
        ("engine", {"strategy": "megatron"}, "engine.strategy='megatron'"),
        ("engine", {"ulysses_sequence_parallel_size": 2}, "ulysses_sequence_parallel_size=2"),
        ("engine", {"qat": SimpleNamespace(enable=True)}, "engine.qat.enable=True"),
        ("engine", {"mixed_precision": {"param_dtype": "fp16"}}, "param_dtype='fp16'"),
        ("engine", {"model_dtype": "bf16"}, "engine.model_dtype='bf16'"),
        ("model", {"use_fused_kernels": True}, "model.use_fused_kernels=True"),
        ("model", {"use_liger": True}, "model.use_liger=True"),
        ("model", {"tiled_mlp": {"enabled": True}}, "model.tiled_mlp.enabled=True"),
        ("model", {"enable_activation_offload": True}, "enable_activation_offload=True"),
        ("model", {"lora_rank": 8}, "model.lora_rank=8"),
        ("model", {"lora": {"rank": 8}}, "model.lora.rank=8"),
        ("model", {"lora_adapter_path": "a"}, "model.lora_adapter_path='a'"),
        ("model", {"mtp": SimpleNamespace(enable=True)}, "model.mtp.enable=True"),
    ],
)
def test_an_option_of_the_trainer_is_refused_by_name(ours, side, options, what):
    with pytest.raises(ValueError, match=re.escape(what)):
        ours.Engine(*configs(**{side: options}), None, None)


def test_a_reference_in_16_bits_and_other_spellings_are_covered(ours):
    engine = {"model_dtype": "bf16", "forward_only": True}
    precision = {"mixed_precision": {"param_dtype": "bfloat16"}, "qat": {"enable": False}}
    assert ours.Engine(*configs(engine=engine | precision), None, None).engine_config


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("name", "sglang"), ("top_p", 0.9), ("top_k", 50), ("do_sample", False)),
        *(("repetition_penalty", 1.1), ("logprobs_mode", "raw_logprobs"), ("quantization", "fp8")),
        *(("full_determinism", True), ("enable_rollout_routing_replay", True)),
        ("disaggregation.enabled", True),
        ("checkpoint_engine.backend", "delta_sharded"),
    ],
)
def test_an_option_of_the_rollout_is_refused_by_name(ours, name, value):
    rollout = importlib.import_module("rl_consistency.integrations.verl_rollout")
    good = {"name": "vllm", "top_p": 1.0, "top_k": -1, "do_sample": True}
    assert rollout.Adapter(SimpleNamespace(**good), None, None).config
    first, _, second = name.partition(".")
    bad = {first: SimpleNamespace(**{second: value}) if second else value}
    with pytest.raises(ValueError, match=re.escape(f"rollout.{name}={value!r}")):
        rollout.Adapter(SimpleNamespace(**{**good, **bad}), None, None)


@pytest.mark.parametrize(
    ("module", "name", "value", "message"),
    [
        ("verl", "__version__", "0.10.0", r"verl is 0\.10\.0"),
        ("verl.utils.device", "get_device_name", lambda: "npu", "here is nvidia npu"),
        ("verl.utils.device", "get_vendor", lambda: "amd", "here is amd cpu"),
    ],
)
def test_another_verl_or_device_is_refused(monkeypatch, module, name, value, message):
    fake_verl.install(monkeypatch)
    monkeypatch.setattr(sys.modules[module], name, value)
    with pytest.raises(ImportError, match=message):
        importlib.import_module("rl_consistency.integrations.verl")


def test_weights_come_whole_rounded_and_with_digests(engine, plain):
    sent = dict(engine.get_per_tensor_param(layered_summon=False, base_sync_done=True)[0])
    assert list(sent)[-1] == DIGESTS
    digests = take_digests(sent)
    assert DIGESTS not in sent and take_digests(sent) == {}
    assert sent.keys() >= dict(plain.named_parameters()).keys()
    assert {weight.dtype for weight in sent.values()} == {torch.bfloat16}
    compare_digests(digests, each_digest(plain))


def change_a_bit(plain):
    plain.model.norm.weight.data.view(torch.int16)[3] ^= 1


@pytest.mark.parametrize(
    ("mutant", "what"),
    [
        (change_a_bit, "model.norm.weight has the digest"),
        (lambda plain: plain.float(), "model.embed_tokens.weight has the digest"),
        (lambda plain: setattr(plain, "more", torch.nn.Linear(2, 2)), "and none in the trainer"),
    ],
)
def test_other_bits_than_the_trainers_are_named(directory, mutant, what):
    plain = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    sent = take_digests(dict(with_digests(plain.state_dict().items())))
    compare_digests(sent, each_digest(plain))
    mutant(plain)
    with pytest.raises(ConsistencyError, match=what):
        compare_digests(sent, each_digest(plain))


@pytest.fixture
def worker(ours, directory, monkeypatch):
    """A worker of vLLM with a patched model, and the buckets that a trainer sends it."""

    class CanonicalForCausalLM:
        def __init__(self):
            self.hf = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)

        def load_weights(self, weights):
            self.hf.load_state_dict(dict(weights), strict=False)

        def digests(self):
            return each_digest(self.hf)

    module = ModuleType("rl_consistency.integrations.vllm.model")
    module.CanonicalForCausalLM = CanonicalForCausalLM
    monkeypatch.setitem(sys.modules, module.__name__, module)
    rollout = importlib.import_module("rl_consistency.integrations.verl_rollout")
    found, model = rollout.WorkerExtension(), CanonicalForCausalLM()
    found.device = "cpu"
    found.model_runner = SimpleNamespace(get_model=lambda: model)
    weights = list(with_digests((n, w * 1.5) for n, w in model.hf.state_dict().items()))
    receiver = fake_verl.BucketedWeightReceiver
    monkeypatch.setattr(receiver, "sent", [weights[:7], weights[7:]])
    monkeypatch.setattr(receiver, "answered", False)
    return found


def test_a_worker_takes_over_weights_in_buckets(worker):
    model = worker.model_runner.get_model()
    before = model.hf.model.norm.weight.clone()
    worker.update_weights_from_ipc(peft_config=None, base_sync_done=True, use_shm=False)
    assert torch.equal(model.hf.model.norm.weight, before * 1.5)


def test_an_error_is_raised_when_the_sender_has_its_answers(worker):
    model = worker.model_runner.get_model()
    model.load_weights = lambda weights: [][1:] if len(weights) == 7 else int("x")
    with pytest.raises(ValueError, match="invalid literal"):
        worker.update_weights_from_ipc()
    assert fake_verl.BucketedWeightReceiver.answered


def test_a_lost_bucket_is_an_error_that_names_a_parameter(worker):
    model = worker.model_runner.get_model()
    model.load_weights = lambda weights: None
    with pytest.raises(ConsistencyError, match="after the weight sync model.embed_tokens.weight"):
        worker.update_weights_from_ipc()


def test_a_worker_rules_out_no_token(worker):
    model = worker.model_runner.get_model()
    worker.monkey_patch_model(vocab_size=200, banned_token_ids=None)
    assert "compute_logits" not in vars(model)
    with pytest.raises(ValueError, match="images"):
        worker.monkey_patch_model(200, [3])


def test_a_worker_whose_vllm_runs_its_own_model_is_refused(worker):
    worker.model_runner = SimpleNamespace(get_model=lambda: torch.nn.Linear(2, 2))
    with pytest.raises(ConsistencyError, match="made a Linear.*VLLM_PLUGINS"):
        worker.monkey_patch_model(200)


def test_servers_of_the_trained_model_have_the_plug_in(ours, monkeypatch):
    server = importlib.import_module("rl_consistency.integrations.verl_server")
    monkeypatch.setenv("RL_CONSISTENCY_VLLM", "0")
    found = server.Server(*[None] * 9)
    assert os.environ["RL_CONSISTENCY_VLLM"] == "1"
    module, _, name = found._get_worker_extension_cls().rpartition(".")
    assert issubclass(
        getattr(importlib.import_module(module), name), fake_verl.vLLMColocateWorkerExtension
    )
    found._preprocess_engine_kwargs(given := {})
    assert given == {"seen": True}
    with pytest.raises(ValueError, match="worker_extension_cls='a.B'"):
        found._preprocess_engine_kwargs({"worker_extension_cls": "a.B"})
    assert server.Replica(0, None, None).server_class == ("remote", server.Server)
    for role in ("is_reward_model", "is_teacher_model"):
        assert (
            server.Replica(0, None, None, **{role: True}).server_class is fake_verl.vLLMHttpServer
        )
