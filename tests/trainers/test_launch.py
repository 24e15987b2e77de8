"""What `accelerate launch` and `torchrun` ask for is honoured or refused, never ignored."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from rl_consistency.distributed.leaves import LeafOrder
from rl_consistency.trainers import launch
from rl_consistency.trainers.config.recipe import dump_config
from rl_consistency.trainers.launch import (
    check_launch,
    is_first_process,
    refuse_many_processes,
)
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


def test_a_plain_process_and_one_of_accelerate_launch_are_let_through(launched):
    check_launch()
    launched(**ACCELERATE, ACCELERATE_USE_CPU="True")
    check_launch("cpu")


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
        (TWO | {"WORLD_SIZE": "5"}, 4, "5 processes cannot share 4 x 1 .*: 1, 2, 3, 4[.]"),
        ({"WORLD_SIZE": "2"}, 4, "WORLD_SIZE=2 without LOCAL_RANK"),
        ({"WORLD_SIZE": "two"}, 4, "WORLD_SIZE=two: a positive number"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, 4, "OMPI_COMM_WORLD_SIZE=4: .* not MPI"),
        (ACCELERATE | {"MASTER_ADDR": "127.0.0.1"}, 4, "started one: on a CPU set ACCELERATE_USE"),
        (TWO | {"ACCELERATE_MIXED_PRECISION": "bf16"}, 4, "--mixed_precision bf16"),
    ],
)
def test_processes_that_cannot_train_are_refused(launched, variables, leaves, message):
    launched(**variables)
    with pytest.raises(ValueError, match=message):
        check_launch("cpu", LeafOrder(leaves))


@pytest.mark.parametrize("variables", [TWO, {"WORLD_SIZE": "1", "LOCAL_RANK": "0"}, {}])
def test_processes_that_share_leaves_are_let_through(launched, variables):
    launched(**variables)
    check_launch("cpu", LeafOrder(2))


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, "--mixed_precision bf16: policy.dtype"),
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, "steps 4: training.micro_batch_size"),
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "--dynamo_backend inductor"),
        ({"ACCELERATE_USE_FSDP": "true"}, "ACCELERATE_USE_FSDP"),
        ({"ACCELERATE_USE_FSDP": "Yes"}, "ACCELERATE_USE_FSDP"),
        ({"ACCELERATE_USE_MEGATRON_LM": "on"}, "ACCELERATE_USE_MEGATRON_LM"),
        ({"ACCELERATE_USE_CPU": "garbage"}, "ACCELERATE_USE_CPU garbage: .* true or false"),
        ({"ACCELERATE_USE_CPU": ""}, "ACCELERATE_USE_CPU : .* true or false"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "ACCELERATE_USE_DEEPSPEED"),
        ({"ACCELERATE_TORCH_DEVICE": "cuda:0"}, "ACCELERATE_TORCH_DEVICE cuda: .* run.device cpu"),
    ],
)
def test_a_setting_that_a_run_does_not_follow_is_refused(launched, variables, message):
    launched(**variables)
    with pytest.raises(ValueError, match=message):
        check_launch("cpu")


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
        check_launch("cuda")


def test_a_run_refuses_before_its_directory_is_touched(launched, tiny_run):
    launched(ACCELERATE_MIXED_PRECISION="fp16")
    with pytest.raises(ValueError, match="--mixed_precision fp16"):
        tiny_run()
    assert not (tiny_run.directory / "run").exists()


@pytest.mark.parametrize(
    ("variables", "changed"),
    [
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, False),
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, True),
    ],
)
def test_without_the_check_a_setting_is_ignored_or_changes_the_weights(
    launched, tiny_run, monkeypatch, variables, changed
):
    """Negative control."""
    expected, _ = tiny_run.of_its_own("plain", **{"training.steps": 1})
    launched(**variables)
    monkeypatch.setattr(launch, "check_launch", lambda *given: None)
    found, _ = tiny_run(**{"training.steps": 1})
    assert (found["parameter_digest"] != expected["parameter_digest"]) == changed


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
    script.write_text("from rl_consistency.trainers.launch import check_launch\ncheck_launch()\n")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", *options, str(script)]
    # A home of its own: no saved configuration of this machine takes part.
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode != 0
    assert all(message in done.stderr for message in messages), done.stderr


def test_the_steps_are_read_from_the_line_of_the_launcher(launched, monkeypatch):
    launched(**ACCELERATE)
    line = ["sh", "-c", "echo; read _", "launch", "--gradient_accumulation_steps"]
    for steps, refusal in (("1", nullcontext()), ("4", pytest.raises(ValueError, match="steps 4"))):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen([*line, steps], **pipes) as launcher:
            launcher.stdout.readline()  # its line stands in /proc
            monkeypatch.setattr(os, "getppid", lambda pid=launcher.pid: pid)
            with refusal:
                check_launch()
            launcher.communicate(b"\n")


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
