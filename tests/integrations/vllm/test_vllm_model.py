"""The model class of vLLM over random steps gives the logprobs that training computes."""

import random
from dataclasses import replace

import pytest
import torch

import rl_consistency
from rl_consistency.kernels.attention.layout import PackedSequences
from rl_consistency.kernels.sampling.op import SamplingRows, distribution
from rl_consistency.models.moe import recorded_routing
from rl_consistency.verify.presets import build_preset
from tests.integrations.vllm.fake_vllm import Server, vllm_config

PRESETS = (
    *("tiny-qwen3", "tiny-llama", "tiny-qwen2", "tiny-mistral"),
    *("tiny-qwen3-moe", "tiny-olmoe", "tiny-mixtral"),
)
LENGTHS = 3, 17, 40, 96, 150, 33


def served(trained, dtype=torch.bfloat16):
    """vLLM's model with the weights of a trained one."""
    from rl_consistency.integrations.vllm.model import CanonicalForCausalLM

    torch.set_default_dtype(dtype)
    try:
        model = CanonicalForCausalLM(vllm_config=vllm_config(trained.config, dtype))
    finally:
        torch.set_default_dtype(torch.float32)
    model.load_weights((n, p.detach()) for n, p in trained.named_parameters())
    return model


def sequences_of(vocabulary, seed=1):
    draw = random.Random(seed)
    return [[draw.randrange(vocabulary) for _ in range(n)] for n in LENGTHS]


def logprobs_of(model, sequences, **options):
    """Of all tokens but the first of each sequence, by vLLM's way through random steps."""
    server = Server(model, sequences, **options)
    found = [[] for _ in sequences]
    while server.unfinished:
        hidden, places = server.run(server.take() or [(i, 1) for i in left(server)[:1]])
        next_tokens = [(*sequences[i], 0)[p + 1] for i, p in places]
        behaviour = distribution(model.compute_logits(hidden), SamplingRows.uniform(len(places)))
        logprobs = behaviour.logprobs_of(torch.tensor(next_tokens)).tolist()
        for (i, _), logprob in zip(places, logprobs, strict=True):
            found[i].append(logprob)
    return [each[:-1] for each in found]


def left(server):
    return [i for i, s in enumerate(server.sequences) if server.computed[i] < len(s)]


def differing(one, other):
    pairs = [p for a, b in zip(one, other, strict=True) for p in zip(a, b, strict=True)]
    return sum(a != b for a, b in pairs), len(pairs)


@pytest.mark.parametrize(
    "preset, dtype",
    [(preset, torch.bfloat16) for preset in PRESETS]
    + [("tiny-qwen3", torch.float32), ("tiny-mixtral", torch.float16)],
)
def test_steps_of_vllm_give_the_logprobs_of_training(preset, dtype):
    trained = build_preset(preset, dtype)
    sequences = sequences_of(trained.config.vocab_size)
    with rl_consistency.patch(trained, cuda_graphs=False), torch.no_grad():
        model = served(trained, dtype)
        scored = rl_consistency.token_logprobs(trained, sequences, prompt_lengths=[1] * 6)
        with rl_consistency.strict(False):
            stock = rl_consistency.token_logprobs(trained, sequences, prompt_lengths=[1] * 6)
        assert model.digest() == rl_consistency.model_digest(trained)
    scored, stock = ([x.tolist() for x in each.split()] for each in (scored, stock))
    found = logprobs_of(model, sequences)
    assert differing(found, scored) == (0, 333)
    assert differing(stock, scored)[0] > 100  # the comparison finds differences


@pytest.mark.parametrize("preset", ["tiny-qwen3", "tiny-mistral", "tiny-olmoe"])
@pytest.mark.parametrize("shares", [False, True])
def test_a_captured_decode_step_gives_the_bits_of_any_other(preset, shares, monkeypatch):
    """With padding, and where sequences lie in the same blocks."""
    from rl_consistency.integrations.vllm import steps

    monkeypatch.setattr(steps, "reads_shared_keys_once", lambda keys: shares)
    monkeypatch.setattr(steps, "SHARED_FROM", 2)
    trained = build_preset(preset, torch.bfloat16)
    draw = random.Random(3)
    head = [draw.randrange(trained.config.vocab_size) for _ in range(160)]
    sequences = [head + [i, i + 1, i + 2] for i in range(5)]
    with rl_consistency.patch(trained, cuda_graphs=False):
        model = served(trained)
        server = Server(model, sequences, pad=(3, 3))
    for table in server.tables[1:]:
        table[:10] = server.tables[0][:10]
    server.run([(i, 160) for i in range(5)])
    others = Server(model, sequences, pad=(3, 3), keep=server)
    for _ in range(3):
        found, _ = server.run([(i, 1) for i in range(5)], captured=True)
        expected, _ = others.run([(i, 1) for i in range(5)])
        assert torch.equal(found, expected)
    *_, layout = model._decode._made.values()  # vLLM has one table
    assert (layout.most_runs > 0) == shares
    if shares:
        assert layout.numbers.shared.runs.tolist() == [[0, 5, 128], [0, 0, 0]]


def routing_of(trained, sequences):
    """(token, position) of each sequence -> its experts, by a pass of the trained model."""
    found = {}
    for tokens in sequences:
        ids, positions = torch.tensor(tokens), torch.arange(len(tokens))
        layout = PackedSequences.of([0], [len(tokens)])
        with recorded_routing() as record, torch.no_grad():
            trained.model.packed_forward(ids, positions, layout)
        (numbers,) = record.fingerprints()
        found |= dict(zip(zip(tokens, range(len(tokens)), strict=True), numbers.tolist()))
    return found


@pytest.mark.parametrize("captured", [False, True])
def test_the_routing_of_a_step_is_that_of_training_and_of_its_tokens_alone(captured):
    trained = build_preset("tiny-qwen3-moe", torch.bfloat16)
    sequences = [[10 * i + j for j in range(9)] for i in range(4)]  # no token is twice
    with rl_consistency.patch(trained, cuda_graphs=False):
        expected = routing_of(trained, sequences)
        model = served(trained)
        server = Server(model, sequences, pad=(3, 3))
    server.run([(i, 8) for i in range(4)])
    for chunks in [[(i, 1) for i in range(4)]] if captured else []:
        server.run(chunks, captured=True)
    numbers, tokens, positions = model.routing().tolist()
    assert len(numbers) == (4 if captured else 32)
    for number, token, position in zip(numbers, tokens, positions, strict=True):
        assert expected[token, position] == number
    assert len(set(numbers)) > 1


def test_a_dense_model_has_no_routing():
    trained = build_preset("tiny-llama", torch.bfloat16)
    with rl_consistency.patch(trained, cuda_graphs=False):
        model = served(trained)
    Server(model, [[1, 2, 3]]).run([(0, 3)])
    assert model.routing().shape == (3, 0)


def test_settings_that_something_changed_end_the_step(monkeypatch):
    trained = build_preset("tiny-llama", torch.bfloat16)
    with rl_consistency.patch(trained, cuda_graphs=False):
        model = served(trained)
    hidden = torch.zeros(1, trained.config.hidden_size, dtype=torch.bfloat16)
    model.compute_logits(hidden)
    torch.set_float32_matmul_precision("high")
    with pytest.raises(rl_consistency.ConsistencyError, match="float32_matmul_precision"):
        model.compute_logits(hidden)
    torch.set_float32_matmul_precision("highest")


def test_a_digest_is_refused_once_a_product_of_the_library_was_withdrawn(monkeypatch):
    from rl_consistency.kernels.matmul import audit

    trained = build_preset("tiny-llama", torch.bfloat16)
    with rl_consistency.patch(trained, cuda_graphs=False):
        model = served(trained)
    monkeypatch.setattr(audit._counts, "withdrawn", ["nt bf16"])
    with pytest.raises(rl_consistency.ConsistencyError, match="nt bf16.*Start vLLM again"):
        model.digest()


def test_the_fingerprint_is_that_of_the_process():
    trained = build_preset("tiny-llama", torch.bfloat16)
    with rl_consistency.patch(trained, cuda_graphs=False):
        model = served(trained)
        assert model.fingerprint() == rl_consistency.fingerprint().entries


def test_prompts_as_embeddings_are_refused():
    trained = build_preset("tiny-llama", torch.bfloat16)
    with rl_consistency.patch(trained, cuda_graphs=False):
        model = served(trained)
    with pytest.raises(ValueError, match="embeddings are not covered"):
        model(torch.zeros(1), torch.zeros(1), inputs_embeds=torch.zeros(1, 96))


# Mutants: each turns the comparison with training, or the count of routed rows, red.


def _bounds_in_place_of_lengths(monkeypatch, steps):
    """As where vLLM schedules ahead of what it knows."""
    made = steps.Step.__init__

    def wrong(self, common, **options):
        ends = common.seq_lens + (common.seq_lens > 0).int()
        made(self, replace(common, seq_lens=ends, seq_lens_cpu_upper_bound=ends), **options)

    monkeypatch.setattr(steps.Step, "__init__", wrong)


def _padding_is_written(monkeypatch, steps):
    """Slot -1 taken as it is: what lies before the cache, here its end."""
    slots = 16 * (1 + sum(-(-n // 16) for n in LENGTHS))
    monkeypatch.setattr(steps.Step, "slots", lambda self: self.common.slot_mapping % slots)


def _tables_in_another_order(monkeypatch, steps):
    made = steps.SequenceTables
    monkeypatch.setattr(steps, "SequenceTables", lambda *t: made(*t[:3], t[3].flip(0)))


@pytest.mark.parametrize(
    "mutant", [_bounds_in_place_of_lengths, _padding_is_written, _tables_in_another_order]
)
def test_a_mutant_of_a_step_is_seen(mutant, monkeypatch):
    from rl_consistency.integrations.vllm import steps

    trained = build_preset("tiny-llama", torch.bfloat16)
    sequences = sequences_of(trained.config.vocab_size)
    with rl_consistency.patch(trained, cuda_graphs=False), torch.no_grad():
        model = served(trained)
        scored = rl_consistency.token_logprobs(trained, sequences, prompt_lengths=[1] * 6)
    mutant(monkeypatch, steps)
    # The last block is a sequence's.
    found = logprobs_of(model, sequences, blocks=1 + sum(-(-n // 16) for n in LENGTHS))
    assert differing(found, [x.tolist() for x in scored.split()])[0] > 0


def test_a_routed_row_of_padding_is_seen(monkeypatch):
    from rl_consistency.integrations.vllm import steps

    trained = build_preset("tiny-olmoe", torch.bfloat16)
    with rl_consistency.patch(trained, cuda_graphs=False):
        model = served(trained)

    def all_rows(step):
        return torch.tensor([len(step.common.slot_mapping)], dtype=torch.int32)

    monkeypatch.setattr(steps.Step, "used", all_rows)
    Server(model, [[1, 2, 3]], pad=(2, 5)).run([(0, 3)])
    assert model.routing().shape == (3, 8)
