"""The verification itself: what its parts count, and that a small run of all of it is green."""

import json
from functools import partial

import pytest
import torch

from rl_consistency.cases.case import CPU
from rl_consistency.kernels.pointwise.glu import glu_values
from rl_consistency.models.patch import patch
from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.verify.checks.whole_model import (
    Chain,
    check_gradient_chain,
    check_packed_chain,
)
from rl_consistency.verify.claims import CLAIMS, Check, Tally
from rl_consistency.verify.presets import (
    PRESETS,
    REAL_PRESETS,
    build_lifelike,
    build_preset,
    preset_config,
)
from rl_consistency.verify.run import (
    CHAIN_CHECKS,
    OP_CHECKS,
    PROCESS_CHECKS,
    jobs_of,
    op_setups,
    run_checks,
)
from rl_consistency.verify.substitution import substituted
from rl_consistency.verify.sweep import CUDA_FULL, CUDA_QUICK, Sweep
from rl_consistency.verify.targets import (
    Target,
    default_targets,
    directory_targets,
    preset_targets,
)

TINY = Sweep(batches=(1, 4), lengths=(1, 17, 33), chunks=(7,), pads=(0, 3), cache_blocks=(7, 16))


def check(body):
    return Check(claim="C1", subject="x", scope="fp32", what="y", body=body).run()


QWEN2 = Target(
    name="tiny-qwen2",
    dtype=torch.bfloat16,
    sweep=TINY,
    build=partial(build_preset, "tiny-qwen2", torch.bfloat16),
)


def test_a_sparse_family_without_sparse_layers_has_no_balance_to_check():
    config = preset_config("tiny-qwen3-moe")
    config.mlp_only_layers = list(range(config.num_hidden_layers))
    chain = Chain(build_lifelike(config), TINY)
    with patch(chain.model):
        tally = Tally()
        check_gradient_chain(tally, chain)
    assert tally.passed, tally.detail


def test_every_claim_holds_for_a_tiny_model():
    reported = []
    results = run_checks([QWEN2], on_result=reported.append)
    assert [r for r in results if not r.passed] == []
    assert reported == results
    assert len(results) == len(PROCESS_CHECKS) + len(OP_CHECKS) + len(CHAIN_CHECKS)
    assert {r.claim for r in results} == set(CLAIMS)


def test_only_some_checks_run_and_a_name_of_none_is_refused():
    results = run_checks([QWEN2], only=["C1 rotary", "C6 glu"])
    assert [(r.claim, r.subject) for r in results] == [("C1", "rotary"), ("C6", "glu")]
    with pytest.raises(ValueError, match="no check is called 'rotery'.*C1 rotary"):
        run_checks([QWEN2], only=["C1 rotary", "rotery"])


def test_bytes_are_compared_and_zeros_of_both_signs_differ():
    tally = Tally()
    assert tally.equal("same", torch.tensor([1.0, -0.0]), torch.tensor([1.0, -0.0]))
    assert not tally.equal("zero", torch.tensor([1.0, 0.0]), torch.tensor([1.0, -0.0]))
    assert (tally.cases, tally.mismatches) == (2, 1)
    assert tally.detail == "zero: row 1: 0.0 against -0.0 (1 of 2 values)"


def test_the_first_difference_is_kept_with_its_place_and_values():
    tally = Tally()
    a = torch.zeros(3, 4, dtype=torch.bfloat16)
    b = a.clone()
    b[2, 1] = 0.5
    tally.equal("batch 8", a, b, "sample 7 position {}".format)
    tally.equal("batch 16", a, a + 1)
    text = "batch 8: sample 7 position 2 element [1]: 0.0 against 0.5 (1 of 12 values)"
    assert tally.detail == text
    assert tally.mismatches == 2


def test_other_shapes_dtypes_and_values_that_are_not_finite_fail():
    tally = Tally()
    for bad in (torch.nan, torch.inf):
        values = torch.tensor([1.0, bad])
        assert not Tally().equal("x", values, values.clone())
    assert not tally.equal("shape", torch.zeros(2), torch.zeros(3))
    assert not tally.equal("dtype", torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16))
    assert "torch.float32 [2] against torch.float32 [3]" in tally.detail


def test_nothing_compared_and_a_refusal_are_red_and_other_errors_pass_through():
    result = check(lambda tally: None)
    assert not result.passed and result.detail == "nothing was compared"

    def refuse(tally):
        tally.expect("fine", True)
        raise ConsistencyError("bytes differ")

    result = check(refuse)
    assert (result.passed, result.mismatches, result.detail) == (False, 1, "refused: bytes differ")
    with pytest.raises(KeyError):
        check(lambda tally: {}["bug"])


def test_a_sweep_runs_every_sample_in_every_batch_size():
    names = dict(TINY.arrangements())
    everything = list(range(len(TINY.sample_lengths())))
    for size in TINY.batches:
        calls = names[f"batch {size}"]
        assert [i for call in calls for i in call] == everything
        assert max(map(len, calls)) == min(size, len(everything))
    assert sorted(names["permuted batch"][0]) == everything
    places = [call.index(0) for call in names["every place in a batch"]]
    assert places == list(range(len(places)))


def test_a_chain_that_differs_names_the_op():
    def mutant(gate, up, activation):
        value = glu_values(gate, up, activation)
        return value * (1 + 2**-20) if gate.shape[-2] > 64 else value

    model = build_preset("tiny-llama")
    with patch(model), substituted(glu_values, mutant):
        result = check(partial(check_packed_chain, chain=Chain(model, TINY)))
    assert not result.passed
    assert "first to differ: glu of layer 0 (model.layers.0.mlp), output" in result.detail


def test_a_substitution_reaches_every_binding_and_is_undone_on_an_error():
    from rl_consistency.kernels.gradient_fold import gradient_buffer
    from rl_consistency.kernels.linear import op as linear
    from rl_consistency.kernels.pointwise import embedding

    original = gradient_buffer.fold_parameter
    with pytest.raises(RuntimeError), substituted(original, print):
        bound = {gradient_buffer.fold_parameter, linear.fold_parameter, embedding.fold_parameter}
        assert bound == {print}
        raise RuntimeError
    bound = {gradient_buffer.fold_parameter, linear.fold_parameter, embedding.fold_parameter}
    assert bound == {original}
    with pytest.raises(ValueError, match="nothing to substitute"), substituted(object(), print):
        pass


CUDA = torch.device("cuda")


def test_the_default_on_a_gpu_adds_a_model_of_real_shape_and_fp16():
    targets = default_targets(device=CUDA, quick=True)
    assert {t.name for t in targets} == {*PRESETS, "qwen3-0.6b"}
    assert {t.dtype for t in targets} == {torch.float32, torch.bfloat16, torch.float16}
    assert {t.sweep for t in targets} == {CUDA_QUICK}
    assert {t.sweep for t in default_targets(device=CUDA)} == {CUDA_FULL}


def test_ops_are_checked_at_the_tiny_sizes_and_at_those_of_each_model():
    targets = [*preset_targets("tiny-llama", [], device=CUDA)]
    targets += preset_targets("qwen3-8b", [torch.bfloat16], device=CUDA)
    found = [(s.shapes.name, s.dtype) for s in op_setups(targets)]
    assert ("qwen3-8b", torch.bfloat16) in found
    assert [dtype for name, dtype in found if not name] == [t.dtype for t in targets[:3]]
    assert len(found) == 4
    assert {s.device for s in op_setups(targets)} == {CUDA}
    assert op_setups(default_targets())[0].device == CPU


def test_jobs_know_how_much_memory_they_may_hold():
    targets = [*preset_targets("tiny-llama", [torch.bfloat16], device=CUDA)]
    targets += preset_targets("qwen3-8b", [torch.bfloat16, torch.float32], device=CUDA)
    memory: dict[str, float] = {}
    for job in jobs_of(targets):
        memory[job.scope] = max(memory.get(job.scope, 0.0), job.memory / 2**30)
    # Of the fp32 model: 37.9 GiB were seen; of the ops: 1 to 5, 63, 38, 9.9, 27.3 and 10.2.
    assert 1 <= memory["tiny-llama bf16"] < 1.1
    assert 38 < memory["qwen3-8b bf16"] < memory["qwen3-8b fp32"] < 48
    assert memory["C1 rotary"] == 5
    assert memory["C6 token_logprobs"] > 60 > memory["C3 token_logprobs"] > 38
    assert 10 < memory["C1 token_logprobs"] < 13
    assert memory["C3 embedding"] > 28 > 13 > memory["C1 embedding"] > 10.2
    tiny = jobs_of(preset_targets("tiny-llama", [torch.bfloat16], device=CUDA))
    assert all(2**30 <= job.memory < 1.1 * 2**30 for job in tiny[1:])


def test_a_directorys_model_takes_the_memory_of_its_parameters(tmp_path):
    preset_config("qwen3-8b").save_pretrained(tmp_path)
    (target,) = directory_targets(tmp_path, [torch.bfloat16], device=CUDA)
    chain = next(job for job in jobs_of([target]) if job.scope == target.scope)
    assert chain.memory > 18 * 8e9


def test_a_model_of_real_shape_is_refused_on_a_cpu():
    for name in REAL_PRESETS:
        with pytest.raises(ValueError, match="--device cuda"):
            preset_targets(name, [])


def test_a_model_directory_runs_in_the_dtype_it_was_saved_in(tmp_path):
    build_preset("tiny-mistral", torch.bfloat16).save_pretrained(tmp_path / "policy")
    (target,) = directory_targets(tmp_path / "policy", [])
    assert (target.name, target.dtype) == ("policy", torch.bfloat16)
    assert target.build().dtype == torch.bfloat16
    (cast,) = directory_targets(tmp_path / "policy", [torch.float32])
    assert cast.build().dtype == torch.float32


def test_damaged_weights_are_named(tmp_path):
    build_preset("tiny-mistral").save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    (target,) = directory_targets(tmp_path, [])
    with pytest.raises(ValueError, match="damaged"):
        target.build()


def test_a_wrong_value_in_config_json_is_named(tmp_path):
    preset_config("tiny-qwen3").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"vocab_size": "x"}))
    with pytest.raises(ValueError, match=r"config\.json: vocab_size is 'x': give an integer"):
        directory_targets(tmp_path, [])


def test_unknown_targets_are_named(tmp_path):
    with pytest.raises(ValueError, match="unknown preset"):
        preset_targets("tiny-gpt", [])
    with pytest.raises(FileNotFoundError, match="is not a directory"):
        directory_targets(tmp_path / "absent", [])
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        directory_targets(tmp_path, [])
