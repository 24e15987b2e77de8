"""Every benchmark case runs, on a CPU and small, and times the same work on all sides."""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from benchmarks import peers as bench_peers
from benchmarks.bars import BARS
from benchmarks.distributed.suites import distributed_suites
from benchmarks.ops import matmul
from benchmarks.ops.attention import attention_backward, attention_decode, attention_forward
from benchmarks.ops.elementwise import elementwise_cases
from benchmarks.ops.experts import (
    experts_few,
    experts_forward,
    experts_gradient,
    moe_block,
)
from benchmarks.ops.logprobs import logprobs_and_gradients
from benchmarks.ops.matmul import gradient_fold, product, tuned_product
from benchmarks.ops.routing import ROUTINGS
from benchmarks.ops.suites import accuracy_cases, op_suites, random_op_suites
from benchmarks.peers import LIGER_FP32
from benchmarks.rollout.side_by_side import MODELS, vllm_suites
from benchmarks.rollout.suites import (
    named_rollout_suites,
    random_rollout_suites,
    rollout_suites,
)
from benchmarks.shapes import BANDS
from benchmarks.suite import cases, of_seed
from benchmarks.timing import Ceilings, _fields
from benchmarks.train import step
from benchmarks.train.step import (
    named_training_suites,
    random_training_suites,
    training_step,
    training_suites,
)
from benchmarks.trl.grpo import trl_suites
from rl_consistency.cases.case import TINY_SHAPES
from rl_consistency.kernels.core.findings import Winner, findings_of
from rl_consistency.kernels.matmul.cublaslt import certified_to_the_row
from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.tuning.products import product as product_work
from rl_consistency.tuning.tune import TuningReport

CPU = torch.device("cpu")
SIZES = [{"m": m, "n": n, "k": k} for m in (1, 17, 300) for n, k in ((48, 32), (32, 96))]
FOLD = {"tokens": 32, "n": 48, "k": 32}
SPARSE = {"hidden": 64, "intermediate": 48, "experts": 8, "top_k": 3}
TOLERANCE = {"attention": 0.02, "training": 0.01, "token_logprobs": 0.01, "MoE": 0.04}


class Machine:
    """Runs every contestant once instead of timing it, and keeps what they gave."""

    device = torch.device("cpu")

    def __init__(self):
        self.results = {}
        self.race = None

    def copies(self, operand_bytes):
        return 2

    def measure(self, race):
        self.race = race
        contestants = {"ours": race.ours, **race.stock, **race.peers}
        for name, contestant in contestants.items():
            with contestant.context():
                try:
                    self.results[name] = [flat(call()) for call in contestant.calls]
                except (RuntimeError, NotImplementedError):
                    if name == "ours":
                        raise
        seconds = {name: 1.0 for name in self.results}
        if not race.stock.keys() & seconds.keys():
            seconds[next(iter(race.stock))] = 1.0  # no such backend on a CPU
        return _fields(race, seconds, {}, Ceilings(1.0, 1.0).seconds(race))

    def idle_share(self, contestant):
        return 0.25

    def peak_bytes(self, contestant):
        contestant.calls[0]()
        return 5


def flat(result):
    parts = result if isinstance(result, (tuple, list)) else (result,)
    return [part.detach().double() for part in parts]


def sparse(sizes):
    """The sizes under every routing."""
    return [{**sizes, **SPARSE, "routing": routing} for routing in ROUTINGS]


def prefill(length):
    return {"length": length, "batch": 64 // length, "heads": "4/2"}


CASES = [
    *cases("matmul forward", partial(product, "nt"), SIZES),
    *cases("matmul dX", partial(product, "nn"), SIZES),
    *cases("dW fold", gradient_fold, [FOLD]),
    *cases("attention forward", attention_forward, [prefill(32), prefill(64)]),
    *cases("attention backward", attention_backward, [prefill(32)]),
    *cases(
        "attention decode",
        attention_decode,
        [{"batch": batch, "context": 32, "heads": "4/2"} for batch in (1, 2)],
    ),
    *cases(
        "attention forward",
        attention_forward,
        [{"length": 24, "batch": 2, "heads": "6/2", "head_dim": 80}],
    ),
    *cases(
        "attention backward",
        attention_backward,
        [{"length": 24, "batch": 2, "heads": "3/1", "head_dim": 48}],
    ),
    *cases(
        "attention decode",
        attention_decode,
        [{"batch": 2, "context": 21, "heads": "3/1", "head_dim": 80}],
    ),
    *elementwise_cases(((32, 256),), vocabulary=40),
    *cases(
        "token_logprobs forward + backward",
        logprobs_and_gradients,
        [{"tokens": 32, "width": 16, "vocabulary": 50}],
    ),
    *cases("experts", experts_forward, sparse({"tokens": 100})),
    *cases("experts", experts_few, [*sparse({"tokens": 1}), *sparse({"tokens": 5})]),
    *cases("dW of experts", experts_gradient, sparse({"tokens": 96, "length": 24})),
    *cases(
        "MoE block forward + backward",
        moe_block,
        [
            shape
            for family in ("qwen3_moe", "olmoe", "mixtral")
            for shape in sparse({"family": family, "tokens": 64})
        ],
    ),
    *cases(
        "training step",
        training_step,
        [
            {"model": model, "sequences": 2, "length": 32}
            for model in (
                *("tiny-qwen3", "llama-2x64-4/2x16-96-331", "qwen2-2x80-5/1x16-96-331-tied"),
                *("tiny-qwen3-moe", "tiny-olmoe", "tiny-mixtral"),
            )
        ],
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.work} {dict(c.shape)}")
def test_ours_and_stock_do_the_same_work(case):
    torch.manual_seed(0)
    machine = Machine()
    fields = case.run(machine)
    assert fields["ours_us"] > 0 and fields["ratio"] > 0
    race = machine.race
    if race.clock == "events" and race.moved_bytes:
        assert fields["ceiling_fraction"] > 0
    compared = [n for n in race.stock if n in machine.results]
    assert compared or case.work == "dW fold", "torch.mm widens its result on CUDA only"
    limit = TOLERANCE.get(case.work.split()[0], 0.01)
    for name in compared:
        for ours, stock in zip(machine.results["ours"], machine.results[name], strict=True):
            for mine, theirs in zip(ours, stock, strict=True):
                if mine.shape != theirs.shape:  # heads before positions
                    theirs = theirs.transpose(1, 2)
                theirs = theirs.reshape(mine.shape)
                if case.work == "rotary backward":
                    continue  # the same cotangent values lie in another layout
                assert (mine - theirs).norm() <= limit * theirs.norm(), name


def test_peers_that_are_not_installed_are_left_out(monkeypatch):
    monkeypatch.setattr(bench_peers, "find_spec", lambda name: None)
    assert bench_peers.installed() == {}
    for case in CASES:
        case.run(machine := Machine())
        assert machine.race.peers.keys() <= {"torch rms_norm", "index_add_", "grouped_mm alone"}


def test_the_embedding_gradient_adds_what_eager_adds():
    (case,) = (c for c in elementwise_cases(((64, 16),), 8) if c.work == "embedding gradient")
    machine = Machine()
    case.run(machine)
    ((ours,),), ((eager,),) = machine.results["ours"], machine.results["eager"]
    assert (ours - eager).norm() < 0.01 * eager.norm() and ours.norm() > 0


def test_a_wrong_contestant_would_be_noticed():
    product("nt", machine := Machine(), 300, 48, 32)
    ours, stock = machine.results["ours"][0][0], machine.results["cublas"][0][0]
    assert (ours.roll(1, 0) - stock).norm() > 0.01 * stock.norm()


def test_accuracy_rows_hold_the_error_ratio():
    fields = accuracy_cases(TINY_SHAPES)[0].run(Machine())
    assert 0 < fields["error_ratio"] < 1.1 and "gradient_norm" in fields["figures"]


def test_every_bar_names_suites_that_exist_and_no_case_is_there_twice(tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    suites = {**op_suites(), **training_suites(), **rollout_suites(), **distributed_suites()}
    suites |= trl_suites() | random_op_suites(3) | random_training_suites(3)
    suites |= random_rollout_suites(3) | named_training_suites(["llama3.2-1b", "olmoe-1b-7b"])
    suites |= named_rollout_suites(["llama3.2-1b", "olmoe-1b-7b"])
    suites |= vllm_suites(tmp_path, [*MODELS, "qwen3-30b-a3b"])
    assert {name for bar in BARS.values() for name in bar.suites} == suites.keys()
    for cases_of in suites.values():
        assert cases_of
        shapes = [(case.work, case.dtype, *case.shape.items()) for case in cases_of]
        assert len(set(shapes)) == len(shapes)


def test_suites_of_random_shapes_name_their_seed_and_depend_on_it():
    for suites_of in (random_op_suites, random_training_suites, random_rollout_suites):
        suites, others = suites_of(5), suites_of(6)
        assert suites.keys() == others.keys()
        for name, found in suites.items():
            assert name.endswith("_random")
            assert all(case.shape["seed"] == 5 for case in found)
            assert [c.shape | {"seed": 0} for c in found] != [
                c.shape | {"seed": 0} for c in others[name]
            ], name
    products = random_op_suites(5)["matmul_random"]
    for low, high in BANDS:
        assert sum(low <= case.shape["m"] <= high for case in products) == 12
    assert {case.work for case in products} == {"matmul forward", "matmul dX"}


def test_a_case_of_random_shapes_runs_without_its_seed():
    suites = of_seed(5, {"gradient_fold": cases("dW fold", gradient_fold, [FOLD])})
    (case,) = suites["gradient_fold_random"]
    assert case.shape == {"seed": 5} | FOLD
    assert case.run(Machine())["ours_us"] > 0


def test_random_products_run_in_graphs_certified_to_the_row_and_large_ones_of_a_table_do_not():
    for rows, graph_rows, clock in ((300, 256, "events"), (300, 16384, "graph")):
        machine = Machine()
        product("nt", machine, rows, 48, 32, graph_rows=graph_rows)
        assert machine.race.clock == clock
        certified = machine.race.ours.context is certified_to_the_row
        assert certified == (clock == "graph")
        assert len(machine.race.ours.calls) == (2 if clock == "graph" else 1)


def test_a_tuned_product_runs_by_the_winner_of_its_bucket_and_the_users_come_back(monkeypatch):
    work = product_work(CPU, "nt", 32, 48, 32, torch.bfloat16, torch.bfloat16)
    winner = next(name for name in work.candidates if name != work.picked)
    seen = []

    def tuned(works, bench, store, *, clock):
        seen.extend(works)
        store.keep(works[0].entry, Winner(winner, 1.0, 2.0))
        return TuningReport()

    monkeypatch.setattr(matmul, "tune_works", tuned)
    users = findings_of(CPU)
    machine = Machine()
    fields = tuned_product("nt", machine, 17, 48, 32)
    assert [found.shape["m"] for found in seen] == [32]
    assert fields["schedule"] == winner and machine.results["ours"]
    assert findings_of(CPU) is users and users.winner(work.entry) is None


def test_a_tuned_product_whose_candidate_gave_other_bytes_is_an_error(monkeypatch):
    outcome = SimpleNamespace(work=SimpleNamespace(entry="matmul/x"), withdrawn={"tile": "row 3"})
    monkeypatch.setattr(matmul, "tune_works", lambda *_, **__: TuningReport(outcomes=[outcome]))
    with pytest.raises(ConsistencyError, match="other bytes: {'matmul/x: tile': 'row 3'}"):
        tuned_product("nt", Machine(), 17, 48, 32)


def test_a_training_step_says_how_long_the_device_waits_and_ligers_peak_in_fp32(monkeypatch):
    monkeypatch.setattr(step, "patch_by_liger", lambda model: nullcontext)
    fields = training_step(Machine(), "tiny-qwen3", sequences=2, length=8)
    assert fields["figures"] == {"idle_share": 0.25}
    assert fields["peak_bytes"] == {LIGER_FP32: 5}


def test_gradients_in_fp32_are_summed_and_leave_none_behind():
    model = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
    grads = []

    class Peak:
        def peak_bytes(self, contestant):
            for _ in range(2):
                model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
                grads.append(model.weight.grad)

    step._peak_in_fp32(Peak(), None, model)
    assert grads == [None, None]
    model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    assert model.weight.grad is not None


def test_named_models_are_refused_before_anything_is_measured():
    case, *others = named_training_suites(["qwen2.5-0.5b"])["training_step_named"]
    assert case.shape == {"model": "qwen2.5-0.5b", "sequences": 16, "length": 1024}
    sizes = [(case.shape["sequences"], case.shape["length"]) for case in (case, *others)]
    assert sizes == [(16, 1024), (8, 2048), (1, 32768)]
    with pytest.raises(ValueError, match="no model 'qwen'"):
        named_training_suites(["qwen2.5-0.5b", "qwen"])


def test_mixtures_of_experts_are_measured_in_suites_of_their_own():
    models = ["qwen2.5-0.5b", "qwen3-30b-a3b-6l", "olmoe-1b-7b"]
    steps = named_training_suites(models)
    assert {case.shape["model"] for case in steps["training_step_named"]} == {models[0]}
    shapes = [tuple(case.shape.values()) for case in steps["training_step_sparse"]]
    assert shapes == [(m, n, 16384 // n) for m in models[1:] for n in (16, 4)]
    decode = named_rollout_suites(models[1:])
    (cases_of,) = decode.values()
    batches = [case.shape["sequences"] for case in cases_of]
    assert list(decode) == ["rollout_roofline_sparse"] and batches == 2 * [1, 8, 32, 64, 256]
