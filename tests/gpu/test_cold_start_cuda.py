"""Kernels compiled ahead: after `warm_up` steps compile next to nothing, and nothing else has
changed."""

import sys
from contextlib import contextmanager

import pytest
import torch
from triton import knobs
from triton.runtime import build
from triton.runtime.jit import JITFunction

from rl_consistency.kernels.core import findings as findings_module
from rl_consistency.kernels.core.findings import CACHE_VARIABLE
from rl_consistency.kernels.core.launch import Remembered
from rl_consistency.kernels.matmul import audit
from rl_consistency.models.patch import patch
from rl_consistency.rollout.device import rollout_kernels
from rl_consistency.rollout.device.rollout_kernels import RolloutBounds, RolloutKernels
from rl_consistency.rollout.engine import RolloutEngine
from rl_consistency.rollout.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu

PLAIN = SamplingParams(n=2, max_tokens=24, seed=3, ignore_eos=True)
TRUNCATED = SamplingParams(
    n=2, temperature=0.9, top_k=40, top_p=0.9, max_tokens=24, seed=3, ignore_eos=True
)
LENGTHS = (1, 2, 3, 7, 16, 17, 31, 33, 50, 64, 65, 100, 130, 200, 300, 400)
PROMPTS = [[(7 * i + 3 * n) % 331 for i in range(n)] for n in LENGTHS]
FEW = 2
"""The most kernels that the fixed list of calls may miss here."""
SIZES = {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8}


@pytest.fixture
def model(small_model):
    """Large enough that the library computes some of its products."""
    with patch(found := small_model(**SIZES)):
        yield found


@pytest.fixture
def new_process(monkeypatch, tmp_path):
    """No kernel, launcher or certificate is known, neither here nor on disk."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "own"))
    monkeypatch.setattr(findings_module, "_by_device", {})
    monkeypatch.setattr(audit, "AUDIT_EVERY", 3)
    forget_kernels()
    yield tmp_path
    forget_kernels()


def forget_kernels():
    modules = [m for name, m in sys.modules.items() if name.startswith("rl_consistency")]
    kernels = [value for module in modules for value in vars(module).values()]
    for kernel in kernels:
        if isinstance(kernel, Remembered):
            kernel._compiled.clear()
            kernel.kernel.device_caches.clear()
        elif isinstance(kernel, JITFunction):
            kernel.device_caches.clear()


@contextmanager
def compilations(monkeypatch):
    """The kernels compiled, or read from disk, and the launchers built in the block."""
    found = []
    with monkeypatch.context() as patched:
        real = build._build
        patched.setattr(knobs.compilation, "listener", lambda *, src, **_: found.append(src.name))
        patched.setattr(build, "_build", lambda *call: (found.append("launcher"), real(*call))[1])
        yield found


def engine_of(model, **settings):
    sizes = {"num_kv_blocks": 400, "max_num_seqs": 40, "max_batch_tokens": 600}
    return RolloutEngine(model, eos_token_id=1, **sizes | settings)


def rollouts(engine, sampling):
    """New prompts, the same ones out of the prefix cache, each alone, and continued ones."""
    found = [*engine.generate(PROMPTS, sampling), *engine.generate(PROMPTS, sampling)]
    for i, prompt in enumerate(PROMPTS):
        found += engine.generate([prompt], sampling, prompt_ids=[i])
        found += engine.generate([[*prompt, *range(5, 5 + i)]], sampling, prompt_ids=[i])
    return [(c.token_ids, c.token_logprobs.view(torch.int32).tolist()) for c in found]


@pytest.mark.parametrize("sampling", [PLAIN, TRUNCATED], ids=["plain", "truncated"])
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_after_a_warm_up_steps_compile_next_to_nothing(
    model, new_process, monkeypatch, sampling, graphs
):
    engine = engine_of(model, cuda_graphs=graphs)
    with compilations(monkeypatch) as warming:
        engine.warm_up(sampling)
    assert len(warming) > 20
    with compilations(monkeypatch) as later:
        rollouts(engine, sampling)
    assert len(later) <= FEW, later


def test_without_the_calls_ahead_steps_compile(model, new_process, monkeypatch):
    """Negative control."""
    for shapes in ("prompt_shapes", "continued_shapes"):
        monkeypatch.setattr(rollout_kernels, shapes, lambda bounds: ())
    engine = engine_of(model)
    with compilations(monkeypatch):
        engine.warm_up(PLAIN)
    with compilations(monkeypatch) as later:
        rollouts(engine, PLAIN)
    assert len(later) > FEW, later


def test_a_second_process_finds_everything_on_disk(model, new_process, monkeypatch):
    engine = engine_of(model)
    engine.warm_up(PLAIN)
    rollouts(engine, PLAIN)
    forget_kernels()
    hits = []
    monkeypatch.setattr(
        knobs.compilation, "listener", lambda *, cache_hit, **_: hits.append(cache_hit)
    )
    monkeypatch.setattr(build, "_build", lambda *call: pytest.fail(f"built {call[0]}"))
    engine = engine_of(model)
    engine.warm_up(PLAIN)
    rollouts(engine, PLAIN)
    assert hits and all(hits)


def test_compiling_ahead_moves_no_bit(model, new_process, monkeypatch):
    warmed, lazy = engine_of(model), engine_of(model)
    warmed.warm_up(TRUNCATED)
    expected = rollouts(warmed, TRUNCATED)
    assert rollouts(lazy, TRUNCATED) == expected
    monkeypatch.setattr(RolloutKernels, "_compile", lambda *_, **__: 0)
    forget_kernels()
    assert rollouts(engine_of(model), TRUNCATED) == expected


def test_compiling_ahead_writes_no_certificate_key_token_or_count(model, new_process):
    engine = engine_of(model)
    runner = engine._runner
    kept = [*runner._cache.keys, *runner._cache.values, runner._state.block_tables]
    before = [t.clone() for t in kept]
    tokens, counts = (
        runner._state.last_tokens[:-1].clone(),
        (audit._counts.calls, audit.withdrawals()),
    )
    bounds = RolloutBounds(tokens=600, sequences=40, longest=500, batch_sizes=(1, 40))
    assert engine._kernels.compile(bounds) > 20
    assert all(a.equal(b) for a, b in zip(kept, before))
    assert runner._state.last_tokens[:-1].equal(tokens)
    assert (audit._counts.calls, audit.withdrawals()) == counts
    assert not list(new_process.rglob("findings/*.json"))
    engine.generate(PROMPTS, PLAIN)
    assert list(new_process.rglob("findings/*.json")), "the model is too small for the library"


def test_hooks_see_nothing_of_it(model, new_process):
    seen = []
    handle = model.model.layers[0].register_forward_hook(lambda *_: seen.append(1))
    engine = engine_of(model)
    engine._runner.begin()
    bounds = RolloutBounds(tokens=64, sequences=4, longest=64, batch_sizes=(1,))
    assert engine._kernels.compile(bounds) == 0 and not seen
    handle.remove()


def test_the_first_rollout_compiles_for_itself_ahead(model, new_process, monkeypatch):
    engine, ahead = engine_of(model), []
    real = rollout_kernels.compile_ahead
    monkeypatch.setattr(
        rollout_kernels, "compile_ahead", lambda *call: (ahead.append(real(*call)), ahead[-1])[1]
    )
    with compilations(monkeypatch) as found:
        engine.generate(PROMPTS[:8], PLAIN)
    kernels = [name for name in found if name != "launcher"]
    assert len(ahead) == 1 and ahead[0] <= len(kernels) <= 1.2 * ahead[0]
    engine.generate(PROMPTS[:8], PLAIN)
    assert len(ahead) == 1
