import json
import os
import re
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from rl_consistency.cli import markup, report
from rl_consistency.cli.plots import save_picture
from rl_consistency.cli.report import _worst_tokens, render
from rl_consistency.numerics import files
from rl_consistency.numerics.fingerprint import fingerprint
from rl_consistency.parity.metric_table import SECTIONS, WORST
from rl_consistency.parity.replay import LOCALIZATION, TEXTS, save_replay_bundle
from rl_consistency.trainers.run_directory.manifest import begin_manifest


def make_run(run_dir, *, mismatched=0, checks=(True, True), summary=None, more=None):
    run_dir.mkdir()
    with open(run_dir / "metrics.jsonl", "w") as stream:
        for step, passed in enumerate(checks, start=1):
            row = {
                "step": step,
                "reward/mean": 0.1 * step,
                "tokens_per_second": 1000.0,
                "time/rollout_seconds": 1.0,
                "consistency/tokens": 500,
                "consistency/mismatched_tokens": mismatched,
                "consistency/mismatch_fraction": mismatched / 500,
                "consistency/logprob_abs_diff/max": 1e-6 * mismatched,
                "stock/tokens": 500,
                "stock/mismatched_tokens": 210,
                "stock/mismatch_fraction": 0.42,
                "stock/logprob_abs_diff/max": 3e-6,
                "consistency/gradient_check/passed": passed,
                "consistency/gradient_check/mismatched_elements": 0 if passed else 3,
            }
            stream.write(json.dumps(row | (more or {})) + "\n")
    (run_dir / "config.yaml").write_text("run:\n  name: <script>alert(1)</script>\n")
    if summary is not None:
        (run_dir / "summary.json").write_text(json.dumps(summary))
    return run_dir


@pytest.mark.thorough
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_run_of_which_no_figure_is_finite_has_a_page_that_says_so(tmp_path, value):
    row = json.loads((make_run(tmp_path / "first") / "metrics.jsonl").read_text().splitlines()[0])
    run_dir = make_run(tmp_path / "run", more=dict.fromkeys(row.keys() - {"step"}, value))
    page = render(run_dir).read_text("utf-8")
    assert f'"verdict bad"><strong>{value} of {value} tokens differ' in page
    assert save_picture(run_dir).stat().st_size > 0


SUMMARY = {
    "consistency/mismatched_tokens": 0,
    "consistency/logprob_abs_diff/max": 0.0,
    "stock/logprob_abs_diff/max": 3.25e-6,
    "consistency/importance_ratio/first_update": 0.99999999,
    "tokens": 51234,
    "final": {"parameter_digest": "abcd", "resumed": False},
}


class Elements(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.seen, self.text = [], []
        self.feed(page)
        self.cells = [part for part in self.text if part.strip()]

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text.append(data)


def read(path):
    return Elements(path.read_text(encoding="utf-8"))


def test_the_page_needs_nothing_but_itself(tmp_path):
    path = render(make_run(tmp_path / "run", summary=SUMMARY))
    assert path == tmp_path / "run" / "report.html"
    page, text = read(path), path.read_text()
    assert not {tag for tag, _ in page.seen} & {"script", "link", "img", "iframe"}
    assert "<script>alert(1)</script>" in "".join(page.text)  # of the recipe
    for _, attributes in page.seen:
        for name in ("src", "href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith("#")
    assert not re.search(r"url\((?!['\"]?#)|@import", text)
    svgs = re.findall(r"<svg .*?</svg>", text, flags=re.DOTALL)
    labels = [ElementTree.fromstring(svg).get("aria-label") for svg in svgs]
    assert labels == [s.title for s in SECTIONS if s is not WORST]


def test_the_verdict_says_which_gradient_checks_had_no_gradient(tmp_path, undrawn):
    run = make_run(tmp_path / "run", more={"consistency/gradient_check/without_gradient": True})
    assert "; in 2 there was no gradient, nothing checked." in render(run).read_text("utf-8")


HOSTILE = """</style></title></pre><img src=x onerror=alert(1)><script>alert(2)</script>' " & {0}"""
TAGS = {
    *("html", "head", "meta", "title", "style", "body", "main", "h1", "h2", "p", "section"),
    *("strong", "table", "tr", "th", "td", "code", "details", "summary", "pre"),
}


def unknown(page):
    """Elements of a page that it does not have by itself, and their attributes."""
    known = ("charset", "http-equiv", "content", "lang", "name", "class")
    wrong = [(tag, attributes) for tag, attributes in page.seen if tag not in TAGS]
    return wrong + [seen for seen in page.seen if not set(seen[1]) <= {*known}]


def hostile_values(tree):
    """Copies of a JSON tree, in each of which one value or name is hostile."""
    items = list(tree.items() if isinstance(tree, dict) else enumerate(tree))
    for key, value in items:
        others = [HOSTILE, [HOSTILE], {HOSTILE: HOSTILE}]
        if isinstance(value, dict | list):
            others += hostile_values(value)
        for other in others:
            yield (
                {**tree, key: other}
                if isinstance(tree, dict)
                else [*tree[:key], other, *tree[key + 1 :]]
            )
        if isinstance(tree, dict):
            yield {**{k: v for k, v in items if k != key}, HOSTILE: value}


def hostile_files(file):
    """What may stand in a file of a run, with one hostile field each."""
    if file.suffix == ".jsonl":
        first, *rest = file.read_text().splitlines(keepends=True)
        return [
            json.dumps(tree) + "\n" + "".join(rest) for tree in hostile_values(json.loads(first))
        ]
    if file.suffix == ".json":
        return [json.dumps(tree) for tree in hostile_values(json.loads(file.read_text()))]
    return [HOSTILE]


SAMPLE = {
    **dict.fromkeys(("prompt", "completion", "answer", "finish_reason"), "text"),
    **{"reward": 0.5, "tokens": 3, "rewards": {"f": 0.5}},
}


def test_no_field_of_any_file_becomes_markup(tmp_path, undrawn, monkeypatch):
    monkeypatch.setattr(report.plots, "section_figure", lambda section, rows: None)
    monkeypatch.setattr(files, "flush", lambda *paths: None)  # takes most of the time
    run = make_run(tmp_path / f"run{HOSTILE.replace('/', '|')}", mismatched=1, summary=SUMMARY)
    (run / "samples.jsonl").write_text(json.dumps({"step": 1, "samples": [SAMPLE]}) + "\n")
    (run / "digests.jsonl").write_text(json.dumps({"step": 1, "weights": {"a": "b"}}) + "\n")
    bundle = bundle_of(run, [-1.0, -2.5], step=3, decode=str)
    (bundle / LOCALIZATION).write_text(json.dumps({"first": {"op": "linear"}}))
    shown = 0
    for file in [
        path for path in sorted(run.rglob("*")) if path.suffix in (".json", ".jsonl", ".yaml")
    ]:
        before = file.read_text()
        for content in hostile_files(file):
            file.write_text(content)
            (run / "report.html").unlink(missing_ok=True)
            try:
                page = read(render(run))
            except ValueError as error:  # another refusal would hide what the page shows
                assert file.name in str(error)
                continue
            assert not unknown(page), (file, content)
            shown += "onerror" in "".join(page.text)
        file.write_text(before)
    assert shown > 60


def test_where_values_are_not_escaped_a_field_becomes_markup(tmp_path, undrawn, monkeypatch):
    """Negative control."""
    monkeypatch.setattr(markup.html, "escape", lambda text: text)
    assert unknown(read(render(make_run(tmp_path / "run"))))


def test_a_browser_is_told_to_run_no_script(tmp_path, undrawn):
    page = read(render(make_run(tmp_path / "run")))
    (policy,) = [
        a["content"] for _, a in page.seen if a.get("http-equiv") == "Content-Security-Policy"
    ]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'" and "script-src" not in rules


def test_tokens_that_met_other_experts_turn_the_verdict_bad(tmp_path, undrawn):
    """Equal logprobs alone do not pass."""
    run = make_run(tmp_path / "run", more={"consistency/rerouted_tokens": 3})
    page = render(run).read_text()
    assert 'bad"><strong>0 of 1,000 tokens differ, 6 met other experts</strong>' in page


def bundle_of(run_dir, training, step, **options):
    return save_replay_bundle(
        run_dir / "replay",
        sequences=[[1, 2, 7, 8], [1, 9]],
        rollout_logprobs=[torch.tensor([-1.0, -2.0]), torch.tensor([-3.0])],
        training_logprobs=[torch.tensor(training), torch.tensor([-3.0])],
        prompt_lengths=[2, 1],
        config={"step": step},
        parameter_digest="d",
        fingerprint=fingerprint("cpu"),
        **options,
    )


def test_the_worst_tokens_are_those_of_the_first_bundle(tmp_path, undrawn):
    run = make_run(tmp_path / "run", mismatched=1)
    assert "no token differed" in _worst_tokens(run)
    first = bundle_of(run, [-1.0, -2.5], step=3)
    for step in range(4, 8):
        bundle_of(run, [-1.0, -2.0 - step], step=step)
    (first / LOCALIZATION).write_text("{}")
    cells = read(render(run)).cells
    assert any(part.startswith("Step 3, replay/bundle-") for part in cells)
    at = cells.index("training − rollout")
    assert cells[at + 1 : at + 7] == ["8", "0", "1", "-2", "-2.5", "-0.5"]
    (first / "bundle.json").write_text("{}")
    assert "is damaged or was renamed" in _worst_tokens(run)


def cells_after(text, head):
    cells = Elements(text).cells
    return cells[cells.index(head) + 1 :]


def test_the_worst_tokens_have_their_texts_where_the_run_wrote_them(tmp_path):
    run = make_run(tmp_path / "run", mismatched=1)
    path = bundle_of(run, [-1.5, -2.75], step=3, decode=lambda ids: {7: "\n <b>", 8: "a'"}[ids[0]])
    text = _worst_tokens(run)
    rows = cells_after(text, "training − rollout")
    assert rows[:2] == ["8", repr("a'")] and rows[7:9] == ["7", repr("\n <b>")]
    assert "<b>" not in text and "\n" not in text
    (path / TEXTS).write_text('{"7": "x"}')
    rows = cells_after(_worst_tokens(run), "training − rollout")
    assert rows[:2] == ["8", "0"] and rows[6:8] == ["7", "'x'"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"8": ', "not JSON"),
        (b"[]", "a JSON object is needed, got list"),
        (b'{"8": 3}', "the text of token 8 is int"),
        (b"\xff", "not JSON in UTF-8"),
    ],
)
def test_damaged_texts_are_said_and_the_ids_stay(tmp_path, content, said):
    run = make_run(tmp_path / "run", mismatched=1)
    path = bundle_of(run, [-1.0, -2.5], step=3, decode=str)
    (path / TEXTS).write_bytes(content)
    text = _worst_tokens(run)
    assert f"{TEXTS}: {said}" in text
    assert cells_after(text, "training − rollout")[:2] == ["8", "0"]


def test_the_same_run_gives_the_same_page(tmp_path):
    run = make_run(tmp_path / "run", summary=SUMMARY)
    begin_manifest(run)
    assert render(run).read_bytes() == render(run).read_bytes()


def test_a_page_that_no_run_wrote_is_not_overwritten(tmp_path, undrawn):
    run = make_run(tmp_path / "run", summary=SUMMARY)
    (run / "report.html").write_text("mine")
    with pytest.raises(ValueError, match=r"report.html is a link, or not what a run of ours wrote"):
        render(run)
    assert (run / "report.html").read_text() == "mine"


@pytest.mark.parametrize(
    ("options", "verdict", "words"),
    [
        ({}, "verdict", ["0 of 1,000 tokens differ", "420 of 1,000", "passed: 2 of 2"]),
        ({"mismatched": 2}, "verdict bad", ["4 of 1,000 tokens differ"]),
        ({"checks": (True, False)}, "verdict bad", ["passed: 1 of 2"]),
    ],
)
def test_the_verdict_turns_bad_on_drift_or_a_failed_check(
    tmp_path, options, verdict, words, undrawn
):
    page = read(render(make_run(tmp_path / "run", **options)))
    assert ("section", {"class": verdict}) in page.seen
    text = " ".join(page.text)
    assert all(word in text for word in words)


def test_the_summary_sets_both_paths_side_by_side_and_never_rounds_to_a_claim(tmp_path, undrawn):
    page = read(render(make_run(tmp_path / "run", summary=SUMMARY)))
    text, at = " ".join(page.text), page.cells.index("logprob_abs_diff/max")
    assert page.cells[at : at + 3] == ["logprob_abs_diff/max", "0.0", "3.25e-06"]
    assert "0.99999999" in text and "51,234" in text
    assert "final/parameter_digest" in text and "abcd" in text


def test_a_run_without_a_summary_whose_name_is_no_utf_8_has_a_page(tmp_path, undrawn):
    text = render(make_run(tmp_path / os.fsdecode(b"run\xff"))).read_text("utf-8")
    assert "<h1>run\ufffd</h1>" in text and "the run has not finished" in text


def test_a_truncated_metrics_line_is_named_and_the_old_report_kept(tmp_path, undrawn):
    run = make_run(tmp_path / "run")
    before = render(run).read_bytes()
    with open(run / "metrics.jsonl", "a") as stream:
        stream.write('{"step": 3, "rew')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 3.*resume the run"):
        render(run)
    assert (run / "report.html").read_bytes() == before


@pytest.mark.parametrize(
    ("summary", "message"), [('{"a": ', "not JSON"), ("[1]", "JSON object is needed, got list")]
)
def test_a_damaged_summary_is_named(tmp_path, summary, message, undrawn):
    run = make_run(tmp_path / "run")
    (run / "summary.json").write_text(summary)
    with pytest.raises(ValueError, match=message):
        render(run)


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "config.yaml", "manifest.json", "summary.json", "report.html"]
)
def test_a_pipe_in_the_place_of_a_file_is_refused_and_not_waited_for(tmp_path, name, undrawn):
    run = make_run(tmp_path / "run", summary=SUMMARY)
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    with pytest.raises(ValueError, match=f"{name} is no regular file"):
        render(run)


def test_where_a_pipe_counts_as_a_file_it_is_waited_for(tmp_path, monkeypatch, undrawn):
    """Negative control: the page is not there until somebody has written into the pipe."""
    monkeypatch.setattr(Path, "is_file", Path.exists)
    pipe = make_run(tmp_path / "run") / "summary.json"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as pool:
        page, writer = pool.submit(render, pipe.parent), None
        while writer is None and not page.done():
            with suppress(OSError):  # opening fails until the command reads
                writer = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        with open(writer, "w") as stream:
            stream.write('{"name": "from the pipe"}')
    assert "from the pipe" in page.result().read_text()


def test_what_is_not_a_run_directory_is_refused(tmp_path, undrawn):
    run = make_run(tmp_path / "run")
    for missing in ("config.yaml", "metrics.jsonl"):
        (run / missing).unlink()
        with pytest.raises(FileNotFoundError, match=f"no {missing}"):
            render(run)
    with pytest.raises(FileNotFoundError, match="no run directory"):
        render(tmp_path / "nowhere")
