"""docs/metrics.md and docs/recipe.md are what the code says."""

import pytest

from tools import reference


def test_the_reference_fits_the_code():
    assert reference.main(["--check"]) == 0


def test_a_document_that_does_not_fit_is_named_and_written_anew(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(reference, "DOCS", tmp_path)
    assert reference.main(["--check"]) == 1 and not any(tmp_path.iterdir())
    assert "docs/metrics.md, docs/recipe.md: run python tools/ref" in capsys.readouterr().err
    assert reference.main([]) == 0 == reference.main(["--check"])
    (tmp_path / "metrics.md").write_text("# Metrics\n")
    assert reference.main(["--check"]) == 1


@pytest.mark.parametrize("key", ["`rollout.sampling`", "`policy.build`", "`tracking.wandb`"])
def test_nested_sections_have_a_table(key):
    assert f"\n## {key}\n" in reference.recipe()


def test_defaults_bounds_and_choices_are_shown():
    lines = reference.recipe().splitlines()
    for line in (
        "| `micro_batch_size` | integer >= 1 | `8` |",
        "| `betas` | [number >= 0 < 1, number >= 0 < 1] | `[0.9, 0.999]` |",
        "| `gradient_leaves` | integer or list of integer | `1` |",
        '| `on_drift` | `raise`, `warn`, `record` | `"raise"` |',
        "| `learning_rate` | number > 0 | required |",
    ):
        assert any(found.startswith(line) for found in lines), line
