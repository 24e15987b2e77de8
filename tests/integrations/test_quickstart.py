"""The quick starts of TRL's README, unchanged but for the line that attaches."""

import json
import logging
from importlib import metadata
from shutil import copytree

import pytest

pytest.importorskip("trl", reason="trl is an optional extra")

import torch
from transformers import AutoTokenizer, GenerationConfig
from trl import RLOOConfig, RLOOTrainer

from rl_consistency.models.families import UnsupportedModelError
from rl_consistency.numerics.masters import MasterAdamW
from tests.integrations.trainers import grpo, loaded, logged, quick_at

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
TALK = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
DATA = {
    "trl-lib/DeepMath-103K": {"prompt": TALK[:1], "solution": "$2$"},
    "trl-lib/Capybara": {"messages": TALK},
    "trl-lib/ultrafeedback_binarized": {
        "chosen": TALK,
        "rejected": [TALK[0], {"role": "assistant", "content": "3"}],
    },
}
MODELS = ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-0.5B", "Qwen/Qwen3-0.6B")
LINE = "rl_consistency.attach(trainer)\n"


async def judged(completions, **_):
    """A reward that may be any of TRL's: asynchronous, and now and then not applicable."""
    texts = [message["content"] for (message,) in completions]
    return [None if len(text) % 5 == 4 else float(len(set(text))) for text in texts]


def script_of(trainer):
    """The README's script of a trainer."""
    readme = metadata.metadata("trl").get_payload()
    text = readme[readme.index(f"### `{trainer}`") :]
    return text.partition("```python\n")[2].partition("```")[0]


@pytest.fixture
def quick_start(directory, tmp_path, monkeypatch, caplog):
    """Runs a script of the README where its names are folders: returns its variables."""
    for name in MODELS:
        copytree(directory, tmp_path / name)
        tokenizer = AutoTokenizer.from_pretrained(directory, chat_template=TEMPLATE)
        tokenizer.save_pretrained(tmp_path / name)
        config = json.loads((tmp_path / name / "config.json").read_text())
        config["max_position_embeddings"] = 1024
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        # Many ends, so that completions are short.
        GenerationConfig(eos_token_id=[258, *range(64)]).save_pretrained(tmp_path / name)
    for name, row in DATA.items():
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "train.jsonl").write_text(f"{json.dumps(row)}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    # TRL's default is bf16, which transformers allows on a GPU.
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)

    # math_verify, which judges answers, is no dependency of TRL.
    monkeypatch.setattr("trl.rewards.accuracy_reward", judged)

    def run(trainer):
        script = script_of(trainer)
        assert script.endswith("\ntrainer.train()\n")
        script = "import rl_consistency\n" + script.replace(
            "trainer.train()\n", "attachment = " + LINE + "trainer.train()\n"
        )
        variables = {}
        with caplog.at_level(logging.WARNING, "rl_consistency"):
            exec(script, variables)
        return variables

    return run


def test_grpo_trains_without_a_differing_token(quick_start, caplog):
    found = quick_start("GRPOTrainer")
    trainer, attachment = found["trainer"], found["attachment"]
    assert trainer.args.bf16 and trainer.args.gradient_checkpointing and trainer.model.training
    assert attachment.drift.mismatched_tokens == 0 < attachment.drift.tokens
    assert trainer.state.global_step == 3
    (line,) = [r.getMessage() for r in caplog.records if r.name.startswith("rl_consistency")]
    assert "fp32 weights are computed with in bfloat16" in line
    assert {p.dtype for p in trainer.model.parameters()} == {torch.bfloat16}
    masters = trainer.optimizer.optimizer
    assert isinstance(masters, MasterAdamW)
    wide = [master.clone() for master in masters._masters]
    attachment.detach()
    assert all(map(torch.equal, wide, masters._weights))
    start = loaded(MODELS[0], dtype=torch.float32)
    pairs = zip(start.parameters(), trainer.model.parameters(), strict=True)
    assert not any(torch.equal(*pair) or pair[1].dtype != torch.float32 for pair in pairs)


@pytest.mark.parametrize("name", quick_at("DPO", {"SFT": "SFTTrainer", "DPO": "DPOTrainer"}))
def test_given_data_is_learned_from(name, quick_start):
    trainer = quick_start(name)["trainer"]
    assert trainer.state.global_step == 3 and trainer.state.log_history[-1]["train_loss"] > 0
    assert {p.dtype for p in trainer.model.parameters()} == {torch.bfloat16}


@pytest.fixture
def named(directory, tmp_path, monkeypatch):
    """Trainers of a model that is given by its name, with TRL's default of bf16."""
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)

    def made(folder=".", **options):
        return grpo(directory, tmp_path / folder, model=str(directory), bf16=None, **options)

    return made


def test_the_reference_is_rounded_too_and_both_are_given_back(named, attach):
    trainer = named(config=RLOOConfig, trainer=RLOOTrainer, max_steps=1)
    trainer.evaluate()  # under autocast, which accelerate then keeps in the model's forward
    with attach(trainer, check_gradients_every=1):
        trainer.train()
    assert logged(trainer, "consistency/mismatched_tokens") == [0] and logged(trainer, "kl") == [0]
    weights = [*trainer.model.parameters(), *trainer.ref_model.parameters()]
    assert {weight.dtype for weight in weights} == {torch.float32}
    assert trainer.accelerator.native_amp


def test_weights_that_were_loaded_meanwhile_stay(named, attach):
    trainer = named()
    before = {name: weight.clone() for name, weight in trainer.model.named_parameters()}
    with attach(trainer):  # as `load_best_model_at_end` does
        trainer.model.model.norm.weight.data.fill_(0.5)
    before["model.norm.weight"].fill_(0.5)
    assert all(torch.equal(w, before[name]) for name, w in trainer.model.named_parameters())


def test_what_is_refused_rounds_no_weight(named, attach):
    trainer = named(optim="sgd")
    with pytest.raises(ValueError, match="optim='sgd' for a model in torch.bfloat16.*bf16=False"):
        attach(trainer)
    assert {weight.dtype for weight in trainer.model.parameters()} == {torch.float32}
    assert trainer.accelerator.native_amp


def test_a_forward_under_autocast_is_refused(named, attach):
    """Negative control of leaving it out."""
    trainer = named()
    attach(trainer)
    trainer.accelerator.native_amp = True
    with pytest.raises(UnsupportedModelError, match="accelerate.*leave the model to .*attach"):
        trainer.train()


@pytest.mark.thorough
def test_a_resumed_run_ends_with_the_same_masters(named, attach, tmp_path):
    def run(folder, **options):
        trainer = named(folder, save_strategy="steps", save_steps=2, max_steps=3)
        attach(trainer)
        trainer.train(**options)
        return trainer.optimizer.optimizer._masters

    whole = run("a")
    resumed = run("b", resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert all(map(torch.equal, whole, resumed))
