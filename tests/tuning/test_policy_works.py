"""The works of a policy: all its products, each once, those first that take most of a step."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from rl_consistency.models.families import UnsupportedModelError, num_experts
from rl_consistency.tuning.policy_works import policy_config, policy_works, sparse_layers
from rl_consistency.verify.presets import build_preset, preset_config

CPU = torch.device("cpu")
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def works():
    return policy_works(preset_config("qwen3-8b"), BF16, CPU, 4096)


def shapes(works, op, **wanted):
    found = [w.shape for w in works if w.op == op]
    return [s for s in found if all(s[name] == value for name, value in wanted.items())]


def test_every_work_has_a_name_and_candidates_and_its_default_is_one_of_them(works):
    assert len({work.entry for work in works}) == len(works)
    for work in works:
        assert work.entry and work.picked in work.candidates, work.key
        assert work.seconds > 0 and work.moved > 0
    assert [work.seconds for work in works] == sorted((w.seconds for w in works), reverse=True)


def test_rows_come_in_buckets_from_one_to_the_training_batch(works):
    rows = {s["m"] for s in shapes(works, "matmul", layout="nt")}
    assert rows == {1, *(2**i for i in range(4, 13))}
    assert {s["m"] for s in shapes(works, "qkv")} == {m for m in rows if m <= 128}
    trained = {s["m"] for s in shapes(works, "matmul", layout="nn")}
    assert trained == {256, 512, 1024, 2048, 4096} == {s["tokens"] for s in shapes(works, "fold")}


def test_a_winner_of_many_rows_has_to_hold_for_fewer_of_the_same_bucket(works):
    for work in works:
        if work.op in ("matmul", "fold", "qkv", "gate_up"):
            rows = work.shape.get("m", work.shape.get("tokens"))
            assert (work.fewer is None) == (rows == 1), work.key
    others = [(work, work.fewer) for work in works if work.fewer is not None]
    for work, fewer in others:
        assert (fewer.entry, fewer.op) == (work.entry, work.op) and fewer.shape != work.shape
    assert {work.op for work, _ in others} == {work.op for work in works}


def test_every_weight_of_a_layer_and_the_head_is_there(works):
    forward = {(s["n"], s["k"]) for s in shapes(works, "matmul", layout="nt", m=1024)}
    layer = {(4096, 4096), (1024, 4096), (12288, 4096), (4096, 12288)}
    assert forward == layer
    backward = {(s["k"], s["n"]) for s in shapes(works, "matmul", layout="nn", m=1024)}
    assert backward == layer
    assert {(s["n"], s["k"]) for s in shapes(works, "fold", tokens=1024)} == layer
    head = [w for w in works if w.shape.get("n") == 151936 and w.op == "matmul"]
    assert {w.shape["m"] for w in head} == {1, 16, 32, 64, 128, 256, 512}
    assert all("/bf16/fp32/" in w.entry for w in head)
    assert shapes(works, "fold", n=151936) == [{"tokens": 4096, "n": 151936, "k": 4096}]


def test_few_rows_take_the_fused_launches(works):
    few = {(s["n"], s["k"]) for s in shapes(works, "matmul", layout="nt", m=16)}
    assert few == {(4096, 4096), (4096, 12288), (151936, 4096)}
    assert {s["n"] for s in shapes(works, "qkv")} == {"4096+1024+1024"}
    assert {s["n"] for s in shapes(works, "gate_up")} == {12288}


def test_weights_that_no_descriptor_addresses_keep_the_ops_rule():
    config = preset_config("tiny-qwen3")
    config.vocab_size = 331
    assert not any(331 in w.shape.values() for w in policy_works(config, BF16, CPU, 64))


@pytest.mark.parametrize(
    ("changes", "error"),
    [({"dtype": torch.float8_e4m3fn}, TypeError), ({"rows": 0}, ValueError)],
)
def test_bad_input_is_refused(changes, error):
    given = {"dtype": BF16, "rows": 64} | changes
    with pytest.raises(error, match=r"canonical order|1 or more"):
        policy_works(preset_config("tiny-qwen3"), given["dtype"], CPU, given["rows"])


def test_an_architecture_without_orders_is_refused():
    with pytest.raises(UnsupportedModelError, match="gpt2"):
        policy_works(AutoConfig.for_model("gpt2"), BF16, CPU, 64)


def test_the_config_is_found_under_wrappers_and_missed_without_one():
    model = build_preset("tiny-llama")
    wrapper = nn.Module()
    wrapper.module = model
    assert policy_config(wrapper) == (model.config, torch.float32)
    with pytest.raises(TypeError, match="got Linear"):
        policy_config(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("preset", "sparse", "inner"),
    [("tiny-qwen3-moe", None, 48), ("tiny-olmoe", 2, 48), ("tiny-mixtral", 2, None)],
)
def test_sparse_layers_have_works_of_their_router_and_experts(preset, sparse, inner):
    config = preset_config(preset)
    experts, top_k = num_experts(config), config.num_experts_per_tok
    inner, hidden = inner or config.intermediate_size, config.hidden_size
    found = policy_works(config, BF16, CPU, 256)
    assert sparse is None or sparse_layers(config) == sparse
    products = {"gate_up": {(inner, hidden)}, "nt": {(hidden, inner)}}
    products["nn"] = {(inner, hidden), (hidden, 2 * inner)}
    for product, sizes in products.items():
        own = shapes(found, f"experts {product}", k_of=f"{top_k}/{experts}", rows=256)
        assert {(s["n"], s["k"]) for s in own} == sizes
    folds = {(s["n"], s["k"]) for s in shapes(found, "experts fold")}
    assert folds == {(2 * inner, hidden), (hidden, inner)}
    assert all(work.picked in work.candidates for work in found)
    # A layer without experts has the works of its MLP, and only then.
    dense = shapes(found, "glu backward")
    assert bool(dense) == (sparse_layers(config) < config.num_hidden_layers)
