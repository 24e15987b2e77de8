"""New weights in the model that vLLM serves: what arrived, and what may be computed with it.

A worker is not told where a sync ends: TRL sends a parameter a call, verl and vLLM's transfer
engines send buckets. A sync here is all that arrives between two steps of the model, and the step
that follows looks whether it may run. Nothing here imports vLLM, so that a trainer may import it.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rl_consistency.models.whole_weights import whole_weights
from rl_consistency.numerics.errors import ConsistencyError
from rl_consistency.parity.bytes import same_bytes
from rl_consistency.parity.digest import each_digest
from rl_consistency.rollout.weights import model_digest

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
_STACKED = {
    **dict.fromkeys(("gate_proj", "w1"), ("gate_up_proj", 0)),
    **dict.fromkeys(("up_proj", "w3"), ("gate_up_proj", 1)),
    **dict.fromkeys(("down_proj", "w2"), ("down_proj", None)),
}
"""An expert's matrix in a checkpoint -> the parameter [experts, ..] of transformers that holds all
of them, and which half of an expert's rows there."""

_COMPUTED = "rotary_emb.inv_freq"
"""Ends the names in old checkpoints of what a model computes from its config."""

Part = tuple[int, int | None]
"""One matrix within a parameter of all experts: the expert, and the half of its rows."""


def _known(name: str) -> str:
    """A name in a checkpoint of Mixtral as transformers has it."""
    return name.replace(".block_sparse_moe.", ".mlp.")


def _place(parameter: Tensor, part: Part | None) -> Tensor:
    place = parameter.data
    if part is not None:
        place = place[part[0]]
        place = place if part[1] is None else place.chunk(2)[part[1]]
    return place


def _load(param: Tensor, loaded_weight: Tensor, part: Part | None = None) -> None:
    """The `weight_loader` of a parameter: copies in place, since CUDA graphs read its address.

    vLLM's layerwise reload wraps it, and looks for the names of these arguments.
    """
    _place(param, part).copy_(loaded_weight)


class Received:
    """What a model received since its last step."""

    def __init__(self, hf: nn.Module, may_convert: bool) -> None:
        self.own: dict[str, str] = {}  # a parameter's names, several if it is tied, -> the first
        self.modules: dict[str, nn.Module] = {}
        self._beside: dict[nn.Module, list[str]] = {}  # a module's parameters
        self._parts: dict[str, int] = {}  # matrices of a parameter of all experts
        first: dict[int, str] = {}
        for name, parameter in hf.named_parameters(remove_duplicate=False):
            own = self.own[name] = first.setdefault(id(parameter), name)
            if own == name:
                self.modules[own] = hf.get_submodule(own.rpartition(".")[0])
                self._beside.setdefault(self.modules[own], []).append(own)
            parameter.weight_loader = _load  # pyright: ignore[reportAttributeAccessIssue]
            if parameter.dim() == 3:
                self._parts[own] = len(parameter) * (1 + own.endswith(".gate_up_proj"))
        layers: Any = hf.get_submodule("model.layers")
        # Of each window the first layer: what reads it makes keys of NaN in all layers behind, as
        # far as old keys reach, which is further than a window.
        first_of = {each.self_attn.window: i for i, each in reversed([*enumerate(layers)])}
        self.witnesses = first_of.values()
        self.missing: set[str] = set()  # parameters whose weights did not arrive
        self.why = ""
        self.asleep = False
        self.may_convert = may_convert
        self.begin()

    def begin(self) -> None:
        """Forget what arrived: a step runs with it."""
        self._whole: set[str] = set()
        self._some: dict[str, set[Part]] = {}
        self._writer: dict[str, str] = {}
        self.changed = self._on_meta = False

    def parameter(self, own: str) -> Any:
        """As it is now: vLLM puts others in its place, and back."""
        return self.modules[own]._parameters[own.rpartition(".")[2]]

    def find(self, name: str) -> tuple[str, Part | None]:
        """The parameter of a name in a checkpoint; ValueError if unknown."""
        if (name := _known(name)) in self.own:
            return self.own[name], None
        if (found := _EXPERT.fullmatch(name)) is not None:
            stacked, half = _STACKED[found[3]]
            own, expert = f"{found[1]}.{stacked}", int(found[2])
            if own in self.modules and expert < len(self.parameter(own)):
                return own, (expert, half)
        raise ValueError(
            f"weights: {name!r} is no parameter of this model; send the names of its checkpoint, "
            f"such as {next(iter(self.own))!r}."
        )

    def load(self, name: str, tensor: Tensor) -> str | None:
        """Copy a tensor; the name of its parameter if all of that has arrived."""
        own, part = self.find(name)
        parameter, self.changed = self.parameter(own), True
        self._require_fit(name, tensor, _place(parameter, part))
        writer = self._writer.setdefault(own, _known(name))
        if own in self._whole and part is None and writer != _known(name):
            if same_bytes(parameter.data, tensor.to(parameter)):
                return own
            raise ConsistencyError(
                f"weights: {name} and {writer} are one parameter here and arrived with different "
                "bytes, so the trained model does not tie them. Set tie_word_embeddings alike."
            )
        load = getattr(parameter, "weight_loader", _load)
        self._on_meta |= parameter.is_meta
        if parameter.is_meta and load is _load:
            raise ConsistencyError(
                f"weights: {name} goes to the meta device, where it would be lost; begin with "
                "vLLM's start_weight_update, which has loaders keep what arrives."
            )
        load(parameter, tensor, *(() if part is None else (part,)))
        if own in self._whole or part in self._some.get(own, ()):
            self._forget(own)  # of another sync, with no step between
        self._note(own, part)
        if self._whole.issuperset(self._beside[self.modules[own]]) and self.parameter(own).is_meta:
            self._forget(own)  # vLLM waits for more: what came before this update is not in it
            self._note(own, part)
        if own not in self._whole:
            return None
        self.missing.discard(own)
        return own

    def _note(self, own: str, part: Part | None) -> None:
        if part is not None:
            self._some.setdefault(own, set()).add(part)
        if part is None or len(self._some[own]) == self._parts[own]:
            self._whole.add(own)

    def _forget(self, own: str) -> None:
        for other in self._beside[self.modules[own]]:
            self._whole.discard(other)
            self._some.pop(other, None)

    def _require_fit(self, name: str, tensor: Tensor, place: Tensor) -> None:
        if tensor.shape != place.shape:
            has = tuple(place.shape)
            raise ValueError(f"weights: {name} is {tuple(tensor.shape)}; the model has {has}.")
        if tensor.dtype != place.dtype and not (self.may_convert and tensor.is_floating_point()):
            raise ValueError(
                f"weights: {name} is {tensor.dtype}, and the served model is {place.dtype}: "
                "rounded it would be another policy's. Train and serve one dtype (vLLM's --dtype)."
            )

    def distrust(self, why: str) -> None:
        """All parameters must arrive before the next step."""
        self.begin()
        self.missing, self.why, self.changed = set(self.modules), why, True

    def require_weights(self) -> None:
        """ConsistencyError while the weights are not there, or not anybody's."""
        if self.asleep:
            raise ConsistencyError("the weights were asked for while vLLM sleeps; call wake_up.")
        for own in self.modules:
            if own in self.missing:
                raise ConsistencyError(f"{own} has no weights: {self.why}. Send all parameters.")

    def end(self) -> None:
        """ConsistencyError naming the first parameter that a sync left without its weights."""
        self.require_weights()
        arrived = {self.modules[own] for own in (*self._whole, *self._some)}
        for own, module in self.modules.items():
            if self.parameter(own).is_meta:
                raise ConsistencyError(
                    f"{own} is on the meta device in a step: a weight update was started and not "
                    "finished. Pause generation until finish_weight_update."
                )
            # Of a module that received some, vLLM's reload makes the others from fresh memory.
            torn = own in self._some or (self._on_meta and module in arrived)
            if torn and own not in self._whole:
                raise ConsistencyError(
                    f"{own} did not arrive, or not whole, and others of its module did; send all "
                    "parameters of a module in one sync."
                )


_RECEIVED: weakref.WeakKeyDictionary[nn.Module, Received] = weakref.WeakKeyDictionary()


def watch(hf: nn.Module, *, from_checkpoint: bool = True) -> None:
    """Make a patched model ready for what follows, before vLLM records its parameters.

    `from_checkpoint` says that the first load is of one, and not of a trainer.
    """
    _RECEIVED[hf] = Received(hf, from_checkpoint)


def watched() -> list[Received]:
    """What each model of this process received."""
    return list(_RECEIVED.values())


def load_weights(hf: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
    """Copy tensors of a checkpoint, some or all, into a watched model, at the same addresses.

    Names are the checkpoint's or the parameters' own. vLLM's first load, of a checkpoint, may bring
    another floating dtype, which is rounded to nearest as by `from_pretrained`. Returns the names,
    in vLLM's model, of the parameters that are whole. ValueError names a tensor that is unknown, or
    of another shape or dtype; ConsistencyError one that is tied and has other bytes, or would be
    lost. After an error all parameters must arrive.
    """
    received, loaded = _RECEIVED[hf], set[str]()
    if received.asleep:
        raise ConsistencyError("weights arrive while vLLM sleeps; call wake_up first.")
    try:
        with torch.no_grad():
            for name, tensor in weights:
                if not name.endswith(_COMPUTED) and (own := received.load(name, tensor)):
                    loaded.add(f"hf.{own}")
    except BaseException:
        received.distrust("a load failed before its end")
        raise
    received.may_convert = False
    return loaded


def touch(hf: nn.Module) -> None:
    """Somebody may write to parameters in place: take keys that were made before for stale."""
    _RECEIVED[hf].changed = True


def begin_step(hf: nn.Module, caches: Sequence[Any], computed: Sequence[int]) -> None:
    """Before a step of a watched model: look whether its weights are whole, and spoil old keys.

    Args:
        caches: each layer's keys and values, as `keys_and_values`.
        computed: tokens [requests] of which the step's requests have keys in the cache.

    vLLM keeps its prefix cache and the requests under way when weights change. So before the first
    step under new weights all keys of the first layer of each window become NaN, and so do the
    logprobs of whatever reads them, in any later step, also through copied blocks. ConsistencyError
    where all requests of that step would read them, and where weights are not whole, see
    `Received.end`.
    """
    received = _RECEIVED[hf]
    if not received.changed and not received.parameter(next(iter(received.modules))).is_meta:
        return
    received.end()
    # If one request starts from nothing, others may read the keys that it makes in this step.
    if len(computed) and min(computed) > 0:
        raise ConsistencyError(
            "a step after new weights goes on from keys made under the old ones. Abort what is "
            "under way before weights change (vLLM's pause, mode abort), and call "
            "reset_prefix_cache() before the next request."
        )
    for layer in received.witnesses:
        caches[layer].keys_and_values[0].fill_(float("nan"))
    received.begin()


def digest(hf: nn.Module) -> str:
    """`rl_consistency.model_digest` of a watched model; ConsistencyError without its weights."""
    _RECEIVED[hf].require_weights()
    return model_digest(hf)


def digests(hf: nn.Module) -> dict[str, str]:
    """A digest of each parameter of a watched model; errors as those of `digest`."""
    _RECEIVED[hf].require_weights()
    return each_digest(hf)


def check_sync(
    found: Sequence[str],
    model: nn.Module,
    each: Callable[[], Sequence[Mapping[str, str]]] | None = None,
) -> str:
    """Compare all workers' digests with the trained model's, which is returned.

    Args:
        found: `digest` of each worker.
        model: the trained model; if its parameters are shards, every rank calls this.
        each: gives `digests` of each worker; called only where a digest differs.

    ConsistencyError names the worker and the first parameter that differs.
    """
    if not found:
        raise ValueError("check_sync: no worker gave a digest; ask at least one.")
    with whole_weights(model) as policy:
        own = model_digest(policy)
        worker = next((i for i, other in enumerate(found) if other != own), None)
        if worker is None:
            return own
        trained = each_digest(policy)
    what = "give `each`, the digests of parameters, to see where"
    if each is not None:
        served = each()[worker]
        names = dict.fromkeys((*trained, *served))
        first = next((name for name in names if trained.get(name) != served.get(name)), None)
        what = "all parameters agree, so a buffer differs" if first is None else f"first in {first}"
    raise ConsistencyError(
        f"vLLM's worker {worker} serves other weights than the trained model has "
        f"({found[worker][:12]}, not {own[:12]}): {what}. Send the weights again, and draw again "
        "what was drawn since the last sync that agreed."
    )
