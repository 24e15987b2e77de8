"""vLLM's layerwise reload, as far as a model sees it: `start` puts parameters on the meta device
with loaders that keep what arrives, which goes to the old addresses when a module is complete."""

import inspect

import torch


def start(model):
    """The modules' state, for `finish`."""
    return [_Module(module) for module in model.modules() if module._parameters]


def finish(started):
    for each in started:
        each.finish()


class _Module:
    def __init__(self, module):
        self.module, self.kept, self.count = module, [], 0
        self.real = {name: p for name, p in module._parameters.items() if p is not None}
        for name, parameter in self.real.items():
            on_meta = torch.nn.Parameter(parameter.data.to("meta"), requires_grad=False)
            on_meta.__dict__.update(parameter.__dict__)
            on_meta.weight_loader = self.loader(name, parameter.weight_loader)
            module._parameters[name] = on_meta

    def loader(self, name, load):
        def keep(*args, **kwargs):
            if self.real is None:
                return  # as in vLLM, what comes too late is lost
            bound = inspect.signature(load).bind(*args, **kwargs)
            load(*bound.args, **bound.kwargs)
            self.kept.append((name, load, bound))
            self.count += bound.arguments["loaded_weight"].numel()
            if self.count >= sum(p.numel() for p in self.real.values()):
                self.finish()

        return keep

    def finish(self):
        if self.real is None:
            return
        if self.kept:
            fresh = {name: torch.full_like(p, 7.0) for name, p in self.real.items()}
            for name, load, bound in self.kept:
                bound.arguments["param"] = fresh[name]
                load(*bound.args, **bound.kwargs)
            for name, parameter in self.real.items():
                parameter.data.copy_(fresh[name])
        self.module._parameters.update(self.real)
        self.real = None
