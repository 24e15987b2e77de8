"""verl's own classes on two CPUs, where verl is installed: FSDP2, its losses, its micro-batches."""

import ast
import importlib
import inspect
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from rl_consistency.integrations.verl_weights import compare_digests, take_digests
from rl_consistency.models.patch import patch
from rl_consistency.models.scoring.token_logprobs import token_logprobs
from rl_consistency.parity.digest import each_digest
from rl_consistency.rollout.sampling_params import SamplingParams
from rl_consistency.trainers.data.tokenizer import byte_tokenizer
from tests.integrations import fake_verl
from tests.integrations.fake_verl import nested
from tests.ranks import run_ranks

__all__ = ["run_ranks"]

pytest.importorskip("verl")

PROMPTS, RESPONSES = (5, 3, 9, 2), (7, 4, 0, 11)


def on_a_cpu():
    """Let verl take the CPU for its device."""
    from verl.plugin.platform import set_platform
    from verl.plugin.platform.platform_cuda import PlatformCUDA

    nothing = SimpleNamespace(is_available=lambda: False, mem_get_info=lambda *_: (0, 0))
    for name in ("memory_allocated", "memory_reserved", "synchronize", "empty_cache"):
        setattr(nothing, name, lambda *_: 0)

    class Cpu(PlatformCUDA):
        device_name, device_module = "cpu", nothing

        def current_device(self):
            return torch.device("cpu")

    set_platform(Cpu())
    # verl asks for a class of TRL that TRL 1 does not have.
    importlib.import_module("verl.models.transformers.monkey_patch").is_trl_available = lambda: (
        False
    )


def engine_of(path, *, stock=False, **options):
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    lib = None if stock else "rl_consistency.integrations.verl"
    more = {"override_config": {"attn_implementation": "sdpa"}} if stock else {}
    model = HFModelConfig(path=str(path), external_lib=lib, **more, **options)
    config = FSDPEngineConfig(strategy="fsdp2", use_dynamic_bsz=False)
    given = {
        "model_config": model,
        "engine_config": config,
        "checkpoint_config": CheckpointConfig(),
    }
    given["optimizer_config"] = FSDPOptimizerConfig(lr=1e-3, total_training_steps=4)
    made = FSDPEngineWithLMHead if stock else partial(EngineRegistry.new, "language_model", "fsdp2")
    found = made(**given)
    found.initialize()
    return found


def batch(**options):
    from verl.utils import tensordict_utils

    draw = torch.Generator().manual_seed(1)
    prompts, responses = (
        [torch.randint(0, 256, (n,), generator=draw) for n in lens] for lens in (PROMPTS, RESPONSES)
    )
    ids = [torch.cat(pair) for pair in zip(prompts, responses)]
    mask = nested([torch.ones(n, dtype=torch.long) for n in RESPONSES])
    data = {
        "input_ids": nested(ids),
        "position_ids": nested([torch.arange(len(i)) for i in ids]),
        "prompts": nested(prompts),
        "responses": nested(responses),
        "response_mask": mask,
        "loss_mask": mask,
        "old_log_probs": nested([torch.randn(n, generator=draw) * 0.1 - 5 for n in RESPONSES]),
        "advantages": nested([torch.randn(n, generator=draw) for n in RESPONSES]),
    }
    given = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2, "temperature": 0.7}
    given |= {"calculate_entropy": True, "global_batch_size": 4, **options}
    return [i.tolist() for i in ids], tensordict_utils.get_tensordict(data, given)


def loss_of_verl():
    from verl.workers.config import FSDPActorConfig
    from verl.workers.utils.losses import ppo_loss

    options = {"rollout_n": 1, "use_dynamic_bsz": False, "ppo_micro_batch_size_per_gpu": 1}
    config = FSDPActorConfig(strategy="fsdp2", entropy_coeff=0.01, **options)
    return partial(ppo_loss, config=config)


def gradients(engine, size):
    with engine.train_mode():
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(batch(micro_batch_size_per_gpu=size)[1], loss_of_verl())
        return {n: p.grad.full_tensor().clone() for n, p in engine.module.named_parameters()}


def scored(engine, data):
    from verl.workers.utils.padding import response_from_nested

    with engine.eval_mode():
        output = engine.infer_batch(data)["model_output"]
    mask = data["response_mask"]
    return [response_from_nested(output[key], mask).values() for key in ("log_probs", "entropy")]


def verl_on_rank(world, path):
    on_a_cpu()
    stock = engine_of(path, stock=True)
    engine, plain = engine_of(path), AutoModelForCausalLM.from_pretrained(path, dtype="bfloat16")
    patch(plain)
    found = {}
    for step in range(2):
        sequences, data = batch()
        sampling = SamplingParams(temperature=0.7)
        with torch.no_grad():
            expected = token_logprobs(plain, sequences, prompt_lengths=PROMPTS, sampling=sampling)
        logprobs, entropy = scored(engine, data)
        found[f"logprobs {step}"] = torch.equal(logprobs, expected.logprobs)
        found[f"entropy {step}"] = torch.equal(entropy, expected.entropy)
        found[f"stock differs {step}"] = not torch.equal(scored(stock, data)[0], expected.logprobs)
        whole = gradients(engine, 4)
        for size in (1, 2):
            parts = gradients(engine, size)
            found[f"gradients {step} {size}"] = all(torch.equal(parts[n], whole[n]) for n in whole)
        with engine.train_mode():
            engine.train_batch(batch()[1], loss_of_verl())
        before = plain.model.embed_tokens.weight.clone()
        weights = dict(engine.get_per_tensor_param()[0])
        digests = take_digests(weights)
        plain.load_state_dict(weights)
        compare_digests(digests, each_digest(plain))
        found[f"updated {step}"] = not torch.equal(plain.model.embed_tokens.weight, before)
    try:
        engine_of(path, use_fused_kernels=True)
    except ValueError as error:
        found["fused kernels"] = "model.use_fused_kernels=True" in str(error)
    return found


@pytest.mark.parametrize("tied", [True, False])
def test_an_engine_of_verl_has_the_bytes_of_a_plain_policy(run_ranks, tmp_path, tied):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    ids = {"vocab_size": 259, "pad_token_id": 256, "bos_token_id": 257, "eos_token_id": 258}
    config = Qwen3Config(**sizes, **heads, **ids, tie_word_embeddings=tied, initializer_range=0.3)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    for found in run_ranks(2, verl_on_rank, tmp_path, timeout=100):
        assert len(found) == 13 and all(found.values()), found


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("verl.workers.engine.fsdp.transformer_impl", "FSDPEngineWithLMHead"),
        ("verl.workers.engine", "EngineRegistry"),
        ("verl.workers.rollout.replica", "RolloutReplicaRegistry"),
    ],
)
def test_the_fakes_have_verls_signatures(module, name):
    real, fake = getattr(importlib.import_module(module), name), fake_verl.NAMES[module][name]
    for method, function in vars(fake).items():
        if inspect.isfunction(function) or isinstance(function, classmethod):
            given = list(inspect.signature(getattr(fake, method)).parameters)
            assert list(inspect.signature(getattr(real, method)).parameters) == given, method


def signatures(path):
    """Of the functions in a file that is not imported, by class and name: their parameters."""
    tree = ast.parse(path.read_text())
    for cls in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for node in cls.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield (cls.name, node.name), [arg.arg for arg in node.args.args]


@pytest.mark.parametrize(
    "module",
    ["vllm_rollout", "bucketed_weight_transfer", "utils", "vllm_async_server"],
)
def test_the_fakes_of_the_servers_have_verls_signatures(module):

    import verl

    folder = Path(verl.__file__).parent / "workers/rollout/vllm_rollout"
    real = dict(signatures(folder / f"{module}.py"))
    path = "verl.workers.rollout.vllm_rollout" + ("" if module == "vllm_rollout" else f".{module}")
    for name, fake in fake_verl.NAMES[path].items():
        for method, function in vars(fake).items():
            if inspect.isfunction(function):
                given = list(inspect.signature(function).parameters)
                assert real[name, method] == given, (name, method)
