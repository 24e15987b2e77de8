"""The hash table of training on the GPUs there are: over NCCL where there are several."""

import pytest

from rl_consistency.cli.main import main

pytestmark = pytest.mark.gpu


def test_one_hash_on_any_number_of_gpus(capsys):
    strategies = ["--strategy", "replicated", "fsdp2"]
    assert main(["verify", "--device", "cuda", "--world", "--steps", "3", *strategies]) == 0
    assert "one hash per dtype" in capsys.readouterr().out
