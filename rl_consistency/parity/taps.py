"""Taps on a patched model: what each op gives, and what it sends back, token by token.

Inside a `tapped` block the methods of `models/modules.py` report to the taps. They run as they
would without: no hook is set, so fused ops stay fused, and a tapped input is a view of itself. What
a fused op keeps to itself is computed beside it; such a tensor has no gradient to tap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rl_consistency.kernels.attention.paged_cache_triton import HeadNorms
from rl_consistency.kernels.rms_norm.op import rms_norm
from rl_consistency.models import modules
from rl_consistency.models.decoder import CanonicalBaseModel
from rl_consistency.models.layer_graphs import layers_op_by_op
from rl_consistency.models.modules import (
    CanonicalAttention,
    CanonicalEmbedding,
    CanonicalLinear,
    CanonicalRMSNorm,
)
from rl_consistency.models.moe import CanonicalExperts, CanonicalRouter
from rl_consistency.numerics.patched import replaced

RESIDUAL = "residual"
"""The additions of a decoder layer; the other ops are those of `numerics.strict.OPS`."""
OUTPUT, OF_INPUT = "output", "gradient of its input"
LM_HEAD = "lm_head"

_READERS = {
    "q_norm": ("self_attn", "rotary"),
    "k_norm": ("self_attn", "rotary"),
    "v_proj": ("self_attn", "attention"),
    "gate_proj": ("mlp", "glu"),
    "up_proj": ("mlp", "glu"),
}
"""Last part of a module's name -> the part of the layer, and the op, that reads its output alone:
the gradient that arrives there is that op's. Other ops have taps on their inputs."""

_FEEDS = {"o_proj": "attention", "down_proj": "glu"}
"""Last part of a linear map's name -> the op whose output it takes."""


class Tap(NamedTuple):
    """One tensor of a pass, by the op that computed it."""

    op: str
    module: str
    what: str = OUTPUT

    @property
    def layer(self) -> int | None:
        """The decoder layer of the module, counted from 0; None outside the stack."""
        parts = self.module.split(".")
        return int(parts[parts.index("layers") + 1]) if "layers" in parts else None

    @property
    def place(self) -> str:
        return f"{self.op}{'' if self.layer is None else f' of layer {self.layer}'} ({self.module})"

    def __str__(self) -> str:
        return f"{self.place}, {self.what}"


FINAL_NORM = Tap("rms_norm", "model.norm")

_Call = Callable[..., Any]
_Parts = dict[Tap, list[tuple[Tensor, Tensor]]]
"""Tap -> (tokens [n], their rows [n, features]) of each call, on the CPU."""


class Taps:
    """Everything tapped, token by token, sequence after sequence."""

    def __init__(self, model: nn.Module, lengths: Sequence[int], only: Tap | None) -> None:
        self.members: Sequence[int] = range(len(lengths))
        """The sequences of the call at hand, in its order."""
        self._only = only
        self._names = {module: name for name, module in model.named_modules()}
        self._firsts = list(accumulate(lengths, initial=0))
        self._forward: _Parts = {}
        self._backward: _Parts = {}
        self._parameters: dict[Tap, nn.Parameter] = {}
        self._at = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64), 0
        self._attention = self._finished = ""
        self._inside: nn.Module | None = None

    def forward(self) -> dict[Tap, Tensor]:
        """[tokens, features] of each output, in order of execution."""
        return {tap: self._joined(parts) for tap, parts in self._forward.items()}

    def backward(self) -> dict[Tap, Tensor]:
        """[tokens, features] of each gradient and [elements] of each parameter's, in order of the
        backward pass: an op comes after all whose gradients it depends on."""
        found: dict[Tap, Tensor] = {}
        for tap, parts in reversed(self._backward.items()):
            parameter = self._parameters.get(tap)
            if parameter is not None and parameter.grad is not None:
                found[tap] = parameter.grad.detach().reshape(-1).cpu()
            elif parts:
                found[tap] = self._joined(parts)
        return found

    def _joined(self, parts: list[tuple[Tensor, Tensor]]) -> Tensor:
        tokens = torch.cat([tokens for tokens, _ in parts])
        rows = torch.cat([rows for _, rows in parts])
        assert len(tokens) == self._firsts[-1], "a token was tapped twice, or never"
        return rows[tokens.argsort()]

    def gave(self, tap: Tap, value: Tensor, reader: Tap | None = None) -> None:
        """An op's output; `reader`: the only op that reads it, whose gradient arrives there."""
        if self._only in (None, tap):
            self._forward.setdefault(tap, []).append(_taken(value.detach(), *self._at))
        if reader is not None:
            self.sends_back(reader, value)

    def sends_back(self, tap: Tap, value: Tensor) -> None:
        """The gradient that will arrive at this tensor."""
        if value.requires_grad and self._only is None:
            parts, at = self._backward.setdefault(tap, []), self._at
            value.register_hook(lambda gradient: parts.append(_taken(gradient, *at)))

    def given(self, tap: Tap, value: Tensor) -> Tensor:
        """An op's input, as a tensor of the op alone: other readers' gradients do not arrive."""
        if value.requires_grad and self._only is None:
            value = value.view_as(value)
        self.sends_back(tap._replace(what=OF_INPUT), value)
        return value

    def of_parameters(self, op: str, module: nn.Module) -> None:
        """The gradients of a module's own parameters, read at the end."""
        for name, parameter in module.named_parameters(recurse=False):
            tap = Tap(op, self._names[module], f"gradient of {name}")
            self._backward.setdefault(tap, [])
            self._parameters[tap] = parameter

    def reporting(self, report: _Call, run: _Call) -> _Call:
        """A method that reports where its module is of the tapped model."""

        def call(module: nn.Module, *args: Any, **named: Any) -> Any:
            name = self._names.get(module)
            known = run if name is None else partial(report, run, name)
            return known(module, *args, **named)

        return call

    # The wrappers, one for each method that computes something: `run` is the method, `name` that of
    # the module.

    def _call(self, run: _Call, _: str, model: Any, *call: Any) -> Any:
        ids, _, layout, *wanted = call
        rows: list[int] = []
        tokens: list[int] = []
        spans = layout.query_starts, layout.query_lens, layout.context_lens
        for member, start, queries, context in zip(self.members, *spans, strict=True):
            rows += range(start, start + queries)
            end = self._firsts[member] + context
            tokens += range(end - queries, end)
        self._at = torch.tensor(rows), torch.tensor(tokens), ids.shape[0]
        # All rows are taken, in every layer.
        found = run(model, *call[:3])
        return found.index_select(0, wanted[0]) if wanted and wanted[0] is not None else found

    def _leaf(self, run: _Call, name: str, module: Any, x: Tensor) -> Any:
        if name == LM_HEAD or module is self._inside:
            return run(module, x)
        around, _, last = name.rpartition(".")
        if last in _FEEDS:
            self.gave(Tap(_FEEDS[last], around), x)
        if self._finished:  # the first norm after a layer is given its output
            self.gave(Tap(RESIDUAL, self._finished), x)
        self._finished = around.rpartition(".")[0] if last == "down_proj" else ""
        self.of_parameters(module.op, module)
        if x.is_floating_point():
            x = self.given(Tap(module.op, name), x)
        out = run(module, x)
        self.gave(Tap(module.op, name), out, self._reader(around, last))
        return out

    def _gated(self, run: _Call, name: str, down: Any, *gated: Any) -> Any:
        around = name.rpartition(".")[0]
        with torch.no_grad():
            self.gave(Tap("glu", around), modules.glu(*gated))
        self._finished = around.rpartition(".")[0]
        self.of_parameters(down.op, down)
        out = run(down, *gated)
        self.gave(Tap(down.op, name), out)
        return out

    def _route(self, run: _Call, name: str, router: Any, x: Tensor) -> Any:
        self.of_parameters("router", router)
        logits, weights, ids = run(router, self.given(Tap("router", name), x))
        block = name.rpartition(".")[0]
        upward, order = ids.sort(dim=1)  # the stock path has the largest weight first
        self.gave(Tap("router", name, f"{OUTPUT} expert ids"), upward.to(torch.int32))
        self.gave(Tap("router", name, f"{OUTPUT} weights"), weights.detach().gather(1, order))
        self.sends_back(Tap("experts", f"{block}.experts", f"{OF_INPUT} weights"), weights)
        return logits, weights, ids

    def _routed(self, run: _Call, name: str, experts: Any, x: Tensor, *rest: Any, **named: Any):
        self.of_parameters("experts", experts)
        out = run(experts, self.given(Tap("experts", name), x), *rest, **named)
        self.gave(Tap("experts", name), out)
        self._finished = name.rpartition(".mlp")[0]
        return out

    def _reader(self, around: str, last: str) -> Tap | None:
        if around == "model" and last == "norm":
            return Tap("token_logprobs", LM_HEAD, OF_INPUT)
        layer = around.rpartition(".")[0]
        if last in _READERS:
            part, op = _READERS[last]
            return Tap(op, f"{layer}.{part}", f"{OF_INPUT} from {last}")
        if last in ("q_proj", "k_proj") and f"{around}.{last[0]}_norm" not in self._names.values():
            return Tap("rotary", around, f"{OF_INPUT} from {last}")
        return None

    def _addition(self, run: _Call, name: str, norm: Any, x: Tensor, residual: Tensor) -> Any:
        self.of_parameters("rms_norm", norm)
        x = self.given(Tap("rms_norm", name), x)
        self._inside = norm
        normed, total = run(norm, x, residual)
        self._inside = None
        # The sum is the layer before's output where one has finished.
        self.gave(Tap(RESIDUAL, self._finished or name), total)
        self._finished = ""
        around, _, last = name.rpartition(".")
        self.gave(Tap("rms_norm", name), normed, self._reader(around, last))
        return normed, total

    def _inputs(self, run: _Call, name: str, attention: Any, *args: Any) -> Any:
        self._attention = name
        q, k, v = run(attention, *args)
        for part, value in (("q", q), ("k", k)):
            reader = Tap("attention", name, f"{OF_INPUT} {part}")
            self.gave(Tap("rotary", name, f"{OUTPUT} {part}"), value, reader)
        self._attention = ""
        return q, k, v

    def _heads(self, run: _Call, q: Tensor, k: Tensor, *args: Any, norms: HeadNorms | None) -> Any:
        if self._attention and norms is not None:
            # The fused op keeps what its norms give to itself.
            q_normed = rms_norm(q, norms.q_weight, norms.q_eps)
            k_normed = rms_norm(k, norms.k_weight, norms.k_eps)
            self.gave(Tap("rms_norm", f"{self._attention}.q_norm"), q_normed)
            self.gave(Tap("rms_norm", f"{self._attention}.k_norm"), k_normed)
        return run(q, k, *args, norms=norms)

    def _projections(self, run: _Call, *args: Any) -> Any:
        found = run(*args)
        if self._attention:
            for part, value in zip("qkv", found, strict=True):
                self.gave(Tap("linear", f"{self._attention}.{part}_proj"), value)
        return found


def _taken(value: Tensor, rows: Tensor, tokens: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    return tokens, value.reshape(num_rows, -1).cpu()[rows]


@contextmanager
def tapped(model: nn.Module, lengths: Sequence[int], *, only: Tap | None = None) -> Iterator[Taps]:
    """Tap a patched model inside the block.

    Args:
        model: the patched causal LM itself, without a wrapper.
        lengths: tokens of each sequence that the block will run. Its calls may cut and order them
            in any way, if `Taps.members` is set before each.
        only: the one output to keep, and no gradient; None: all.
    """
    taps = Taps(model, lengths, only)
    wrapped: list[tuple[Any, str, _Call]] = [
        (CanonicalBaseModel, "packed_forward", taps._call),
        (CanonicalEmbedding, "forward", taps._leaf),
        (CanonicalLinear, "forward", taps._leaf),
        (CanonicalLinear, "after_glu", taps._gated),
        (CanonicalRMSNorm, "forward", taps._leaf),
        (CanonicalRMSNorm, "after_addition", taps._addition),
        (CanonicalAttention, "_inputs", taps._inputs),
        (CanonicalRouter, "forward", taps._route),
        (CanonicalExperts, "forward", taps._routed),
        (modules, "linear_qkv", taps._projections),
        (modules, "paged_inputs", taps._heads),
    ]
    with ExitStack() as stack:
        for owner, name, report in wrapped:
            reporting = partial if owner is modules else taps.reporting
            stack.enter_context(replaced(owner, name, reporting(report, getattr(owner, name))))
        # Ops are fused where a module has its own forward, which these stand for.
        own = (CanonicalLinear.forward, CanonicalRMSNorm.forward)
        stack.enter_context(replaced(modules, "_FUSED_FORWARDS", own))
        stack.enter_context(layers_op_by_op())
        yield taps
