"""A training step taken from a profile: time by kernel, by class, and without any kernel."""

import json

import pytest

from benchmarks.rollout.profile import Kernel, class_of
from benchmarks.train.profile import CLASSES, COLORS, classes, draw, main, summed

NAMES = ["tma_kernel", "attention_hopper_kernel", "attention_backward_hopper_kernel"]


def steps(count=2):
    """Steps of three kernels of 1,000 us, 500 us apart."""
    return [Kernel(name, 1500.0 * i, 1000.0, i) for i, name in enumerate(NAMES * count)]


def test_a_step_is_summed_by_kernel_and_by_class():
    summary = summed(steps(), 2)
    assert summary["step_us"] == pytest.approx((5 * 1500 + 1000) / 2)
    assert summary["idle_us"] == pytest.approx(5 * 500 / 2)
    assert summary["kernels"]["tma_kernel"] == {"us": 1000.0, "launches": 1.0}
    assert summary["idle_before"] == {NAMES[1]: 500.0, NAMES[2]: 500.0, NAMES[0]: 250.0}
    found = classes(summary)
    assert found["matrix products"] == found["attention forward"] == 1.0
    assert found["attention backward"] == 1.0 and found["no kernel"] == pytest.approx(1.25)
    assert sum(found.values()) * 1e3 == pytest.approx(summary["step_us"])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("attention_statistics_kernel", "attention backward"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", "attention backward"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention forward"),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT", "matrix products"),
        ("_outer_tma_kernel", "matrix products"),
        ("statistics_kernel", "logprobs, loss"),
        ("liger_cross_entropy_kernel", "logprobs, loss"),
        ("_backward_kernel", "norm, rotary, GLU"),
        ("void cudnn::fusion::convert_dq_to_16bits<true>(void const*)", "attention backward"),
        ("Memset (Device)", "other"),
    ],
)
def test_kernels_are_classed_by_name(name, expected):
    assert class_of(name, CLASSES) == expected


def test_the_picture_is_drawn_from_the_file_alone(tmp_path, capsys):
    content = {
        "meta": {"tokens": "16 x 1024", "device": "Test GPU"},
        "steps": {"qwen3-0.6b": {"ours": summed(steps(), 2), "liger": summed(steps(3), 3)}},
    }
    file, picture = tmp_path / "profile.json", tmp_path / "step.png"
    file.write_text(json.dumps(content))
    assert main(["--json", str(file), "--picture", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "qwen3-0.6b liger: " in capsys.readouterr().out
    (axes,) = draw(content).axes
    assert len(axes.containers) == len(COLORS)
    assert [t.get_text() for t in axes.get_yticklabels()] == [
        "qwen3-0.6b: ours",
        "qwen3-0.6b: liger",
    ]
