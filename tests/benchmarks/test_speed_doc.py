"""docs/speed.md, the README's table and docs/accuracy.md are what the generators make."""

import json
from dataclasses import replace

import pytest

from benchmarks import accuracy_doc, speed_doc
from benchmarks.results import Results, load
from benchmarks.rows import Row
from benchmarks.speed_doc import (
    BEGIN,
    END,
    document,
    h100_document,
    picture,
    readme_table,
    rewritten,
)

META = {
    "device": "Test GPU",
    "versions": {"torch": "2.11", "triton": "3.6"},
    "kernels_sha256": "0" * 64,
}


def results(complete=True, ratio=1.28):
    step = Row(
        suite="training_step",
        work="training step",
        shape={"model": "qwen3-0.6b", "sequences": 16, "length": 1024},
        dtype="bfloat16",
        ours_us=250_000.0,
        stock_us=320_000.0,
        ratio=ratio,
        tokens_per_second={"stock": 51_200.0, "ours": 65_536.0},
    )
    folds = [
        Row(
            suite="gradient_fold",
            work="dW fold",
            shape={"tokens": tokens, "n": 8, "k": 4},
            dtype="bfloat16",
            ratio=value,
        )
        for tokens, value in ((16, 0.5), (32, None))
    ]
    decode = Row(
        suite="rollout_idle",
        work="decode",
        shape={"model": "qwen3-0.6b", "sequences": 256, "prompt": 512, "new_tokens": 1024},
        dtype="bfloat16",
        ratio=0.99,
        ceiling_fraction=0.5,
        tokens_per_second={"ours": 50_000.0, "stock": 50_505.0},
        figures={"idle_share": 0.021},
        unavailable={"vllm": "not | installed"},
    )
    found = Results()
    for rows in ([step], folds, [decode]):
        record = {"complete": complete, "kernels_sha256": "0" * 64}
        rows = [replace(row, kernels="0" * 12) for row in rows]
        found = found.merged(rows[0].suite, rows, META, record)
    return found


def test_the_documents_are_those_of_the_results_file():
    recorded = load(speed_doc.RESULTS)
    readme = speed_doc.README.read_text("utf-8")
    said = "run python -m benchmarks speed-doc"
    assert rewritten(readme, readme_table(recorded)) == readme, said
    assert speed_doc.DOC.read_text("utf-8") == document(recorded), said
    other = load(speed_doc.H100_RESULTS)
    assert speed_doc.H100_DOC.read_text("utf-8") == h100_document(other), said


def test_the_accuracy_document_is_that_of_its_results_file():
    content = json.loads(accuracy_doc.RESULTS.read_text("utf-8"))
    assert accuracy_doc.DOC.read_text("utf-8") == accuracy_doc.document(content)


def test_the_document_of_an_h100_has_the_bars_that_were_measured_there():
    bars = h100_document(results()).split("## Bars")[1].split("##")[0]
    assert "training step of Qwen3-0.6B and 1.7B against Hugging Face with SDPA, lowest" in bars
    assert "not measured" in document(results()) and "not measured" not in bars


def test_tables_are_made_of_rows():
    text = document(results())
    assert f"\nTest GPU; torch 2.11, triton 3.6; kernels {'0' * 12}.\n" in text
    assert "| qwen3-0.6b, 16 x 1024 | 65,536 | 51,200 |" in text
    assert "| tokens | 16 | 32 |\n| --- | ---: | ---: |\n| n 8, k 4 | 0.50 | error |" in text
    assert (
        "| qwen3-0.6b: decode, 256 x (512 + 1024) | 50,000 | stock 50,505 | 0.99 | 50% | 2.1% "
        "| vllm: not / installed |" in text
    )


def test_suites_of_random_shapes_have_a_line_each_with_their_slowest_case():
    title = "Shapes drawn by a seed"
    assert title not in document(results())
    rows = [
        Row(
            suite="matmul_random",
            work="matmul dX",
            shape={"seed": 3, "m": m, "n": 8, "k": 4},
            dtype="bfloat16",
            ratio=ratio,
        )
        for m, ratio in ((1, 2.0), (96, 0.5), (700, None))
    ]
    record = {"complete": True, "kernels_sha256": "0" * 64}
    text = document(results().merged("matmul_random", rows, META, record))
    assert title in text
    assert "| matmul | 2 | 1.00 | 0.50 | matmul dX: seed 3, m 96, n 8, k 4 |" in text


def test_mixtures_of_experts_have_tables_where_they_were_measured():
    title = "## Experts few: stock time / our time"
    assert title not in document(results())
    row = {"dtype": "bfloat16", "ratio": 1.25}
    few = Row(suite="experts_few", work="experts", shape={"tokens": 8, "experts": 64}, **row)
    model = {"model": "olmoe-1b-7b", "sequences": 16, "length": 1024}
    rates = {"ours": 12_345.0, "stock": 9_876.0}
    step = Row(suite="training_step_sparse", work="-", shape=model, tokens_per_second=rates, **row)
    figures = {"experts_hit": 2345.6, "experts_hit_if_even": 3456.7, "idle_share": 0.01}
    decode = Row(
        suite="rollout_roofline_sparse",
        work="decode step",
        shape={"model": "olmoe-1b-7b", "sequences": 8, "prompt": 960, "new_tokens": 64},
        dtype="bfloat16",
        ceiling_fraction=0.7,
        figures=figures,
    )
    found = results()
    for measured in (few, step, decode):
        record = {"complete": True, "kernels_sha256": "0" * 64}
        found = found.merged(measured.suite, [measured], META, record)
    text = document(found)
    assert f"{title}\n\n| tokens | 8 |\n| --- | ---: |\n| experts 64 | 1.25 |" in text
    assert "| olmoe-1b-7b, 16 x 1024 | 12,345 | 9,876 |" in text
    assert "| 70% | 1.0% | experts hit 2,346, if even 3,457 |" in text


def test_a_row_beside_vllm_shows_ratios_and_what_did_not_run():
    shape = {"model": "qwen3-8b", "sequences": 256, "prompt": 512, "new_tokens": 128}
    figures = {"vllm/ratio": 1.25, "ours/batch_dependent": 0.0, "vllm/batch_dependent": 0.975}
    row = Row(
        suite="rollout_vllm_qwen3-8b",
        work="generate",
        shape=shape,
        dtype="bfloat16",
        ours_us=1.0,
        tokens_per_second={"ours": 8000.0, "vllm": 6400.0},
        figures=figures,
        unavailable={"vllm batch-invariant": "no answer in 240 s"},
    )
    record = {"complete": True, "kernels_sha256": "0" * 64}
    assert (
        "| qwen3-8b: generate, 256 x (512 + 128) | 8,000 | vllm 6,400 | - | - | - | 1.25 x vLLM, "
        "logprobs that depend on the batch 0.0%, vLLM's 97.5%, "
        "vllm batch-invariant: no answer in 240 s |"
    ) in document(results().merged(row.suite, [row], META, record))


def test_a_row_without_sequences_shows_its_figures():
    figures = {"tune_seconds": 77.4, "works": 156, "of_works": 189, "faster": 33}
    row = Row(
        suite="rollout_tune",
        work="tune",
        shape={"model": "qwen3-8b"},
        dtype="bfloat16",
        ours_us=77.4e6,
        figures=figures,
    )
    record = {"complete": True, "kernels_sha256": "0" * 64}
    assert (
        "| qwen3-8b: tune | - | - | - | - | - | 77 s, 156 works, of 189, 33 of them faster |"
    ) in document(results().merged(row.suite, [row], META, record))


def test_a_missed_and_an_incomplete_bar_are_shown_as_such():
    line = "| training step of Qwen3-0.6B and 1.7B against Hugging Face with SDPA, lowest |"
    assert f"{line} 1.28 | &gt;= 1.15 | yes |" in readme_table(results())
    assert f"{line} 1.02 | &gt;= 1.15 | **no** |" in readme_table(results(ratio=1.02))
    cut = readme_table(results(complete=False))
    assert f"{line} 1.28 | &gt;= 1.15 | not all cases measured |" in cut
    cut_and_missed = readme_table(results(complete=False, ratio=1.02))
    assert f"{line} 1.02 | &gt;= 1.15 | **no**; not all cases measured |" in cut_and_missed
    assert "| GRPO step against stock ops | - | &gt;= 0.97 | not measured |" in cut


def test_a_figure_just_short_of_its_target_does_not_read_as_the_target():
    for ratio, figure in ((1.1494, "1.149"), (1.1496, "1.1496"), (1.14996, "1.14996")):
        assert f"lowest | {figure} | &gt;= 1.15 | **no** |" in readme_table(results(ratio=ratio))
    assert "lowest | 1.15 | &gt;= 1.15 | yes |" in readme_table(results(ratio=1.15))


def test_only_what_is_between_the_markers_changes():
    readme = rewritten(f"before\n{BEGIN}\nold\n{END}\nafter\n", "new\n")
    assert readme == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    for text in ("", BEGIN, f"{BEGIN}{BEGIN}{END}"):
        with pytest.raises(ValueError, match="exactly one"):
            rewritten(text, "new")


def test_figures_of_other_kernels_are_noticed_and_the_picture_has_a_line_per_suite():
    assert speed_doc.other_kernels(results()) == ["training_step", "gradient_fold", "rollout_idle"]
    (axes,) = picture(results()).axes
    assert len(axes.get_yticklabels()) == 3
