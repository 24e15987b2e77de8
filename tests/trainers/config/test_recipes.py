import json
from pathlib import Path

from rl_consistency.trainers.config.recipe import load_config
from rl_consistency.trainers.run import train
from rl_consistency.trainers.run_directory.step_files import read_metrics

ROOT = Path(__file__).parents[3]
GSM8K_RECIPE = ROOT / "recipes" / "ci" / "grpo_gsm8k_tiny_cpu.yaml"


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


def test_the_gsm8k_recipe_runs_over_a_file_of_its_form_without_drift(tiny_run, tmp_path):
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
    model = tiny_run.save_model(seed=0, num_hidden_layers=2, max_position_embeddings=1024)
    given = {"policy.path": model["policy.path"], "data.path": file}
    summary, rows = run(GSM8K_RECIPE, tmp_path / "run", **given)
    require_no_drift(summary, rows)
