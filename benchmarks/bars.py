"""The bars that the benches are held against."""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks import figures
from benchmarks.figures import Figure
from benchmarks.peers import LIGER_FP32
from benchmarks.rows import Row
from benchmarks.shapes import BANDS, NAMED, NAMED_SPARSE

COMPARISONS = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt}


@dataclass(frozen=True)
class Bar:
    """A target: `figure`, computed from the rows of some suites, compared with `bar` by `sign`."""

    what: str
    sign: str
    bar: float
    suites: tuple[str, ...]
    figure: Figure = figures.lowest
    covered: Callable[[Sequence[Row]], bool] = bool
    """Whether the rows are all that the bar asks for."""


def _models(names: Sequence[str], size: str, sizes: Sequence[int]) -> Callable[..., bool]:
    """Whether there are rows of each of these models, or of its first layers, at each size."""

    def covered(rows: Sequence[Row]) -> bool:
        shapes = [row.shape for row in rows]
        found = {(re.sub(r"-\d+l$", "", str(s.get("model"))), s.get(size)) for s in shapes}
        return found.issuperset(itertools.product(names, sizes))

    return covered


def _two_seeds(rows: Sequence[Row]) -> bool:
    """Whether shapes of two seeds or more were measured."""
    return len({seed for row in rows if type(seed := row.shape.get("seed")) is int}) >= 2


def _two_seeds_in_band(low: int, high: int) -> Callable[[Sequence[Row]], bool]:
    """Whether products of `low` to `high` rows were measured at shapes of two seeds or more."""
    return lambda rows: _two_seeds([r for r in rows if low <= int(r.shape["m"]) <= high])


_steps_of_all = _models(NAMED, "length", (1024, 2048, 32768))
_steps_of_16k = _models(NAMED, "length", (1024, 2048))
_sparse_steps = _models(NAMED_SPARSE[:2], "length", (1024, 4096))
_sparse_decoding = _models(NAMED_SPARSE, "sequences", (1, 8, 64, 256))
_decoding = _models([name for name in NAMED if name != "qwen3-8b"], "sequences", (64, 256))


_MATMUL = ("matmul_forward", "matmul_dx")
_LOGPROBS, _ROWS, _STEP = ("token_logprobs",), ("elementwise",), ("training_step",)
_DECODE = tuple(f"rollout_decode_{model}" for model in ("qwen3-0.6b", "qwen3-1.7b", "qwen3-8b"))
_GRPO, _START = ("rollout_grpo_step",), ("rollout_cold_start",)
_VLLM = tuple(f"rollout_vllm_{model}" for model in ("qwen3-0.6b", "qwen2.5-1.5b", "qwen3-8b"))
_SUM, _RANKS, _SCALING = ("distributed_sum",), ("distributed_step",), ("distributed_grpo",)
_TRL = ("trl_grpo",)

_SPARSE_STEP, _SPARSE_DECODE = ("training_step_sparse",), ("rollout_roofline_sparse",)

# The formatter would give each argument a line.
# fmt: off
_RANDOM: Mapping[str, Bar] = {
    f"{suite}_{low}_{name}": Bar(
        f"random products of {low} to {high} rows{after} against cuBLAS, {text}", ">=", target,
        (suite,), figures.in_band(low, high, figure), _two_seeds_in_band(low, high))
    for suite, after, mean, lowest in (
        ("matmul_random", "", 1.0, 0.85), ("matmul_tuned_random", " after tune", 1.03, 0.93))
    for low, high in BANDS
    for name, text, target, figure in (
        ("geomean", "geometric mean", mean, figures.geomean),
        ("lowest", "lowest", lowest, figures.lowest))
} | {
    "gradient_fold_random": Bar(
        "random dW folds against cuBLAS + add, geometric mean", ">=", 0.95,
        ("gradient_fold_random",), figures.geomean, _two_seeds),
    "attention_forward_random": Bar(
        "random attention forward against the best SDPA, lowest", ">=", 0.85,
        ("attention_forward_random",), covered=_two_seeds),
    "attention_backward_random": Bar(
        "random attention backward against the best SDPA, lowest", ">=", 0.8,
        ("attention_backward_random",), covered=_two_seeds),
    "attention_decode_random": Bar(
        "random paged decode against SDPA on contiguous KV, lowest", ">=", 0.95,
        ("attention_decode_random",), covered=_two_seeds),
    "elementwise_random": Bar(
        "random memory-bound ops against eager torch, lowest", ">", 1.0, ("elementwise_random",),
        covered=_two_seeds),
    "token_logprobs_random": Bar(
        "random token_logprobs against log_softmax of full logits, lowest", ">", 1.0,
        ("token_logprobs_random",), covered=_two_seeds),
    "accuracy_random": Bar(
        "random sizes: error against fp64 / stock's, highest of all ops", "<=", 1.05,
        ("accuracy_random",), figures.largest_error, _two_seeds),
    "rollout_decode_random": Bar(
        "random models: decoding against the same engine with stock ops", ">=", 0.97,
        ("rollout_decode_random",), covered=_two_seeds),
} | {
    f"training_step_{kind}_{name}": Bar(
        f"training step of {text} models against {against}, lowest", ">=", target,
        suites, figure, covered)
    for kind, text, suites, covered in (
        ("random", "random", ("training_step_random",), _two_seeds),
        ("named", "all named", (*_STEP, "training_step_named"), _steps_of_all))
    for name, against, target, figure in (
        ("stock", "Hugging Face with SDPA", 1.15, figures.where_stock_fits),
        ("liger", "Liger", 1.0, figures.where_liger_fits(figures.against_liger)))
} | {
    "training_step_memory": Bar(
        "its peak memory / Liger's with gradients in fp32, highest", "<=", 1.05,
        (*_STEP, "training_step_named"), figures.where_liger_fits(figures.peak_against(LIGER_FP32)),
        _steps_of_all),
    "training_step_idle": Bar(
        "GPU idle in a training step of 16k tokens, highest share", "<=", 0.05,
        (*_STEP, "training_step_named"), figures.of_16k(figures.highest("idle_share")),
        _steps_of_16k),
}

_SPARSE: Mapping[str, Bar] = {
    name + kind: Bar(
        text + what, ">=", target, (suite + kind,), figure, _two_seeds if kind else bool)
    for kind, text in (("", ""), ("_random", "random "))
    for name, suite, what, target, figure in (
        ("experts_forward_geomean", "experts_forward",
         "experts from 2,048 tokens against grouped_mm, geometric mean", 1.0, figures.geomean),
        ("experts_forward_lowest", "experts_forward",
         "experts from 2,048 tokens against grouped_mm, lowest", 0.9, figures.lowest),
        ("experts_few", "experts_few",
         "experts of 1 to 256 tokens against the better of grouped_mm and batched_mm, lowest",
         1.0, figures.lowest),
        ("experts_few_bandwidth", "experts_few",
         "experts of 1 to 256 tokens: share of a copy's bandwidth, lowest", 0.65,
         figures.lowest_share),
        ("experts_gradient", "experts_gradient",
         "dW of experts against grouped_mm + fp32 add, sequences of 1k and 4k, geometric mean",
         0.95, figures.long(figures.geomean)),
        ("moe_block", "moe_block",
         "MoE block forward and backward against Transformers with grouped_mm, lowest", 1.15,
         figures.lowest))
} | {
    "training_step_sparse_stock": Bar(
        "training step of mixtures of experts against Hugging Face with SDPA and grouped_mm, "
        "lowest", ">=", 1.15, _SPARSE_STEP, covered=_sparse_steps),
    "training_step_sparse_liger": Bar(
        "the same against Liger where it has the family, lowest", ">=", 1.0, _SPARSE_STEP,
        figures.against_liger_if_covered, _sparse_steps),
    "rollout_roofline_sparse": Bar(
        "decode step of mixtures of experts: share of a copy's bandwidth over the experts hit, "
        "1 to 256 sequences, lowest", ">=", 0.65, _SPARSE_DECODE, figures.lowest_share,
        _sparse_decoding),
    "rollout_idle_sparse": Bar(
        "GPU idle in these steps from 32 sequences, share of the time", "<=", 0.05,
        _SPARSE_DECODE, figures.many(figures.highest("idle_share")), _sparse_decoding),
}

BARS: Mapping[str, Bar] = {
    "matmul_geomean": Bar(
        "matmul forward and dX against cuBLAS, geometric mean", ">=", 1.0, _MATMUL,
        figures.geomean),
    "matmul_lowest": Bar("matmul forward and dX against cuBLAS, lowest", ">=", 0.93, _MATMUL),
    "gradient_fold_geomean": Bar(
        "dW fold against cuBLAS + add, geometric mean", ">=", 0.95, ("gradient_fold",),
        figures.geomean),
    "attention_forward": Bar(
        "attention forward against the best SDPA, lowest", ">=", 0.85, ("attention_forward",)),
    "attention_backward": Bar(
        "attention backward against the best SDPA, lowest", ">=", 0.8, ("attention_backward",)),
    "attention_decode": Bar(
        "paged decode against SDPA on contiguous KV, lowest", ">=", 1.0, ("attention_decode",)),
    "elementwise_bandwidth": Bar(
        "memory-bound ops: share of a copy's bandwidth", ">=", 0.85, _ROWS, figures.bandwidth),
    "elementwise_eager": Bar("memory-bound ops against eager torch, lowest", ">", 1.0, _ROWS),
    "token_logprobs_stock": Bar(
        "token_logprobs against log_softmax of full logits, lowest", ">", 1.0, _LOGPROBS),
    "token_logprobs_liger": Bar(
        "token_logprobs against Liger, lowest", ">", 1.0, _LOGPROBS, figures.against_liger),
    "token_logprobs_memory": Bar(
        "its peak memory / Liger's", "<=", 1.0, _LOGPROBS, figures.peak_against("liger")),
    "token_logprobs_memory_fp32": Bar(
        "its peak memory / Liger's in fp32", "<=", 1.0, _LOGPROBS,
        figures.peak_against("liger fp32")),
    "training_step_stock": Bar(
        "training step of Qwen3-0.6B and 1.7B against Hugging Face with SDPA, lowest", ">=", 1.15,
        _STEP),
    "training_step_liger": Bar(
        "the same against Liger, lowest", ">=", 1.0, _STEP, figures.against_liger),
    "accuracy": Bar(
        "error against fp64 / stock's, highest of all ops", "<=", 1.05, ("accuracy",),
        figures.largest_error),
    "rollout_decode": Bar(
        "decoding 256 sequences against the same engine with stock ops", ">=", 0.97, _DECODE),
    "rollout_hugging_face": Bar(
        "generation against Hugging Face, lowest", ">=", 10.0, ("rollout_hugging_face",)),
    "rollout_roofline": Bar(
        "8B decode step: share of a copy's bandwidth", ">=", 0.65, ("rollout_roofline",),
        figures.lowest_share),
    "rollout_roofline_named": Bar(
        "the same of other models, 64 and 256 sequences, lowest", ">=", 0.65,
        ("rollout_roofline_named",), figures.lowest_share, _decoding),
    "rollout_roofline_one": Bar(
        "8B decode step of one sequence: share of a copy's bandwidth", ">=", 0.75,
        ("rollout_roofline_one",), figures.lowest_share),
    "rollout_idle": Bar(
        "GPU idle in decoding, share of the time", "<", 0.05, ("rollout_idle",),
        figures.highest("idle_share")),
    "rollout_shared_keys": Bar(
        "groups of 8, 2k prompts read once against by each", ">=", 1.5, ("rollout_shared_keys",)),
    "rollout_speculation": Bar(
        "n-gram speculation on a copied text against plain", ">=", 1.5, ("rollout_speculation",)),
    "rollout_long_context": Bar(
        "a token at 32k / at 1k of context", "<=", 1.6, ("rollout_long_context",),
        figures.highest("times_short")),
    "rollout_grpo_step": Bar("GRPO step against stock ops", ">=", 0.97, _GRPO),
    "rollout_grpo_drift": Bar(
        "mismatched tokens of those steps", "<=", 0.0, _GRPO, figures.stock_drifts),
    "rollout_cold_start": Bar(
        "seconds to a new process's first token, empty caches", "<=", 15.0, _START,
        figures.highest("cold/first_token_seconds")),
    "rollout_warm_start": Bar(
        "the same, kernels on disk", "<=", 3.0, _START,
        figures.highest("warm/first_token_seconds")),
    "rollout_tune": Bar(
        "seconds of `tune` for an 8B policy", "<=", 90.0, ("rollout_tune",),
        figures.highest("tune_seconds")),
    "rollout_vllm": Bar(
        "generation against vLLM's defaults, lowest", ">=", 1.05, _VLLM,
        figures.against_vllm("vllm", "generate")),
    "rollout_vllm_invariant": Bar(
        "generation against vLLM's batch-invariant mode, lowest", ">=", 1.2, _VLLM,
        figures.against_vllm("vllm batch-invariant", "generate")),
    "rollout_vllm_prefill": Bar(
        "prefill alone against vLLM's defaults, lowest", ">=", 0.95, _VLLM,
        figures.against_vllm("vllm", "prefill")),
    "rollout_vllm_joining": Bar(
        "prompts that join decoding ones against vLLM's defaults, lowest", ">=", 1.05, _VLLM,
        figures.against_vllm("vllm", "generate, joining")),
    "rollout_vllm_sparse": Bar(
        "Qwen3-30B-A3B, 256 x (512 + 128), against vLLM's defaults", ">=", 0.95,
        ("rollout_vllm_qwen3-30b-a3b",), figures.against_vllm("vllm", "generate", 128)),
    "distributed_sum": Bar(
        "NCCL's fp32 reduce-scatter against all-to-all and sum, lowest", ">=", 0.8, _SUM),
    "distributed_step": Bar(
        "optimizer step on several GPUs / with NCCL's sum, highest", "<=", 1.05, _RANKS,
        figures.of_strategies(False, "times_stock")),
    "distributed_step_zero": Bar(
        "the same under DeepSpeed", "<=", 1.1, _RANKS, figures.of_strategies(True, "times_stock")),
    "distributed_memory": Bar(
        "peak memory of that step, less the carry / with NCCL's sum, highest", "<=", 1.05, _RANKS,
        figures.highest("memory_times_stock")),
    "distributed_grpo": Bar(
        "GRPO tokens a second on several GPUs / on one, long completions, lowest", ">=", 1.8,
        _SCALING, figures.scaling),
    "trl_step": Bar("TRL's GRPO step as it comes / attached", ">=", 3.0, _TRL),
    "trl_training": Bar(
        "its training part as it comes / attached", ">=", 1.0, _TRL,
        figures.of_all(min, figures.further("training_ratio"))),
    "trl_memory": Bar(
        "peak of that part / TRL's with fp32 gradients", "<=", 1.05, _TRL,
        figures.highest("memory_times_trl_defaults")),
    "trl_drift": Bar("mismatched tokens of those steps", "<=", 0.0, _TRL, figures.stock_drifts),
    "trl_recipe": Bar(
        "an attached step / one of our own recipe", "<=", 1.1, _TRL,
        figures.highest("times_own_recipe")),
    "trl_monitor": Bar(
        "share of the drift monitor in that step", "<=", 0.01, _TRL,
        figures.highest("monitor_share")),
    "trl_gradient_check": Bar(
        "share of a gradient check every 10 steps", "<=", 0.05, _TRL,
        figures.highest("gradient_check_share")),
    **_SPARSE,
    **_RANDOM,
}
"""Name to target. The lowest or highest is over every row of the suites: no row can hide."""
# fmt: on
