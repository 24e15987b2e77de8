import io
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from rl_consistency.cli import localize
from rl_consistency.cli.console import print_whole
from rl_consistency.cli.main import main
from rl_consistency.models import modules
from rl_consistency.models.patch import patch
from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.numerics.fingerprint import Fingerprint, fingerprint
from rl_consistency.parity.digest import parameter_digest
from rl_consistency.parity.replay import load_replay_bundle, save_replay_bundle
from rl_consistency.trainers.config.recipe import RunConfig
from rl_consistency.trainers.data.tokenizer import byte_tokenizer
from rl_consistency.trainers.hooks import ConsistencyHook
from rl_consistency.trainers.run import train
from rl_consistency.verify.presets import build_preset
from rl_consistency.verify.substitution import attribute
from tests.cli.test_train import RECIPE

SAVED = {"steps": 1, "save_every": 1}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    build_preset("tiny-qwen3").save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture
def of_prompt(model_dir, tmp_path):
    def run(*arguments):
        given = ["--model", str(model_dir), "--prompt", "1+2=", "--max-tokens", "6"]
        file = tmp_path / "found.json"
        status = main(["localize", *given, "--json", str(file), *arguments])
        return status, json.loads(file.read_text())

    return run


def worse_decode(q, paged, index, *, run=modules.attention_paged, **named):
    out, lse = run(q, paged, index, **named)
    return (out * (1 + 2**-20) if index == 1 and len(q) == 1 else out), lse


def test_equal_sides_are_said_to_be_equal(of_prompt, capsys):
    status, record = of_prompt("--no-ablation")
    assert status == 0 and record["equal"] and record["first"] is None
    text = capsys.readouterr().out
    assert "rollout and training are equal, byte for byte: 6 tokens, 37 tensors, forward" in text


def test_a_difference_of_sides_that_promise_equality_is_status_1(of_prompt, tmp_path, capsys):
    picture = tmp_path / "growth.png"
    with attribute(modules, "attention_paged", worse_decode):
        status, record = of_prompt("--picture", str(picture))
    assert status == 1 and record["promised"] and not record["equal"]
    assert (record["first"]["op"], record["first"]["layer"]) == ("attention", 1)
    assert record["first"]["position"] == 4  # the first token after the prompt
    assert len(record["ablation"]) == 14
    assert picture.read_bytes().startswith(b"\x89PNG")
    text = " ".join(capsys.readouterr().out.split())
    assert "differ first in: attention of layer 1 (model.layers.1.self_attn)" in text
    assert "How the difference grows" in text and "One op canonical, the rest stock" in text


def test_the_stock_path_may_differ(of_prompt):
    status, record = of_prompt("--between", "training", "stock", "--no-ablation")
    assert status == 0 and not record["equal"] and not record["promised"]
    assert {op["pass"] for op in record["ops"]} == {"forward", "backward"}


def test_another_run_is_a_side(of_prompt, model_dir, tmp_path, capsys):
    assert of_prompt("--other", str(model_dir), "--no-ablation")[0] == 0
    text = capsys.readouterr().out
    assert "training and training of the other run are equal, byte for byte: 6 tokens" in text
    other = build_preset("tiny-qwen3")
    with torch.no_grad():
        other.model.layers[1].self_attn.o_proj.weight[0, 0] += 1
    other.save_pretrained(tmp_path / "other")
    status, record = of_prompt("--other", str(tmp_path / "other"), "--no-ablation")
    assert status == 1 and record["of_two_runs"] and record["between"] == ["training"] * 2
    assert record["first"]["module"] == "model.layers.1.self_attn.o_proj"
    assert "of the other run differ first in: linear of layer 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a replay bundle, or --model DIR and --prompt TEXT"),
        (["--prompt", "x"], "--prompt needs --model"),
        (["nowhere", "--prompt", "x"], "give a replay bundle, or"),
        (["nowhere", "--max-tokens", "3"], "--max-tokens goes with --prompt"),
        (["nowhere"], "nowhere is not a replay bundle: bundle.json is missing"),
        (["--model", "nowhere", "--prompt", "x"], "no model directory nowhere"),
        (["nowhere", "--device", "tpu", "--json", "/nowhere/x"], "--json /nowhere/x"),
        (["nowhere", "--between", "training", "magic"], "give two of rollout, training, stock"),
    ],
)
def test_bad_input_is_status_2_and_named(arguments, message, capsys):
    assert main(["localize", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.fixture
def drifted_run(tmp_path):
    """A run that stopped at a step whose logprobs were made to differ, and its bundle."""

    def stop(**sections_of_its_own):
        sections = {"run": RECIPE["run"] | {"output_dir": str(tmp_path / "run")}}
        sections |= {"consistency": {}, "tracking": {"console": False}, **sections_of_its_own}
        measure = ConsistencyHook.on_training_logprobs

        def measured(self, logprobs):
            return measure(self, [part - 1e-6 for part in logprobs])

        config = RunConfig.model_validate(RECIPE | sections)
        with (
            attribute(ConsistencyHook, "on_training_logprobs", measured),
            pytest.raises(ConsistencyError),
        ):
            train(config, announce=lambda line: None)
        (bundle,) = (tmp_path / "run" / "replay").iterdir()
        return bundle

    return stop


def test_a_bundle_is_run_with_the_weights_of_its_recipe(drifted_run, capsys):
    bundle = drifted_run()
    assert main(["localize", str(bundle), "--no-ablation"]) == 0
    text = capsys.readouterr().out
    assert "rollout and training are equal, byte for byte" in text
    assert "recorded: " in text


def test_a_bundle_of_trained_weights_needs_a_checkpoint_that_has_them(drifted_run, capsys):
    bundle = drifted_run(warm_start={"steps": 1, "batch_size": 2}, training=SAVED)
    file = bundle.parents[1] / "checkpoints" / "step_000000" / "model.safetensors"
    assert main(["localize", str(bundle), "--no-ablation"]) == 0
    assert "byte for byte" in capsys.readouterr().out
    file.write_bytes(file.read_bytes()[:-5])
    assert main(["localize", str(bundle)]) == 2
    assert f"{file} is damaged" in capsys.readouterr().err
    shutil.rmtree(file.parent)
    assert main(["localize", str(bundle)]) == 2
    assert "neither its recipe's first weights nor one of" in capsys.readouterr().err


def test_a_bundle_of_a_loop_of_ones_own_needs_its_model(model_dir, tmp_path, capsys):
    with patch(model := build_preset("tiny-qwen3")):
        bundle = save_replay_bundle(
            tmp_path,
            sequences=[[1, 2, 3]],
            prompt_lengths=[1],
            rollout_logprobs=[torch.tensor([-1.0, -2.0])],
            training_logprobs=[torch.tensor([-1.0, -2.5])],
            config={"seed": 4},
            parameter_digest=parameter_digest(model),
            fingerprint=fingerprint(),
        )
    assert main(["localize", str(bundle)]) == 2
    assert "its configuration is no recipe. Give --model DIR" in capsys.readouterr().err
    assert main(["localize", str(bundle), "--model", str(model_dir), "--no-ablation"]) == 0


def test_another_run_s_bundle_gives_its_weights(drifted_run, tmp_path, capsys):
    bundle = drifted_run()
    other = tmp_path / "another run" / "replay" / bundle.name
    shutil.copytree(bundle, other)
    given = ["localize", str(bundle), "--no-ablation", "--other", str(other)]
    assert main(given) == 0
    assert "training of the other run are equal, byte for byte" in capsys.readouterr().out
    own = load_replay_bundle(bundle)
    parts = ("sequences", "prompt_lengths", "rollout_logprobs", "training_logprobs", "config")
    elsewhere = save_replay_bundle(
        tmp_path,
        parameter_digest=own.parameter_digest,
        fingerprint=Fingerprint(own.fingerprint | {"torch": "9"}),
        **{name: getattr(own, name) for name in parts},
    )
    assert main([*given[:-1], str(elsewhere)]) == 2
    assert "another fingerprint: torch: " in capsys.readouterr().err
    with open(other / "bundle.json", "a") as file:
        file.write(" ")
    assert main(given) == 2
    assert f"{other} is damaged or was renamed" in capsys.readouterr().err


@pytest.mark.parametrize("terminal", [False, True])
def test_no_table_cuts_a_word_in_eighty_columns(terminal):
    names = ("pass_", "layer", "op", "what", "elements", "differing", "max_abs", "rms")
    rows = [
        ("backward", 31, "token_logprobs", "gradient of weight", 7, 7, 1.2e-05, 3.4e-07),
        ("backward", None, "shared_experts", "gradient of gate_up_proj", 9, 9, 1e-10, 1e-10),
    ]
    ops = [SimpleNamespace(**dict(zip(names, row)), relative_rms=1.5e-06) for row in rows]
    out = Console(file=io.StringIO(), force_terminal=terminal, width=80, color_system=None)
    print_whole(out, localize._growth_table(SimpleNamespace(ops=ops, first=ops[0])))
    text = out.file.getvalue()
    words = {word for row in rows for value in row[:4] for word in str(value).split()} - {"None"}
    assert words | {"1.5e-06", "differing"} <= set(text.split()) and "…" not in text
    assert "relative" in text and (not terminal or max(map(len, text.splitlines())) <= 80)
