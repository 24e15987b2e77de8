"""A change of what a forward reads ends the rollout, also one that is undone before its end."""

import random
import signal
from collections import OrderedDict
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

from rl_consistency.models.patch import patch
from rl_consistency.models.snapshot import MODULES_PER_PART, Snapshot
from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.rollout.sampling_params import SamplingParams
from rl_consistency.rollout.step_watch import StepWatch
from rl_consistency.rollout.weights import model_digest
from tests.rollout.engine.engines import content, engine_of, is_idle

PROMPTS = [[1, 2, 3, 4, 5, 6], [7, 8]]
SAMPLING = SamplingParams(n=2, max_tokens=9, seed=4, stop=("never",), speculation=3)


class Plain:
    """A tokenizer."""

    def decode(self, token_ids, *, skip_special_tokens=True):
        return " ".join(map(str, token_ids))


class Wrong:
    """A drafter that is mostly wrong, and its own state."""

    def start(self, token_ids):
        return self

    def append(self, token_ids):
        pass

    def propose(self, most):
        return [1]


@pytest.fixture(scope="module")
def model(tiny_qwen3):
    with patch(built := tiny_qwen3()):
        yield built


@pytest.fixture(scope="module")
def expected(model):
    return content(engine_of(model, tokenizer=Plain()).generate(PROMPTS, SAMPLING))


def setting(target, name, value):
    """Sets an attribute for the time of a block."""

    def change(undo):
        patching = undo.enter_context(pytest.MonkeyPatch.context())
        patching.setattr(target, name, value, raising=False)

    return change


def entry(target, name, value):
    def change(undo):
        undo.enter_context(pytest.MonkeyPatch.context()).setitem(target, name, value)

    return change


def memory_of(weight, changed):
    """Gives a parameter other memory."""
    return setting(weight, "data", changed(weight.data))


class Written:
    """Writes to memory, whatever its version says of it."""

    def __init__(self, memory, index=()):
        self.memory, self.index = memory, index

    def __call__(self, undo):
        kept = self.memory.clone()
        undo.callback(lambda: self.memory.copy_(kept))
        self.memory[self.index] *= 1.5


def in_place(weight):
    def change(undo):
        with torch.no_grad():
            weight.mul_(2.0)
        undo.callback(lambda: torch.no_grad()(weight.mul_)(0.5))

    return change


def hooked(model):
    def change(undo):
        handle = model.model.layers[1].mlp.register_forward_hook(lambda m, x, y: 2 * y)
        undo.callback(handle.remove)

    return change


def reordered(model):
    layers = model.model.layers

    def change(undo):
        kept = dict(layers._modules)
        layers._modules = OrderedDict(reversed(kept.items()))
        undo.callback(lambda: setattr(layers, "_modules", OrderedDict(kept)))

    return change


def reordered_in_place(model):
    modules = model.model.layers._modules

    def change(undo):
        modules["0"] = modules.pop("0")
        undo.callback(lambda: modules.update({"1": modules.pop("1")}))

    return change


def changes(model):
    base = model.model
    attention, mlp = base.layers[0].self_attn, base.layers[1].mlp
    weight, gate = attention.o_proj.weight, mlp.gate_proj
    return {
        "scaling": (setting(attention, "scaling", 0.9), "self_attn has scaling=0.9, and had 0.25"),
        "eps": (setting(base.norm, "variance_epsilon", 0.5), "norm has variance_epsilon=0.5"),
        "window": (setting(attention, "window", 2), "window=2"),
        "new": (setting(attention, "softcap", 2.0), "softcap=2.0, and had none"),
        "forward": (setting(mlp, "forward", lambda x: x), "mlp has forward="),
        "call": (setting(type(mlp), "__call__", lambda self, x: x), "has another __call__"),
        "class": (setting(gate, "__class__", nn.Linear), "gate_proj is a torch.nn.*Linear now"),
        "property": (setting(type(attention), "scaling", property(lambda _: 1.0)), "another scal"),
        "property of config": (
            setting(type(model.config), "use_cache", property(lambda _: False)),
            "Config has another use_cache",
        ),
        "hook": (hooked(model), "mlp got a hook"),
        "global hook": (
            entry(torch_module._global_forward_hooks, 99, lambda m, x, y: None),
            "a hook stands on all modules",
        ),
        "config": (setting(model.config, "rms_norm_eps", 0.5), "the config has rms_norm_eps=0.5"),
        "nested config": (entry(model.config.rope_parameters, "rope_theta", 5.0), "rope_param"),
        "submodule": (entry(mlp._modules, "act_fn", nn.ReLU()), "got in exchange a submodule"),
        "bias": (entry(gate._parameters, "bias", nn.Parameter(torch.ones(48))), "parameter bias"),
        "other memory": (memory_of(weight, torch.clone), "o_proj.weight was moved to other memory"),
        "transposed": (memory_of(weight, torch.t), "o_proj.weight has other strides"),
        "dictionary": (
            setting(mlp, "__dict__", {**vars(mlp), "forward": lambda x: x}),
            "module model.layers.1.mlp has another __dict__",
        ),
        "negated": (memory_of(weight, torch._neg_view), "o_proj.weight has another sign"),
        "in place": (in_place(weight), "o_proj.weight was written in place"),
        "through data": (Written(weight.data), "o_proj.weight has other values"),
        "one value": (Written(base.embed_tokens.weight.data, (7, 3)), "embed_tokens.weight has"),
        "inv_freq": (in_place(base.rotary_emb.inv_freq), "inv_freq was written in place"),
        "angles": (in_place(base.rotary_emb._rotary_table), "_rotary_table was written in place"),
        "order": (reordered(model), "layers were put in another order"),
        "order in place": (reordered_in_place(model), "layers were put in another order"),
        "function": (
            setting(nn.functional, "silu", nn.functional.relu),
            "code that the forward stands on was replaced",
        ),
    }


NAMES = [
    *("scaling", "eps", "window", "new", "forward", "call", "class", "property", "hook", "config"),
    *("submodule", "bias", "order", "function", "property of config", "global hook"),
    *("nested config", "other memory", "transposed", "in place", "through data", "one value"),
    *("inv_freq", "order in place", "angles", "negated", "dictionary"),
]


def test_every_change_is_tried(model, expected):
    assert sorted(NAMES) == sorted(changes(model))


@pytest.mark.parametrize("name", NAMES)
def test_a_change_for_some_steps_ends_the_rollout(model, expected, name, monkeypatch):
    monkeypatch.setattr("rl_consistency.models.snapshot.CODE_EVERY", 1)
    engine, undo, calls = engine_of(model, tokenizer=Plain()), ExitStack(), []
    change, message = changes(model)[name]

    def progress(*_):
        calls.append(1)
        if len(calls) == 3:
            change(undo)
        elif len(calls) == 7:
            undo.close()

    digest = model_digest(model)
    step = "[4-7]" if name == "one value" else "4"  # a look compares a quarter of the values
    try:
        with pytest.raises(ConsistencyError, match=rf"generation.*{message}.*seen in step {step}"):
            engine.generate(PROMPTS, SAMPLING, progress=progress)
    finally:
        undo.close()
    assert 3 <= len(calls) <= 6 and is_idle(engine) and model_digest(model) == digest
    assert content(engine.generate(PROMPTS, SAMPLING)) == expected


class Changing:
    """User code that changes an attribute in a call, and puts it back in a later one."""

    def __init__(self, model):
        self.attention, self.calls, self.at = model.model.layers[0].self_attn, 0, (4, 8)

    def __call__(self, result=None):
        self.calls += 1
        if self.calls in self.at:
            self.attention.scaling = 0.9 if self.calls == self.at[0] else 0.25
        return result


def by_a_drafter(model, changing, monkeypatch):
    monkeypatch.setattr(Wrong, "propose", lambda self, most: changing([1]))
    engine_of(model, tokenizer=Plain(), drafter=Wrong()).generate(PROMPTS, SAMPLING)


def by_a_tokenizer(model, changing, monkeypatch):
    changing.at = (9, 17)  # not where the prompts are read, before the rollout
    monkeypatch.setattr(Plain, "decode", lambda *_, **named: changing("text"))
    engine_of(model, tokenizer=Plain()).generate(PROMPTS, SAMPLING)


def by_the_consumer_of_a_stream(model, changing, monkeypatch):
    for _ in engine_of(model, max_num_seqs=1, tokenizer=Plain()).stream(PROMPTS * 3, SAMPLING):
        changing()


def by_the_caller_of_steps(model, changing, monkeypatch):
    engine = engine_of(model, tokenizer=Plain())
    engine.submit(PROMPTS, SAMPLING)
    while engine.has_unfinished:
        changing()
        engine.step()


def by_a_signal(model, changing, monkeypatch):
    before = signal.signal(signal.SIGUSR1, lambda *_: changing())
    try:
        engine = engine_of(model, tokenizer=Plain())
        engine.generate(PROMPTS, SAMPLING, progress=lambda *_: signal.raise_signal(signal.SIGUSR1))
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(
    "run",
    [
        by_a_drafter,
        by_a_tokenizer,
        by_the_consumer_of_a_stream,
        by_the_caller_of_steps,
        by_a_signal,
    ],
)
def test_a_change_is_seen_whoever_makes_it(model, monkeypatch, run):
    changing = Changing(model)
    try:
        with pytest.raises(ConsistencyError, match=r"has scaling=0\.9"):
            run(model, changing, monkeypatch)
    finally:
        changing.attention.scaling = 0.25


def test_what_no_forward_reads_may_change(model, expected):
    engine, calls = engine_of(model, tokenizer=Plain()), []
    kept = model.model.layers[0]
    kept.seen = []

    def progress(*_):
        calls.append(1)
        kept.seen = [torch.ones(2)] * len(calls)
        model.train(len(calls) % 2 == 0)
        model.zero_grad()

    try:
        assert content(engine.generate(PROMPTS, SAMPLING, progress=progress)) == expected
    finally:
        del kept.seen
        model.eval()


def test_looking_draws_no_random_number_of_the_user(model):
    engine = engine_of(model, tokenizer=Plain())
    states = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()
    engine.generate(PROMPTS, SAMPLING)
    after = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()
    assert after == states


def test_while_a_device_is_busy_all_is_looked_at_and_else_a_part_in_each_step(model, monkeypatch):
    monkeypatch.setattr("rl_consistency.models.snapshot.MODULES_PER_PART", 4)
    watch: Any = StepWatch(Snapshot(model), model.named_parameters())
    count = -(-len(list(model.modules())) // 4) + 2
    assert MODULES_PER_PART > 4 and len(watch._parts) == count > 3
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(model.lm_head, "in_features", 1)
        seen = [watch.look(lambda: False) is not None for _ in range(2 * count)]
        assert sum(seen) == 2 and seen.index(True) == count - 1
        assert watch.look(lambda: True) is not None
    assert watch.look() is None


def test_another_rollout_that_begins_hides_no_change_from_the_one_under_way(model):
    snapshot, weights = Snapshot(model), [("of no model", torch.ones(1))]
    first = StepWatch(snapshot, weights)
    assert first.look() is None
    with torch.no_grad():
        model.model.norm.weight.mul_(1.0)
    second = StepWatch(snapshot, weights)
    assert first.look() == ("model.norm.weight was written in place", True)
    assert second.look() is None


def test_the_weights_memory_is_not_kept_after_a_rollout(model):
    engine = engine_of(model, max_num_seqs=1, tokenizer=Plain())
    engine.generate(PROMPTS, SAMPLING)
    assert engine._weights._steps is None
    stream = engine.stream(PROMPTS, SAMPLING)
    next(stream)
    assert engine._weights._steps is not None
    stream.close()
    assert engine._weights._steps is None
