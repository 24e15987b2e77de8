"""A library product that was withdrawn is reported, and nothing computed with it is used again."""

import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch

from rl_consistency.kernels.core import findings as findings_module
from rl_consistency.kernels.core.findings import Findings
from rl_consistency.kernels.matmul import audit
from rl_consistency.kernels.matmul.cublaslt import Key
from rl_consistency.rollout.device.decode_graphs import DecodeGraphs
from rl_consistency.rollout.engine import RolloutEngine
from rl_consistency.rollout.sampling_params import SamplingParams

CPU = torch.device("cpu")
KEYS = [Key.of("nt", torch.bfloat16, torch.bfloat16, False, rows, 64, 96) for rows in (40, 90)]
PARAMS = SamplingParams(max_tokens=5)
PROMPT = list(range(1, 20))

Differs = Callable[[Key], None]


@pytest.fixture
def differs(monkeypatch, tmp_path):
    """Says that a sample of a product was found to differ, not read yet."""
    monkeypatch.setattr(audit, "_counts", audit._Counts())
    monkeypatch.setattr(
        findings_module, "_by_device", {CPU: Findings(tmp_path / "findings.json", {})}
    )

    def difference(key):
        audit.record(key.name, torch.zeros(2), torch.tensor([0.0, 1.0]))

    return difference


def warnings_of(act):
    """The warnings while `act` runs."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        act()
    return [str(warning.message) for warning in seen]


@pytest.mark.parametrize("reads_before", [False, True])
def test_a_withdrawn_product_is_warned_of_once(engine, differs, reads_before):
    look = engine._weights.withdrawals
    assert warnings_of(look) == [] and look() == 0
    for count, key in enumerate(KEYS, start=1):
        differs(key)
        if reads_before:  # such as a trainer, or another engine
            assert audit.schedule_audit().found == 1
        [message] = warnings_of(look)
        assert f"withdrawn: {key.name}." in message
        assert warnings_of(look) == [] and look() == count


def test_an_engine_does_not_warn_of_what_was_withdrawn_before_it_was_built(model, differs):
    differs(KEYS[0])
    engine = RolloutEngine(model, eos_token_id=None, kv_block_size=4)
    look = engine._weights.withdrawals
    assert warnings_of(look) == [] and look() == 1


def test_both_of_two_engines_are_warnings_of(model, differs):
    engines = [RolloutEngine(model, eos_token_id=None, kv_block_size=4) for _ in range(2)]
    streams = [engine.stream([PROMPT], PARAMS) for engine in engines]
    differs(KEYS[0])
    for stream in streams:
        [message] = warnings_of(partial(list, stream))
        assert KEYS[0].name in message


@pytest.mark.parametrize("when", ["before", "during", "in a stream that was closed"])
def test_a_rollout_warns_once_of_what_was_withdrawn_by_its_end(engine, differs, when):
    stream = engine.stream([PROMPT], PARAMS) if when != "before" else None
    differs(KEYS[0])
    generate = partial(engine.generate, [PROMPT], PARAMS)
    if when == "in a stream that was closed":
        assert warnings_of(stream.close) == []
    [message] = warnings_of(partial(list, stream) if when == "during" else generate)
    assert KEYS[0].name in message
    assert warnings_of(generate) == []


def test_keys_cached_before_a_withdrawal_are_dropped(engine, differs):
    def hits():
        engine.generate([PROMPT], PARAMS)
        return engine.stats.prefix_hit_tokens

    assert [hits(), hits()] == [0, 16]
    differs(KEYS[0])
    with pytest.warns(UserWarning, match="withdrawn"):
        assert hits() == 0
    assert hits() == 16


def test_graphs_captured_before_a_withdrawal_are_dropped(engine, differs, monkeypatch):
    dropped = []
    monkeypatch.setattr(DecodeGraphs, "drop", lambda self: dropped.append(1))
    runner = engine._runner
    runner.decode_graphs = DecodeGraphs(*runner.parts, capacity=64)
    engine.warm_up(PARAMS, batch_sizes=[])
    assert not dropped
    for count, key in enumerate(KEYS, start=1):
        differs(key)
        for again in (False, True):
            assert len(warnings_of(lambda: engine.warm_up(PARAMS, batch_sizes=[]))) == (not again)
            assert len(dropped) == count
