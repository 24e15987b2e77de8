"""Weights on their way into vLLM's model: all of them, in place, and no key of older ones."""

import importlib.metadata
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import rl_consistency
from rl_consistency.kernels.sampling.op import SamplingRows, distribution
from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.verify.presets import build_lifelike, build_preset, preset_config
from tests.integrations.vllm import layerwise_reload
from tests.integrations.vllm.fake_vllm import BLOCK_SIZE, Server, vllm_config

PRESETS = "tiny-qwen3", "tiny-qwen2", "tiny-qwen3-moe", "tiny-mixtral"


def model_of(config, dtype=torch.bfloat16, **changed):
    from rl_consistency.integrations.vllm.model import CanonicalForCausalLM

    torch.set_default_dtype(dtype)
    try:
        return CanonicalForCausalLM(vllm_config=vllm_config(config, dtype, **changed))
    finally:
        torch.set_default_dtype(torch.float32)


def policy(preset="tiny-qwen3", dtype=torch.bfloat16, seed=0):
    return build_preset(preset, dtype, seed=seed)


def received(model):
    from rl_consistency.integrations.vllm.weights import watched

    (own,) = (
        each for each in watched() if each.modules["model.norm.weight"] is model.hf.model.norm
    )
    return own


def named(trained):
    return [(name, parameter.detach()) for name, parameter in trained.named_parameters()]


def served(trained, **options):
    model = model_of(trained.config, **options)
    model.load_weights(named(trained))
    return model


def addresses(model):
    return {name: parameter.data_ptr() for name, parameter in model.named_parameters()}


def of_a_checkpoint(trained):
    """Names and tensors as checkpoints of mixtures have them, an expert's matrix each."""
    mixtral = trained.config.model_type == "mixtral"
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    for name, tensor in named(trained):
        if mixtral:
            name = name.replace(".mlp.", ".block_sparse_moe.")
        base = name.rpartition(".")[0]
        if name.endswith("experts.gate_up_proj"):
            for i, both in enumerate(tensor):
                for part, half in zip((gate, up), both.chunk(2), strict=True):
                    yield f"{base}.{i}.{part}.weight", half
        elif name.endswith("experts.down_proj"):
            yield from ((f"{base}.{i}.{down}.weight", each) for i, each in enumerate(tensor))
        else:
            yield name, tensor


@pytest.mark.parametrize("reload", (False, True))
@pytest.mark.parametrize(
    ("preset", "names"),
    (
        *((preset, "parameters") for preset in PRESETS),
        *((preset, "checkpoint") for preset in PRESETS[2:]),
    ),
)
def test_every_way_of_sending_gives_the_trained_bits_at_the_old_addresses(preset, reload, names):
    old, new = policy(preset), policy(preset, seed=1)
    model = served(old)
    before = addresses(model)
    pieces = list(of_a_checkpoint(new) if names == "checkpoint" else named(new))
    random.Random(0).shuffle(pieces)
    started = layerwise_reload.start(model) if reload else []
    loaded = set().union(*(model.load_weights([piece]) for piece in pieces))
    layerwise_reload.finish(started)
    assert loaded == set(before) == set(addresses(model))
    assert addresses(model) == before
    assert model.digest() == rl_consistency.model_digest(new) != rl_consistency.model_digest(old)
    model.begin_step([])


def test_old_checkpoints_bring_frequencies_that_are_computed():
    model = model_of(policy().config)
    assert not model.load_weights([("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(4))])


def test_a_parameter_on_meta_that_nothing_keeps_is_an_error():
    trained = policy()
    model = served(trained)
    norm = model.hf.model.norm
    norm._parameters["weight"] = torch.nn.Parameter(norm.weight.data.to("meta"), False)
    with pytest.raises(ConsistencyError, match="model.norm.weight goes to the meta device"):
        model.load_weights(named(trained))
    with pytest.raises(ConsistencyError, match="has no weights: a load failed"):
        model.begin_step([0])


def test_a_copy_beside_the_loaders_is_lost_in_a_reload_and_the_digest_names_it():
    new = policy(seed=1)
    model = served(policy())
    started = layerwise_reload.start(model)
    model.load_weights(pair for pair in named(new) if pair[0] != "model.norm.weight")
    model.hf.model.norm.weight.data.copy_(new.model.norm.weight)  # the mutant
    layerwise_reload.finish(started)
    with pytest.raises(ConsistencyError, match=r"worker 0 .*first in model\.norm\.weight"):
        check(model, new)


def check(model, trained, asked=None):
    from rl_consistency.integrations.vllm.weights import check_sync

    def each():
        if asked is not None:
            asked.append(model)
        return [model.digests()]

    return check_sync([model.digest()], trained, each)


def swapped(pairs):
    """Two matrices of one shape in each other's place."""
    tensors = dict(pairs)
    one, other = (f"model.layers.{i}.mlp.up_proj.weight" for i in (0, 1))
    tensors[one], tensors[other] = tensors[other], tensors[one]
    return tensors.items(), one


def flipped(pairs):
    tensors = dict(pairs)
    name = "model.layers.1.post_attention_layernorm.weight"
    tensors[name] = tensors[name].clone()
    tensors[name].view(torch.int16)[3] ^= 1
    return tensors.items(), name


@pytest.mark.parametrize("mutant", (swapped, flipped))
def test_a_sync_that_left_other_bits_names_the_first_parameter(mutant):
    trained, asked = policy(), []
    pairs, first = mutant(named(trained))
    model = served(trained)
    assert check(model, trained, asked) == rl_consistency.model_digest(trained)
    assert not asked  # digests of parameters are for the case of a difference
    model.load_weights(pairs)
    with pytest.raises(ConsistencyError, match=f"first in {first}"):
        check(model, trained, asked)
    assert asked


def test_the_check_names_the_worker_and_wants_one():
    from rl_consistency.integrations.vllm.weights import check_sync

    trained = policy()
    own = rl_consistency.model_digest(trained)
    with pytest.raises(ConsistencyError, match="worker 2 serves other weights"):
        check_sync([own, own, "0" * 64], trained)
    with pytest.raises(ValueError, match="no worker gave a digest"):
        check_sync([], trained)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    (
        ("model.layers.9.mlp.up_proj.weight", torch.ones(1), "is no parameter of this model"),
        ("model.norm.weight", torch.ones(3, dtype=torch.bfloat16), r"is \(3,\); the model has"),
        ("model.norm.weight", None, "is torch.float32, and the served model is torch.bfloat16"),
    ),
)
def test_what_does_not_fit_is_named_and_all_must_arrive_again(name, tensor, message):
    trained = policy()
    model = served(trained)
    with pytest.raises(ValueError, match=message):
        model.load_weights(
            [(name, trained.model.norm.weight.detach().float() if tensor is None else tensor)]
        )
    with pytest.raises(ConsistencyError, match="embed_tokens.weight has no weights"):
        model.digest()
    model.load_weights(named(trained))
    assert check(model, trained)


def test_a_checkpoint_of_another_dtype_is_rounded_as_by_from_pretrained():
    wide = policy(dtype=torch.float32)
    model = model_of(wide.config)
    model.load_weights([*named(wide), ("lm_head.weight", wide.lm_head.weight.detach())])
    assert model.digest() == rl_consistency.model_digest(wide.to(torch.bfloat16))


def test_a_trainers_dtype_is_not_rounded_where_vllm_loaded_no_checkpoint():
    wide = policy(dtype=torch.float32)
    model = model_of(wide.config, load_config__load_format="dummy")
    with pytest.raises(ValueError, match="embed_tokens.weight is torch.float32, and the served"):
        model.load_weights(named(wide))


def test_a_tied_head_must_carry_the_bytes_of_the_embedding():
    trained = policy()
    assert trained.config.tie_word_embeddings
    pairs = [*named(trained), ("lm_head.weight", trained.lm_head.weight.detach())]
    model = model_of(trained.config)
    for sync in (pairs, pairs[::-1], pairs):
        model.load_weights(sync)
        model.begin_step([])
    assert check(model, trained)
    other = trained.lm_head.weight.detach().clone()
    other[0, 0] += 1
    with pytest.raises(ConsistencyError, match="lm_head.weight and model.embed_tokens.weight are"):
        model.load_weights([*named(trained), ("lm_head.weight", other)])


def test_a_head_that_vllm_unties_for_its_checkpoint_stays_tied():
    trained = policy()
    config = preset_config("tiny-qwen3")
    config.tie_word_embeddings = False
    model = model_of(config, model_config__word_embeddings_untied_by_checkpoint=True)
    model.load_weights([*named(trained), ("lm_head.weight", trained.lm_head.weight.detach())])
    assert model.hf.lm_head.weight is model.hf.get_input_embeddings().weight
    assert check(model, trained)


def test_a_module_torn_by_a_reload_is_an_error_and_frozen_modules_are_not():
    trained = policy("tiny-qwen2")
    bias = "model.layers.0.self_attn.q_proj.bias"
    model = served(trained)
    for left_out, torn in (("mlp", False), (bias, True)):
        started = layerwise_reload.start(model)
        model.load_weights(pair for pair in named(trained) if left_out not in pair[0])
        layerwise_reload.finish(started)
        if torn:
            with pytest.raises(ConsistencyError, match=f"{bias} did not arrive"):
                model.begin_step([])
        else:
            model.begin_step([])
            assert check(model, trained)


@pytest.mark.parametrize("preset", ("tiny-qwen2", "tiny-mixtral"))
def test_a_module_in_two_reloads_is_torn(preset):
    new = policy(preset, seed=1)
    model = served(policy(preset))
    model.begin_step([])
    module = ".q_proj." if preset == "tiny-qwen2" else ".experts."
    pieces = [pair for pair in of_a_checkpoint(new) if module in pair[0] and ".0." in pair[0]]
    assert len(pieces) > 1
    for half in (pieces[:1], pieces[1:]):
        started = layerwise_reload.start(model)
        model.load_weights(half)
        layerwise_reload.finish(started)
    with pytest.raises(ConsistencyError, match="did not arrive"):
        model.begin_step([])


def test_an_expert_that_did_not_arrive_is_an_error():
    trained = policy("tiny-qwen3-moe")
    model = served(trained)
    pieces = [pair for pair in of_a_checkpoint(trained) if ".3.up_proj" not in pair[0]]
    model.load_weights(pieces)
    with pytest.raises(ConsistencyError, match="experts.gate_up_proj did not arrive, or not whole"):
        model.begin_step([])


def test_a_step_before_an_update_is_finished_is_an_error():
    trained = policy()
    model = served(trained)
    model.begin_step([])
    started = layerwise_reload.start(model)
    with pytest.raises(ConsistencyError, match="started and not finished"):
        model.begin_step([0])
    model.load_weights(named(trained)[:3])
    with pytest.raises(ConsistencyError, match="started and not finished"):
        model.begin_step([0])
    layerwise_reload.finish(started)


# Keys of older weights. A sequence of these is a request; `Server.computed` is what vLLM finds in
# its cache.
def step(model, server, chunks):
    """Logprobs of the tokens that follow a step's, by sequence."""
    model.begin_step([server.computed[i] for i, _ in chunks])
    hidden, places = server.run(chunks)
    tokens = torch.tensor([(*server.sequences[i], 0)[p + 1] for i, p in places])
    rows = distribution(model.compute_logits(hidden), SamplingRows.uniform(len(places)))
    found = {i: [] for i, _ in chunks}
    for (i, _), logprob in zip(places, rows.logprobs_of(tokens).tolist(), strict=True):
        found[i].append(logprob)
    return found


def scored(trained, sequence):
    with torch.no_grad():
        return (
            rl_consistency.token_logprobs(trained, [sequence], prompt_lengths=[1])
            .split()[0]
            .tolist()
        )


@pytest.mark.parametrize(
    ("preset", "spoils"),
    (
        *((preset, True) for preset in ("tiny-qwen3", "tiny-mistral", "tiny-qwen3-moe")),
        ("tiny-qwen3", False),
    ),
)
def test_keys_of_older_weights_are_never_read_in_silence(preset, spoils):
    old, new = policy(preset), policy(preset, seed=1)
    draw = random.Random(3)
    prompt, tails = ([draw.randrange(200) for _ in range(n)] for n in (2 * BLOCK_SIZE, 24))
    sequences = [prompt + tails[:8], prompt + tails[8:16], tails]
    with rl_consistency.patch(new, cuda_graphs=False):
        model = served(old)
        server = Server(model, sequences)
        step(model, server, [(0, len(sequences[0]))])
        model.load_weights(named(new))
        if not spoils:  # the mutant
            received(model).witnesses = []
        # vLLM's cache was not reset: the second request starts from the first one's blocks.
        server.tables[1][:2], server.computed[1] = server.tables[0][:2], len(prompt)
        with pytest.raises(ConsistencyError, match="call reset_prefix_cache"):
            model.begin_step([len(prompt)])
        found = step(model, server, [(1, 8), (2, 24)])
        want = scored(new, sequences[1])[len(prompt) :]
        assert all(value != value for value in found[1]) == spoils
        assert found[1][:-1] != want
        # A request that starts from nothing has the trained bits, and so has one behind it.
        assert found[2][:-1] == scored(new, sequences[2])
        server.tables[0], server.computed[0] = list(range(90, 93)), 0
        found = step(model, server, [(0, len(sequences[0]))])
        assert found[0][:-1] == scored(new, sequences[0])
        server.tables[1][:2], server.computed[1] = server.tables[0][:2], len(prompt)
        assert step(model, server, [(1, 8)])[1][:-1] == want


def test_keys_of_older_weights_show_beyond_their_window():
    """They reach further than a window: through the layers below, into keys of later tokens."""
    config = preset_config("tiny-mistral")
    config.sliding_window = 8
    old, new = (build_lifelike(config, torch.bfloat16, seed=seed) for seed in (0, 1))
    draw = random.Random(5)
    head = [draw.randrange(200) for _ in range(2 * BLOCK_SIZE)]
    sequences = [head, head + [draw.randrange(200) for _ in range(4 * BLOCK_SIZE)]]
    with rl_consistency.patch(new, cuda_graphs=False):
        model = served(old)
        server = Server(model, sequences)
        step(model, server, [(0, len(head))])
        model.load_weights(named(new))
        model.begin_step([0])
        server.tables[1][:2], server.computed[1] = server.tables[0], len(head)
        found = step(model, server, [(1, 4 * BLOCK_SIZE)])[1][:-1]
        want = scored(new, sequences[1])[len(head) :]
    wrong = [a == a and a != b for a, b in zip(found, want, strict=True)]
    assert not any(wrong)
    assert found[0] != found[0] and found[-1] == want[-1]


def test_vllms_runner_has_each_step_looked_at():
    model = served(policy())
    state = object.__new__(model.get_model_state_cls())
    state.model = model
    with pytest.raises(ConsistencyError, match="call reset_prefix_cache"):
        state.preprocess_state(SimpleNamespace(num_computed_tokens_np=np.array([16])), (), None, ())
    state.preprocess_state(SimpleNamespace(num_computed_tokens_np=np.array([16, 0])), (), None, ())
    state.preprocess_state(SimpleNamespace(num_computed_tokens_np=np.array([16])), (), None, ())


def test_a_layer_of_each_window_loses_its_keys():
    config = preset_config("tiny-qwen2")
    config.use_sliding_window, config.sliding_window = True, 8
    config.layer_types = ["full_attention", "sliding_attention"]
    model = served(build_lifelike(config, torch.bfloat16))
    for cache in model.caches:
        cache.kv_cache = torch.zeros(3, BLOCK_SIZE, 2 * cache.kv_heads, cache.head_dim)
    model.begin_step([])
    assert all(cache.keys_and_values[0].isnan().all() for cache in model.caches)
    assert not any(cache.keys_and_values[1].isnan().any() for cache in model.caches)


@pytest.mark.parametrize("through_module", (False, True))
def test_a_parameter_that_vllm_writes_to_makes_keys_stale(through_module):
    model = served(policy())
    model.begin_step([])
    if through_module:  # vLLM 0.31
        parameter = model.get_submodule("hf.model.norm").get_parameter("weight")
    else:
        parameter = model.get_parameter("hf.model.norm.weight")
    parameter.data.mul_(2)
    with pytest.raises(ConsistencyError, match="call reset_prefix_cache"):
        model.begin_step([16])


def test_sleep_at_level_two_takes_the_weights_and_all_must_arrive():
    from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory

    trained = policy()
    model = served(trained)
    model.begin_step([])
    backend = SleepModeBackendFactory.create_backend(model.vllm_config.model_config)
    backend.suspend(level=1)
    with pytest.raises(ConsistencyError, match="while vLLM sleeps"):
        model.digest()
    with pytest.raises(ConsistencyError, match="arrive while vLLM sleeps"):
        model.load_weights(named(trained))
    backend.resume()
    assert check(model, trained)
    with pytest.raises(ConsistencyError, match="call reset_prefix_cache"):
        model.begin_step([16])  # whose keys slept
    backend.suspend(level=2)
    backend.resume(["weights"])
    for use in (model.digest, model.digests, lambda: model.begin_step([0])):
        with pytest.raises(ConsistencyError, match="embed_tokens.weight has no weights: vLLM's sl"):
            use()
    for pair in named(trained):
        model.load_weights([pair])
    backend.resume(["kv_cache"])
    assert check(model, trained)
    model.begin_step([0])


def test_another_backend_of_sleep_is_refused():
    from rl_consistency.integrations.vllm.sleep import watch_sleep

    with pytest.raises(ValueError, match="sleep_mode_backend 'criu' is not covered"):
        watch_sleep(SimpleNamespace(sleep_mode_backend="criu"))


def test_the_reload_code_of_vllm_itself_loses_nothing():
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("vLLM is not installed")
    script = Path(__file__).with_name("reload_by_vllm.py")
    command = [sys.executable, "-W", "ignore", script, *PRESETS]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    torn = {"tiny-qwen2": "bias"}
    found = [line for line in done.stdout.splitlines() if line.startswith("tiny-")]
    assert found == [f"{name} {torn.get(name, 'same')}" for name in PRESETS]
