import json
from functools import partial

import pytest
import torch

from rl_consistency.kernels.matmul.audit import AuditReport
from rl_consistency.models.patch import patch
from rl_consistency.models.scoring.token_logprobs import token_logprobs
from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.numerics.fingerprint import Fingerprint, fingerprint
from rl_consistency.parity.digest import each_digest, joint_digest, parameter_digest
from rl_consistency.parity.drift import FIGURES
from rl_consistency.parity.replay import load_replay_bundle
from rl_consistency.rollout.engine import RolloutEngine
from rl_consistency.rollout.sampling_params import SamplingParams
from rl_consistency.trainers import hooks
from rl_consistency.trainers.config.sections import BuildSection
from rl_consistency.trainers.data.tokenizer import byte_tokenizer
from rl_consistency.trainers.hooks import ConsistencyHook, Rollout, regrouped
from rl_consistency.trainers.policy import build_model
from tests.trainers.conftest import RECIPE

SAMPLING = SamplingParams(n=2, temperature=0.8, max_tokens=9, seed=4)
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8], [9]]


def digests_of_gradients(model):
    return each_digest({name: p.grad for name, p in model.named_parameters()})


@pytest.fixture(scope="module")
def model():
    model = build_model(BuildSection(**RECIPE["policy"]["build"]), byte_tokenizer(), seed=1)
    with patch(model):
        yield model


@pytest.fixture(scope="module")
def rollout(model):
    engine = RolloutEngine(model, eos_token_id=None, num_kv_blocks=64)
    completions = engine.generate(PROMPTS, SAMPLING)
    prompts = [PROMPTS[c.prompt_index] for c in completions]
    return Rollout(
        step=1,
        sequences=[[*p, *c.token_ids] for p, c in zip(prompts, completions)],
        prompt_lengths=[len(p) for p in prompts],
        logprobs=[c.token_logprobs for c in completions],
        sampling=SAMPLING,
    )


@pytest.fixture
def make_hook(model, tmp_path):
    def make(**changes):
        given = {"replay_dir": tmp_path / "replay", "config": {"seed": 4}} | changes
        return ConsistencyHook(model, **given)

    return make


def at_step(rollout, step):
    return Rollout(**{**vars(rollout), "step": step})


def recomputed(model, rollout):
    with torch.no_grad():
        return token_logprobs(
            model, rollout.sequences, prompt_lengths=rollout.prompt_lengths, sampling=SAMPLING
        ).split()


def one_ulp_off(logprobs):
    """The same logprobs but for the second token of sequence 3."""
    changed = [part.clone() for part in logprobs]
    changed[3][1] = torch.nextafter(changed[3][1], torch.tensor(0.0))
    return changed


def global_mean(rollout):
    tokens = sum(len(part) for part in rollout.logprobs)
    return lambda scored, group: -(scored.logprobs / tokens).sum()


def mean_of_what_is_at_hand(scored, group):
    return -scored.logprobs.mean()


def trained(model, rollout, loss):
    """Gradients of the whole batch, and their check: what a hook is told."""
    model.zero_grad(set_to_none=True)
    scored = token_logprobs(
        model, rollout.sequences, prompt_lengths=rollout.prompt_lengths, sampling=SAMPLING
    )
    loss(scored, range(len(rollout.sequences))).backward()
    given = model, rollout.sequences, rollout.prompt_lengths, None
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return gradients, partial(regrouped, *given, loss=loss, sampling=SAMPLING)


def whole_step(hook, model, rollout):
    metrics = hook.on_rollout(rollout)
    metrics |= hook.on_training_logprobs(recomputed(model, rollout))
    metrics |= hook.on_gradients(*trained(model, rollout, global_mean(rollout)))
    return metrics | hook.on_step_end()


def test_a_step_without_drift_has_the_promised_names_and_reads_zero(make_hook, model, rollout):
    metrics = whole_step(make_hook(gradient_check_every=1, shadow_every=1), model, rollout)
    expected = {f"consistency/{name}" for name in FIGURES}
    expected |= {
        "consistency/gradient_digest",
        "consistency/gradient_check/passed",
        "consistency/gradient_check/without_gradient",
        "consistency/gradient_check/mismatched_elements",
        "consistency/logprob_abs_diff/count/0",
        "consistency/importance_ratio/count/1",
    }
    expected |= {f"stock/{name}" for name in FIGURES}
    counts = {name: metrics.pop(name) for name in list(metrics) if name.startswith("stock/logprob")}
    metrics |= {name: counts.pop(name) for name in list(counts) if "/count/" not in name}
    ratios = [metrics.pop(n) for n in list(metrics) if n.startswith("stock/importance_ratio/count")]
    assert sum(counts.values()) == sum(ratios) == 54 and len(counts) > 1
    assert {name for name in metrics if not name.startswith("time/")} == expected
    assert metrics["consistency/tokens"] == metrics["stock/tokens"] == 54
    assert metrics["consistency/mismatched_tokens"] == metrics["consistency/ulp/max"] == 0
    assert metrics["consistency/importance_ratio/min"] == 1.0
    assert metrics["consistency/importance_ratio/max"] == 1.0
    assert metrics["consistency/gradient_check/passed"] is True
    assert metrics["consistency/gradient_digest"] == joint_digest(digests_of_gradients(model))
    assert metrics["stock/mismatched_tokens"] > 0
    assert 0 < metrics["stock/logprob_abs_diff/max"] < 1e-4


def test_a_shadow_within_a_budget_says_once_what_it_measured(make_hook, model, rollout):
    told, begun = [], []
    hook = make_hook(shadow_every=1, shadow_budget=5, warn=told.append, progress=begun.append)
    for step in (1, 2):
        metrics = whole_step(hook, model, at_step(rollout, step))
        assert metrics["stock/tokens"] == 30 and metrics["consistency/tokens"] == 54
    assert len(told) == 1 and "on 6 of 6 completions, at most 5 tokens of each" in told[0]
    assert begun == ["stock shadow"] * 2


def test_a_check_that_takes_longer_than_its_step_is_named_with_its_remedy():
    times = {"step": 100.0, "shadow": 71.0, "gradient_check": 9.0}
    metrics = {f"time/{name}_seconds": seconds for name, seconds in times.items()}
    assert hooks.slow_checks(metrics) == [
        "the shadow took 71 s, the step without checks 20 s; lower consistency.shadow_budget or "
        "raise shadow_every"
    ]
    assert hooks.slow_checks({name: value / 20 for name, value in metrics.items()}) == []


def test_checks_come_on_the_first_step_and_every_so_many_after(make_hook, model, rollout):
    hook = make_hook(gradient_check_every=2, shadow_every=3)
    checked, shadowed = [], []
    for step in range(1, 8):
        metrics = whole_step(hook, model, at_step(rollout, step))
        checked += [step] if "consistency/gradient_check/passed" in metrics else []
        shadowed += [step] if "stock/tokens" in metrics else []
    assert checked == [1, 3, 5, 7] and shadowed == [1, 4, 7]
    assert hook.counted["gradient_checks"] == hook.counted["gradient_checks_passed"] == 4


def test_drift_saves_a_replay_bundle_before_it_raises(make_hook, model, rollout, tmp_path):
    hook = make_hook(on_drift="raise")
    hook.on_rollout(at_step(rollout, 5))
    training = one_ulp_off(rollout.logprobs)
    with pytest.raises(ConsistencyError, match=r"step 5: 1 of 54 tokens .* 1 ULP") as caught:
        hook.on_training_logprobs(training)
    (path,) = (tmp_path / "replay").iterdir()
    assert str(path) in str(caught.value)
    bundle = load_replay_bundle(path)
    assert bundle.sequences == [rollout.sequences[3]] and bundle.sequence_indices == [3]
    assert bundle.config == {"seed": 4, "step": 5}
    assert bundle.parameter_digest == parameter_digest(model)
    assert bundle.fingerprint == fingerprint().entries
    assert torch.equal(bundle.training_logprobs[0], training[3])
    assert torch.equal(bundle.rollout_logprobs[0], rollout.logprobs[3])
    assert hook.monitor.total is not None and hook.monitor.total.mismatched_tokens == 1


@pytest.mark.parametrize("on_drift", ["warn", "record"])
def test_drift_can_be_told_or_only_recorded(make_hook, rollout, tmp_path, on_drift):
    told = []
    hook = make_hook(on_drift=on_drift, warn=told.append)
    hook.on_rollout(rollout)
    metrics = hook.on_training_logprobs(one_ulp_off(rollout.logprobs))
    assert metrics["consistency/mismatched_tokens"] == metrics["consistency/ulp/max"] == 1
    assert len(told) == (on_drift == "warn")
    assert len(list((tmp_path / "replay").iterdir())) == 1
    assert hook.summary()["consistency/mismatched_tokens"] == 1


def test_a_loss_whose_weights_depend_on_the_cut_fails_the_gradient_check(make_hook, model, rollout):
    hook = make_hook(gradient_check_every=1)
    hook.on_rollout(rollout)
    step = trained(model, rollout, mean_of_what_is_at_hand)
    with pytest.raises(ConsistencyError, match=r"step 1: gradients depend on .* first in model\."):
        hook.on_gradients(*step)
    assert (hook.counted["gradient_checks"], hook.counted["gradient_checks_passed"]) == (1, 0)


@pytest.mark.parametrize("on_drift", ["raise", "warn", "record"])
def test_a_gradient_that_is_zero_everywhere_is_told_and_not_counted(
    make_hook, model, rollout, on_drift
):
    told = []
    hook = make_hook(gradient_check_every=1, on_drift=on_drift, warn=told.append)
    hook.on_rollout(rollout)
    zero = trained(model, rollout, lambda scored, group: (scored.logprobs * 0.0).sum())
    metrics = hook.on_gradients(*zero) | hook.on_value_gradients(zero[1])
    for name in ("gradient_check", "critic_gradient_check"):
        assert metrics[f"consistency/{name}/without_gradient"] is True
        assert f"consistency/{name}/passed" not in metrics
    assert [line.split(": all")[0] for line in told] == [
        "step 1: no gradient, nothing checked",
        "step 1: critic: no gradient, nothing checked",
    ]
    found = {n.rpartition("/")[2]: v for n, v in hook.summary().items() if "gradient_check/" in n}
    assert found == {"checks": 0, "passed": 0, "without_gradient": 2, "mismatched_elements": 0}


def test_regroupings_of_sequences_without_a_gradient_are_not_counted(make_hook, model, rollout):
    """The others have one, which alone is compared as trained and all at once."""
    hook = make_hook(gradient_check_every=1)
    hook.on_rollout(rollout)

    def others(scored, group):
        wanted = torch.cat([torch.full((n,), float(i > 1)) for i, n in zip(group, scored.lengths)])
        return (scored.logprobs * wanted).sum()

    gradients, check = trained(model, rollout, others)
    given = {**check.keywords}
    few = partial(regrouped, model, rollout.sequences, rollout.prompt_lengths, 2, **given)
    assert hook.on_gradients(gradients, few)["consistency/gradient_check/without_gradient"] is True
    assert hook.on_gradients(gradients, check)["consistency/gradient_check/passed"] is True
    assert hook.counted["gradient_checks"] == 1


def test_gradients_that_are_not_those_of_the_step_fail_the_gradient_check(
    make_hook, model, rollout
):
    told = []
    hook = make_hook(gradient_check_every=1, on_drift="warn", warn=told.append)
    hook.on_rollout(rollout)
    step = trained(model, rollout, global_mean(rollout))
    weight = model.model.layers[0].mlp.up_proj.weight
    with torch.no_grad():
        weight.grad[0, 0] = torch.nextafter(weight.grad[0, 0], torch.tensor(1.0))
    metrics = hook.on_gradients(*step)
    assert metrics["consistency/gradient_check/passed"] is False
    assert metrics["consistency/gradient_check/mismatched_elements"] == 1
    assert "differs from one whole packed batch in 1 of " in told[0]
    assert "first in model.layers.0.mlp.up_proj.weight" in told[0]


def test_totals_survive_a_checkpoint(make_hook, model, rollout):
    def hook():
        return make_hook(gradient_check_every=1, shadow_every=1, on_drift="record")

    def bad_step(hook, step):
        hook.on_rollout(at_step(rollout, step))
        hook.on_training_logprobs(one_ulp_off(rollout.logprobs))
        hook.on_gradients(*trained(model, rollout, mean_of_what_is_at_hand))
        hook.on_step_end()

    whole, first, second = hook(), hook(), hook()
    for step in (1, 2):
        bad_step(whole, step)
    bad_step(first, 1)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.summary() == first.summary()
    bad_step(second, 2)
    assert second.summary() == whole.summary()
    assert whole.summary()["consistency/mismatched_tokens"] == 2
    assert whole.summary()["consistency/gradient_check/passed"] == 0
    assert whole.summary()["stock/tokens"] == 108


def test_another_side_with_another_fingerprint_is_refused_by_name(make_hook):
    ours = fingerprint().entries
    make_hook(expected_fingerprint=Fingerprint(dict(ours)))
    theirs = Fingerprint({**ours, "order.attention": "v9 0", "num_threads": "99"})
    with pytest.raises(
        ConsistencyError, match=r"num_threads: \d+ != 99; order\.attention: v\d+ \w+ != v9 0"
    ):
        make_hook(expected_fingerprint=theirs)


def test_methods_out_of_order_are_refused(make_hook, rollout):
    hook = make_hook(gradient_check_every=1)
    with pytest.raises(ValueError, match="on_rollout must be called before"):
        hook.on_training_logprobs(rollout.logprobs)
    hook.on_rollout(rollout)
    hook.on_step_end()
    with pytest.raises(ValueError, match="on_rollout must be called before"):
        hook.on_gradients({}, None)


@pytest.fixture
def on_a_gpu(make_hook, monkeypatch):
    """Makes a hook that audits as on a GPU."""

    def make(**changes):
        hook = make_hook(**changes)
        hook._device = torch.device("cuda")
        return hook

    reported(monkeypatch, 0, found=0)
    return make


def reported(monkeypatch, differing, *, found):
    """What the audit says from here on."""
    names = ["nt/bf16/plain/n64/k64/m64"] if differing else []
    report = AuditReport(calls=514, audited=2, differing=differing, found=found, withdrawn=names)
    monkeypatch.setattr(hooks, "schedule_audit", lambda: report)


def test_on_a_gpu_each_step_says_what_the_audit_of_schedules_found(
    make_hook, model, rollout, on_a_gpu
):
    metrics = whole_step(on_a_gpu(), model, rollout)
    assert metrics["consistency/schedule_audit"] == 0
    assert "consistency/schedule_audit" not in whole_step(make_hook(), model, rollout)


@pytest.mark.parametrize("found", [3, 0])  # read here first, or by the engine before
def test_a_schedule_that_differs_stops_the_run(model, rollout, on_a_gpu, monkeypatch, found):
    warnings = []
    strict, warning = on_a_gpu(), on_a_gpu(on_drift="warn", warn=warnings.append)
    reported(monkeypatch, 3, found=found)
    with pytest.raises(ConsistencyError, match=r"step 1: library .* 3 sampled .*nt/bf16") as caught:
        whole_step(strict, model, rollout)
    assert caught.value.metrics["consistency/schedule_audit"] == 3
    assert whole_step(warning, model, rollout)["consistency/schedule_audit"] == 3
    assert len(warnings) == 1


def test_what_nobody_read_before_the_hook_was_made_is_judged_too(
    model, rollout, on_a_gpu, monkeypatch
):
    reported(monkeypatch, 3, found=2)
    hook = on_a_gpu()
    reported(monkeypatch, 3, found=0)
    with pytest.raises(ConsistencyError, match="step 1: library"):
        whole_step(hook, model, rollout)


def test_a_difference_found_before_is_still_logged_and_stops_no_later_step(
    model, rollout, on_a_gpu, monkeypatch
):
    reported(monkeypatch, 3, found=0)
    hook = on_a_gpu()
    for _ in range(2):
        assert whole_step(hook, model, rollout)["consistency/schedule_audit"] == 3
