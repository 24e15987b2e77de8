"""The strategy that accelerate asks for, and the settings of its engines, as its launcher gives."""

import json
import os

import pytest
from accelerate.commands import launch
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

from rl_consistency.trainers.config.recipe import load_config
from rl_consistency.trainers.launch import (
    DEEPSPEED,
    FSDP,
    check_launch,
    engines_off,
    is_on,
    strategy_of,
    unfollowed,
)
from tests.trainers.config.test_config import DEMO, ROOT

CONFIGS = sorted((ROOT / "recipes" / "accelerate").glob("*.yaml"))
FSDP2 = {FSDP: "true", "FSDP_VERSION": "2"}
TORCHRUN = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "RANK": "0"}


@pytest.fixture
def launched(monkeypatch, tmp_path):
    """Sets the variables that a launcher hands on; accelerate's saved configuration is not read."""
    monkeypatch.setattr(launch, "default_config_file", str(tmp_path / "none.yaml"))

    def launch_with(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return launch_with


def environment_of(*options):
    """What accelerate's launcher sets under these options."""
    parser = launch.launch_command_parser()
    args, *_ = launch._validate_launch_command(parser.parse_args([*options, "script.py"]))
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ""
        _, environment = prepare_deepspeed_cmd_env(args)
    else:
        environment = prepare_multi_gpu_env(args)
    return {name: text for name, text in environment.items() if os.environ.get(name) != text}


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_each_config_file_asks_for_its_strategy_and_for_nothing_else(launched, file):
    assert isinstance(load_config_from_file(str(file)), ClusterConfig)
    launched(**TORCHRUN, **environment_of("--config_file", str(file)))
    assert strategy_of(None) == strategy_of(file.stem) == file.stem
    overrides = ["consistency.gradient_leaves=4", "consistency.shadow_every=0"]
    check_launch(load_config(DEMO, overrides))


@pytest.mark.parametrize(
    ("variables", "asked"),
    [
        (FSDP2, "fsdp2"),
        (FSDP2 | {FSDP: "Yes"}, "fsdp2"),
        ({DEEPSPEED: "true"}, "zero2"),
        ({DEEPSPEED: "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "1"}, "zero1"),
        ({DEEPSPEED: "1", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}, "zero2"),
        ({DEEPSPEED: "on", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}, "zero3"),
    ],
)
def test_the_launcher_decides_where_the_recipe_does_not(launched, variables, asked):
    launched(**variables)
    assert strategy_of(None) == strategy_of(asked) == asked
    with pytest.raises(ValueError, match=f"strategy is replicated, and .* asks for {asked} .ACC"):
        strategy_of("replicated")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({FSDP: "true"}, "FSDP_VERSION 1: FSDP1 flattens parameters, .* set fsdp_version to 2"),
        (FSDP2 | {DEEPSPEED: "true"}, "a run has one strategy"),
        ({DEEPSPEED: "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "0"}, "stage 0: the stages are 1,"),
        ({DEEPSPEED: "perhaps"}, "ACCELERATE_USE_DEEPSPEED perhaps: .* true or false"),
    ],
)
def test_an_engine_that_no_strategy_stands_for_is_refused(launched, variables, message):
    launched(**variables)
    with pytest.raises(ValueError, match=message):
        strategy_of(None)


FSDP_SETTINGS = [
    (["--fsdp_offload_params", "true"], "FSDP_OFFLOAD_PARAMS true: "),
    (["--fsdp_reshard_after_forward", "false"], "FSDP_RESHARD_AFTER_FORWARD false: "),
    (["--fsdp_activation_checkpointing", "true"], "FSDP_ACTIVATION_CHECKPOINTING true: "),
    (["--fsdp_auto_wrap_policy", "SIZE_BASED_WRAP"], "FSDP_AUTO_WRAP_POLICY SIZE_BASED_WRAP: "),
    (["--fsdp_transformer_layer_cls_to_wrap", "A"], "FSDP_TRANSFORMER_CLS_TO_WRAP A: "),
    (["--fsdp_forward_prefetch", "true"], "FSDP_FORWARD_PREFETCH true: "),
]
DEEPSPEED_SETTINGS = [
    (["--gradient_clipping", "1.0"], "ACCELERATE_GRADIENT_CLIPPING 1.0: "),
    (["--offload_optimizer_device", "cpu"], "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE cpu: "),
    (["--offload_param_device", "nvme"], "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE nvme: "),
    (["--zero3_init_flag", "true"], "ACCELERATE_DEEPSPEED_ZERO3_INIT true: "),
    (["--deepspeed_moe_layer_cls_names", "Moe"], "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES Moe: "),
]


@pytest.mark.parametrize(
    ("start", "options", "setting"),
    [
        *((["--use_fsdp", "--fsdp_version", "2"], *case) for case in FSDP_SETTINGS),
        *((["--use_deepspeed", "--zero_stage", "3"], *case) for case in DEEPSPEED_SETTINGS),
    ],
)
def test_a_setting_of_an_engine_that_is_not_followed_is_named(launched, start, options, setting):
    launched(**environment_of(*start, "--num_processes", "2", *options))
    (found,) = unfollowed("float32")
    assert found.startswith(f"{setting}the recipe decides this") and "leave it out" in found


@pytest.fixture
def deepspeed_file(launched, tmp_path):
    """Writes DeepSpeed's own configuration and hands it on as the launcher does."""

    def write(content):
        file = tmp_path / "deepspeed.json"
        file.write_text(content if isinstance(content, str) else json.dumps(content))
        start = ["--use_deepspeed", "--num_processes", "2", "--deepspeed_config_file", str(file)]
        launched(**environment_of(*start))

    return write


USUAL = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 0.0,
    "fp16": {"enabled": False, "loss_scale": 0, "initial_scale_power": 16},
    "bf16": {"enabled": "auto"},
    "communication_data_type": "fp32",
    "data_types": {"grad_accum_dtype": "fp32"},
    "wall_clock_breakdown": False,
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "none", "pin_memory": True},
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}


def test_the_stage_of_deepspeed_s_own_file_counts(deepspeed_file, monkeypatch):
    deepspeed_file(USUAL)
    assert strategy_of(None) == "zero3"
    assert list(unfollowed("float32")) == list(unfollowed("bfloat16")) == []
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
    with pytest.raises(ValueError, match="ZeRO stage 2 and, in deepspeed_config_file, 3: give one"):
        strategy_of(None)
    deepspeed_file({"zero_optimization": {"stage": "auto"}})
    assert strategy_of(None) == "zero2"


@pytest.mark.parametrize(
    ("key", "value", "setting"),
    [
        ("fp16", {"enabled": True}, "fp16.enabled true"),
        ("bf16", {"enabled": True}, "bf16.enabled true"),
        ("communication_data_type", "bf16", 'communication_data_type "bf16"'),
        ("communication_data_type", "fp16", 'communication_data_type "fp16"'),
        ("data_types", {"grad_accum_dtype": "bf16"}, 'data_types.grad_accum_dtype "bf16"'),
        ("gradient_clipping", 1.0, "gradient_clipping 1.0"),
        ("gradient_accumulation_steps", 4, "gradient_accumulation_steps 4"),
        ("train_micro_batch_size_per_gpu", 2, "train_micro_batch_size_per_gpu 2"),
        ("optimizer", {"type": "Adam"}, 'optimizer.type "Adam"'),
        ("tensor_parallel", {"autotp_size": 2}, "tensor_parallel.autotp_size 2"),
        (
            "zero_optimization",
            {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            'zero_optimization.offload_optimizer.device "cpu"',
        ),
        (
            "zero_optimization",
            {"stage": 3, "offload_param": {"device": "nvme"}},
            'zero_optimization.offload_param.device "nvme"',
        ),
        (
            "zero_optimization",
            {"stage": 2, "overlap_comm": True},
            "zero_optimization.overlap_comm true",
        ),
    ],
)
def test_a_setting_of_deepspeed_s_own_file_is_named(deepspeed_file, key, value, setting):
    deepspeed_file(USUAL | {key: value})
    (found,) = unfollowed("float32")
    assert found.startswith(f"deepspeed_config_file: {setting}: the recipe decides this")


def test_bf16_in_deepspeed_s_file_is_that_of_the_policy(deepspeed_file):
    deepspeed_file(USUAL | {"bf16": {"enabled": True}})
    assert list(unfollowed("bfloat16")) == []
    deepspeed_file(USUAL | {"bf16": {"enabled": False}})
    assert list(unfollowed("float32")) == []
    (found,) = unfollowed("bfloat16")
    assert "bf16.enabled false, policy.dtype bfloat16" in found


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "deepspeed_config_file .*deepspeed.json cannot be read: "),
        ([], "must hold an object"),
        ({"fp16": {"enabled": False}}, "ZeRO stage 0: the stages are 1, 2, 3"),
    ],
)
def test_a_file_of_deepspeed_without_a_stage_is_refused(deepspeed_file, content, message):
    deepspeed_file(content)
    with pytest.raises(ValueError, match=message):
        strategy_of(None)


def test_accelerate_s_engines_are_off_inside_a_run(launched):
    launched(**FSDP2, **{DEEPSPEED: "true"})
    with engines_off():
        assert not is_on(FSDP) and not is_on(DEEPSPEED)
        assert strategy_of("zero3") == "zero3"
    assert is_on(FSDP) and is_on(DEEPSPEED)
