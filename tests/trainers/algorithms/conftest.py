from tests.ranks import run_ranks

__all__ = ["run_ranks"]
