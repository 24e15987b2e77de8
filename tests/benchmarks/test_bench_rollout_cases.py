"""The measuring of `bench rollout` on a tiny model, and its arithmetic on ticks made by hand."""

import time

import pytest
import torch

from benchmarks.results_file import Row
from benchmarks.rollout import measure as bench_rollout_measure
from benchmarks.rollout.cases import (
    decode_case,
    engine_for,
    idle_case,
    long_context_case,
    roofline_case,
    steady_attention,
)
from benchmarks.rollout.copying import (
    check_equal,
    copied_share,
    copying_case,
    copying_model,
    edited_stretch,
)
from benchmarks.rollout.grpo import grpo_step_case
from benchmarks.rollout.measure import (
    Generation,
    ReplayEvents,
    Tick,
    Window,
    replay_events,
    timed_generation,
)
from benchmarks.rollout.models import ModelShelf
from benchmarks.rollout.peers import (
    GENERATE,
    generate_rate,
    hugging_face_case,
    our_rate,
    public_engines_case,
)
from benchmarks.rollout.workload import Workload, requests
from benchmarks.suite import OutOfTime
from benchmarks.timing import Ceilings
from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.rollout.completion import Completion

TINY = "tiny-qwen3"
SPREAD = Workload(groups=2, group_size=4, prompt_len=20, longest=24, shortest=8)
EQUAL = Workload(groups=1, group_size=2, prompt_len=12, longest=6, shortest=6)


class Machine:
    device = torch.device("cpu")
    ceilings = Ceilings(1e10, 1e11)
    deadline = None


@pytest.fixture(scope="module")
def shelf():
    return ModelShelf()


def fields(case):
    found = case.run(Machine())
    Row(suite="rollout", work=case.work, shape=case.shape, dtype=case.dtype, **found)
    return found


def completion(index, token_ids, logprobs=None):
    values = torch.tensor(logprobs or [-1.0] * len(token_ids))
    return Completion(index, 0, list(token_ids), values, "length")


def generation(tokens, count=2, replays=None):
    ticks = [Tick(float(i), n, i) for i, n in enumerate(tokens)]
    done = [completion(i, [0]) for i in range(count)]
    return Generation(
        completions=done,
        seconds=float(len(ticks)),
        ticks=ticks,
        replays=replays or ReplayEvents(),
        statistics=None,
    )


class Event:
    """An event whose time is given."""

    def __init__(self, at):
        self.at = at

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return end.at - self.at


def test_decoding_begins_behind_the_step_that_gave_the_last_its_first_token():
    # Two sequences; the second is prefilled while the first decodes alone, and the first ends.
    run = generation([0, 1, 2, 4, 6, 8, 9, 10])
    assert run.prefill_end == 2 and run.first_token_seconds == 1.0
    window = run.decoding()
    assert (window.steps, window.tokens, window.seconds, window.tokens_before) == (5, 8, 5.0, 2)
    assert window.tokens_per_second == 1.6 and window.step_seconds == 1.0
    steady = run.steady(1)
    assert (steady.steps, steady.tokens, steady.tokens_before) == (2, 4, 4)
    assert run.after_first_tokens().tokens_before == 2


def test_a_step_that_prefills_all_is_no_decode_step():
    assert generation([0, 2, 4, 6, 8]).prefill_end == 1


def test_the_last_step_is_never_steady():
    assert generation([0, 2, 4, 6, 8]).steady(0).steps == 2


def test_sequences_that_never_run_together_are_named():
    with pytest.raises(RuntimeError, match="no step decoded all 2 sequences"):
        generation([0, 1, 2, 3, 4]).decoding()
    with pytest.raises(RuntimeError, match="no steps to measure"):
        generation([0, 2, 4, 6, 8]).steady(10)


def test_idle_is_what_no_replay_covers():
    pairs = [(Event(0.0), Event(8.0)), (Event(10.0), Event(19.0)), (Event(19.0), Event(20.0))]
    events = ReplayEvents(pairs)
    assert events.idle_share() == pytest.approx(0.1)
    assert events.idle_share(1, 3) == 0.0
    assert events.idle_share(0, 1) is None
    run = generation([0, 2, 4, 6], replays=ReplayEvents([pairs[0], *pairs]))
    assert run.window(1, 3).idle_share == pytest.approx(2 / 19)


@pytest.fixture
def log(monkeypatch):
    """What graphs and events do that stand in for those of a GPU."""
    log = []

    class Graph:
        def replay(self):
            log.append("replay")

    class TimingEvent:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append("event")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Event", TimingEvent)
    return log


def test_replays_are_timed_by_events_and_the_method_is_put_back(log):
    before = torch.cuda.CUDAGraph.replay
    with replay_events(torch.device("cuda")) as events:
        torch.cuda.CUDAGraph().replay()
    assert log == ["event", "replay", "event"] and len(events.pairs) == 1
    assert torch.cuda.CUDAGraph.replay is before


@pytest.mark.parametrize("warm_up", [None, "sampling"])
def test_graphs_captured_ahead_of_a_generation_are_timed_in_it(log, monkeypatch, warm_up):
    class Engine:
        stats = None
        replay = None

        def warm_up(self, sampling):
            assert sampling == "sampling"
            self.replay = torch.cuda.CUDAGraph().replay

        def generate(self, prompts, sampling, progress):
            if self.replay is None:
                self.warm_up("sampling")
            self.replay()
            return []

    monkeypatch.setattr(bench_rollout_measure, "finished_seconds", lambda device: 0.0)
    found = timed_generation(Engine(), [], [], torch.device("cuda"), warm_up=warm_up)
    assert log == ["event", "replay", "event"] and len(found.replays.pairs) == 1


def test_attention_of_a_steady_window_counts_every_key():
    window = Window(steps=3, tokens=6, seconds=1.0, tokens_before=4, idle_share=None)
    # Two sequences behind 12 prompt tokens: 14, 15 and 16 keys each.
    assert steady_attention(EQUAL, window) == 2 * (14 + 15 + 16)


def test_a_deadline_ends_a_generation(shelf):
    with shelf.patched(TINY, torch.device("cpu")) as model:
        engine = engine_for(model, EQUAL)
        work = (EQUAL.prompts(0, 300), requests(EQUAL.lengths()), torch.device("cpu"))
        with pytest.raises(OutOfTime):
            timed_generation(engine, *work, time.perf_counter() - 1)
        assert timed_generation(engine, *work).new_tokens == 12


def test_decode_has_a_ratio_a_roofline_and_both_modes(shelf):
    found = fields(decode_case(shelf, TINY, SPREAD))
    assert found["ratio"] == pytest.approx(found["stock_us"] / found["ours_us"])
    assert 0 < found["ceiling_fraction"] < 1
    figures = found["figures"]
    assert figures["strict/new_tokens"] == figures["stock/new_tokens"] == sum(SPREAD.lengths())
    assert figures["strict/prefix_hit_tokens"] > 0 and figures["strict/preemptions"] == 0
    assert 0 < figures["strict/first_token_seconds"] <= figures["strict/seconds"]


def test_one_mode_has_no_ratio(shelf):
    found = fields(decode_case(shelf, TINY, SPREAD, modes=("stock",)))
    assert found["ratio"] is None and found["ceiling_fraction"] is None
    assert set(found["tokens_per_second"]) == {"stock"} and "ours_us" not in found


def test_roofline_idle_and_long_context_rows(shelf):
    found = fields(roofline_case(shelf, TINY, 2, prompt_len=20, new_tokens=16))
    assert 0 < found["ceiling_fraction"] < 1 and 20 < found["figures"]["context"] < 36
    assert fields(idle_case(shelf, TINY, 4, prompt_len=20, new_tokens=16))["ours_us"] > 0
    found = fields(long_context_case(shelf, TINY, 64, 32, new_tokens=16))
    times = found["ours_us"] / found["figures"]["short_us"]
    assert found["figures"]["times_short"] == pytest.approx(times)


def test_the_model_that_copies_really_copies_and_drafts_are_mostly_right(shelf):
    found = fields(copying_case(shelf, TINY, 2, new_tokens=64))
    figures = found["figures"]
    assert 0.85 < figures["copied_share"] < 1.0
    assert figures["acceptance_rate"] > 0.5 and figures["steps"] < figures["plain/steps"] / 2


def test_the_successor_is_certain_and_edits_are_as_many_as_said():
    model, cycle = copying_model(TINY, torch.device("cpu"))
    after = dict(zip(cycle, cycle[1:] + cycle[:1], strict=True))
    with torch.no_grad():
        logits = model(torch.tensor([cycle])).logits[0].float()
    assert logits.argmax(-1).tolist() == [after[token] for token in cycle]
    assert logits.softmax(-1).max(-1).values.min() > 0.99
    prompt = edited_stretch(cycle, 320, 3)
    text = [after[prompt[-1]]]
    while len(text) < 319:
        text.append(after[text[-1]])
    edits = sum(a != b for a, b in zip(prompt, text, strict=False))
    assert 4 < edits < 32


def test_other_bytes_with_speculation_are_an_error():
    plain, same = (generation([0, 1], count=1) for _ in range(2))
    check_equal(plain, same)
    for other in (completion(0, [1]), completion(0, [0], [-1.0000001])):
        same.completions[0] = other
        with pytest.raises(ConsistencyError, match="sequence 0"):
            check_equal(plain, same)
    assert copied_share(plain, [[0, 5]]) == 1.0 and copied_share(plain, [[1]]) == 0.0


def test_a_grpo_step_is_timed_by_phase_and_only_stock_drifts(shelf):
    workload = Workload(groups=1, group_size=4, prompt_len=10, longest=6, shortest=6)
    found = fields(grpo_step_case(shelf, TINY, workload, micro_batch=2, rounds=1))
    figures = found["figures"]
    assert figures["strict/mismatched_tokens"] == 0 < figures["stock/mismatched_tokens"]
    assert figures["strict/tokens"] == figures["stock/tokens"] == 24
    phases = [figures[f"strict/{phase}_seconds"] for phase in ("rollout", "training", "update")]
    assert 1e6 * sum(phases) == pytest.approx(found["ours_us"])


def test_hugging_face_generates_the_same_number_of_tokens(shelf):
    found = fields(hugging_face_case(shelf, TINY, EQUAL, "generate", GENERATE))
    assert found["unavailable"] == {} and found["stock"] in GENERATE
    assert set(found["tokens_per_second"]) == {"ours", *GENERATE}
    assert found["ratio"] == pytest.approx(found["stock_us"] / found["ours_us"])


def test_a_way_that_raises_is_named_and_the_row_has_no_ratio(shelf):
    def refuse(model, workload, bench):
        raise AttributeError("no such method\nhere")

    found = fields(hugging_face_case(shelf, TINY, EQUAL, "generate_batch", {"batch": refuse}))
    assert found["unavailable"] == {"batch": "AttributeError: no such method"}
    assert found["ratio"] is None and found["tokens_per_second"]["ours"] > 0


def test_a_generation_that_ends_early_is_no_measurement(shelf):
    class Short:
        config = type("Config", (), {"vocab_size": 300})

        def generate(self, input_ids, attention_mask):
            return input_ids

    with pytest.raises(RuntimeError, match="not all the tokens asked for"):
        generate_rate(Short(), EQUAL, Machine(), cache=None)


def test_public_engines_that_are_not_installed_are_said(shelf):
    found = fields(public_engines_case(shelf, TINY, EQUAL))
    assert found["unavailable"]["vllm"] == "not installed" and "ratio" not in found


def test_a_model_directory_and_what_is_none(tmp_path, shelf):
    device = torch.device("cpu")
    shelf.model(TINY, device).save_pretrained(tmp_path)
    assert our_rate(shelf, str(tmp_path), EQUAL, Machine()) > 0
    with pytest.raises(ValueError, match="neither a preset nor a directory"):
        shelf.model(str(tmp_path / "absent"), device)


def test_a_model_is_freed_for_the_next_one_and_after_a_failure():
    shelf, device = ModelShelf(), torch.device("cpu")
    first = shelf.model(TINY, device)
    assert shelf.model(TINY, device) is first
    assert shelf.model("tiny-llama", device) is not first
    with pytest.raises(ZeroDivisionError), shelf.patched("tiny-llama", device):
        raise ZeroDivisionError
    assert shelf._model is None
