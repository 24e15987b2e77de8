import triton

from rl_consistency.kernels.core.launch import cdiv, next_power_of_2


def test_a_quotient_is_rounded_up_as_triton_does():
    for x in (0, 1, 15, 16, 17, 2**31 + 1):
        for y in (1, 16, 48):
            assert cdiv(x, y) == triton.cdiv(x, y)
    assert cdiv(17, 16) == 2 and cdiv(16, 16) == 1


def test_the_next_power_of_two_is_triton_s():
    for n in (1, 2, 3, 64, 65, 4095, 2**31 + 1):
        assert next_power_of_2(n) == triton.next_power_of_2(n)
    assert [next_power_of_2(n) for n in (0, 1, 64, 65)] == [1, 1, 64, 128]
