"""`rl-consistency dashboard`: the panels of a run as a page (a "workspace view") in wandb."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rl_consistency.parity.metric_table import Panel, Section, sections

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Workspace

NAME = "rl_consistency"
"""Name of the page in wandb."""


def run(args: argparse.Namespace) -> int:
    """Print the page, or push it and print where it is; ValueError where wandb refuses."""
    view = workspace(args.entity, args.project, sections(of_experts=args.experts), args.trl)
    if args.verb == "show":
        print(json.dumps(page(view), indent=1))
        return 0
    import wandb

    try:
        if not wandb.login():
            raise ValueError("there is no key for wandb: set WANDB_API_KEY or run `wandb login`")
        print(view.save().url)
    except wandb.Error as error:
        raise ValueError(
            f"wandb does not take the page ({error}): check key, entity and project"
        ) from error
    return 0


def workspace(entity: str, project: str, shown: Sequence[Section], of_trl: bool) -> Workspace:
    """The page of some sections as `wandb_workspaces` has it, with the names of TRL if asked for.

    ValueError where the package is missing.
    """
    try:
        import wandb_workspaces.reports.v2 as reports
        import wandb_workspaces.workspaces as workspaces
    except ImportError as error:
        raise ValueError(
            "this needs wandb and wandb-workspaces, which are not installed: "
            "pip install 'rl-consistency[wandb]'"
        ) from error

    def drawn(panel: Panel, names: list[str]) -> Any:
        if panel.kind == "histogram":
            return reports.MediaBrowser(title=panel.title, media_keys=names)
        if panel.kind == "table":
            return reports.WeavePanelSummaryTable(table_name=names[0])
        looks: dict[str, Any] = {"title_y": panel.unit or None}
        if panel.kind == "difference":
            looks["log_y"] = True
        if panel.kind == "stacked":
            looks["plot_type"] = "stacked-area"
        return reports.LinePlot(title=panel.title, y=[*names], **looks)

    made = []
    for section in shown:
        found = ((panel, [*(panel.trl_keys if of_trl else panel.keys)]) for panel in section.panels)
        panels = [drawn(panel, names) for panel, names in found if names]
        made.append(workspaces.Section(name=section.title, panels=panels, is_open=True))
    return workspaces.Workspace(entity=entity, project=project, name=NAME, sections=made)


def page(view: Workspace) -> dict[str, Any]:
    """What wandb would be sent. Its panels have random ids, here the same each time."""
    spec = view._to_model().spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    sections = spec["section"]["panelBankConfig"]["sections"]
    for number, panel in enumerate(panel for section in sections for panel in section["panels"]):
        panel["__id__"] = f"panel-{number}"
    return spec
