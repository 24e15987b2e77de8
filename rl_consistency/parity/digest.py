"""SHA-256 of weights and gradients: two runs agree when one short string does.

A tensor enters as its name, dtype, shape and raw bytes, in sorted order of names, so that the
digest does not depend on how a model happens to enumerate its parameters. Tied parameters enter
once, under the name `named_parameters` gives them; a missing gradient is left out, unlike zeros.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from rl_consistency.kernels.reduction.weights_digest import weights_digest
from rl_consistency.models.whole_weights import whole_weights

Tensors = nn.Module | Mapping[str, Tensor | None]

SMALL = 1 << 17
"""Bytes up to which `each_digest` takes a tensor to the host."""


def parameter_digest(model: nn.Module | Mapping[str, Tensor]) -> str:
    """Hexadecimal SHA-256 of all parameters of a model, or of tensors by name.

    Every rank calls it if the parameters are shards; the digest is that of whole ones.
    """
    if not isinstance(model, nn.Module):
        return _digest(model)
    with whole_weights(model) as policy:
        return _digest(dict(policy.named_parameters()))


def joint_digest(each: Mapping[str, str]) -> str:
    """Hexadecimal SHA-256 of what `each_digest` gave, which reads no tensor again."""
    return hashlib.sha256(json.dumps(sorted(each.items())).encode()).hexdigest()


def each_digest(tensors: Tensors) -> dict[str, str]:
    """A digest of each parameter of a model, or of each tensor by name; what is None is left out.

    It has 32 hexadecimal digits, the same on every device. A large tensor is read where it lies.
    The host waits for a GPU once for each. Every rank calls it if the parameters are shards.
    """
    if isinstance(tensors, nn.Module):
        with whole_weights(tensors) as policy:
            return each_digest(dict(policy.named_parameters()))
    # One at a time: a mapping may gather a tensor when it is read.
    found: dict[str, str] = {}
    for name, tensor in tensors.items():
        if tensor is not None:
            # A reduction has a price of its own, for which small tensors are copied and hashed.
            small = tensor.nbytes <= SMALL
            digest = _digest({name: tensor}) if small else weights_digest([(name, tensor)])
            found[name] = digest[:32]
    return found


def list_digest(parts: Sequence[Tensor]) -> str:
    """One digest, of 32 hexadecimal digits, of tensors [any length] in their order.

    The tensors lie on one device.
    """
    lengths = torch.tensor([len(part) for part in parts])
    return weights_digest([("values", torch.cat(list(parts))), ("lengths", lengths)])[:32]


def _digest(tensors: Mapping[str, Tensor]) -> str:
    state = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        # A JSON header ends unambiguously and fixes how many bytes follow it.
        state.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        # A NumPy view would keep FSDP2 from freeing the memory afterwards.
        state.update((ctypes.c_char * len(content)).from_address(content.data_ptr()))
    return state.hexdigest()
