"""What runs is what the installed files say: any other code of the list is refused."""

import functools
import importlib
import importlib.abc
import importlib.machinery
import inspect
import os
import random
import re
import subprocess
import sys
import time
import types
from contextlib import ExitStack

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel, masking_utils
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral

from rl_consistency.models import families, installed_code
from rl_consistency.models.families import UnsupportedModelError
from rl_consistency.models.patch import patch
from rl_consistency.models.scoring.token_logprobs import token_logprobs
from rl_consistency.verify.presets import build_preset, preset_config

PRESETS = (
    *("tiny-llama", "tiny-mistral", "tiny-qwen2", "tiny-qwen3"),
    *("tiny-qwen3-moe", "tiny-olmoe", "tiny-mixtral"),
)


def rewritten(function, old, new):
    """A function of the same names and the same module whose text is another."""
    source = inspect.getsource(function)
    assert old in source
    space = {}
    owner, _, _ = function.__qualname__.rpartition(".")
    text = f"class {owner}:\n{source}" if owner else source.replace("@", "# @")
    exec(text.replace(old, new), function.__globals__, space)
    made = vars(space[owner])[function.__name__] if owner else space[function.__name__]
    return types.FunctionType(made.__code__, function.__globals__, function.__name__)


def causal(name):
    return lambda monkeypatch: monkeypatch.setattr(
        modeling_llama, "create_causal_mask", getattr(masking_utils, name)
    )


def prefix_mask(monkeypatch):
    made = functools.partial(
        modeling_llama.create_causal_mask, or_mask_function=lambda b, h, q, k: k < 5
    )
    monkeypatch.setattr(modeling_llama, "create_causal_mask", made)


def prefix_mask_at_its_home(monkeypatch):
    made = functools.partial(masking_utils.create_causal_mask, allow_is_causal_skip=False)
    monkeypatch.setattr(masking_utils, "create_causal_mask", made)
    monkeypatch.setattr(modeling_llama, "create_causal_mask", made)


def helper_of_masks(monkeypatch):
    monkeypatch.setattr(
        masking_utils, "causal_mask_function", lambda batch, head, query, key: key <= query + 1
    )


def attention_of_another_family(monkeypatch):
    softcapped = functools.partial(modeling_gemma2.eager_attention_forward, softcap=1.0)
    attention = modeling_llama.ALL_ATTENTION_FUNCTIONS._global_mapping
    monkeypatch.setitem(attention, "sdpa", softcapped)


def not_causal(monkeypatch):
    attention = modeling_llama.ALL_ATTENTION_FUNCTIONS._global_mapping
    monkeypatch.setitem(attention, "sdpa", functools.partial(attention["sdpa"], is_causal=False))


def function_in_its_module(monkeypatch):
    made = rewritten(modeling_llama.eager_attention_forward, "* scaling", "* 0.5 * scaling")
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", made)


def method_in_its_module(monkeypatch):
    cls = modeling_llama.LlamaMLP
    made = rewritten(cls.forward, "return down_proj", "return 0.5 * down_proj")
    monkeypatch.setattr(cls, "forward", made)


def code_of_a_method(monkeypatch):
    cls = modeling_llama.LlamaMLP
    made = rewritten(cls.forward, "return down_proj", "return 0.5 * down_proj")
    monkeypatch.setattr(cls.forward, "__code__", made.__code__)


def wrapped(wrap, cls, name="forward"):
    return lambda monkeypatch: monkeypatch.setattr(cls, name, wrap(getattr(cls, name)))


def frequencies(monkeypatch):
    kinds = modeling_llama.ROPE_INIT_FUNCTIONS
    own = kinds["linear"]
    monkeypatch.setitem(kinds, "linear", lambda config, *rest, **named: own(config, *rest, **named))


def defaults(monkeypatch):
    monkeypatch.setattr(modeling_llama.apply_rotary_pos_emb, "__defaults__", (2,))


def _wrap(old):
    called = old if callable(old) else old.fget

    @functools.wraps(called)
    def around(*given, **named):
        return called(*given, **named)

    return around


def _without_gradients(function):
    with torch.enable_grad():  # `set_grad_enabled(False)` takes effect at once
        return torch.set_grad_enabled(False)(function)


def another(module, name, value):
    return lambda monkeypatch: monkeypatch.setattr(module, name, value, raising=False)


def cell_of_a_wrapper(monkeypatch):
    forward = modeling_llama.LlamaForCausalLM.forward
    place = forward.__code__.co_freevars.index("func")
    inner = _wrap(forward.__closure__[place].cell_contents)
    monkeypatch.setattr(forward.__closure__[place], "cell_contents", inner)


def with_gradients(monkeypatch):
    cls = modeling_llama.LlamaRotaryEmbedding
    monkeypatch.setattr(cls, "forward", torch.enable_grad()(cls.forward.__wrapped__))


class OtherMasks(masking_utils.AttentionMaskInterface):
    pass


Attention = modeling_llama.LlamaAttention
REPLACED = {
    "a mask with a prefix": prefix_mask,
    "a partial at its home and where it is imported": prefix_mask_at_its_home,
    "a bidirectional mask": causal("create_bidirectional_mask"),
    "a mask of windows": causal("create_sliding_window_causal_mask"),
    "a helper of masks": helper_of_masks,
    "soft-capped attention": attention_of_another_family,
    "attention that is not causal": not_causal,
    "a function rewritten in its module": function_in_its_module,
    "a method rewritten in its module": method_in_its_module,
    "a method's code": code_of_a_method,
    "a forward under no_grad": wrapped(torch.no_grad(), Attention),
    "a forward under set_grad_enabled": wrapped(_without_gradients, Attention),
    "a forward under autocast": wrapped(torch.autocast("cpu", torch.bfloat16), Attention),
    "a forward under no_grad twice": wrapped(torch.no_grad(), modeling_llama.LlamaRotaryEmbedding),
    "a linear map under inference_mode": wrapped(torch.inference_mode(), nn.Linear),
    "another decorator of transformers": wrapped(
        modeling_llama.can_return_tuple, modeling_llama.LlamaModel
    ),
    "a function of frequencies": frequencies,
    "the defaults of a function": defaults,
    "the call of all models": another(
        PreTrainedModel, "__call__", lambda self, *given, **named: nn.Module.__call__(self, *given)
    ),
    "the lookup of all models": another(
        PreTrainedModel, "__getattr__", lambda self, name: nn.Module.__getattr__(self, name)
    ),
    "a module under its name": another(modeling_llama, "torch", types.ModuleType("torch")),
    "a function of Python's own": another(masking_utils, "min", lambda *given: given[0]),
    "a table of masks": another(masking_utils, "ALL_MASK_ATTENTION_FUNCTIONS", OtherMasks()),
    "the lookup of attention": wrapped(
        _wrap, type(modeling_llama.ALL_ATTENTION_FUNCTIONS), "get_interface"
    ),
    "the cell of a wrapper": cell_of_a_wrapper,
    "another context in a wrapper": with_gradients,
    "a method of tensors": wrapped(_wrap, torch.Tensor, "mean"),
}


@pytest.mark.parametrize("replace", REPLACED.values(), ids=REPLACED)
def test_other_code_under_a_covered_name_is_refused_before_and_after_a_patch(replace, monkeypatch):
    config = preset_config("tiny-llama")
    config.rope_parameters = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    model = modeling_llama.LlamaForCausalLM(config)
    with monkeypatch.context() as before:
        replace(before)
        with pytest.raises(UnsupportedModelError, match=r"replaced by|is a (partial|function) of"):
            patch(model)
    with patch(model):
        token_logprobs(model, [[1, 2, 3]], prompt_lengths=[1])
        replace(monkeypatch)
        with pytest.raises(UnsupportedModelError, match=r"replaced by|is a (partial|function) of"):
            token_logprobs(model, [[1, 2, 3]], prompt_lengths=[1])


def test_other_bases_of_a_layer_are_refused():
    class Layer(modeling_llama.GradientCheckpointingLayer):
        def __call__(self, hidden_states, **named):
            return super().__call__(hidden_states * 0.5, **named)

    cls, model = modeling_llama.LlamaDecoderLayer, build_preset("tiny-llama")
    with patch(model) as session:
        own, cls.__bases__ = cls.__bases__, (Layer,)
        try:
            with pytest.raises(UnsupportedModelError, match="a class of the bases .*Layer"):
                session.check()
        finally:
            cls.__bases__ = own
        session.check()


@pytest.mark.parametrize("kind", ["attn", "experts"])
def test_an_implementation_that_is_not_registered_is_refused(kind):
    model = build_preset("tiny-qwen3-moe")
    setattr(model.config, f"_{kind}_implementation_internal", "nope")
    with pytest.raises(UnsupportedModelError, match=f"{kind} implementation 'nope' is not regist"):
        patch(model)


def test_a_mask_without_its_window_is_refused(monkeypatch):
    full = modeling_mistral.create_causal_mask
    monkeypatch.setattr(modeling_mistral, "create_sliding_window_causal_mask", full)
    with pytest.raises(UnsupportedModelError, match="window_causal_mask was replaced by"):
        patch(build_preset("tiny-mistral"))


class Edited(importlib.machinery.SourceFileLoader):
    """Loads a file as an edit on disk would have it."""

    def get_data(self, path):
        if not path.endswith(".py"):
            raise OSError("no bytecode")
        return super().get_data(path).replace(b"self.act_fn(", b"1.5 * self.act_fn(")


EDITED = """
import importlib.machinery, importlib.abc, sys
sys.path.insert(0, {tests!r})
from test_installed_code import Edited
from rl_consistency.models.patch import patch
from rl_consistency.verify.presets import build_preset

name = "transformers.models.qwen3.modeling_qwen3"
for module in [key for key in sys.modules if key.startswith("transformers.models.qwen3.")]:
    del sys.modules[module]

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, found, path, target=None):
        if found == name:
            spec = importlib.machinery.PathFinder.find_spec(found, path)
            spec.loader = Edited(found, spec.origin)
            return spec

sys.meta_path.insert(0, Finder())
import transformers.models.qwen3.modeling_qwen3 as modeling
from transformers import Qwen3Config
try:
    patch(modeling.Qwen3ForCausalLM(Qwen3Config(hidden_size=32, intermediate_size=32, vocab_size=32,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16)))
except ValueError as error:
    print(error)
"""


def test_an_edited_text_that_was_imported_is_refused():
    text = EDITED.format(tests=os.path.dirname(__file__))
    run = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert "Qwen3MLP was replaced by a class with another forward" in run.stdout, run.stderr


def test_an_edited_file_is_refused(monkeypatch, tmp_path):
    name = modeling_llama.__name__
    path, recorded = installed_code._record(name)
    edited = tmp_path / "modeling_llama.py"
    edited.write_text(path.read_text() + "\n")
    for record, message in (
        ((edited, recorded), "replaced by an edited file, .*modeling_llama.py"),
        ((path, ""), "replaced by code that transformers was installed with no digest of"),
        ((None, ""), "replaced by code of no installed file"),
    ):
        with monkeypatch.context() as changed:
            changed.setattr(installed_code, "_record", lambda _, record=record: record)
            file = installed_code.InstalledFile(name)
            changed.setattr(installed_code, "installed", lambda _, file=file: file)
            found = [*map(str, installed_code.differences(name, ("LlamaMLP",)))]
        assert len(found) == 1
        assert re.search(message, found[0])


class Remembers:
    """An object that says it wraps a function."""

    def __init__(self, function):
        self.__wrapped__ = function


def test_only_the_cache_of_functools_is_looked_into():
    def function():
        return 1

    codes = [function.__code__]
    for decorator in ("cache", "lru_cache"):
        remembered = functools.cache(function)
        assert installed_code._unwrapped(remembered, codes, [decorator]) is function
        assert installed_code._unwrapped(remembered, codes, []) is None
        assert installed_code._unwrapped(Remembers(function), codes, [decorator]) is None


def test_a_report_lists_what_the_forward_stands_on():
    model = build_preset("tiny-llama")
    with patch(model) as session:
        rows = {row.name: row for row in session.report().rows if row.verdict == "as installed"}
    name = modeling_llama.__name__
    assert rows[f"{name}.LlamaMLP"].kind == "class"
    assert rows[f"{name}.LlamaMLP"].basis.startswith("transformers ")
    assert installed_code.installed(name).digest[:16] in rows[f"{name}.LlamaMLP"].basis
    assert rows["transformers.masking_utils"].kind == "all functions"


# The fuzz: each function, class and method of the list, changed in each of these ways.
def _places(config):
    """Holder and name of all that a family's forward is made of, found by looking at the modules
    and not at what identity makes of their files."""
    for name, names in families.stands_on(config).items():
        module = importlib.import_module(name)
        for key, value in [*vars(module).items()]:
            of_here = getattr(value, "__module__", "") == name
            counts = key in names or installed_code.EVERY in names
            if isinstance(value, types.FunctionType) and of_here and counts:
                yield module, key
            elif isinstance(value, type) and of_here and key in names:
                yield module, key
                for member, function in [*vars(value).items()]:
                    is_method = isinstance(function, types.FunctionType | staticmethod | property)
                    if is_method and (value is not nn.Module or member in installed_code._CALLED):
                        yield value, member


def _replace(old):
    return (lambda *given, **named: None) if not isinstance(old, type) else type("Other", (), {})


def _subclass(old):
    if not isinstance(old, type):
        return torch.no_grad()(old if isinstance(old, types.FunctionType) else _replace(old))
    try:
        made = type(old.__name__, (old,), {"__module__": old.__module__})
    except TypeError:  # a class that is made by another rule
        return _replace(old)
    made.__qualname__ = old.__qualname__
    return made


def _copy(old):
    """The same names, the same module and another text."""
    function = old.fget if isinstance(old, property) else getattr(old, "__func__", old)
    if not isinstance(function, types.FunctionType):
        return _subclass(old)
    code = function.__code__
    changed = code.replace(co_consts=(*code.co_consts, "another"))
    made = types.FunctionType(
        changed,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    vars(made).update(vars(function))
    made.__qualname__, made.__kwdefaults__ = function.__qualname__, function.__kwdefaults__
    return type(old)(made) if isinstance(old, property | staticmethod) else made


WAYS = {
    "replaced": _replace,
    "wrapped": _wrap,
    "partial": lambda old: functools.partial(old if callable(old) else _replace(old)),
    "property": lambda old: property(lambda self: old),
    "subclassed or under no_grad": _subclass,
    "rewritten": _copy,
}


def _is_refused(config, holder, key, way):
    old = vars(holder)[key]
    made = WAYS[way](old)
    with ExitStack() as undo:
        if hasattr(holder, key):
            undo.callback(setattr, holder, key, old)
        setattr(holder, key, made)
        try:
            families.check_code(config)
        except UnsupportedModelError:
            return True
    return False


@pytest.mark.parametrize("preset", PRESETS)
def test_a_fuzz_of_the_list_finds_nothing_silent(preset):
    """RL_CONSISTENCY_FUZZ_SECONDS runs it longer, with other draws."""
    config, seconds = preset_config(preset), os.environ.get("RL_CONSISTENCY_FUZZ_SECONDS")
    draws = random.Random(time.time() if seconds else preset)
    places, watch = [*_places(config)], families.CodeWatch(config)
    assert len(places) > 150
    families.check_code(config)
    sound, end = watch.read(config), time.monotonic() + float(seconds or 0.7)
    silent, tried = [], 0
    while time.monotonic() < end:
        (holder, key), way = draws.choice(places), draws.choice([*WAYS])
        old = vars(holder)[key]
        if not _is_refused(config, holder, key, way):
            silent.append((holder.__name__, key, way))
        setattr(holder, key, WAYS[way](old))
        if watch.read(config) == sound:
            silent.append((holder.__name__, key, way, "unseen by the watch"))
        setattr(holder, key, old)
        tried += 1
    families.check_code(config)
    assert watch.read(config) == sound
    assert tried > 5 and silent == []
