"""C1, C2 and C3 on a whole model: embedding, layers, norm, LM head, logprob, loss, backward."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rl_consistency.cases.probe import probe_tokens
from rl_consistency.kernels.token_logprobs.op import lm_head_logits
from rl_consistency.models.families import SPARSE, stock_class
from rl_consistency.models.forward import lm_head_weight, packed_hidden_states, paged_hidden_states
from rl_consistency.models.layer_graphs import CAPTURED_AT, LayerGraphs
from rl_consistency.models.moe import CanonicalMoEBlock
from rl_consistency.models.packing import PackedBatch, lay_out
from rl_consistency.models.patch import patch
from rl_consistency.models.scoring.token_logprobs import TokenLogprobs, token_logprobs
from rl_consistency.parity import gradients
from rl_consistency.parity.bytes import same_bytes
from rl_consistency.parity.sides import PagedCall, cache_arguments
from rl_consistency.parity.taps import tapped
from rl_consistency.verify.checks.attention import paged_plans, paged_rows
from rl_consistency.verify.claims import Tally
from rl_consistency.verify.sweep import Sweep, padded, split

GRADIENT_REGROUPINGS = (
    gradients.Regrouping("run again", (1 << 30,)),
    gradients.Regrouping("micro-batch 2", (2,)),
    gradients.Regrouping("micro-batch 8", (8,)),
    gradients.Regrouping("4 accumulation steps", (3,)),
    *gradients.REGROUPINGS,
)

GRADIENT_LENGTHS = (33, 7, 48, 2, 129, 16, 31, 64, 5, 40, 17, 90)
"""Sequences of one step, long and short in turn."""


class Chain:
    """A patched model, the samples it is swept over, and each sample's outputs when alone."""

    def __init__(self, model: Any, sweep: Sweep) -> None:
        self.model, self.config = model, model.config
        self.device: torch.device = model.device
        self.sweep = sweep.within(self.config.max_position_embeddings)
        self.samples = probe_tokens(self.sweep.sample_lengths(), self.config.vocab_size, seed=1)

    @cached_property
    def alone(self) -> list[Tensor]:
        """Hidden states [n, H] of each sample in a call of its own."""
        return [self.hidden([i])[0] for i in range(len(self.samples))]

    @cached_property
    def alone_logprobs(self) -> list[Tensor]:
        """[n - 1, 2] logprob and entropy of each sample's tokens in a call of its own."""
        return [self.logprobs([i])[0] for i in range(len(self.samples))]

    @torch.no_grad()
    def hidden(self, members: Sequence[int], gap: int = 0) -> list[Tensor]:
        """Hidden states of some samples packed in one call."""
        sequences = [self.samples[i] for i in members]
        batch = PackedBatch.from_sequences(sequences, self.device, gap=gap)
        rows = packed_hidden_states(self.model, batch)[batch.token_rows]
        return list(rows.split([len(s) for s in sequences]))

    @torch.no_grad()
    def logprobs(self, members: Sequence[int], layout: Any = "packed") -> list[Tensor]:
        """Logprobs and entropies of some samples; empty for a sample of one token."""
        sequences = [self.samples[i] for i in members if len(self.samples[i]) > 1]
        if not sequences:
            return [torch.empty(0, 2, device=self.device) for _ in members]
        inputs, mask = lay_out(sequences, layout, self.device)
        prompts = [1] * len(sequences)
        scored = token_logprobs(self.model, inputs, attention_mask=mask, prompt_lengths=prompts)
        both = torch.stack([scored.logprobs, scored.entropy], dim=1)
        return list(both.split([len(self.samples[i]) - 1 for i in members]))

    def divergence(self, sample: int, members: Sequence[int]) -> str:
        """The first part that differs between a sample alone and packed among `members`."""
        traces = []
        for group in ([sample], members):
            sequences = [self.samples[i] for i in group]
            lengths = [len(tokens) for tokens in sequences]
            with tapped(self.model, lengths) as taps, torch.no_grad():
                packed_hidden_states(self.model, PackedBatch.from_sequences(sequences, self.device))
            place = list(group).index(sample)
            own = slice(sum(lengths[:place]), sum(lengths[: place + 1]))
            traces.append({tap: rows[own] for tap, rows in taps.forward().items()})
        alone, packed = traces
        differing = (f"first to differ: {t}" for t in alone if not same_bytes(alone[t], packed[t]))
        return next(differing, "not in a packed batch")


def check_packed_chain(tally: Tally, chain: Chain) -> None:
    """Hidden states of packed calls of every size, order and neighbourhood."""
    for name, calls in chain.sweep.arrangements():
        for members in calls:
            _compare_samples(tally, chain, name, members, chain.hidden(members))
    members = list(range(len(chain.samples)))
    for gap in (1, 3):
        found = chain.hidden(members, gap)
        _compare_samples(tally, chain, f"packed with gap {gap}", members, found)


@torch.no_grad()
def check_padded_chain(tally: Tally, chain: Chain) -> None:
    """Hidden states and logits of padded batches and of one row with position resets."""
    # Without the long samples: logits of a padded batch are [16, longest, vocabulary].
    members = list(range(min(len(chain.samples) - len(chain.sweep.long), 16)))
    tokens = [torch.tensor(chain.samples[i], device=chain.device) for i in members]
    logits = [chain.model.lm_head(chain.alone[i]) for i in members]
    for pad in chain.sweep.pads:
        for side in ("left", "right"):
            ids, mask = padded(tokens, pad, side)
            name = f"{side} padding {pad}"
            hidden = chain.model.model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
            found = [row[kept] for row, kept in zip(hidden, mask, strict=True)]
            _compare_samples(tally, chain, name, members, found)
            if pad == chain.sweep.pads[-1]:
                out = chain.model(input_ids=ids, attention_mask=mask.long()).logits
                for i in members:
                    tally.equal(f"{name}, logits", logits[i], out[i][mask[i]], _token(i))
    positions = torch.cat([torch.arange(len(own), device=chain.device) for own in tokens])
    rows = {"input_ids": torch.cat(tokens)[None], "position_ids": positions[None]}
    hidden = chain.model.model(**rows).last_hidden_state[0]
    found = list(hidden.split([len(own) for own in tokens]))
    _compare_samples(tally, chain, "position resets in one row", members, found)


def check_paged_chain(tally: Tally, chain: Chain) -> None:
    """Hidden states through the paged cache: chunk sizes, decode, cache block sizes."""
    cache = cache_arguments(chain.model)
    for name, block_size, members, cut in paged_plans(chain.sweep):
        samples = [chain.samples[i] for i in members]

        def run(call: PagedCall, samples: list[list[int]] = samples) -> Tensor:
            ids = [t for i, a, b in call.spans for t in samples[i][a:b]]
            positions = [p for _, a, b in call.spans for p in range(a, b)]
            both = torch.tensor([ids, positions], device=chain.device)
            return paged_hidden_states(chain.model, both[0], both[1], call.paged)

        schedules = [cut(len(sample)) for sample in samples]
        found = paged_rows(schedules, run, block_size=block_size, **cache)
        _compare_samples(tally, chain, name, members, found)


def check_logprob_chain(tally: Tally, chain: Chain) -> None:
    """Logprobs and entropies of `token_logprobs` in every batch size and layout."""
    members, sizes = list(range(len(chain.samples))), chain.sweep.batches[1:]
    calls = [(f"batch {b}", group, "packed") for b in sizes for group in split(members, b)]
    layouts = ("packed_with_gaps", "left_padded", "right_padded")
    calls += [(layout, members[1:16], layout) for layout in layouts]
    for name, group, layout in calls:
        for i, rows in zip(group, chain.logprobs(group, layout), strict=True):
            tally.equal(name, chain.alone_logprobs[i], rows, _token(i, 1))
    hidden = torch.cat(chain.alone)[:512]
    weight = lm_head_weight(chain.model).detach()
    logits = lm_head_logits(hidden, weight)
    for count in (1, 3, 17):
        parts = torch.cat([lm_head_logits(h, weight) for h in hidden[: 8 * count].split(count)])
        tally.equal(f"LM head, {count} rows a call", logits[: len(parts)], parts)


@torch.no_grad()
def check_weights_in_place(tally: Tally, chain: Chain) -> None:
    """Hidden states after all weights were written in place, against those of a model that has only
    ever had these."""
    members = range(min(len(chain.samples), 8))
    chain.hidden(members)  # whatever is kept of the weights is kept by now
    parameters = list(chain.model.parameters())
    try:
        for parameter in parameters:
            parameter.neg_()  # exact, and so is undoing it
        found = chain.hidden(members)
        other = _fresh(chain.model)
        with patch(other):
            fresh = Chain(other, chain.sweep)
            for i, rows, expected in zip(members, found, fresh.hidden(members), strict=True):
                tally.equal("weights negated", expected, rows, _token(i))
    finally:
        for parameter in parameters:
            parameter.neg_()


def check_gradient_chain(tally: Tally, chain: Chain) -> None:
    """Gradients of a clipped-objective-like loss with an entropy term, regrouped; in a sparse model
    with the load-balancing loss of each sequence."""
    sequences, prompts, loss = _step(chain)
    sparse = any(isinstance(module, CanonicalMoEBlock) for module in chain.model.modules())
    options: Any = {"regroupings": GRADIENT_REGROUPINGS, "balance": sparse}
    report = gradients.check_gradients(
        chain.model, sequences, prompt_lengths=prompts, loss=loss, **options
    )
    for r in report.results:
        where = f"of {report.elements} elements, first in {r.first_parameter}"
        passed = r.mismatched_elements == 0 and not report.without_gradient
        tally.expect(r.name, passed, f"{r.mismatched_elements} {where}")


def check_gradient_checkpointing(tally: Tally, chain: Chain) -> None:
    """Gradients with the activations of each layer recomputed in backward."""
    stored, model, runs = _gradients(chain), chain.model, []
    training = model.training
    handle = model.model.layers[0].input_layernorm.register_forward_hook(lambda *_: runs.append(0))
    model.train()
    # Newer transformers renamed the method.
    new = hasattr(model, "activation_checkpointing_enable")
    checkpointing = "activation_checkpointing" if new else "gradient_checkpointing"
    getattr(model, f"{checkpointing}_enable")()
    try:
        _compare_gradients(tally, chain, stored)
    finally:
        getattr(model, f"{checkpointing}_disable")()
        model.train(training)
        handle.remove()
    tally.expect("layers were recomputed", len(runs) == 2, f"a layer ran {len(runs)} times")


def check_captured_layers(tally: Tally, chain: Chain) -> None:
    """Gradients of passes that a GPU replays from CUDA graphs, and of ops that run one by one."""
    expected = _gradients(chain)
    graphs = chain.model.model.layer_graphs = LayerGraphs()
    try:
        # The first replay finds accumulators that nothing was folded into, the second does not.
        for _ in range(CAPTURED_AT + 1):
            _compare_gradients(tally, chain, expected)
    finally:
        chain.model.model.layer_graphs = None
    if chain.device.type == "cuda" and chain.config.model_type not in SPARSE:
        tally.expect("layers were captured", len(graphs) > 0)


def _compare_samples(
    tally: Tally, chain: Chain, case: str, members: Sequence[int], found: Sequence[Tensor]
) -> None:
    """Compare hidden states with each sample alone; the first difference names its module."""
    for i, rows in zip(members, found, strict=True):
        unseen = tally.mismatches == 0
        if not tally.equal(case, chain.alone[i], rows, _token(i)) and unseen:
            tally.detail += f"; {chain.divergence(i, members)}"


def _step(chain: Chain) -> tuple[list[list[int]], list[int], gradients.LossFunction]:
    """Sequences, prompt lengths and loss of one training step."""
    lengths = [min(n, chain.config.max_position_embeddings) for n in GRADIENT_LENGTHS]
    prompts = [1 + n // 3 for n in lengths]
    tokens = sum(lengths) - sum(prompts)

    def share(scored: TokenLogprobs, group: Sequence[int]) -> Tensor:
        total = scored.logprobs.new_zeros(())
        entropies = scored.entropy.split(scored.lengths)
        for i, logprobs, entropy in zip(group, scored.split(), entropies, strict=True):
            advantage = (-1.0) ** i * (0.5 + 0.1 * i)
            total = total - (advantage * logprobs + 0.01 * entropy).sum() / tokens
        return total if scored.balance is None else total + 0.01 * scored.balance.sum()

    return probe_tokens(lengths, chain.config.vocab_size, seed=2), prompts, share


def _fresh(model: Any) -> Any:
    """A model of the same config around the same weights that has never run."""
    config = copy.deepcopy(model.config)
    with torch.device("meta"):
        made: Any = stock_class(type(model))(config)
    made.load_state_dict(model.state_dict(), assign=True)
    made.tie_weights()
    made.model.rotary_emb = type(made.model.rotary_emb)(config).to(model.device)
    return made.eval()


def _gradients(chain: Chain) -> dict[str, Tensor]:
    sequences, prompts, loss = _step(chain)
    with gradients.gradients_kept(chain.model):
        chain.model.zero_grad(set_to_none=True)
        scored = token_logprobs(chain.model, sequences, prompt_lengths=prompts)
        loss(scored, range(len(sequences))).backward()
        return {name: p.grad for name, p in chain.model.named_parameters() if p.grad is not None}


def _compare_gradients(tally: Tally, chain: Chain, expected: Mapping[str, Tensor]) -> None:
    found = _gradients(chain)
    tally.expect("same parameters", expected.keys() == found.keys())
    for name in expected:
        tally.equal(name, expected[name], found.pop(name))


def _token(sample: int, first: int = 0) -> Any:
    return lambda row: f"sample {sample} position {row + first}"
