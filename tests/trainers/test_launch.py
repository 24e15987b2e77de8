"""What `accelerate launch` and `torchrun` ask for is honoured or refused, never ignored."""

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from rl_consistency.distributed.world import CollectiveError
from rl_consistency.trainers import launch
from rl_consistency.trainers.config.recipe import dump_config, load_config
from rl_consistency.trainers.launch import (
    check_launch,
    check_machine,
    is_first_process,
    leave,
    refuse_many_processes,
)
from tests.trainers.config.test_config import DEMO
from tests.trainers.distributed.runs import LEAVES

ACCELERATE = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO"}
ROOT = Path(__file__).parents[2]


@pytest.fixture
def launched(monkeypatch):
    """Stands for a launcher: sets the variables it hands on."""

    def launch_with(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return launch_with


def recipe(leaves=1, *overrides):
    return load_config(DEMO, [f"consistency.gradient_leaves={leaves}", *overrides])


def test_a_plain_process_and_one_of_accelerate_launch_are_let_through(launched):
    check_launch(recipe())
    launched(**ACCELERATE, ACCELERATE_USE_CPU="True")
    check_launch(recipe())


TWO = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "RANK": "0"}


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (TWO, "WORLD_SIZE=2: this is for one process"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_SIZE=4: .* not MPI"),
        ({"WORLD_SIZE": "1", "LOCAL_RANK": "0"}, "without torchrun"),
        (ACCELERATE | {"MASTER_ADDR": "127.0.0.1"}, "asked for several processes and started one"),
    ],
)
def test_several_processes_are_refused(launched, variables, message):
    launched(**variables)
    with pytest.raises(ValueError, match=message):
        refuse_many_processes()


@pytest.mark.parametrize(
    ("variables", "leaves", "message"),
    [
        (TWO, 1, "WORLD_SIZE=2: .* set consistency.gradient_leaves to 2 or more"),
        (TWO, 1, "set consistency.ordered to false .the weights then depend"),
        (TWO | {"WORLD_SIZE": "5"}, 4, "5 processes cannot share 4 x 1 .*: 1, 2, 3, 4[.]"),
        ({"WORLD_SIZE": "2"}, 4, "WORLD_SIZE=2 without LOCAL_RANK"),
        ({"WORLD_SIZE": "two"}, 4, "WORLD_SIZE=two: a positive number"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, 4, "OMPI_COMM_WORLD_SIZE=4: .* not MPI"),
        (ACCELERATE | {"MASTER_ADDR": "127.0.0.1"}, 4, "started one: on a CPU set ACCELERATE_USE"),
        (TWO | {"ACCELERATE_MIXED_PRECISION": "bf16"}, 4, "--mixed_precision bf16"),
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, 1, "--mixed_precision bf16: policy.dtype"),
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, 1, "steps 4: training.micro_batch_size"),
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, 1, "--dynamo_backend inductor"),
        ({"ACCELERATE_USE_MEGATRON_LM": "on"}, 1, "MEGATRON_LM: .* tensor, pipeline, context"),
        ({"ACCELERATE_USE_PARALLELISM_CONFIG": "1"}, 1, "PARALLELISM_CONFIG: .* tensor, pipeline"),
        ({"ACCELERATE_USE_CPU": "garbage"}, 1, "ACCELERATE_USE_CPU garbage: .* true or false"),
        ({"ACCELERATE_USE_CPU": ""}, 1, "ACCELERATE_USE_CPU : .* true or false"),
        ({"ACCELERATE_TORCH_DEVICE": "cuda:0"}, 1, "ACCELERATE_TORCH_DEVICE cuda: .* run.device"),
    ],
)
def test_processes_and_settings_that_cannot_train_are_refused(launched, variables, leaves, message):
    launched(**variables)
    with pytest.raises(ValueError, match=message):
        check_launch(recipe(leaves))


@pytest.mark.parametrize(
    ("size", "micro_batch", "message"),
    [
        ("5", 64, "and each of 5 processes .* at most 52 per leaf. Start fewer"),
        ("300", 1, "and .* 256 sequences cannot be cut into 300 leaves"),
    ],
)
def test_without_an_order_the_processes_are_the_leaves(launched, size, micro_batch, message):
    changes = ["consistency.ordered=false", f"training.micro_batch_size={micro_batch}"]
    launched(WORLD_SIZE="4", LOCAL_RANK="0", RANK="0")
    check_launch(recipe(1, *changes))
    launched(WORLD_SIZE=size)
    with pytest.raises(ValueError, match=f"consistency.ordered is false, {message}"):
        check_launch(recipe(1, *changes))


def test_shards_need_no_launcher(tiny_run):
    expected, _ = tiny_run.of_its_own("replicated", **LEAVES)
    try:
        found, _ = tiny_run(**LEAVES, **{"training.strategy": "fsdp2"})
    finally:
        leave()
    assert not dist.is_initialized()
    assert found["parameter_digest"] == expected["parameter_digest"]
    assert (found["strategy"], found["processes"]) == ("fsdp2", 1)


def test_the_launcher_s_strategy_becomes_the_run_s(launched):
    assert check_machine(recipe()).training.strategy == "replicated"
    launched(**TWO, ACCELERATE_USE_FSDP="true", FSDP_VERSION="2")
    assert check_machine(recipe(2)).training.strategy == "fsdp2"
    launched(ACCELERATE_USE_FSDP="false", ACCELERATE_USE_DEEPSPEED="true")
    with pytest.raises(ValueError, match="shadow_every: under zero2 DeepSpeed takes"):
        check_machine(recipe(2))
    launched(ACCELERATE_DEEPSPEED_ZERO_STAGE="1")
    bf16 = recipe(2, "policy.dtype=bfloat16", "consistency.shadow_every=0")
    with pytest.raises(ValueError, match="zero1 has no fp32 gradients of a bfloat16 policy .* use"):
        check_machine(bf16)


def test_a_timeout_reaches_every_group_of_processes(tiny_run, monkeypatch):
    given = []
    for name in ("Accelerator", "World"):
        real = getattr(launch, name)
        monkeypatch.setattr(launch, name, Spy(real, given))
    summary, _ = tiny_run(**{"run.collective_timeout": 7, "training.steps": 1})
    assert given == [timedelta(seconds=7)] * 2
    found = tuple(summary[key] for key in ("strategy", "processes", "ordered"))
    assert found == ("replicated", 1, True)


class Spy:
    """Stands for `Accelerator` and `World`; keeps the timeouts they are given."""

    def __init__(self, real, given):
        self._real, self._given = real, given

    def __call__(self, **given):
        self._given += [handler.timeout for handler in given["kwargs_handlers"]]
        return self._real(**given)

    def join(self, device, timeout):
        self._given.append(timeout)
        return self._real.join(device, timeout)


def test_only_the_first_of_several_processes_speaks(launched):
    assert is_first_process()
    launched(RANK="1")
    assert is_first_process()  # a variable that something else has left
    launched(WORLD_SIZE="2")
    assert not is_first_process()
    launched(RANK="0")
    assert is_first_process()


@pytest.mark.parametrize("text", ["True", "yes", "1"])
def test_a_launcher_on_the_cpu_does_not_move_a_run_off_its_gpu(launched, text):
    launched(ACCELERATE_USE_CPU=text)
    with pytest.raises(ValueError, match="--cpu: the recipe says run.device cuda"):
        check_launch(recipe(1, "run.device=cuda"))


@pytest.mark.parametrize(
    "variables",
    [{"ACCELERATE_MIXED_PRECISION": "bf16"}, {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}],
)
def test_without_the_check_a_setting_is_ignored(launched, tiny_run, monkeypatch, variables):
    """Negative control."""
    expected, _ = tiny_run.of_its_own("plain", **{"training.steps": 1})
    launched(**variables)
    monkeypatch.setattr(launch, "check_launch", lambda *given: None)
    found, _ = tiny_run(**{"training.steps": 1})
    assert found["parameter_digest"] == expected["parameter_digest"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("options", "messages"),
    [
        (["--num_processes", "2"], ["asked for several processes"]),
        (
            ["--gradient-accumulation-steps=4", "--mixed_precision", "bf16"],
            ["--gradient_accumulation_steps 4", "--mixed_precision bf16"],
        ),
    ],
    ids=["processes", "steps and precision"],
)
def test_what_accelerate_launch_is_told_reaches_the_check(tmp_path, options, messages):
    script = tmp_path / "script.py"
    script.write_text(
        "from rl_consistency.trainers.config.recipe import load_config\n"
        "from rl_consistency.trainers.launch import check_launch\n"
        f"check_launch(load_config({str(DEMO)!r}))\n"
    )
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", *options, str(script)]
    # A home of its own: no saved configuration of this machine takes part.
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode != 0
    assert all(message in done.stderr for message in messages), done.stderr


@pytest.mark.thorough
def test_accelerate_launch_trains_on_two_processes(tiny_run):
    """As on a GPU, but for one variable; the weights are those of one process."""
    changes = LEAVES | {"reward.functions": [{"name": "arithmetic"}], "run.name": "two"}
    changes |= {
        "warm_start.steps": 2,
        "warm_start.batch_size": 8,
        "algorithm.entropy_coefficient": 0.1,
    }
    alone, _ = tiny_run.of_its_own("alone", **changes)
    recipe = tiny_run.directory / "recipe.yaml"
    recipe.write_text(dump_config(tiny_run.config(**changes)))
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu"]
    command += ["--num_processes", "2", "--main_process_port", "0"]
    command += ["--gradient_accumulation_steps", "1"]
    command += ["-m", "rl_consistency", "train", str(recipe)]
    variables = {"ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT)}
    environment = os.environ | variables | {"HF_HOME": str(tiny_run.directory)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tiny_run.directory / "run" / "summary.json").read_text())
    assert summary["parameter_digest"] == alone["parameter_digest"]
    assert done.stdout.count("two: 2 steps in") == 1  # by the first process alone


def test_a_rank_that_never_comes_is_named(monkeypatch, tiny_run):
    def alone(**_):
        raise dist.DistStoreError("Timed out after 4 seconds. 1/2 clients joined.")

    monkeypatch.setattr(launch, "Accelerator", alone)
    with pytest.raises(CollectiveError, match="not all processes .* 1/2 clients joined"):
        launch.join(tiny_run.config())
