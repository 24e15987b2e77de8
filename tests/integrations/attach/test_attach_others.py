"""RLOOTrainer, SFTTrainer and transformers' Trainer with `attach`."""

import copy
import itertools

import pytest

pytest.importorskip("trl", reason="trl is an optional extra")

import torch
from transformers import TrainerCallback
from trl import RLOOConfig, RLOOTrainer

from rl_consistency.models.modules import CanonicalModule
from tests.integrations.trainers import dpo, grpo, loaded, logged, plain, quick_at, sft


@pytest.mark.parametrize("options", [{}, {"num_iterations": 2}], ids=["plain", "two iterations"])
def test_rloo_has_no_differing_token_on_a_first_update(options, run):
    kinds = {"config": RLOOConfig, "trainer": RLOOTrainer}
    trainer, attachment = run(beta=0.1, **kinds, **options)
    counts = logged(trainer, "consistency/mismatched_tokens")
    assert counts == [0] * (2 // options.get("num_iterations", 1)) and attachment.drift.passed
    assert not logged(trainer, "consistency/uncompared_tokens")
    assert bool(logged(trainer, "off_policy/tokens")) == bool(options)


SFT = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "checkpointing": {"gradient_checkpointing": True},
    "DFT": {"loss_type": "dft"},
    "label smoothing": {"label_smoothing_factor": 0.1},
}


@pytest.mark.parametrize("options", quick_at("plain", SFT))
def test_sft_gives_trl_s_figures_within_rounding(options, directory, tmp_path, attach):
    check_figures_of_stock(sft, ("mean_token_accuracy",), options, directory, tmp_path, attach)


DPO = {"plain": {}, "two losses": {"loss_type": ["ipo", "sft"]}, "lengths": {"ld_alpha": 0.5}}
FIGURES = ("mean_token_accuracy", "logits/chosen", "rewards/margins", "logps/rejected", "entropy")


@pytest.mark.parametrize("options", quick_at("plain", DPO))
def test_dpo_gives_trl_s_figures_within_rounding(options, directory, tmp_path, attach):
    check_figures_of_stock(dpo, FIGURES, options, directory, tmp_path, attach)


def test_dpo_begins_at_its_reference_by_the_bit(directory, tmp_path, attach):
    trainer = dpo(directory, tmp_path, model=loaded(directory, dtype=torch.bfloat16), max_steps=1)
    attach(trainer, check_gradients_every=1)
    trainer.train()
    assert logged(trainer, "rewards/chosen") == logged(trainer, "rewards/margins") == [0.0]
    assert logged(trainer, "consistency/gradient_check/mismatched_elements") == [0]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"precompute_ref_log_probs": True}, "precompute_ref_log_probs=True; a stock model has"),
        ({"use_weighting": True}, "use_weighting=True; it needs a sum over"),
    ],
)
def test_dpo_with_what_a_stock_model_computes_is_refused(options, message, make, attach):
    with pytest.raises(ValueError, match=message):
        attach(make(dpo, **options))


@pytest.mark.parametrize("options", quick_at("plain", SFT)[:3])
def test_a_plain_trainer_gives_its_figures_within_rounding(options, directory, tmp_path, attach):
    check_figures_of_stock(plain, (), options, directory, tmp_path, attach)


def check_figures_of_stock(build, more, options, directory, tmp_path, attach):
    options = {"gradient_checkpointing": False, **options}
    stock, ours = (build(directory, tmp_path, **options) for _ in range(2))
    attachment = attach(ours)
    for trainer in (stock, ours):
        trainer.train()
        trainer.evaluate()
    assert isinstance(ours.model, CanonicalModule) and attachment.drift is None
    for name in ("loss", "grad_norm", "eval_loss", *more):
        left, right = (torch.tensor(logged(trainer, name)) for trainer in (stock, ours))
        assert len(left) > 0
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)
    weights = [list(trainer.model.parameters()) for trainer in (stock, ours)]
    assert not all(map(torch.equal, *weights))


def test_accuracy_of_sft_counts_the_most_likely_labels(directory, attach, make):
    """On a line whose tokens are the model's own greedy continuation, all but the first."""
    model = loaded(directory)
    ids = torch.tensor([[65]])
    for _ in range(6):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    ids[0, 3] = (ids[0, 3] + 1) % 200
    right = (model(ids).logits[0, :-1].argmax(-1) == ids[0, 1:]).tolist()
    trainer = make(sft, model=model)
    attach(trainer)
    found = trainer.model(input_ids=ids, labels=ids, fused_lm_head=True)
    assert found.is_top1[0].tolist() == right
    assert any(right) and not all(right)


def test_the_weights_of_sft_do_not_depend_on_micro_batches_or_padding(run):
    """One batch of four lines: at once, one by one, and padded further."""
    ends = []
    for options in ({"per_device_train_batch_size": 4}, {"gradient_accumulation_steps": 4}):
        size = {"per_device_train_batch_size": 1} | options
        for padding in (None, 32):
            trainer, _ = run(sft, max_steps=1, pad_to_multiple_of=padding, **size)
            ends.append([parameter.detach().clone() for parameter in trainer.model.parameters()])
    assert all(all(map(torch.equal, ends[0], end)) for end in ends[1:])


def test_packed_lines_give_the_weights_of_lines_by_themselves(run):
    ends = []
    for options in ({"padding_free": True, "max_length": None}, {}):
        trainer, _ = run(sft, per_device_train_batch_size=4, max_steps=1, **options)
        ends.append([parameter.detach().clone() for parameter in trainer.model.parameters()])
    assert all(map(torch.equal, *ends))


def test_boundaries_that_position_ids_contradict_are_refused(attach, make):
    trainer = make(sft)
    attach(trainer)
    ids, positions = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[0, 1, 0, 1]])
    call = {"input_ids": ids, "labels": ids, "position_ids": positions, "fused_lm_head": True}
    trainer.model(**call, cu_seq_lens_q=torch.tensor([0, 2, 4]))
    with pytest.raises(ValueError, match=r"cu_seq_lens_q is \[0, 1, 4\].*\[0, 2, 4\]"):
        trainer.model(**call, cu_seq_lens_q=torch.tensor([0, 1, 4]))


def test_what_has_no_effect_on_a_trainer_is_refused(attach, make):
    with pytest.raises(TypeError, match="a SFTTrainer does not generate"):
        attach(make(sft), num_kv_blocks=3)
    with pytest.raises(TypeError, match="a Trainer has no sampling metrics"):
        attach(make(plain), sampling_metrics=True)
    trainer = make(plain)
    trainer.compute_metrics = print
    with pytest.raises(ValueError, match="compute_metrics=.* needs logits"):
        attach(trainer)


class Swaps(TrainerCallback):
    def __init__(self, trainer, when):
        self.trainer, self.other = trainer, copy.deepcopy(trainer.model)
        setattr(self, when, self.swap)

    def swap(self, args, state, control, **kwargs):
        if state.global_step == 1:
            self.trainer.model = self.other


SWAPPED = [(grpo, "on_step_begin"), *itertools.product((sft, plain), ("on_step_begin", "on_log"))]


@pytest.mark.parametrize("build, when", SWAPPED)
def test_a_model_that_a_callback_swapped_is_refused_at_the_next_call(build, when, attach, make):
    trainer = make(build)
    swaps = Swaps(trainer, when)
    attach(trainer)
    trainer.add_callback(swaps)
    with pytest.raises(ValueError, match="trainer.model is another model than at attach"):
        trainer.train()
    assert trainer.state.global_step == 1 and trainer.model is swaps.other


@pytest.mark.parametrize("build", [grpo, sft, plain])
def test_a_model_swapped_before_training_is_refused_before_any_step(build, attach, make):
    """The trainer would train the other one, and never call the patched one."""
    trainer = make(build)
    attach(trainer)
    trainer.model = trainer.model_wrapped = make(build).model
    for call in (trainer.train, trainer.evaluate):
        with pytest.raises(ValueError, match="trainer.model is another model than at attach"):
            call()
    assert trainer.state.global_step == 0


@pytest.mark.parametrize("build", [sft, plain])
def test_a_trainer_whose_step_failed_is_detachable(build, attach, make):
    trainer = make(build)
    forward = vars(trainer.model).get("forward")
    attachment = attach(trainer)

    def fails(gradient):
        raise ZeroDivisionError("in a backward pass")

    hook = trainer.model.get_input_embeddings().weight.register_hook(fails)
    with pytest.raises(ZeroDivisionError, match="in a backward pass"):
        trainer.train()
    hook.remove()
    attachment.detach()
    assert vars(trainer.model).get("forward") is forward
    assert not any(isinstance(module, CanonicalModule) for module in trainer.model.modules())
    trainer.train()
    assert trainer.state.global_step == 2


def test_labels_that_stock_scores_from_a_row_of_another_are_refused(attach, make):
    trainer = make(plain)
    attach(trainer)
    ids, mask = torch.tensor([[9, 9, 3, 4, 5]]), torch.tensor([[0, 0, 1, 1, 1]])
    rows = torch.tensor([[3, 4, 5, 6, 7]]), torch.tensor([[0, 1, 2, 0, 1]])
    calls = {
        "at padding": {"input_ids": ids, "attention_mask": mask, "labels": ids},
        "at a first token": {
            "input_ids": ids,
            "attention_mask": mask,
            "labels": ids.masked_fill(mask == 0, -100),
        },
        "packed": {"input_ids": rows[0], "position_ids": rows[1], "labels": rows[0]},
    }
    for call in calls.values():
        with pytest.raises(ValueError, match="labels at padding, or at the first token"):
            trainer.model(**call)
    hidden = calls["at a first token"]["labels"].clone()
    hidden[0, 2] = -100
    assert (
        trainer.model(**(calls["packed"] | {"labels": rows[0].where(rows[1] > 0, -100)})).loss > 0
    )
    assert trainer.model(input_ids=ids, attention_mask=mask, labels=hidden).loss > 0


def test_predictions_of_a_plain_trainer_are_refused(attach, make):
    trainer = make(plain)
    attachment = attach(trainer)
    with pytest.raises(ValueError, match="predict.* needs logits"):
        trainer.predict(trainer.eval_dataset)
    attachment.detach()
    assert len(trainer.predict(trainer.eval_dataset).predictions) == 2


def mean_square(outputs, labels, **_):
    """A loss of the user's, over the logits of tokens."""
    return outputs.logits.float().square().mean(-1)[labels != -100].mean()


@pytest.mark.parametrize(
    "options",
    [{"label_smoothing_factor": 0.1}, {"compute_loss_func": mean_square}],
    ids=["smoothed", "own"],
)
def test_a_plain_trainer_s_loss_from_logits_is_stock_s(options, directory, tmp_path, attach):
    check_figures_of_stock(plain, (), options, directory, tmp_path, attach)


def test_padding_free_rows_give_a_loss_from_logits_too(directory, tmp_path, attach):
    options = {"padding_free": True, "max_length": None, "label_smoothing_factor": 0.1}
    check_figures_of_stock(sft, (), options, directory, tmp_path, attach)
