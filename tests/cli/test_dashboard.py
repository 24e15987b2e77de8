"""The page in wandb: the panels of the report, as wandb-workspaces makes them of the data."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from rl_consistency.cli.main import main
from rl_consistency.parity.histograms import HISTOGRAMS
from rl_consistency.parity.metric_table import SECTIONS, WORST_TOKENS, all_metrics, sections

GOLDEN = Path(__file__).with_name("dashboard.json")
"""Written by `rl-consistency dashboard show`, with the version that constraints-cpu.txt pins."""
MEDIA = {*(histogram.wandb for histogram in HISTOGRAMS), WORST_TOKENS}
PANELS = [panel for section in SECTIONS for panel in section.panels]
# wandb-workspaces 0.4.13 is written for pydantic 1 and 2.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
needs_workspaces = pytest.mark.skipif(
    find_spec("wandb_workspaces") is None, reason="wandb-workspaces is an optional extra"
)


def test_every_panel_shows_something_that_is_described():
    panels = [panel for section in sections(of_experts=True) for panel in section.panels]
    assert all(panel.keys for panel in panels)
    assert {key for panel in panels for key in panel.keys} >= MEDIA
    described = {name for name, _ in all_metrics()}
    assert {curve.key for panel in panels for curve in panel.curves} <= described


@needs_workspaces
def test_the_page_is_the_golden_one(capsys):
    assert main(["dashboard", "show"]) == 0
    page = json.loads(capsys.readouterr().out)
    assert page == json.loads(GOLDEN.read_text())
    sections = page["section"]["panelBankConfig"]["sections"]
    assert [section["name"] for section in sections] == [section.title for section in SECTIONS]
    assert sum(len(section["panels"]) for section in sections) == len(PANELS)


@needs_workspaces
def test_the_page_of_a_trl_run_has_its_names(capsys):
    assert main(["dashboard", "show", "--trl"]) == 0
    text = capsys.readouterr().out
    for key in ("train/consistency/mismatch_fraction", "train/grad_norm", WORST_TOKENS):
        assert f'"{key}"' in text
    assert '"train/stock' not in text and '"stock/' not in text and '"reward/mean"' not in text
    assert [panel.title for panel in PANELS if not panel.trl_keys] == ["Tokens per second"]


@needs_workspaces
def test_what_is_pushed_is_what_is_shown_and_its_address_is_printed(capsys, monkeypatch):
    import wandb
    from wandb_workspaces.workspaces import interface

    sent = []

    def upsert(view):
        sent.append(view)
        return {"upsertView": {"view": {"id": "1", "name": "nw-abc-v"}}}

    monkeypatch.setattr(wandb, "login", lambda: True)
    monkeypatch.setattr(wandb, "Api", lambda: None)
    monkeypatch.setattr(interface.internal, "upsert_view2", upsert)
    monkeypatch.setattr(interface, "get_app_url", lambda api: "https://wandb.example")
    assert main(["dashboard", "push", "--entity", "us", "--project", "bits"]) == 0
    assert capsys.readouterr().out.endswith("https://wandb.example/us/bits?nw=abc\n")
    (view,) = sent
    assert (view.entity, view.project, view.display_name) == ("us", "bits", "rl_consistency")
    pushed = json.loads(view.spec.model_dump_json(by_alias=True, exclude_none=True))
    golden = json.loads(GOLDEN.read_text())
    for spec in (pushed, golden):
        for section in spec["section"]["panelBankConfig"]["sections"]:
            for panel in section["panels"]:
                del panel["__id__"]
    assert pushed == golden


@needs_workspaces
def test_without_a_key_the_page_is_not_pushed_and_the_remedy_named(capsys, monkeypatch, tmp_path):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    for name in ("HOME", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    assert main(["dashboard", "push", "--entity", "us", "--project", "bits"]) == 2
    assert "check key, entity and project" in capsys.readouterr().err


def test_without_the_package_the_remedy_is_named(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    assert main(["dashboard", "show"]) == 2
    assert "pip install 'rl-consistency[wandb]'" in capsys.readouterr().err
