"""Tool turns of TRL's GRPOTrainer: what the engine sampled before and after a tool's answer."""

import pytest

pytest.importorskip("trl", reason="trl is an optional extra")

import numpy as np
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer

from tests.integrations.trainers import PLAIN, ROLLOUT, loaded, logged

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments }})"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def twice(number: int) -> str:
    """
    Double a number.

    Args:
        number: What to double.
    """
    return str(2 * number)


def calls_at_first(tokenizer, ids, prefix=None, tools=None):
    """A random model never calls a tool; here each first turn of an even length has called one."""
    message = {"role": "assistant", "content": tokenizer.decode(ids)}
    if len(ids) % 2 == 0 and "<tool>" not in tokenizer.decode(prefix):
        call = {"name": "twice", "arguments": {"number": len(ids)}}
        message["tool_calls"] = [{"type": "function", "function": call}]
    return message


@pytest.mark.parametrize("longest", [40, 13], ids=["whole", "second turn cut"])
@pytest.mark.parametrize("measured", [False, True], ids=["attached", "measured"])
def test_every_token_of_all_turns_is_compared(
    longest, measured, directory, tmp_path, attach, monkeypatch
):
    monkeypatch.setattr(grpo_trainer, "parse_response", calls_at_first)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, "not read"
    asked = [[{"role": "user", "content": f"{n}+{n}"}] for n in range(8)]
    model = loaded(directory)
    model.generation_config.eos_token_id = list(range(0, 259, 3))  # short turns
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=[lambda completions, **_: [float(len(c)) for c in completions]],
        args=GRPOConfig(
            output_dir=str(tmp_path), **(PLAIN | ROLLOUT | {"max_completion_length": longest})
        ),
        train_dataset=Dataset.from_dict({"prompt": asked}),
        processing_class=tokenizer,
        tools=[twice],
    )
    options = {"measure_only": True} if measured else {"check_gradients_every": 1}
    attachment = attach(trainer, **options)
    trainer.train()
    assert max(logged(trainer, "tools/failure_frequency")) == 0
    turns = [np.frombuffer(key, np.int64) for key in attachment._drift._samples]
    after_tools = [turn for turn in turns if b"<tool>" in bytes(turn[turn < 256].tolist())]
    assert after_tools
    first_prompt = len("<user>0+0<a>")
    assert any(len(turn) > first_prompt + longest for turn in after_tools) == (longest == 13)
    assert not logged(trainer, "consistency/uncompared_tokens")
    drift = attachment.drift
    assert drift.max_abs_diff < 1e-4 and drift.passed == (not measured)
    assert measured or attachment.gradients.passed
