"""What `attach` does not cover is one error before any step, which names it and the remedy."""

from importlib import metadata

import pytest

pytest.importorskip("trl", reason="trl is an optional extra")

import torch
from transformers import GPT2Config, GPT2LMHeadModel
from trl import GRPOTrainer, KTOTrainer, RewardTrainer
from trl.experimental.online_dpo import OnlineDPOTrainer

from rl_consistency.models.families import UnsupportedModelError
from tests.integrations.trainers import plain, sft


def set_on(path, value):
    """Set what cannot be asked for here, for want of a package or a GPU."""

    def change(trainer):
        *owners, name = path.split(".")
        for owner in owners:
            trainer = getattr(trainer, owner)
        setattr(trainer, name, value)

    return change


def tools_and_support(trainer):
    trainer.tools, trainer.top_p = [print], 0.9


ASKED = {
    "fp32 head": ({"cast_lm_head_to_fp32": True}, r"cast_lm_head_to_fp32=True; .*to False"),
    "repetition": ({"repetition_penalty": 1.1}, r"repetition_penalty=1\.1; .*set it to 1\.0"),
    "other sampling": (
        {"generation_kwargs": {"num_beams": 2}},
        "generation_kwargs=num_beams; the .* stop_strings, stop, ",
    ),
    "support and KL": ({"top_p": 0.9, "beta": 0.1}, r"top_p=0\.9.*set beta=0"),
    "support and iterations": (
        {"top_k": 5, "num_iterations": 2},
        "top_k=5.*, and 2 passes over a rollout .* for 1 of",
    ),
    "support and misaligned steps": (
        {"top_k": 3, "steps_per_generation": 2, "gradient_accumulation_steps": 3},
        "top_k=3.* and 2 passes over a rollout .* for 3 of an update",
    ),
    "greedy": ({"temperature": 0.0}, r"temperature=0\.0; greedy completions are equal"),
    "no length": ({"max_completion_length": None}, "max_completion_length=None; the engine needs"),
    "beyond the context": ({"max_completion_length": 64}, "exceeds the model.s context of"),
    "noise": ({"neftune_noise_alpha": 5.0}, r"neftune_noise_alpha=5\.0; .*to None"),
}
CHANGED = {
    "suppressed tokens": (
        set_on("model.generation_config.suppress_tokens", [5]),
        r"model.generation_config.suppress_tokens=\[5\]; the engine has no such rule",
    ),
    "least length": (set_on("model.generation_config.min_new_tokens", 3), "min_new_tokens=3; the"),
    "a last token": (set_on("model.generation_config.forced_eos_token_id", 1), "forced_eos_token_"),
    "training": (set_on("is_in_train", True), r"call attach\(\) before train\(\)"),
    "liger": (set_on("args.use_liger_kernel", True), "use_liger_kernel=True; .*to False"),
    "adapters": (set_on("model.peft_config", {}), "peft_config=.*merge_and_unload"),
    "a model made later": (set_on("model_init", print), "model_init=.*makes another model.*model="),
    "FSDP": (set_on("is_fsdp_enabled", True), "is_fsdp_enabled=True; use DeepSpeed"),
    "a live vLLM": (set_on("args.use_vllm", True), "use_vllm=True; .*to False, or measure_only"),
    "no eos": (set_on("processing_class.eos_token", None), "tokenizer .*no eos_token"),
    "a rollout of its own": (set_on("rollout_func", print), "rollout_func=.*leave it out"),
    "tools and support": (tools_and_support, r"top_p=0\.9.* with tools: .*without t"),
    "float16": (lambda trainer: trainer.model.half(), "float16.*load it in bfloat16"),
    "compiled": (set_on("args.torch_compile", True), "torch_compile=True; .*to False"),
    "fp8": (set_on("accelerator.state._mixed_precision", "fp8"), "mixed_precision='fp8'.*bf16 or"),
    "masters of another": (
        lambda trainer: [
            set_on("args.bf16", True)(trainer),
            set_on("optimizer", torch.optim.SGD(trainer.model.parameters()))(trainer),
        ],
        "bf16=True with an optimizer of your own, .*load the model in bfloat16",
    ),
    "bf16 of DeepSpeed": (
        lambda trainer: [
            set_on("args.bf16", True)(trainer),
            set_on("is_deepspeed_enabled", True)(trainer),
        ],
        "bf16=True with DeepSpeed; load the model in bfloat16 and set bf16=False",
    ),
    "several GPUs": (set_on("args._n_gpu", 2), r"2 GPUs in one process.*accelerate launch"),
}


def check_refused(trainer, attach, error, message):
    found, own = dict(vars(trainer)), set(vars(trainer.model))
    with pytest.raises(error, match=message):
        attach(trainer)
    assert vars(trainer) == found and set(vars(trainer.model)) == own


@pytest.mark.parametrize("options, message", ASKED.values(), ids=ASKED)
def test_an_argument_that_is_not_covered(options, message, attach, make):
    check_refused(make(**options), attach, ValueError, message)


@pytest.mark.parametrize("change, message", CHANGED.values(), ids=CHANGED)
def test_a_state_that_is_not_covered(change, message, attach, make):
    trainer = make()
    change(trainer)
    check_refused(trainer, attach, ValueError, message)


def test_rules_of_generation_that_say_nothing_are_covered(attach, make):
    trainer = make(top_p=None)
    idle = {"min_length": 0, "num_beams": 1, "typical_p": 1.0, "bad_words_ids": [], "top_k": 50}
    trainer.model.generation_config.update(
        **idle, output_scores=True, cache_implementation="static"
    )
    assert attach(trainer)


def test_a_loss_of_the_models_own(attach, make):
    for name, value in (("loss_function", lambda *given: 0), ("loss_type", "ForMaskedLM")):
        trainer = make(plain)
        setattr(trainer.model, name, value)
        check_refused(trainer, attach, ValueError, rf"model\._?{name}")


def test_gradient_checks_of_a_loss_from_logits(attach, make):
    for trainer in (
        make(sft, label_smoothing_factor=0.1),
        make(plain, compute_loss_func=lambda outputs, labels, **_: outputs.logits.sum()),
    ):
        with pytest.raises(
            ValueError, match="check_gradients_every reads scores of calls with lab"
        ):
            attach(trainer, check_gradients_every=1)


def test_a_second_attachment_until_the_first_is_undone(attach, make):
    trainer = make()
    first = attach(trainer)
    check_refused(trainer, attach, ValueError, r"already; detach\(\) that one first")
    first.detach()
    assert attach(trainer) is not first


@pytest.mark.parametrize("version", ["1.14.9", "1.17.0", "2.0.0"])
def test_a_version_of_trl_that_was_not_read(version, attach, monkeypatch, make):
    trainer = make()
    monkeypatch.setattr(metadata, "version", lambda name: version)
    message = rf"trl is {version}, .*<1\.17,>=1\.15.*pip install"
    check_refused(trainer, attach, ImportError, message)


@pytest.mark.parametrize("cls", [KTOTrainer, RewardTrainer, OnlineDPOTrainer, dict])
def test_a_class_that_is_not_covered(cls, attach):
    with pytest.raises(TypeError, match=rf"got a .*{cls.__name__}; it covers GRPOTrainer, RLOO"):
        attach(cls.__new__(cls))


def test_a_trainer_or_a_subclass_with_a_seam_of_its_own(attach, make):
    trainer = make()
    trainer._generate_single_turn = lambda *given: None
    check_refused(trainer, attach, TypeError, "_generate_single_turn of its own")

    class Own(GRPOTrainer):
        def _generate_single_turn(self, *args, **kwargs):
            return super()._generate_single_turn(*args, **kwargs)

    trainer = make(trainer=Own)
    check_refused(trainer, attach, TypeError, "Own has a _generate_single_turn of its own")

    class Harmless(GRPOTrainer):
        """Nothing of its own."""

    attach(make(trainer=Harmless))


def test_an_option_that_the_engine_does_not_take(attach, make):
    trainer = make()
    with pytest.raises(TypeError, match=r"got blocks; allowed for the engine: .*num_kv_blocks"):
        attach(trainer, blocks=3)
    with pytest.raises(TypeError, match="got eos_token_id"):
        attach(trainer, eos_token_id=3)


def test_a_model_that_patch_does_not_cover_keeps_trl_s_forward(attach, make):
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 259, "n_positions": 64}
    trainer = make(model=GPT2LMHeadModel(GPT2Config(**sizes)))
    check_refused(trainer, attach, UnsupportedModelError, "GPT2|gpt2")
    assert "forward" in vars(trainer.model)
