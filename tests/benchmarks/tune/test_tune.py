"""The tune harness: candidates of other bytes are refused, winners become the shipped findings."""

import json

import torch

from benchmarks.tune.harness import measured, tune, write_shipped
from benchmarks.tune.works import OPS
from rl_consistency.tuning.work import Work


class Machine:
    """Takes as long for a call as its result says."""

    def copies(self, operand_bytes):
        return 2

    def timers(self, calls):
        assert all(len(own) == 2 for own in calls.values())
        return {name: self.timer(float(own[0]().shape[0])) for name, own in calls.items()}

    def timer(self, us):
        return lambda i: us * 1e-6


def work(**changes):
    """Addition in place; the candidate `wrong` gives other bytes."""

    def add(x):
        return x.add_(1.0)

    fields = {
        "op": "matmul",
        "shape": {"layout": "nt", "m": 1, "n": 2, "k": 3},
        "operands": lambda: (torch.arange(8.0),),
        "candidates": {"slow": add, "wrong": lambda x: x + 1.001},
        "picked": "slow",
        "others": {"cublaslt": add},
    }
    return Work(**fields | changes)


def test_a_candidate_of_other_bytes_is_refused_and_not_timed(capsys):
    rows = tune([work()], Machine())
    (row,) = rows.values()
    assert row["refused"] == ["wrong"] and set(row["us"]) == {"slow", "cublaslt"}
    assert row["differing"] == {"cublaslt": 0}
    assert "REFUSED: other bytes  wrong" in capsys.readouterr().out


def test_a_call_that_writes_into_its_operands_is_compared_on_fresh_ones():
    row = measured(work(candidates={"a": lambda x: x.add_(1.0), "b": lambda x: x + 1.0}), Machine())
    assert row["refused"] == [] and set(row["us"]) == {"a", "b", "cublaslt"}


def test_what_a_file_has_is_not_measured_again(tmp_path):
    file = tmp_path / "tune.json"
    tune([work()], Machine(), file)
    before = json.loads(file.read_text())
    assert tune([work(operands=None)], Machine(), file) == before


def test_the_fastest_schedules_are_written_and_what_was_withdrawn_stays(tmp_path):
    def row(m):
        return {
            "op": "matmul",
            "shape": {"layout": "nt", "m": m, "n": 2, "k": 3},
            "us": {"a": 10.0, "b": 8.0, "cublaslt": 7.0},
            "differing": {"cublaslt": 0},
            "refused": [],
        }

    file = tmp_path / "shipped.json"
    file.write_text(json.dumps({"certificates": {}, "withdrawn": {"key": "why"}}))
    write_shipped({"1": row(1), "2": row(64)}, {"device": "Test GPU"}, file)
    names = [f"matmul/nt/bf16/bf16/tma/n2/k3/m{m}" for m in (1, 64)]
    assert json.loads(file.read_text()) == {
        "identity": {"device": "Test GPU"},
        "winners": {name: {"schedule": "b"} for name in names},
        "certificates": {},
        "withdrawn": {"key": "why"},
    }
    assert file.read_text().count('{"') == 2


def test_every_op_names_its_schedules_once_and_one_of_them_is_picked():
    for op, works in OPS.items():
        found = list(works(torch.device("cpu")))
        assert found, op
        for entry in found:
            assert entry.picked in entry.candidates or op == "matmul", entry.key
        assert len({entry.key for entry in found}) == len(found)
