"""A decode step taken from a profile: which kernels, which classes, how much of the time."""

import json

import pytest

from benchmarks.rollout.profile import (
    COLORS,
    Kernel,
    class_of,
    covered,
    draw,
    main,
    one_step,
    shares,
)

NAMES = ["qkv_kernel", "attention_fwd_kernel", "pointer_kernel", "_rotary_kernel"] * 3


def replayed(steps=5, gap=2.0):
    """Graph replays of 12 kernels of 1 us, 1 us apart in each, with a copy before each."""
    kernels, now = [], 100.0
    for step in range(steps):
        kernels.append(Kernel("Memcpy HtoD", now, 0.5, 900 + step))
        now += gap
        for name in NAMES:
            kernels.append(Kernel(name, now, 1.0, step))
            now += 2.0
    return kernels


def test_one_step_goes_from_one_replay_to_the_next():
    step = one_step(replayed())
    assert [k.name for k in step[:-1]] == [*NAMES, "Memcpy HtoD"]
    assert step[0].start == 0.0 and step[-1].start == 12 * 2.0 + 2.0


def test_shares_count_time_in_kernels_and_between_launches():
    found = shares(one_step(replayed()))
    assert found["matmul"] == pytest.approx(6 / 26) and found["attention"] == pytest.approx(3 / 26)
    assert found["norm, rotary"] == pytest.approx(3 / 26)
    assert found["between kernels"] == pytest.approx(1 - 12.5 / 26)
    # The replay covers 23 us of the 26, the copy half of one.
    assert found["between launches"] == pytest.approx(1 - 23.5 / 26)
    late = shares(one_step(replayed(gap=10.0)))
    assert late["between launches"] > found["between launches"]


def test_overlapping_spans_are_covered_once():
    assert covered([(0, 4), (1, 2), (3, 6), (8, 9)]) == 7
    assert covered([]) == 0


def test_a_profile_without_replays_is_refused():
    for kernels in ([], replayed(2), [Kernel("a", float(i), 0.5, i) for i in range(50)]):
        with pytest.raises(ValueError, match="no replays among them"):
            one_step(kernels)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("attention_combine_kernel", "attention"),
        ("tma_kernel", "matmul"),
        ("gate_up_glu_tma_kernel", "matmul"),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "matmul"),
        ("_forward_kernel", "norm, rotary"),
        ("row_statistics_kernel", "sampling"),
        ("combine_kernel", "sampling"),
        ("uniforms_kernel", "sampling"),
        ("Memcpy DtoH (Device -> Pinned)", "other"),
        ("void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add>", "other"),
    ],
)
def test_kernels_are_classed_by_name(name, expected):
    assert class_of(name) == expected


def test_the_picture_is_drawn_from_the_file_alone(tmp_path, capsys):
    meta = {"model": "qwen3-8b", "batch": 64, "context": 1024, "device": "Test GPU"}
    step = [
        {"name": k.name, "start": k.start, "duration": k.duration, "launch": k.launch}
        for k in one_step(replayed())
    ]
    file, picture = tmp_path / "profile.json", tmp_path / "step.png"
    file.write_text(json.dumps({"meta": meta, "step": step}))
    assert main(["--json", str(file), "--picture", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG") and "0.03 ms" in capsys.readouterr().out
    whole, part = draw(json.loads(file.read_text())).axes
    assert len(whole.collections) == len(COLORS)
    assert whole.get_xlim() == pytest.approx((0.0, 0.026))
    assert part.get_xlim()[1] - part.get_xlim()[0] == pytest.approx(0.06 * 0.026)
