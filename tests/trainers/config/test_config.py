"""What a recipe may say, and how it is told what it may not."""

import os
import re
from pathlib import Path

import pytest
import yaml

from rl_consistency.distributed.gradient_parts import PartOrder
from rl_consistency.rollout.sampling_params import SamplingParams
from rl_consistency.trainers.config import strict_yaml
from rl_consistency.trainers.config.recipe import ConfigError, RunConfig, dump_config, load_config

ROOT = Path(__file__).resolve().parents[3]
RECIPES = sorted(p for d in ("recipes", "recipes/ci") for p in (ROOT / d).glob("*.yaml"))
DEMO = ROOT / "recipes" / "grpo_arithmetic_tiny_cpu.yaml"


def refusal(*overrides, recipe=DEMO):
    with pytest.raises(ConfigError) as caught:
        load_config(recipe, overrides)
    return str(caught.value)


def refusal_of(tmp_path, text):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text)
    return refusal(recipe=recipe)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_loads_and_its_resolved_config_loads_back_equal(recipe, tmp_path):
    config = load_config(recipe)
    resolved = tmp_path / "config.yaml"
    resolved.write_text(dump_config(config))
    assert load_config(resolved) == config


def test_every_field_is_documented():
    def undocumented(model, path=""):
        for name, field in model.model_fields.items():
            if not field.description:
                yield path + name
            section = field.annotation
            if isinstance(section, type) and hasattr(section, "model_fields"):
                yield from undocumented(section, f"{path}{name}.")

    assert list(undocumented(RunConfig)) == []


def test_the_output_directory_follows_the_name():
    assert load_config(DEMO, ["run.name=x"]).run.output_dir == Path.cwd() / "runs/x"
    assert load_config(DEMO, ["run.output_dir=/tmp/y"]).run.output_dir == Path("/tmp/y")
    assert load_config(DEMO, ["run.output_dir=~/y"]).run.output_dir == Path.home() / "y"


def test_a_directory_whose_name_is_no_utf_8_is_refused(tmp_path, monkeypatch):
    directory = tmp_path / os.fsdecode(b"\xff")
    directory.mkdir()
    monkeypatch.chdir(directory)
    assert (
        "run.output_dir: " in (message := refusal("run.name=x")) and "no text in UTF-8" in message
    )
    assert load_config(DEMO, [f"run.output_dir={tmp_path}"]).run.output_dir == tmp_path


def test_overrides_are_yaml_and_the_last_one_wins():
    config = load_config(
        DEMO,
        [
            "optimizer.learning_rate=1e-4",
            "optimizer.betas=[0.5, 0.6]",
            "optimizer.max_grad_norm=null",
            "tracking.wandb={project: p}",
            "tracking.wandb.mode=online",
            "reward.functions.0.weight=2",
            "training.steps=3",
            "training.steps=4",
        ],
    )
    assert config.optimizer.learning_rate == 1e-4
    assert config.optimizer.betas == (0.5, 0.6)
    assert config.optimizer.max_grad_norm is None
    assert config.tracking.wandb is not None and config.tracking.wandb.mode == "online"
    assert config.reward.functions[0].weight == 2.0
    assert config.training.steps == 4


@pytest.mark.parametrize("value", ["1e-3", "'1e-3'", "1E-3", "0.001", ".001"])
def test_a_float_may_be_written_in_any_way(value):
    assert load_config(DEMO, [f"optimizer.learning_rate={value}"]).optimizer.learning_rate == 1e-3


TEXTS = {
    "{prompt} =": "{prompt} =",
    "{prompt}": "{prompt}",
    "Q: {prompt} A:": "Q: {prompt} A:",
    " Q\n{prompt} ": "Q\n{prompt}",
    "# {prompt} #1": "# {prompt} #1",
    "- *{prompt}* !": "- *{prompt}* !",
    "'tis {prompt}": "'tis {prompt}",
    '"{prompt}\\n"': "{prompt}\n",
    "' {prompt} #1' # a comment": " {prompt} #1",
}


@pytest.mark.parametrize("value", TEXTS)
def test_a_text_needs_no_quotes_in_an_override(value, tmp_path):
    sets = "data.eval_sets.a.path=x.jsonl", f"data.eval_sets.a.prompt_template={value}"
    config = load_config(DEMO, [f"data.prompt_template={value}", *sets])
    found = config.data.prompt_template, config.data.eval_sets["a"].prompt_template
    assert found == (TEXTS[value],) * 2
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "config.yaml") == config


def test_a_text_may_look_like_a_number_and_null_stays_null():
    config = load_config(DEMO, ["run.name=010", "run.output_dir=x", "data.name=null"])
    assert config.run.name == "010" and config.data.name is None
    given = ["data.sources=[{path: a.jsonl}]", "data.sources.0.revision=1e5", "data.task=null"]
    (source,) = load_config(DEMO, [*given, "training.eval_every=0"]).data.sources or ()
    assert source.revision == "1e5"
    assert "data.prompt_template: " in (text := refusal("data={prompt_template: {prompt}}"))
    assert "put a text in quotes" in text


def test_what_no_yaml_can_hold_is_no_text():
    assert "half a surrogate pair" in refusal("data.prompt_template={prompt}\udcff")


def test_yaml_1_1_does_not_reinterpret_values():
    assert load_config(DEMO, ["run.name=on"]).run.name == "on"
    assert load_config(DEMO, ["run.name=2026-11-20"]).run.name == "2026-11-20"
    assert load_config(DEMO, ["run.seed=010"]).run.seed == 10


def test_all_problems_are_reported_at_once_by_dotted_path():
    message = refusal(
        "optimizer.learning_rte=1",
        "clip_low=0.1",
        "policy.dtype=fp8",
        "training.steps=0",
        "reward.functions.0.weight=x",
        "tracking.wandb.mode=sometimes",
        "run.name=a b",
        "consistency.frobnicate=1",
    )
    for part in (
        "9 problems",
        "optimizer.learning_rte: unknown key; did you mean learning_rate?",
        "clip_low: unknown key; did you mean algorithm.clip_low?",
        "policy.dtype: Input should be 'float32' or 'bfloat16', got 'fp8'",
        "training.steps: Input should be greater than or equal to 1, got 0",
        "reward.functions.0.weight: ",
        "tracking.wandb.project: missing",
        "tracking.wandb.mode: ",
        "run.name: ",
        "consistency.frobnicate: unknown key; the keys here are strict, ",
    ):
        assert part in message


REFUSED = [
    ("training.steps=true", "a number is needed, not true or false"),
    ("training.steps=1.5", "training.steps: "),
    ("training.steps=99999999999999999999", "training.steps: Input should be less than"),
    ("data.task.num_terms=1000", "data.task.num_terms: Input should be less than or equal to 64"),
    ("run.num_threads=999999999", "run.num_threads: Input should be less than or equal to 1024"),
    ("optimizer.learning_rate=.nan", "finite"),
    ("optimizer.learning_rate=1e999", "a finite number, got inf"),
    ("optimizer.learning_rate=0", "greater than 0"),
    ("rollout.sampling.temperature=0", "rollout.sampling: temperature must be above 0"),
    ("rollout.sampling.temperature=hot", "rollout.sampling: temperature must be a number"),
    ("rollout.sampling.top_p=0", "rollout.sampling: top_p must lie in (0, 1]"),
    ("rollout.sampling.speculation=8", "rollout.sampling: speculation must be an integer"),
    ("rollout.sampling.n=1", "rollout.sampling: n must be at least 2"),
    ("rollout.sampling={n: 2, top_q: 1}", "did you mean top_p?; missing: max_tokens"),
    ("rollout.sampling=3", "rollout.sampling: "),
    ("rollout.sampling.seed=3", "rollout.sampling: unknown key seed; the keys here are n, "),
    (
        "rollout.temperature=0.5",
        "rollout.temperature: unknown key; did you mean rollout.sampling.temp",
    ),
    ("rollout.max_new_tokens=5", "unknown key; did you mean rollout.sampling.max_tokens"),
    ("run.device=tpu", "run.device: Input should be 'cpu'"),
    ("run.seed=-1", "run.seed: "),
    ("run.seed=12:30", "run.seed: "),
    ("run.output_dir=' '", "run.output_dir: the path is empty"),
    ("data.path=''", "data.path: the path is empty"),
    ("policy.path=somewhere", "policy: exactly one of path, hub, build is needed, got path, "),
    ("policy.build=null", "policy: exactly one of path, hub, build is needed, got none"),
    ("policy.build.num_key_value_heads=3", "no multiple of num_key_value_heads 3"),
    ("policy.build.head_dim=24", "head_dim: Input should be a multiple of 16"),
    ("data.path=x.jsonl", "data: exactly one of task, path, sources is needed, got task, path"),
    ("data.eval_path=x.jsonl", "eval_path goes with path"),
    ("data.prompt_template=hello", "must contain {prompt}"),
    ("data.task.name=geometry", "data.task.name: "),
    ("data.task.max_value=1", "too few for two disjoint splits"),
    ("reward.functions=[]", "at least one reward function"),
    ("reward.functions=[{name: a}, {name: a}]", "a stands more than once"),
    ("consistency.strict_except=[softmax]", "unknown op softmax; the ops are "),
    ("optimizer.learning_rate=1e300", "1e+300 is beyond 1e+30, and float32 computes with it"),
    ("algorithm.clip_high=1e39", "1e+39 is beyond 1e+30, and float32 computes with it"),
    ("tokenizer.kind=auto", "tokenizer.kind: a built policy has no tokenizer"),
    ("rollout.sampling.max_tokens=60", "policy.build.max_position_embeddings: 64 positions"),
    ("rollout.num_kv_blocks=1", "rollout.num_kv_blocks: 1 blocks of 16 cannot hold"),
    ("rollout.prefill_chunk_size=32768", "rollout.prefill_chunk_size: 32768 exceeds"),
    ("algorithm.updates_per_rollout=3", "algorithm.updates_per_rollout: 3 does not divide"),
    ("data.limit=5", "rollout.prompts_per_step: "),
    ("algorithm.overlong=penalty", "algorithm.overlong_buffer: must be positive"),
    ("algorithm.overlong_buffer=2", "algorithm.overlong_buffer: must be positive"),
    ("algorithm.overlong=penalty algorithm.overlong_buffer=99", "overlong_buffer: 99 exceeds"),
    ("optimizer.warmup_steps=100000", "optimizer.warmup_steps: 100000 exceeds"),
    ("data.task.eval_size=0", "training.eval_every: there is no evaluation set"),
    (
        "consistency.strict=false consistency.strict_except=[linear]",
        "consistency.strict_except: has no meaning",
    ),
    (
        "training.strategy=zero1 policy.dtype=bfloat16",
        "training.strategy: zero1 has no fp32 gradients of a bfloat16 policy in DeepSpeed: use",
    ),
    ("training.strategy=zero2", "shadow_every: under zero2 DeepSpeed takes every gradient"),
    ("training.strategy=zero3", "shadow_every: under zero3 DeepSpeed takes every gradient"),
    (
        "algorithm.kl_coefficient=0.1 rollout.sampling.top_k=5 rollout.sampling.min_p=0.1",
        "rollout.sampling sets top_k, min_p: ",
    ),
    *(
        (
            f"rollout.sampling.top_p=0.9 rollout.sampling.min_p=0.1 algorithm.{key}=2",
            "top_p, min_p with 2 updates on a rollout",
        )
        for key in ("updates_per_rollout", "epochs_per_rollout")
    ),
    *(
        (f"consistency.gradient_leaves={text}", "gradient_leaves: a positive number, or two: [in")
        for text in ("0", "true", "4.0", "[]", "[2,2,2]", "[2,0]", "null")
    ),
    ("consistency.gradient_leaves=257", "256 sequences cannot be cut into 257 leaves"),
    ("consistency.gradient_leaves=[2,4]", "64 sequences does not fit into a leaf"),
    ("consistency.gradient_leaves=65 training.micro_batch_size=1", "of 64 sequences"),
    ("consistency.gradient_leaves=4 consistency.strict=false", "needs canonical ops"),
    ("consistency.gradient_leaves=4 consistency.strict_except=[glu]", "needs canonical ops"),
    (
        "consistency.ordered=false consistency.gradient_leaves=4",
        "consistency.ordered: false gives each process one leaf: leave out gradient",
    ),
    ("consistency.ordered=false consistency.strict=false", "needs canonical ops"),
    ("consistency.ordered=false consistency.strict_except=[glu]", "needs canonical ops"),
    ("run.name", "expected section.key=value"),
    ("=3", "expected section.key=value"),
    ("run..name=3", "expected section.key=value"),
    ("run.name.x=3", "run.name is the value 'grpo_arithmetic_tiny_cpu', not a section"),
    ("reward.functions.7.name=x", "reward.functions is a list of 1"),
    ("training.steps=[", "is not valid YAML"),
    ("run.name=[", "run.name: String should match pattern"),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED)
def test_a_wrong_value_a_disagreement_and_a_malformed_override_are_refused(overrides, message):
    whole = ("rollout.sampling=", "reward.functions=", "run.output_dir=' ")
    text = refusal(*([overrides] if overrides.startswith(whole) else overrides.split()))
    assert message in text
    if "expected" not in message:
        assert "problem" not in text or "1 problem\n" in text


def test_a_duplicate_key_is_refused_with_both_lines(tmp_path):
    message = refusal_of(tmp_path, "run:\n  name: x\n  seed: 1\n  name: y\n")
    assert "'name' stands twice, on lines 2 and 4" in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be a mapping of sections, got None"),
        ("- 1\n", "must be a mapping of sections"),
        ("run: [\n", "is not valid YAML"),
        ("1: 2\n", "the key 1 is not a string"),
        ("run: !!python/name:os.system\n", "is not valid YAML"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(tmp_path, text, message):
    assert message in refusal_of(tmp_path, text)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("a\0b", "line 3: the character U.0000 is not allowed"),
        (r'"a\0b"', "line 3: a text with the character 0"),
        (r'"\ud800"', "line 3: a text with .* half a surrogate pair"),
        ("!!bool abc", "line 3: the tag !!bool: leave it out"),
        ("!!timestamp abc", "line 3: the tag !!timestamp"),
        ("&a 1", "line 3: an alias"),
        ("&a [*a]", "line 3: an alias"),
        ("[" * 5_000, "line 3: nested deeper than 32 levels"),
        ("9" * 5_000, "line 3: a number of 5000 digits"),
        ("\n\t- 1", "line 4: found character '.t'"),
        ("1\n---\na: 1", "line 4: but found another document"),
        ("x" * 2**18, "more than 262,144 bytes"),
    ],
)
def test_yaml_that_no_recipe_needs_is_refused_in_one_line(tmp_path, value, message):
    found = refusal_of(tmp_path, f"run:\n  name: x\n  seed: {value}\n")
    assert re.search(message, found) and "\n" not in found


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ("a\0b", yaml.reader.ReaderError),
        ("!!bool abc", KeyError),
        ("!!timestamp abc", AttributeError),
        ("[" * 5_000, RecursionError),
    ],
)
def test_pyyaml_alone_ends_in_a_traceback(tmp_path, monkeypatch, value, error):
    """Negative control."""
    monkeypatch.setattr(strict_yaml, "parse", lambda text, source: yaml.safe_load(text))
    with pytest.raises(error):
        refusal_of(tmp_path, f"run:\n  name: x\n  seed: {value}\n")


def test_an_endless_recipe_is_not_read_to_its_end():
    assert "more than 262,144 bytes" in refusal(recipe=Path("/dev/zero"))


def test_an_unknown_user_s_home_is_named():
    message = refusal("run.output_dir=~nobody_of_this_name/x", "data.task=null", "data.path=~no_/x")
    assert "run.output_dir: there is no user ~nobody_of_this_name: write the path out" in message
    assert "data.path: there is no user ~no_" in message


@pytest.mark.parametrize("key", ["updates_per_rollout", "epochs_per_rollout"])
def test_truncated_samples_or_several_updates_are_taken(key):
    load_config(DEMO, ["rollout.sampling.top_p=0.9", "rollout.sampling.min_p=0.1"])
    load_config(DEMO, [f"algorithm.{key}=2"])


def test_the_sampling_of_a_recipe_is_sampling_params_with_the_seed_of_the_run():
    config = load_config(
        DEMO, ["run.seed=5", "rollout.sampling.top_p=0.9", "rollout.sampling.stop_token_ids=[7]"]
    )
    assert config.sampling == SamplingParams(
        n=8, max_tokens=16, top_p=0.9, stop_token_ids=(7,), seed=5
    )
    assert yaml.safe_load(dump_config(config))["rollout"]["sampling"]["stop_token_ids"] == [7]


@pytest.mark.parametrize(("text", "order"), [("4", PartOrder(4)), ("[2, 2]", PartOrder(2, 2))])
def test_gradient_leaves_are_a_number_or_two(text, order, tmp_path):
    config = load_config(DEMO, [f"consistency.gradient_leaves={text}"])
    assert config.consistency.gradient_leaves == order
    resolved = tmp_path / "config.yaml"
    resolved.write_text(dump_config(config))
    assert load_config(resolved) == config


@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
def test_gradient_checks_of_deepspeeds_stock_sums_are_refused(stage):
    unordered = [f"training.strategy={stage}", "consistency.ordered=false"]
    text = refusal(*unordered, "consistency.gradient_check_every=1")
    assert f"gradient_check_every: the stock sums of {stage} add each micro-batch" in text
    others = ["consistency.gradient_check_every=0", "consistency.shadow_every=0"]
    assert load_config(DEMO, [*unordered, *others]).consistency.ordered is False


PPO = ROOT / "recipes" / "ppo_arithmetic_tiny_cpu.yaml"


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("algorithm.name=reinforce", "algorithm.name: input should be 'grpo', 'dr_grpo', "),
        ("algorithm.ppo.gamma=1.01", "algorithm.ppo.gamma: input should be less than or equal"),
        ("algorithm.ppo.gamma=-0.1", "algorithm.ppo.gamma: input should be greater than or"),
        ("algorithm.ppo.gae_lambda=2", "algorithm.ppo.gae_lambda: input should be less than or"),
        ("algorithm.ppo.gae_lambda=nan", "algorithm.ppo.gae_lambda: input should be"),
        ("algorithm.ppo.value_clip=0", "algorithm.ppo.value_clip: input should be greater than 0"),
        ("algorithm.ppo.value_clip=-1", "algorithm.ppo.value_clip: input should be greater than 0"),
        ("algorithm.ppo.critic_learning_rate=0", "algorithm.ppo.critic_learning_rate: input sho"),
        ("algorithm.ppo.lam=1", "algorithm.ppo.lam: unknown key; "),
        ("algorithm.updates_per_rollout=512", "algorithm.updates_per_rollout: 512 does not divide"),
        ("algorithm.advantage=dr_grpo", "algorithm.advantage: ppo takes advantages from its cri"),
        ("training.strategy=zero2", "training.strategy: zero2 shards no critic, which ppo needs"),
        ("training.strategy=fsdp2", "training.strategy: fsdp2 shards no critic, which ppo needs"),
        ("algorithm.name=grpo", "algorithm.ppo: has no meaning with name: grpo; leave it out"),
    ],
)
def test_a_setting_that_ppo_cannot_have_is_refused_by_name(setting, problem):
    assert problem.lower() in refusal(setting, recipe=PPO).lower()


def test_ppo_needs_no_group():
    sampling = "rollout.sampling={n: 1, max_tokens: 16}"
    assert load_config(PPO, [sampling]).sampling.n == 1
    assert "rollout.sampling: n must be at least 2" in refusal(sampling)
