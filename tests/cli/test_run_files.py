import pytest

from rl_consistency.trainers.run_directory.step_files import load_rows


def test_a_missing_or_empty_run_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no run directory"):
        load_rows(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"no metrics\.jsonl"):
        load_rows(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="before its first step"):
        load_rows(tmp_path)
