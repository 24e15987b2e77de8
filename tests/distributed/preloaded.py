"""What the server imports from which `tests.ranks` forks its processes."""

from importlib import import_module

from rl_consistency.cli.train import uncollected_imports

DEEPSPEED = "deepspeed.runtime.zero.muon.muon_optimizer"
"""What takes a second to import, in each rank that uses it."""

with uncollected_imports():
    for name in ("tests.ranks", "rl_consistency.trainers.run", DEEPSPEED):
        import_module(name)
