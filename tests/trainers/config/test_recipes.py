import json
from pathlib import Path

import pytest

from rl_consistency.trainers.config.recipe import load_config
from rl_consistency.trainers.config.sections import BuildSection
from rl_consistency.trainers.data.tokenizer import byte_tokenizer
from rl_consistency.trainers.policy import build_model
from rl_consistency.trainers.run import train
from rl_consistency.trainers.run_directory.step_files import read_metrics
from tests.trainers.conftest import RECIPE

ROOT = Path(__file__).parents[3]
GSM8K_RECIPE = ROOT / "recipes" / "ci" / "grpo_gsm8k_tiny_cpu.yaml"


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    """A model directory with the context GSM8K's prompts need."""
    directory = tmp_path_factory.mktemp("tiny_model")
    sizes = RECIPE["policy"]["build"] | {"num_hidden_layers": 2, "max_position_embeddings": 1024}
    build_model(BuildSection(**sizes), byte_tokenizer(), seed=0).save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


def run(recipe, directory, **settings):
    settings |= {"run.output_dir": directory, "run.num_threads": 1, "tracking.console": "false"}
    config = load_config(recipe, [f"{name}={value}" for name, value in settings.items()])
    return train(config, announce=lambda line: None), read_metrics(directory / "metrics.jsonl")


def require_no_drift(summary, rows):
    assert summary["consistency/tokens"] > 0
    assert summary["consistency/mismatched_tokens"] == summary["consistency/ulp/max"] == 0
    assert summary["consistency/gradient_check/passed"] == len(rows)
    assert summary["consistency/importance_ratio/max"] == 1.0
    assert summary["stock/mismatched_tokens"] > 0


def test_the_gsm8k_recipe_runs_over_a_file_of_its_form_without_drift(tiny_model, tmp_path):
    lines = [
        {
            "question": f"Ana has {n} pears and buys {n % 5 + 1} more. How many has she now?",
            "answer": f"She has {n}+{n % 5 + 1}=<<{n}+{n % 5 + 1}={n + n % 5 + 1}>>"
            f"{n + n % 5 + 1} pears.\n#### {n + n % 5 + 1}",
        }
        for n in range(20)
    ]
    file = tmp_path / "problems.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary, rows = run(
        GSM8K_RECIPE, tmp_path / "run", **{"policy.path": tiny_model, "data.path": file}
    )
    require_no_drift(summary, rows)
