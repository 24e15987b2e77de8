"""What `accelerate launch` and `torchrun` ask for is honoured or refused, never ignored."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rl_consistency.trainers import run
from rl_consistency.trainers.launch import check_launch, refuse_many_processes

ACCELERATE = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO"}
ROOT = Path(__file__).parents[2]


@pytest.fixture
def launched(monkeypatch):
    """Stands for a launcher: sets the variables it hands on."""

    def launch(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return launch


def test_a_plain_process_and_one_of_accelerate_launch_are_let_through(launched):
    check_launch()
    launched(**ACCELERATE, ACCELERATE_USE_CPU="True")
    check_launch("cpu")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "WORLD_SIZE=2: a run is one process"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_SIZE=4"),
        ({"WORLD_SIZE": "1", "LOCAL_RANK": "0"}, "without torchrun"),
        (ACCELERATE | {"MASTER_ADDR": "127.0.0.1"}, "asked for several processes; .* is one"),
    ],
)
def test_several_processes_are_refused(launched, variables, message):
    launched(**variables)
    for check in (check_launch, refuse_many_processes):
        with pytest.raises(ValueError, match=message):
            check()


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
    monkeypatch.setattr(run, "check_launch", lambda device: None)
    found, _ = tiny_run(**{"training.steps": 1})
    assert (found["parameter_digest"] != expected["parameter_digest"]) == changed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--num_processes", "2"], "asked for several processes"),
        (["--gradient_accumulation_steps", "4"], "--gradient_accumulation_steps 4"),
        (["--gradient-accumulation-steps=4"], "--gradient_accumulation_steps 4"),
        (["--mixed_precision", "bf16"], "--mixed_precision bf16"),
        (["--num_processes", "1", "--gradient_accumulation_steps", "1"], None),
    ],
)
def test_what_accelerate_launch_is_told_reaches_the_check(tmp_path, options, message):
    script = tmp_path / "script.py"
    script.write_text("from rl_consistency.trainers.launch import check_launch\ncheck_launch()\n")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", *options, str(script)]
    # A home of its own: no saved configuration of this machine takes part.
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode != 0) == (message is not None), done.stderr
    assert (message or "") in done.stderr
