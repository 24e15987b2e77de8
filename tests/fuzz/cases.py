"""A random case: model, modifications, engine settings, cuts, interruptions, judged by two oracles.

The oracles are the stock forward in fp64, and the laws of bytes. A model that is refused, before
or after the patch, has passed.
"""

import copy
import random
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import get_args

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rl_consistency import ConsistencyError, RolloutEngine, SamplingParams, patch, token_logprobs
from rl_consistency.models.packing import Layout
from rl_consistency.parity.gradients import Regrouping, check_gradients
from rl_consistency.verify.presets import make_lifelike
from tests.comparison import first_difference
from tests.fuzz.modifications import MODIFICATIONS

REFUSED = (ValueError, TypeError, ConsistencyError)

DENSE = ("llama", "mistral", "qwen2", "qwen3")
SPARSE = ("mixtral", "olmoe", "qwen3_moe")

NEAR_TIE = 1e-5
"""Router logits this close may choose other experts in another dtype, and then nothing is near."""


class Interrupted(Exception):
    """Raised by a case in the middle of something."""


def random_config(rng):
    heads = rng.choice([1, 2, 4])
    dim = rng.choice([16, 32, 48])
    family = rng.choice(DENSE if rng.random() < 0.6 else SPARSE)
    options = {
        "vocab_size": rng.choice([64, 257, 331]),
        "hidden_size": heads * dim,  # qwen2 takes the head size from it
        "intermediate_size": rng.choice([24, 80, 129]),
        "num_hidden_layers": rng.choice([1, 2, 3]),
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([h for h in (1, 2, 4) if heads % h == 0]),
        "head_dim": dim,
        "max_position_embeddings": 256,
        "tie_word_embeddings": rng.random() < 0.5,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "rms_norm_eps": rng.choice([1e-6, 1e-5]),
        "hidden_act": rng.choice(["silu", "silu", "gelu_pytorch_tanh"]),
    }
    if family in ("llama", "qwen3"):
        options["attention_bias"] = rng.random() < 0.5
    if family == "llama":
        options["mlp_bias"] = rng.random() < 0.5
    if family in ("mistral", "mixtral") and rng.random() < 0.7:
        options["sliding_window"] = rng.choice([5, 17, 100])
    if family in SPARSE:
        experts = rng.choice([1, 3, 4, 7, 16])
        options["num_experts" if family != "mixtral" else "num_local_experts"] = experts
        options["num_experts_per_tok"] = rng.randint(1, min(experts, 4))
    if family == "qwen3_moe":
        options["moe_intermediate_size"] = rng.choice([16, 40, 49])
        options["decoder_sparse_step"] = rng.choice([1, 1, 2])
        options["mlp_only_layers"] = rng.choice([[], [], [0]])
    if family in ("qwen3_moe", "olmoe"):
        options["norm_topk_prob"] = rng.random() < 0.5
    theta = rng.choice([1e4, 5e5])
    options["rope_parameters"] = rng.choice(
        [
            {"rope_type": "default", "rope_theta": theta},
            {"rope_type": "linear", "rope_theta": theta, "factor": 2.0},
        ]
    )
    return family, options


def random_model(rng, dtype):
    family, options = random_config(rng)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rng.randrange(1 << 30))
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(family, **options), dtype=dtype
        )
    model.config._experts_implementation = "eager"  # the others refuse most of these sizes
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    with torch.no_grad():
        for parameter in model.parameters():
            make_lifelike(parameter, generator)
    return model.eval(), f"{family} {options}"


def sequences_for(rng, vocabulary):
    return [
        [rng.randrange(2, vocabulary) for _ in range(rng.choice([2, 3, 9, 16, 17, 40]))]
        for _ in range(rng.choice([1, 2, 5]))
    ]


@dataclass
class Work:
    """What a model is asked to do."""

    sequences: list[list[int]]
    weights: torch.Tensor
    """Of the scored tokens in the loss, [T] fp32."""

    def loss(self, logprobs, group=None):
        """Weighted sum of the logprobs of some sequences; all by default."""
        group = range(len(self.sequences)) if group is None else group
        ends = list(accumulate(len(tokens) - 1 for tokens in self.sequences))
        spans = [self.weights[ends[i] - len(self.sequences[i]) + 1 : ends[i]] for i in group]
        return -(logprobs * torch.cat(spans).to(logprobs.dtype)).sum()


def stock_logprobs(model, sequences):
    """Of all tokens but the first of each, by the stock forward."""
    found = []
    for tokens in sequences:
        ids = torch.tensor([tokens])
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
        wide = logits if logits.dtype == torch.float64 else logits.float()
        found.append(wide.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0])
    return torch.cat(found)


def in_fp64(model):
    """A copy whose experts run one by one: torch's grouped products do not take fp64."""
    model = copy.deepcopy(model).double()
    model.config._experts_implementation = "eager"
    return model


def closest_tie(model, sequences):
    """The smallest distance of all rows between logits of a chosen expert and one left out."""
    model, found = in_fp64(model), [float("inf")]

    def look(router, operands, output):
        logits = output[0].sort(dim=-1, descending=True).values
        if router.top_k < logits.shape[-1]:
            gaps = logits[:, router.top_k - 1] - logits[:, router.top_k]
            found.append(gaps.min().item())

    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.register_forward_hook(look)
    with torch.no_grad():
        stock_logprobs(model, sequences)
    return min(found)


def canonical_logprobs(model, sequences, **options):
    prompts = [1] * len(sequences)
    return token_logprobs(model, sequences, prompt_lengths=prompts, **options).logprobs


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def stock_numbers(model, work, dtype):
    """Logprobs and gradients by the stock forward of a copy in a dtype."""
    model = in_fp64(model) if dtype == torch.float64 else copy.deepcopy(model)
    model.zero_grad()
    logprobs = stock_logprobs(model, work.sequences)
    work.loss(logprobs).backward()
    return logprobs.detach().double(), {n: g.double() for n, g in gradients(model).items()}


def same_bytes(found, expected, what):
    difference = first_difference({"": found}, {"": expected})
    assert difference is None, f"{what}: {difference}"


def judge_numbers(model, work, by_stock, by_fp64):
    """Logprobs and gradients are those of the stock forward, as far as rounding goes."""
    (stock, stock_gradients), (exact, exact_gradients) = by_stock, by_fp64
    model.zero_grad()
    scored = canonical_logprobs(model, work.sequences)
    work.loss(scored).backward()
    if closest_tie(model, work.sequences) < NEAR_TIE:
        return
    allowed = 4 * (stock - exact).abs().max() + 5e-4
    error = (scored.detach().double() - exact).abs().max()
    assert error <= allowed, f"logprobs are {error:.3g} off, allowed {allowed:.3g}"
    found = gradients(model)
    assert found.keys() == exact_gradients.keys(), found.keys() ^ exact_gradients.keys()
    largest = max((right.norm() for right in exact_gradients.values()), default=0.0)
    for name, gradient in found.items():
        right = exact_gradients[name]
        scale = right.norm() + 1e-3 * largest + 1e-9  # some are zero but for rounding
        allowed = 4 * (stock_gradients[name] - right).norm() / scale + 5e-4
        error = (gradient.double() - right).norm() / scale
        assert error <= allowed, f"gradient of {name} is {error:.3g} off, allowed {allowed:.3g}"


def judge_cuts(rng, model, work):
    """Gradients do not depend on the cut, nor on a backward pass that was interrupted."""
    cuts = [
        Regrouping("cut", (rng.randint(1, 3), rng.randint(1, 3)), rng.choice(get_args(Layout)))
        for _ in range(2)
    ]
    loss = lambda scored, group: work.loss(scored.logprobs, group)  # noqa: E731
    prompts = [1] * len(work.sequences)
    check = {"prompt_lengths": prompts, "loss": loss, "regroupings": cuts, "compare_present": True}
    if rng.random() < 0.3:
        interrupted_backward(rng, model, work)
        model.zero_grad()
        work.loss(canonical_logprobs(model, work.sequences)).backward()
    report = check_gradients(model, work.sequences, **check)
    assert report.failure() is None, report.failure()


def interrupted_backward(rng, model, work):
    def interrupt(gradient):
        raise Interrupted

    trained = [p for p in model.parameters() if p.requires_grad]
    handle = rng.choice(trained).register_hook(interrupt)
    try:
        work.loss(canonical_logprobs(model, work.sequences)).backward()
    except Interrupted:
        pass
    finally:
        handle.remove()


def judge_rollout(rng, model, work):
    """Rollout logprobs are training's; no setting and no interruption moves a byte."""
    sampling = SamplingParams(
        n=rng.choice([1, 3]),
        temperature=rng.choice([0.0, 0.7, 1.0]),
        top_k=rng.choice([0, 0, 5]),
        top_p=rng.choice([1.0, 0.9]),
        min_p=rng.choice([0.0, 0.1]),
        max_tokens=rng.choice([1, 7, 24]),
        seed=rng.randrange(1 << 40),
        speculation=rng.choice([0, 0, 3]),
    )
    eos = rng.choice([None, 1])
    found = [random_engine(rng, model, eos).generate(work.sequences, sampling)]
    other = random_engine(rng, model, eos)
    if rng.random() < 0.5:
        steps = rng.randrange(6)

        def interrupt(*counts):
            nonlocal steps
            steps -= 1
            if steps < 0:
                raise Interrupted

        with suppress(Interrupted):
            other.generate(work.sequences, sampling, progress=interrupt)
    found.append(other.generate(work.sequences, sampling))
    first, second = ([(c.token_ids, list(c.token_logprobs)) for c in cs] for cs in found)
    assert first == second, "completions depend on the engine's settings"
    sequences = [[*work.sequences[c.prompt_index], *c.token_ids] for c in found[0]]
    lengths = [len(work.sequences[c.prompt_index]) for c in found[0]]
    with torch.no_grad():
        scored = token_logprobs(model, sequences, prompt_lengths=lengths, sampling=sampling)
    rollout = torch.tensor([x for c in found[0] for x in c.token_logprobs])
    same_bytes(rollout, scored.logprobs, "rollout against training")


def random_engine(rng, model, eos):
    return RolloutEngine(
        model,
        eos_token_id=eos,
        kv_block_size=rng.choice([1, 7, 16]),
        num_kv_blocks=rng.choice([None, 200]),
        max_batch_tokens=rng.choice([4, 33, 2048]),
        max_num_seqs=rng.choice([1, 4, 256]),
        prefill_chunk_size=rng.choice([None, 3, 16]),
        enable_prefix_sharing=rng.random() < 0.7,
    )


@dataclass(frozen=True)
class Outcome:
    """What became of a case."""

    text: str
    refused: str | None
    """Why it is refused, by us or by the stock forward."""


def plan_of(seed):
    """The random numbers of a case, its dtype, and its changes before and after the patch."""
    rng = random.Random(seed)
    dtype = rng.choice([torch.float32, torch.float32, torch.bfloat16])
    before = rng.sample(MODIFICATIONS, rng.choice([0, 0, 1, 1, 1, 2]))
    after = rng.sample(MODIFICATIONS, rng.choice([0, 0, 1]))
    return rng, dtype, before, after


def run(seed, plan=None):
    """Run the case of a seed, or a plan like `plan_of`'s; an AssertionError is a finding."""
    rng, dtype, before, after = plan or plan_of(seed)
    model, text = random_model(rng, dtype)
    names = [[change.__name__ for change in changes] for changes in (before, after)]
    text = f"seed {seed}: {text}, {dtype}, changed {names[0]}, after the patch {names[1]}"
    rows = sequences_for(rng, model.config.vocab_size)
    work = Work(rows, torch.rand(sum(len(row) - 1 for row in rows)) + 0.5)
    try:
        for change in before:
            change(model, rng)
        stock_numbers(model, work, None)
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError) as error:
        return Outcome(text, f"the stock forward fails: {error}")
    try:
        with patch(model, grad_dtype=rng.choice([None, torch.float32])):
            judge(rng, model, work)
            for change in after:
                change(model, rng)
                judge(rng, model, work)
    except REFUSED as error:
        assert before or after, f"an unchanged model is refused: {error}"
        assert "\n" not in str(error), f"not one line: {error}"
        return Outcome(text, str(error))
    return Outcome(text, None)


def judge(rng, model, work):
    """All laws; a change after the patch that the stock forward does not survive is no case."""
    try:
        stock = [stock_numbers(model, work, dtype) for dtype in (None, torch.float64)]
    except (RuntimeError, AttributeError, IndexError, KeyError, TypeError):
        raise ValueError("the stock forward fails") from None
    if model.dtype == torch.float32:
        judge_numbers(model, work, *stock)
    else:  # bf16 rounds too much for a tight bound: the same model in fp32 has one
        wide = copy.deepcopy(model).float()
        stock = [stock_numbers(wide, work, dtype) for dtype in (None, torch.float64)]
        with patch(wide):
            judge_numbers(wide, work, *stock)
        model.zero_grad()
        work.loss(canonical_logprobs(model, work.sequences)).backward()
    judge_cuts(rng, model, work)
    judge_rollout(rng, model, work)
