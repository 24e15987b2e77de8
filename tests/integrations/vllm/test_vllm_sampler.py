"""vLLM's steps with the plug-in's sampler: tokens and logprob bytes of our own engine."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import rl_consistency as rlc
from rl_consistency.models.forward import next_token_logits, packed_hidden_states
from rl_consistency.models.graph_cache import GraphPlace
from rl_consistency.models.packing import PackedBatch
from rl_consistency.rollout.sampling_params import Truncation
from tests.integrations.vllm.fake_requests import (
    BaseSampler,
    SamplingParams,
    batch_of,
    children,
)
from tests.models.captured.recorded_graphs import RecordedPlace

VOCABULARY = 60
NEW = 5

MIXED = [
    {},
    {"temperature": 0.7, "seed": 0},
    {"temperature": 0.0, "seed": 4},
    {"temperature": 0.0, "seed": 5, "extra_args": {"greedy_logprobs": "full"}},
    {"top_k": 7, "seed": 2**63 - 1},
    {"top_p": 0.8, "seed": 6, "extra_args": {"prompt_id": 2**63 + 5}},
    {"min_p": 0.2, "seed": 7, "extra_args": {"sample_index": 2**32 - 1}},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "seed": 8},
]


@pytest.fixture
def plugin():
    from rl_consistency.integrations.vllm import sampler

    return sampler


@pytest.fixture
def make(plugin):
    def made(slots=12, vocabulary=VOCABULARY):
        base = BaseSampler(slots, vocabulary)
        return plugin.Sampler(base, graphs=True), base

    return made


@pytest.fixture(scope="module")
def model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
        width = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 16}
        built = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=VOCABULARY,
                initializer_range=0.08,
                max_position_embeddings=64,
                **sizes,
                **width,
            )
        )
    with rlc.patch(built.eval()):
        yield built


def logits_of(model, sequences):
    with torch.no_grad():
        batch = PackedBatch.from_sequences(sequences)
        hidden = packed_hidden_states(model, batch)
        ends = np.cumsum([len(s) for s in sequences]) - 1
        return next_token_logits(model, hidden[batch.token_rows[ends]])


def served(model, sampler, prompts, params, *, seed=0, new=NEW):
    """(token, logprob) of each request, in steps of some of them, in slots of any order."""
    order = random.Random(seed)
    slots = order.sample(range(12), len(prompts))
    sequences, found = [list(p) for p in prompts], [[] for _ in prompts]
    for slot, prompt, given in zip(slots, prompts, params, strict=True):
        sampler.add_request(slot, len(prompt), given)
    while left := [i for i, drawn in enumerate(found) if len(drawn) < new]:
        chosen = order.sample(left, order.randint(1, len(left)))
        sampler.apply_staged_writes()
        rows = [sequences[i] for i in chosen]
        batch = batch_of([slots[i] for i in chosen], [len(row) for row in rows])
        output = sampler(logits_of(model, rows), batch)
        assert output.num_sampled.tolist() == [1] * len(chosen)
        tokens = output.sampled_token_ids[:, 0].tolist()
        logprobs = output.logprobs_tensors.logprobs[:, 0]
        for i, token, logprob in zip(chosen, tokens, logprobs, strict=True):
            sequences[i].append(token)
            found[i].append((token, logprob.numpy().tobytes()))
    return found


def rolled_out(model, prompts, params, requests, **changes):
    """The same of our own engine, for each of its completions."""
    engine = rlc.RolloutEngine(model, eos_token_id=None, tokens_per_sequence=32, quiet=True)
    fields = ("temperature", "top_k", "top_p", "min_p", "seed", "greedy_logprobs")
    asked = [requests.asked(given) for given in params]
    assert all(index == 0 for _, _, index in asked)  # the engine counts a group's samples itself
    own = [
        rlc.SamplingParams(
            **{name: getattr(found, name) for name in fields} | changes, n=given.n, max_tokens=NEW
        )
        for (found, _, _), given in zip(asked, params, strict=True)
    ]
    completions = engine.generate(prompts, own, prompt_ids=[prompt_id for _, prompt_id, _ in asked])
    return [
        [(t, p.numpy().tobytes()) for t, p in zip(c.token_ids, c.token_logprobs, strict=True)]
        for c in completions
    ]


def prompts_of(count):
    draw = random.Random(1)
    return [[draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 20))] for _ in range(count)]


def test_mixed_requests_have_the_tokens_and_logprob_bytes_of_our_engine(model, make, plugin):
    from rl_consistency.integrations.vllm import requests

    seeded = [{"seed": 9} | given for given in MIXED]
    del seeded[6]["extra_args"]
    params = [SamplingParams(logprobs=0, **given) for given in seeded]
    prompts = prompts_of(len(params))
    found = served(model, make()[0], prompts, params)
    assert found == rolled_out(model, prompts, params, requests)
    assert found == served(model, make()[0], prompts, params, seed=1)
    assert found[2] != found[3] and [t for t, _ in found[2]] != [t for t, _ in found[0]]


def test_n_completions_have_the_tokens_of_a_group_of_our_engine(model, make, plugin):
    from rl_consistency.integrations.vllm import requests

    group = SamplingParams(n=3, seed=11, logprobs=0, extra_args={"prompt_id": 3})
    processed = SamplingParams(**vars(group) | {"extra_args": {"prompt_id": 3, "first_seed": 11}})
    prompt = prompts_of(1)
    found = served(model, make()[0], prompt * 3, list(children(processed)))
    assert found == rolled_out(model, prompt, [group], requests)
    assert len({tuple(drawn) for drawn in found}) == 3


def test_an_index_and_a_preemption_change_nothing_but_the_stream(model, make):
    prompts = prompts_of(1)
    given = [SamplingParams(logprobs=0, seed=7, extra_args={"sample_index": 2**32 - 1})]
    sampler, _ = make()
    whole = served(model, sampler, prompts, given)
    assert whole != served(model, sampler, prompts, [SamplingParams(logprobs=0, seed=7)])
    # vLLM adds a preempted request again, with what it has drawn as part of the prompt.
    before = served(model, sampler, prompts, given, new=2)
    rest = [prompts[0] + [token for token, _ in before[0]]]
    again = served(model, sampler, rest, given, seed=3, new=NEW - 2)
    assert [before[0] + again[0]] == whole


def test_a_request_without_a_seed_draws_one_from_vllm(model, make, monkeypatch):
    sampler, _ = make()
    numbers = iter((-5, 7))
    monkeypatch.setattr(np.random, "randint", lambda *_: next(numbers))
    found = served(model, sampler, prompts_of(2), [SamplingParams(logprobs=0)] * 2)
    from rl_consistency.integrations.vllm import requests

    for prompt, drawn, seed in zip(prompts_of(2), found, (2**64 - 5, 7), strict=True):
        own = rolled_out(model, [prompt], [SamplingParams()], requests, seed=seed)
        assert own == [drawn]


def rows_of(make, given, logits, lengths=None):
    """One step of requests in slots 0, 1, ..., with what was staged for them."""
    sampler, base = make(vocabulary=logits.shape[1])
    for slot, params in enumerate(given):
        sampler.add_request(slot, 3, params)
    sampler.apply_staged_writes()
    return sampler, base, batch_of(range(len(given)), lengths or [3] * len(given))


@pytest.fixture
def logits():
    values = torch.randn(6, 300, generator=torch.Generator().manual_seed(5)) * 3
    values[:, 7] *= 20  # an outlier channel
    values[2, [11, 90, 250]] = values[2].max() + 1  # equal ones
    values[3, [4, 5]] = torch.tensor([0.0, -0.0])
    return values


def test_the_most_likely_tokens_come_with_their_exact_logprobs(make, logits, plugin):
    given = [SamplingParams(seed=i, logprobs=k) for i, k in enumerate((4, 0, 3, None, 5, 2))]
    given[4].top_k = 3
    given[5].temperature = 0.0
    sampler, _, batch = rows_of(make, given, logits)
    output = sampler(logits, batch)
    ids, logprobs, ranks = output.logprobs_tensors[:3]
    assert ids.shape == logprobs.shape == (6, 6) and ids.dtype == torch.int64
    assert ids[:, 0].equal(output.sampled_token_ids[:, 0])
    assert ids[2, 1:4].tolist() == [11, 90, 250]
    expected = torch.sort(logits, dim=1, descending=True, stable=True).indices[:, :5]
    assert ids[:, 1:].equal(expected)
    for column in range(6):
        one = sampler._table.draw(logits, batch.idx_mapping, torch.full((6,), 2), Truncation.DRAW)
        assert logprobs[:, column].equal(one[1](ids[:, column].contiguous()))
    assert logprobs[4, 4:].tolist() == [-torch.inf, -torch.inf]  # outside the support
    drawn = logits.gather(1, ids[:, :1])
    assert ranks.tolist() == [int((row >= x).sum()) for row, x in zip(logits, drawn, strict=True)]
    assert ranks[5] == 1 and logprobs[5, 0] == 0.0
    alone = rows_of(make, [SamplingParams(seed=0)], logits[:1])
    assert alone[0](logits[:1], alone[2]).logprobs_tensors is None


def test_all_logprobs_add_up_to_one(make, logits):
    sampler, _, batch = rows_of(make, [SamplingParams(seed=1, logprobs=-1)], logits[:1])
    ids, logprobs, _ = sampler(logits[:1], batch).logprobs_tensors[:3]
    assert sorted(ids[0, 1:].tolist()) == list(range(300))
    assert abs(logprobs[0, 1:].double().exp().sum() - 1) < 1e-6


@pytest.mark.parametrize("refused", [{"presence_penalty": 0.5}, {"bad_words": ["a"]}, {"seed": -3}])
def test_a_request_that_is_not_covered_gets_nan_and_no_sample(make, logits, refused, caplog):
    usual = [SamplingParams(seed=i, top_p=0.9, logprobs=2) for i in range(6)]
    sampler, _, batch = rows_of(make, usual, logits)
    expected = sampler(logits, batch)
    usual[2] = SamplingParams(**{"seed": 2, "logprobs": 2} | refused)
    assert not caplog.records
    sampler, base, batch = rows_of(make, usual, logits)
    assert f"NaN logprobs and token 0: {next(iter(refused))}" in caplog.text
    base.compute_nans = True
    found = sampler(logits, batch)
    others = [0, 1, 3, 4, 5]
    assert found.sampled_token_ids[2] == 0 and found.logprobs_tensors.logprobs[2].isnan().all()
    assert found.num_nans.tolist() == [0, 0, 1, 0, 0, 0] and found.num_nans.dtype == torch.int32
    for ours, theirs in zip(found.logprobs_tensors[:3], expected.logprobs_tensors[:3], strict=True):
        assert ours[others].equal(theirs[others])
    sampler.add_request(2, 3, SamplingParams(seed=2, top_p=0.9, logprobs=2))  # the slot's next
    sampler.apply_staged_writes()
    assert sampler(logits, batch).logprobs_tensors.logprobs.equal(
        expected.logprobs_tensors.logprobs
    )


def test_a_penalty_that_is_ignored_is_seen(make, logits, plugin, monkeypatch):
    """The mutant of the check above."""
    from rl_consistency.integrations.vllm import requests

    monkeypatch.setattr(requests, "COVERED", requests.COVERED | {"presence_penalty"})
    sampler, _, batch = rows_of(make, [SamplingParams(seed=2, presence_penalty=0.5)], logits[:1])
    with pytest.raises(AssertionError):
        assert sampler(logits[:1], batch).sampled_token_ids[0] == 0


def test_vllms_warm_up_is_served_without_a_word(make, logits, caplog):
    sampler, base, batch = rows_of(make, [SamplingParams.for_sampler_warmup()] * 6, logits)
    assert sampler(logits, batch).logprobs_tensors.logprobs.isnan().all()
    assert sampler.penalties_state is base.penalties_state  # which vLLM reads
    assert not caplog.records


def test_nan_logits_are_counted_where_vllm_asks(make, logits):
    logits[1, :4] = torch.nan
    sampler, base, batch = rows_of(make, [SamplingParams(seed=i) for i in range(6)], logits)
    assert sampler(logits, batch).num_nans is None
    base.compute_nans = True
    assert sampler(logits, batch).num_nans.tolist() == [0, 5, 0, 0, 0, 0]


def test_a_chunk_of_a_prompt_samples_nothing(make, logits):
    sampler, _, batch = rows_of(make, [SamplingParams(seed=i) for i in range(6)], logits)
    batch.seq_lens[1] = 2
    assert sampler(logits, batch).num_sampled.tolist() == [1, 0, 1, 1, 1, 1]


class Place(RecordedPlace, GraphPlace):
    """Recorded graphs in the place of CUDA's."""


@pytest.fixture
def graphs(make, logits, plugin, monkeypatch):
    monkeypatch.setattr(plugin.SamplerGraphs, "place", Place)
    given = [SamplingParams(seed=9, **each) for each in ({}, {"top_p": 0.9}, {"temperature": 0.5})]
    given += [SamplingParams(temperature=0.0, extra_args={"greedy_logprobs": "full"})]
    sampler, _, _ = rows_of(make, given, logits)
    return plugin.SamplerGraphs(sampler._table, 5, logits), sampler._table


def test_no_bucket_and_no_padding_moves_a_bit(graphs, logits, plugin):
    graphs, table = graphs
    shapes = {(rows, truncates) for rows in (1, 2, 4, 5) for truncates in Truncation}
    assert {*graphs._captured} == shapes  # before a request
    slots = torch.tensor([3, 0, 2, 1, 0], dtype=torch.int32)
    results = []
    for count in (5, 1, 3, 2, 4, 5):
        rows = torch.randperm(6)[:count]
        step = logits[rows], slots[:count], torch.arange(2, 2 + count), Truncation.DRAW
        results.append((graphs.draw(*step), plugin.draw(table, *step)))
    # Compared at the end: a replay must not write what an earlier one returned.
    for found, expected in results:
        assert [x.numpy().tobytes() for x in found] == [x.numpy().tobytes() for x in expected]


def test_results_in_the_graphs_own_memory_are_seen(graphs, logits, plugin, monkeypatch):
    """The mutant of the check above."""
    graphs, _ = graphs
    monkeypatch.setattr(torch.Tensor, "clone", lambda x: x)
    slots, positions = torch.tensor([0]), torch.tensor([2])
    first = graphs.draw(logits[:1], slots, positions, Truncation.NONE)
    expected = [x.numpy().tobytes() for x in first]
    graphs.draw(logits[1:2], slots, positions, Truncation.NONE)
    assert [x.numpy().tobytes() for x in first] != expected


def test_a_step_is_replayed_unless_it_is_large_or_asks_for_more(make, logits, plugin, monkeypatch):
    monkeypatch.setattr(plugin.SamplerGraphs, "place", Place)
    replays, draw = [], plugin.SamplerGraphs.draw
    monkeypatch.setattr(plugin.SamplerGraphs, "draw", lambda *a: replays.append(1) or draw(*a))
    given = [SamplingParams(seed=i) for i in range(3)]
    sampler, base, batch = rows_of(make, given, logits)
    expected = sampler(logits[:3], batch).sampled_token_ids
    sampler._graphs = plugin.SamplerGraphs(sampler._table, 2, logits)
    for k, count, replayed in ((-1, 2, True), (0, 2, True), (0, 3, False), (1, 2, False)):
        replays.clear()
        base.counts[:] = k
        found = sampler(logits[:count], batch_of(range(count), [3] * count))
        assert found.sampled_token_ids.equal(expected[:count]) and bool(replays) is replayed
        assert (found.logprobs_tensors is None) is (k < 0)


def test_the_state_of_a_model_brings_the_sampler(plugin):
    state = plugin.ModelState()
    for eager in (False, True):
        state.model_config = SimpleNamespace(enforce_eager=eager)
        sampler, rejection = state.custom_sampler(BaseSampler(2, 5))
        assert isinstance(sampler, plugin.Sampler) and rejection is None
        assert sampler._graphed is not eager
