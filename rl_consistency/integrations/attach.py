"""`attach`: the patch inside an unmodified trainer of TRL or transformers, and what it answers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from itertools import accumulate
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from transformers import TrainerCallback
from transformers.modeling_outputs import CausalLMOutputWithPast

from rl_consistency.integrations.generation import (
    EngineGeneration,
    watched_backend,
    watched_forward,
    watched_generate,
)
from rl_consistency.integrations.gradient_checks import GradientChecks
from rl_consistency.integrations.mixed_precision import bf16_weights, is_bf16
from rl_consistency.integrations.refusals import (
    Kind,
    SameModel,
    check_engine_options,
    check_gradient_options,
    check_trainer,
    stops_of,
    trainer_kind,
)
from rl_consistency.integrations.rollout_drift import RolloutDrift
from rl_consistency.integrations.trl_vllm import VLLMSync
from rl_consistency.models.packing import PaddedBatch, packed_inputs
from rl_consistency.models.patch import PatchSession, patch
from rl_consistency.models.scoring.scored_rows import Sampling
from rl_consistency.models.scoring.token_logprobs import LabelLogprobs, label_logprobs
from rl_consistency.models.sharding import unwrapped
from rl_consistency.numerics.masters import MasterAdamW
from rl_consistency.numerics.patched import replaced
from rl_consistency.parity.drift import DriftReport
from rl_consistency.parity.gradients import GradientReport
from rl_consistency.rollout.sampling_params import SamplingParams

_log = logging.getLogger(__name__)

_MARK = "_rl_consistency_attachment"
OPTIMIZERS = ("adamw_torch", "adamw_torch_fused")
"""Names of `args.optim` that are torch's AdamW."""


Rollout = Literal["engine", "vllm"]

Observer = Callable[[Tensor, PaddedBatch, LabelLogprobs], None]
"""Sees input ids [B, L], how they were packed, and their scores, in a pass with gradients."""


@dataclass(eq=False)
class LabelAnswer:
    """Canonical logprobs, in the form that the trainer asks for.

    TRL calls `model(input_ids, attention_mask, labels=..., fused_lm_head=True)` for a
    FusedCausalLMOutput; transformers' Trainer reads the loss of `model(..., labels=...)`.
    """

    sampling: Sampling | None = None  # of the labels; None for data
    most_likely: bool = False  # fills in `is_top1`, which costs the LM head a second time
    mean_logits: bool = False
    observers: Sequence[Observer] = ()

    def __call__(
        self,
        policy: nn.Module,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        *,
        labels: Tensor,
        fused_lm_head: bool = False,
        num_items_in_batch: Tensor | int | None = None,
        **others: Any,
    ) -> Any:
        batch = packed_inputs(input_ids, attention_mask, position_ids, others)
        assert input_ids is not None  # packed_inputs asks for them
        if not fused_lm_head:
            _check_labels(batch, labels)
        wanted = {"most_likely": self.most_likely and fused_lm_head}
        wanted["mean_logits"] = self.mean_logits and fused_lm_head
        scores = label_logprobs(policy, batch, input_ids, labels, self.sampling, **wanted)
        for observe in self.observers if torch.is_grad_enabled() else ():
            observe(input_ids, batch, scores)
        count = scores.mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        loss: Any = -scores.logprobs.sum() / count
        if not fused_lm_head:
            return CausalLMOutputWithPast(loss=loss)
        from trl.trainer.utils import FusedCausalLMOutput

        return FusedCausalLMOutput(
            loss=loss,
            log_probs=scores.logprobs,
            entropy=scores.entropy,
            is_top1=scores.most_likely,
            mean_logits=scores.mean_logits,
            label_mask=scores.mask,
        )


def _check_labels(batch: PaddedBatch, labels: Tensor) -> None:
    """ValueError for labels that stock scores from a row that says nothing of them. They are left
    out here, and the trainer's divisor counts them. That in column 0 has no row in stock."""
    starts = torch.zeros_like(batch.mask[batch.mask])
    starts[list(accumulate(batch.packed.layout.query_lens[:-1], initial=0))] = True
    unscored = ~batch.mask | torch.zeros_like(batch.mask).masked_scatter(batch.mask, starts)
    if bool((unscored & (labels != -100))[:, 1:].any()):
        raise ValueError(
            "labels at padding, or at the first token of a sequence that does not begin its row; "
            "set them to -100: nothing that says something of them comes before."
        )


class Attachment:
    """What `attach` has put into a trainer, until `detach()` or the end of the `with` block."""

    def __init__(self, trainer: Any, gradients: dict[str, Any], cuda_graphs: bool) -> None:
        self._trainer, self._model = trainer, trainer.model
        self._gradients, self._cuda_graphs = gradients, cuda_graphs
        self._undo = ExitStack()
        self._sessions: list[tuple[PatchSession, Any]] = []  # and the forward that TRL has set
        self._values: dict[nn.Parameter, Tensor] = {}  # fp32, of weights that were rounded
        self._drift: RolloutDrift | None = None
        self._checks: GradientChecks | None = None

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *exception: object) -> None:
        self.detach()

    @property
    def drift(self) -> DriftReport | None:
        """Drift between generation and training, over all first updates of this process so far.
        None before the first, and where the trainer does not generate."""
        return None if self._drift is None else self._drift.report

    @property
    def gradients(self) -> GradientReport | None:
        """What the last gradient check of this process found; None before the first."""
        return None if self._checks is None else self._checks.last

    @contextmanager
    def stock(self) -> Iterator[Any]:
        """Inside the block the trainer's models compute as they came, stock Hugging Face with TRL's
        forward, on the weights of training: for `generate` and evaluations of others. Gives the
        policy. Training and the rollout engine are refused in it. After it the patch is back, and
        checked: what was changed inside and cannot be honoured is an UnsupportedModelError."""
        with ExitStack() as stack:
            for session, fused in self._sessions:
                model = stack.enter_context(session.stock())
                if fused is not None:
                    stack.enter_context(replaced(model, "forward", fused))
            yield self._model
        for session, _ in self._sessions:
            if not session._in_stock:
                session.check()

    def detach(self) -> None:
        """Give back the trainer and its models as they were found; weights stay. Idempotent, also
        after an exception inside a step. ValueError inside `stock()`, which puts back what it found
        itself."""
        if any(session._in_stock for session, _ in self._sessions):
            raise ValueError("detach() inside attachment.stock(): leave that block first.")
        self._undo.close()
        self._sessions.clear()

    def _set(self, owner: Any, **values: Any) -> None:
        """Attributes of an object's own, put back by `detach`."""
        for name, value in values.items():
            self._undo.enter_context(replaced(owner, name, value))

    def _call_back(self, callback: TrainerCallback) -> None:
        self._trainer.add_callback(callback)
        self._undo.callback(self._trainer.remove_callback, callback)

    def _patch(self, model: Any, answer: LabelAnswer, grad_dtype: torch.dtype | None) -> None:
        """Patch a model; the forward that TRL has set on it comes back with `detach`."""
        fused = vars(model).pop("forward", None)
        if fused is not None:
            self._undo.callback(vars(model).__setitem__, "forward", fused)
        session = patch(model, grad_dtype=grad_dtype, cuda_graphs=self._cuda_graphs)
        self._undo.callback(session.restore)
        self._sessions.append((session, fused))
        vars(model)["answer"] = answer  # restore() takes it off

    def _patch_policy(self, answer: LabelAnswer) -> None:
        """Patch the policy, and let its `generate` be stock: a callback may call it."""
        generate, told = self._model.generate, False

        @wraps(generate)
        def generate_stock(*args: Any, **kwargs: Any) -> Any:
            nonlocal told
            if not told:
                _log.warning(
                    "rl_consistency.attach: model.generate() runs stock, in attachment.stock(); "
                    "what it draws is not what the trainer learns from"
                )
            told = True
            with self.stock():
                return generate(*args, **kwargs)

        self._patch(self._model, answer, self._give_masters())
        self._set(self._model, generate=generate_stock)

    def _patch_reference(self, answer: LabelAnswer) -> None:
        """Patch and freeze the reference model, if there is one."""
        if (model := getattr(self._trainer, "ref_model", None)) is None:
            return
        reference = unwrapped(model)
        self._patch(reference, answer, None)
        for parameter in reference.parameters():
            self._undo.callback(parameter.requires_grad_, parameter.requires_grad)
            parameter.requires_grad_(False)

    def _to_data(self, kind: Kind) -> None:
        """Patch a trainer that learns from given data."""
        of_dpo = kind == "DPOTrainer"
        answer = LabelAnswer(
            most_likely=of_dpo or kind == "SFTTrainer",
            mean_logits=of_dpo,
            observers=self._checks_of(None),
        )
        if kind == "Trainer":
            self._set(self._trainer, predict=_refuse_predictions)
        self._patch_policy(answer)
        self._patch_reference(LabelAnswer())

    def _to_rollouts(
        self, metrics_of: Sequence[str], sampling_metrics: bool, engine: dict[str, Any] | None
    ) -> None:
        """Patch a trainer that generates, and let a RolloutEngine generate, or vLLM if there are no
        options for one."""
        trainer = self._trainer
        sampling = SamplingParams(
            temperature=trainer.temperature,
            top_k=trainer.top_k or 0,
            top_p=1.0 if trainer.top_p is None else trainer.top_p,
            min_p=trainer.min_p or 0.0,
            max_tokens=trainer.max_completion_length,
            seed=trainer.args.seed,
            **stops_of(trainer),
        )
        drift = self._watch(sampling, metrics_of)

        def observe(ids: Tensor, batch: PaddedBatch, scores: LabelLogprobs) -> None:
            told = scores if engine is not None else replace(scores, routing=None)  # vLLM has none
            drift.observe(ids, batch.mask, told)

        observers: list[Observer] = [observe, *self._checks_of(sampling)]
        self._patch_policy(LabelAnswer(sampling, observers=observers))
        self._patch_reference(LabelAnswer(sampling))
        if engine is None:
            sync = VLLMSync(trainer, self._model)
            sync.check()
            self._watch_backend(drift)
            # The weights may have another dtype than at a sync before.
            backend = {"sync_weights": sync.sync_weights, "_weight_metadata": None}
            self._set(trainer.vllm_generation, **backend)
            self._undo.callback(setattr, trainer, "_last_loaded_step", -1)
        else:
            generation = EngineGeneration(trainer, self._model, sampling, drift, engine)
            self._call_back(generation)
            self._set(trainer, vllm_generation=generation, use_vllm=True, vllm_mode="server")
        self._set(
            trainer, vllm_importance_sampling_correction=sampling_metrics, _last_loaded_step=-1
        )
        self._log(drift.take)

    def _to_stock(self, metrics_of: Sequence[str]) -> None:
        """Watch a trainer as it is."""
        trainer, model, drift = self._trainer, self._model, self._watch(None, metrics_of)
        if trainer.use_vllm:
            self._watch_backend(drift)
        else:
            generate = watched_generate(model.generate, drift, trainer.eos_token_ids)
            self._set(model, generate=generate)
        self._set(model, forward=watched_forward(model.forward, drift))
        self._log(drift.take)

    def _watch_backend(self, drift: RolloutDrift) -> None:
        backend = self._trainer.vllm_generation
        self._set(backend, generate=watched_backend(backend.generate, drift))
        if backend.logprobs is None:  # RLOO's own
            self._set(backend, logprobs=0)

    def _watch(self, sampling: SamplingParams | None, metrics_of: Sequence[str]) -> RolloutDrift:
        self._drift = RolloutDrift(self._trainer, sampling, metrics_of)
        self._call_back(self._drift)
        return self._drift

    def _checks_of(self, sampling: Sampling | None) -> list[Observer]:
        """Let the trainer check gradients, if that is asked for; what has to see its passes."""
        if not self._gradients["every"]:
            return []
        self._checks = GradientChecks(self._trainer, self._model, sampling, **self._gradients)
        self._call_back(self._checks)
        self._log(self._checks.take)
        return [self._checks.observe]

    def _round_weights(self) -> None:
        """Leave bf16 autocast out, with bfloat16 weights in its place."""
        trainer = self._trainer
        if is_bf16(trainer):
            rounded = bf16_weights(trainer, unless=lambda: trainer.is_in_train)
            self._values = self._undo.enter_context(rounded)

    def _give_masters(self) -> torch.dtype | None:
        """Let a 16-bit model be updated through fp32 masters, unless DeepSpeed does it or the
        trainer was given an optimizer; returns the dtype of its gradients for `patch`.

        ValueError if the trainer asks for anything but torch's AdamW."""
        trainer, dtype = self._trainer, next(self._model.parameters()).dtype
        if dtype == torch.float32 or trainer.is_deepspeed_enabled or trainer.optimizer is not None:
            return None
        if trainer.args.optim not in OPTIMIZERS:
            raise ValueError(
                f"attach() got optim={trainer.args.optim.value!r} for a model in {dtype}. Set it "
                f"to {' or '.join(OPTIMIZERS)}, or train in float32 (bf16=False, and a model in "
                "float32)."
            )
        stock = trainer.create_optimizer()
        trainer.optimizer = None
        if type(stock) is not torch.optim.AdamW:
            raise ValueError(
                "attach() would put AdamW with fp32 masters in the place of the trainer's "
                f"{type(stock).__name__}. Give it this optimizer (optimizers=), or float32 weights."
            )
        optimizer = MasterAdamW(stock.param_groups, self._values)
        # Training that goes on without the attachment keeps it: there is no other to step with.
        put = replaced(trainer, "optimizer", optimizer, unless=lambda: trainer.is_in_train)
        self._undo.enter_context(put)
        # DistributedDataParallel takes gradients of the weights' dtype only.
        return torch.float32 if trainer.accelerator.num_processes == 1 else None

    def _log(self, take: Callable[[], dict[str, float]]) -> None:
        """Add figures to what the trainer logs in training."""
        trainer, log = self._trainer, self._trainer.log

        def log_with_figures(logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
            if trainer.model.training:
                logs.update(take())
            log(logs, *args, **kwargs)

        self._set(trainer, log=log_with_figures)


def attach(
    trainer: Any,
    *,
    check_gradients_every: int = 0,
    check_gradients_seconds: float | None = None,
    sampling_metrics: bool = False,
    measure_only: bool = False,
    metrics_of: Sequence[str] = (),
    rollout: Rollout = "engine",
    cuda_graphs: bool = True,
    **engine: Any,
) -> Attachment:
    """Let a trainer generate and train in canonical orders, so that both give the same logprobs.

        trainer = GRPOTrainer(...)
        rl_consistency.attach(trainer)
        trainer.train()

    The model is patched, and so is the reference model, which is frozen. The patched model answers
    the trainer's calls with canonical logprobs. 16-bit weights get an AdamW with fp32 masters,
    unless DeepSpeed keeps them or the trainer was given an optimizer. With `bf16=True` fp32 weights
    become bfloat16 under such masters, in the place of autocast, which one line says. In GRPO and
    RLOO a RolloutEngine generates, and the trainer logs the drift between both sides:
    `consistency/...` of the first update on a rollout, `off_policy/...` of later ones. The first
    mismatch is saved as a replay bundle in `output_dir`/replay and localized, with the weights
    after its step; a warning names the op, and training goes on.

    Args:
        trainer: TRL's GRPOTrainer, RLOOTrainer, SFTTrainer or DPOTrainer, or transformers' Trainer,
            for one of the models that `patch` covers. Built, and not training.
        check_gradients_every: steps from one gradient check under the trainer's own loss to the
            next; 0 is never. A difference is a ConsistencyError that names the parameter.
        check_gradients_seconds: after so many seconds of a check no further regrouping begins;
            None is one regrouping a check, in turn.
        sampling_metrics: let TRL compute its own `sampling/...` metrics and importance correction,
            for one more scoring pass per rollout.
        measure_only: patch nothing, and log the drift of the trainer as it is, between Hugging
            Face's `generate` or vLLM and training; of a GRPOTrainer or RLOOTrainer.
        metrics_of: "trl", "verl", "prime_rl", "nemo_rl": their drift metrics of first updates are
            logged too, by their own names and definitions (`parity/foreign_drift.py`).
        rollout: what generates for a GRPOTrainer or RLOOTrainer: a RolloutEngine, or the trainer's
            own vLLM (`use_vllm=True`), server or colocated, which has to run the plug-in
            (docs/vllm.md). Each weight sync is then compared by digest; a difference is a
            ConsistencyError that names the parameter.
        cuda_graphs: generate, and train small models, through CUDA graphs on a GPU. It moves no
            bit, and graphs keep memory.
        engine: options of `RolloutEngine`, for a trainer that generates.

    Returns the attachment, which holds the drift and `detach()`.

    Raises:
        TypeError: another class of trainer, or an unknown option.
        ImportError: a version of TRL whose seams were not read.
        ValueError: attached already, training already, or an argument of the trainer that is not
            covered; it names the argument and what to do. UnsupportedModelError: the same for the
            model. Nothing was changed.
    """
    kind = trainer_kind(trainer)
    if _MARK in vars(trainer):
        raise ValueError("attach() was called on this trainer already; detach() that one first.")
    if rollout not in get_args(Rollout):
        raise ValueError(f"attach() got rollout={rollout!r}; allowed: {get_args(Rollout)}.")
    by_vllm = rollout == "vllm"
    check_trainer(trainer, kind, measure_only=measure_only, by_vllm=by_vllm)
    check_engine_options(engine)
    gradients = {"every": check_gradients_every, "seconds": check_gradients_seconds}
    check_gradient_options(trainer, **gradients)
    generates = kind in ("GRPOTrainer", "RLOOTrainer")
    if not generates and (engine or measure_only or metrics_of or by_vllm):
        others = "measure_only, metrics_of, rollout and engine options"
        raise TypeError(f"a {kind} does not generate; leave out {others}.")
    if by_vllm and engine:
        raise TypeError(f"{', '.join(engine)} is of our engine; leave it, or rollout='vllm', out.")
    if measure_only and (engine or sampling_metrics or check_gradients_every or by_vllm):
        raise TypeError("measure_only=True leaves generation as it is; give attach() nothing else.")
    if sampling_metrics and kind != "GRPOTrainer":
        raise TypeError(f"a {kind} has no sampling metrics; leave out sampling_metrics=True.")
    attachment = Attachment(trainer, gradients, cuda_graphs)
    try:
        attachment._call_back(SameModel(trainer, trainer.model))
        if measure_only:
            attachment._to_stock(metrics_of)
        else:
            backward = _in_one_thread(trainer.accelerator.backward)
            attachment._set(trainer.accelerator, backward=backward)
            attachment._round_weights()
            if generates:
                options = None if by_vllm else engine | {"cuda_graphs": cuda_graphs}
                attachment._to_rollouts(metrics_of, sampling_metrics, options)
            else:
                attachment._to_data(kind)
    except BaseException:
        attachment.detach()
        raise
    attachment._set(trainer, **{_MARK: attachment})
    return attachment


def _in_one_thread(backward: Callable[..., Any]) -> Callable[..., Any]:
    """`Accelerator.backward`, during which autograd has no other threads.

    With one of its own for CUDA nodes, the Python functions of a patched model would run on two
    cores in turn, each with a cold cache. The order of the nodes, and so every bit, is the same.
    """

    @wraps(backward)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.set_multithreading_enabled(False):
            return backward(*args, **kwargs)

    return call


def _refuse_predictions(*_: Any, **__: Any) -> None:
    raise ValueError("predict() needs logits, and a call with labels makes none; detach() first.")
