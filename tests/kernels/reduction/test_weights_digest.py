"""One digest for equal weights, another for any other."""

import hashlib
import json

import pytest
import torch

from rl_consistency.kernels.reduction import weights_digest as module
from rl_consistency.kernels.reduction.weights_digest import (
    PlacedDigest,
    weights_digest,
    words_sums,
)

MASK = 2**64 - 1


def values(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def weights():
    return {
        "a": values(37, 5),
        "b": values(11).bfloat16(),
        "c": values(3, 3, 3).half(),
        "d": torch.arange(7, dtype=torch.uint8),
        "e": torch.zeros(0, 4),
        "f": torch.tensor(2.5),
        "g": values(9).double(),
    }


def digest(named):
    return weights_digest(named.items())


def by_hand(named):
    """The definition, in Python's integers."""

    def mix(x):
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
        return x ^ (x >> 31)

    def mix_again(x):
        x = (x ^ (x >> 32)) * 0xD6E8FEB86659FD93 & MASK
        return x ^ (x >> 29)

    listed = []
    for name, tensor in sorted(named.items()):
        data = bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())
        data += bytes(-len(data) % 4)
        words = [int.from_bytes(data[i : i + 4], "little") for i in range(0, len(data), 4)]
        mixed = [mix(i << 32 | word) for i, word in enumerate(words)]
        sums = [sum(mixed) & MASK, sum(map(mix_again, mixed)) & MASK]
        listed.append([name, str(tensor.dtype), list(tensor.shape), *sums])
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()


def test_the_digest_is_the_documented_one():
    assert digest(weights()) == by_hand(weights())
    assert digest({}) == by_hand({})


def test_the_order_of_the_tensors_does_not_matter():
    assert digest(dict(reversed(weights().items()))) == digest(weights())


def test_strides_and_offsets_do_not_matter():
    plain = weights()
    strided = plain | {"a": plain["a"].t().contiguous().t()}
    for name in "bcd":
        tensor = plain[name]
        padded = torch.cat([tensor.new_ones(1), tensor.flatten()])[1:]  # 1 or 2 bytes off
        strided[name] = padded.view(tensor.shape)
        assert padded.storage_offset() == 1
    assert not strided["a"].is_contiguous()
    assert digest(strided) == digest(plain)


def test_how_a_cpu_cuts_the_words_does_not_matter(monkeypatch):
    expected = digest(weights())
    monkeypatch.setattr(module, "CPU_CHUNK", 7)
    assert digest(weights()) == expected


def test_a_default_device_does_not_matter():
    named = weights()
    expected = digest(named)
    with torch.device("meta"):
        assert digest(named) == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has this on a GPU")
def test_a_default_device_does_not_matter_to_the_kernel():
    pieces = [values(5003).view(torch.int32), values(1).view(torch.int32)]
    expected = words_sums(pieces, [5, 0])
    with torch.device("meta"):
        assert words_sums(pieces, [5, 0]) == expected


def test_gradients_are_not_asked_for():
    plain = weights()
    asked = {n: torch.nn.Parameter(t, t.is_floating_point()) for n, t in plain.items()}
    assert digest(asked) == digest(plain)


def changed():
    """Weights that differ from `weights()` in one thing each."""
    plain = weights()

    def but(**tensors):
        return {name: tensors.get(name, tensor.clone()) for name, tensor in plain.items()}

    flipped = plain["a"].clone()
    flipped.view(torch.int32)[20, 3] ^= 1
    last_byte = plain["d"].clone()
    last_byte[6] ^= 128
    swapped = plain["a"].clone().view(-1)
    swapped[[3, 50]] = swapped[[50, 3]]
    moved_a, moved_g = plain["a"].clone(), plain["g"].clone()
    moved_a[0, 0], moved_g[0] = moved_g[0].clone(), moved_a[0, 0].clone()
    yield "one bit", but(a=flipped)
    yield "one bit of the last byte", but(d=last_byte)
    yield "two words swapped", but(a=swapped.view(37, 5))
    yield "two halves of a word swapped", but(b=plain["b"][[1, 0, *range(2, 11)]])
    yield "values of two tensors exchanged", but(a=moved_a, g=moved_g)
    yield "two tensors exchanged", but(b=plain["c"], c=plain["b"])
    yield "the sign of a zero", but(f=torch.tensor(-0.0))
    yield "a zero", but(f=torch.tensor(0.0))
    yield "another shape", but(a=plain["a"].view(5, 37))
    yield "another dtype of the same bytes", but(a=plain["a"].view(torch.int32))
    yield "a zero more", but(d=torch.cat([plain["d"], plain["d"].new_zeros(1)]))
    yield "another name", {("z" if n == "a" else n): t for n, t in plain.items()}
    yield "one tensor fewer", {n: t for n, t in plain.items() if n != "e"}


def test_every_change_gives_another_digest():
    digests = {digest(weights()): "none"}
    for what, named in changed():
        found = digest(named)
        assert found not in digests, (what, digests[found])
        digests[found] = what


def test_a_sum_without_the_index_would_not_see_a_swap(monkeypatch):
    """Negative control: what the index is for."""
    monkeypatch.setattr(
        torch, "arange", lambda count, device: torch.zeros(count, dtype=torch.int64)
    )
    plain = values(40)
    swapped = plain[[1, 0, *range(2, 40)]]
    assert digest({"a": plain}) == digest({"a": swapped})


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has this on a GPU")
@pytest.mark.parametrize("first", [0, 5, 2**31 + 3])
@pytest.mark.parametrize("offset", [0, 1])
def test_the_kernel_adds_up_what_a_cpu_does(first, offset, monkeypatch):
    monkeypatch.setattr(module, "SPAN", 2048)
    pieces = [values(5003)[offset:].view(torch.int32), values(1).view(torch.int32)]
    expected = [module._cpu_sums(p, f) for p, f in zip(pieces, (first, 0), strict=True)]
    assert words_sums(pieces, [first, 0]) == expected


def test_a_name_given_twice_is_refused():
    with pytest.raises(ValueError, match="two tensors are named 'a'"):
        weights_digest([("a", values(2)), ("a", values(2))])


def test_a_tensor_beyond_the_index_is_refused(monkeypatch):
    monkeypatch.setattr(module, "MAX_BYTES", 100)
    with pytest.raises(ValueError, match="'a' has 104 bytes; allowed: up to 100"):
        weights_digest([("a", values(26))])


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has this on a GPU")
def test_a_digest_by_addresses_is_that_of_what_lies_there_when_it_is_launched(monkeypatch):
    monkeypatch.setattr(module, "SPAN", 2048)
    named = [(name, x) for name, x in weights().items() if name in "af"] + [("z", values(5003))]
    placed = PlacedDigest(named)
    before = placed.launch()
    assert before() == placed.launch()() == weights_digest(named)
    named[0][1][3, 2] += 1
    assert placed.launch()() == weights_digest(named) != before()
    assert PlacedDigest(named[::-1]).launch()() == weights_digest(named)
