"""New weights through the reload code of an installed vLLM, a parameter a call; a line for each
model. Run in a process of its own, since the tests here put stubs in vLLM's place."""

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType, SimpleNamespace

import torch
from torch import nn

UNUSED = (
    *("aiohttp", "cachetools", "cbor2", "cv2", "fastapi", "llguidance", "msgspec", "openai"),
    *("openai_harmony", "partial_json_parser", "PIL", "pybase64", "soundfile", "starlette"),
    *("tvm_ffi", "uvloop", "xgrammar", "zmq"),
)
"""What vLLM imports and its reload does not use; vLLM's Python files then suffice."""


class Unused(ModuleType):
    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *_, **__: None})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in UNUSED:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Unused(spec.name)

    def exec_module(self, module):
        """There is nothing in it."""


sys.meta_path.insert(0, Finder())

from vllm.model_executor.model_loader.reload import layerwise  # noqa: E402

import rl_consistency  # noqa: E402
from rl_consistency.integrations.vllm import weights  # noqa: E402
from rl_consistency.verify.presets import build_preset  # noqa: E402


def addresses(model):
    return {name: parameter.data_ptr() for name, parameter in model.named_parameters()}


for preset in sys.argv[1:]:
    served, trained = (build_preset(preset, torch.bfloat16, seed=seed) for seed in (0, 1))
    top = nn.Module()
    top.hf = served
    with rl_consistency.patch(served, cuda_graphs=False):
        weights.watch(served, from_checkpoint=False)
        layerwise.record_metadata_for_reloading(top)
        before = addresses(top)
        layerwise.initialize_layerwise_reload(top)
        for pair in trained.named_parameters():
            weights.load_weights(served, [pair])
        layerwise.finalize_layerwise_reload(top, SimpleNamespace(dtype=torch.bfloat16))
        weights.check_sync([weights.digest(served)], trained)
        assert addresses(top) == before
        # Of a module without its bias vLLM fills that from fresh memory.
        layerwise.initialize_layerwise_reload(top)
        for name, parameter in trained.named_parameters():
            if not name.endswith("layers.0.self_attn.q_proj.bias"):
                weights.load_weights(served, [(name, parameter)])
        layerwise.finalize_layerwise_reload(top, SimpleNamespace(dtype=torch.bfloat16))
        try:
            weights.begin_step(served, [], [1])
        except rl_consistency.ConsistencyError as error:
            print(preset, "bias" if "q_proj.bias did not arrive" in str(error) else "same")
