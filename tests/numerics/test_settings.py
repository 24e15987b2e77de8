import pytest
import torch

from rl_consistency.numerics import settings
from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.numerics.settings import SETTINGS, numeric_settings, verify_settings

pytestmark = pytest.mark.usefixtures("nothing_held")


@pytest.fixture
def loosened():
    """Products in a lower precision and in split sums, as a program around us may have set it."""
    before = [setting.read() for setting in SETTINGS]
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (True, True)
    yield [setting.read() for setting in SETTINGS]
    for setting, value in zip(SETTINGS, before, strict=True):
        setting.write(value)


def test_settings_are_held_inside_and_given_back_outside(loosened):
    assert (True, True) in loosened and "high" in loosened
    with numeric_settings():
        assert [setting.read() for setting in SETTINGS] == [s.required for s in SETTINGS]
        verify_settings()
    assert [setting.read() for setting in SETTINGS] == loosened


def test_a_setting_changed_inside_is_named():
    with numeric_settings():
        torch.set_float32_matmul_precision("medium")
        with pytest.raises(
            ConsistencyError,
            match=r"float32_matmul_precision is 'medium', needs 'highest'.*numeric_settings",
        ):
            verify_settings()
    assert torch.get_float32_matmul_precision() != "medium"


def test_denormals_that_are_flushed_are_named_and_seen_again():
    torch.set_flush_denormal(True)
    try:
        with numeric_settings():
            verify_settings()
            torch.set_flush_denormal(True)
            with pytest.raises(ConsistencyError, match="flush_denormal is True, needs False"):
                verify_settings()
        flushed = torch.tensor(1e-39) * 0.5
        assert flushed == 0
    finally:
        torch.set_flush_denormal(False)
    assert torch.tensor(1e-39) * 0.5 > 0


def test_blocks_may_end_in_any_order(loosened):
    """As two patched models do, when the first is restored before the second."""
    first, second = numeric_settings(), numeric_settings()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    verify_settings()
    second.__exit__(None, None, None)
    assert [setting.read() for setting in SETTINGS] == loosened


def test_every_setting_that_a_library_schedule_needs_is_held():
    reductions = {f"allow_{t}_reduced_precision_reduction" for t in ("bf16", "fp16")}
    flags = {"allow_fp16_accumulation", "allow_tf32", *reductions}
    needed = {"cuda.preferred_blas_library", *(f"cuda.matmul.{flag}" for flag in flags)}
    assert {setting.name for setting in SETTINGS} >= needed


def test_a_setting_that_torch_cannot_read_is_named(monkeypatch):
    """As after `torch.backends.mkldnn.matmul.fp32_precision` was set beside the older switch."""

    def mixed():
        raise RuntimeError("PyTorch is checking whether allow_tf32 is set by the old and new API")

    first = SETTINGS[0]._replace(read=mixed)
    monkeypatch.setattr(settings, "SETTINGS", (first, *SETTINGS[1:]))
    for run in (settings.verify_settings, lambda: settings.numeric_settings().__enter__()):
        with pytest.raises(ConsistencyError, match="float32_matmul_precision cannot be read"):
            run()
