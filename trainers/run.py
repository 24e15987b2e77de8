"""A whole run: policy, data, warm start, training steps, checkpoints, summary."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, cast
from uuid import uuid4

from rl_consistency.distributed.world import World, require_same_facts
from rl_consistency.models.patch import patch
from rl_consistency.models.whole_weights import whole_weights
from rl_consistency.numerics.files import remove_leftovers
from rl_consistency.numerics.fingerprint import Fingerprint
from rl_consistency.numerics.strict import current
from rl_consistency.parity.digest import parameter_digest
from rl_consistency.trainers.algorithms.critic import Critic
from rl_consistency.trainers.algorithms.grpo import GRPOTrainer
from rl_consistency.trainers.algorithms.ppo import PPOTrainer
from rl_consistency.trainers.algorithms.rollout_engine import engine_of
from rl_consistency.trainers.config.recipe import RunConfig, require_inputs
from rl_consistency.trainers.data.prompts import encode_targets, load_prompts, overlong_told
from rl_consistency.trainers.dry_run import rehearse
from rl_consistency.trainers.foreign_calls import end_a_stray
from rl_consistency.trainers.hooks import ConsistencyHook, slow_checks
from rl_consistency.trainers.hub import model_directory
from rl_consistency.trainers.interrupts import interrupts_heard
from rl_consistency.trainers.launch import (
    check_machine,
    engines_off,
    join,
    refuse_many_processes,
    threads,
)
from rl_consistency.trainers.optimizer import PolicyOptimizer
from rl_consistency.trainers.policy import check_policy, load_policy, unread_sampling
from rl_consistency.trainers.progress import Progress
from rl_consistency.trainers.reward_functions import RewardError
from rl_consistency.trainers.rewards import fitting_rewards
from rl_consistency.trainers.run_directory.checkpoint import (
    Checkpoint,
    capture,
    load_weights,
    read_weights,
    restore,
    save_checkpoint,
    save_weights,
    seeded,
)
from rl_consistency.trainers.run_directory.directory import (
    CHECKPOINTS,
    METRICS,
    REFERENCE,
    REPLAY,
    check_directory,
    full_disk_explained,
    locked,
    newest_checkpoint,
    open_directory,
    write_config,
)
from rl_consistency.trainers.run_directory.inputs import (
    CHANGEABLE,
    common_settings,
    data_digests,
    fingerprint_of,
    policy_digests,
    reward_digests,
    settings,
)
from rl_consistency.trainers.run_directory.step_files import (
    StepFiles,
    passed,
    read_metrics,
    summary_of,
    write_summary,
)
from rl_consistency.trainers.services import check_wandb
from rl_consistency.trainers.strategies.build import build_strategy, check_canonical
from rl_consistency.trainers.tracking import (
    RunOutput,
    Say,
    TrackerSet,
    take_steps,
    trackers_of,
)
from rl_consistency.trainers.update_rules import check_optimizer
from rl_consistency.trainers.warm_start import warm_start

EQUAL, SKIPPED = "reward/equal_group_fraction", "policy/skipped_updates"
HOOK_SETTINGS = {
    *("gradient_check_every", "value_check_every", "shadow_every", "shadow_budget", "on_drift")
}


def quiet(line: str) -> None:
    """Shows no phase."""


def train(
    config: RunConfig,
    *,
    resume: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    announce: Say = print,
    starting: Say = quiet,
    finish: Callable[[], None] = lambda: None,
    rewards: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
) -> dict[str, Any]:
    """Run a recipe to its end and return the summary, which is also written to `summary.json`.

    `resume` continues from the newest checkpoint of the run directory, also with more steps or with
    other `CHANGEABLE` keys than the run was begun with, which it records. `overwrite` removes the
    run that the directory already holds. `announce` is told, line by line, what goes on, and
    `starting` each phase before the first step, at last "". `finish` is called once the summary is
    written: the trackers learn that the run failed if it raises, or on drift. `rewards` are
    functions by the names that they have in the recipe; a resumed run needs the same ones, by their
    source.

    `dry_run` checks everything, takes one small step, and returns its metrics. It leaves no file.

    A signal with a handler in Python ends the run after its step and a checkpoint of it.
    ValueError on bad configuration, data, policy, rewards or checkpoint; ConsistencyError on drift,
    where the recipe says `on_drift: raise`.
    """
    if dry_run:
        refuse_many_processes()
    config = check_machine(config)
    given = {"resume": str(resume), "overwrite": str(overwrite)}
    with ExitStack() as stack:
        announce = RunOutput(announce)
        stack.enter_context(engines_off())
        world = join(config)
        stack.enter_context(world.naming_others(f"a gather or a sum of {config.training.strategy}"))
        first = world.rank == 0
        announce = announce if first else RunOutput(quiet)
        require_same_facts(world, common_settings(config) | given, when="before anything is read")
        if world.size > 1 and not config.consistency.ordered:
            announce(f"not ordered: the weights depend on the number of processes, {world.size}")
        with world.agreed("the run directory"):
            if first:
                modes = {"resume": resume, "overwrite": overwrite, "dry_run": dry_run}
                if told := check_directory(config, **modes):
                    announce(told)
                stack.enter_context(full_disk_explained(config.run.output_dir))
                if resume:
                    stack.enter_context(locked(config.run.output_dir))
            wandb = check_wandb(config.tracking.wandb, announce) if first else None
        stack.enter_context(threads(config.run.num_threads))
        stack.enter_context(seeded(config.run.seed))
        stack.enter_context(config.consistency.strictness())
        # Everything that may be refused is refused before the directory is touched.
        with world.agreed("the inputs"):
            with seeded(config.run.seed):  # a module that draws as it is imported changes no run
                found = require_inputs(config, rewards).functions
            starts = starting if first else quiet
            run = _Run(config, announce, stack, world, starts, (rewards, found))
        require_same_facts(world, run.continued_under.entries, when="before the first step")
        if dry_run:
            return rehearse(run, announce)
        first_step = run.restore() if resume else run.begin(overwrite=overwrite)
        run.progress.starts("")
        with world.agreed("the trackers"):
            trackers = TrackerSet(trackers_of(run, wandb) if first else [])
        with trackers:
            take_steps(run, trackers, first_step, begins=not resume)
            with whole_weights(run.model):
                summary = world.from_first("the summary", run.summarize)
            world.from_first("the end", finish)
            trackers.failed = not passed(summary)
        return summary


class _Run:
    """The parts of one run, and how they are saved and restored; `stack` undoes the patches."""

    def __init__(
        self,
        config: RunConfig,
        announce: RunOutput,
        stack: ExitStack,
        world: World,
        starting: Say,
        rewards: tuple[Mapping[str, Callable[..., Any]], Mapping[str, Callable[..., Any]]],
    ):
        self.began, self.process = time.perf_counter(), os.getpid()
        self.config, self.directory = config, config.run.output_dir
        self.announce, self.stack = announce, stack
        self.world, self.first = world, world.rank == 0
        compiles, steps = config.run.device == "cuda", config.training.steps
        self.progress = progress = Progress(steps, compiles=compiles, starts=starting)
        check_canonical(config)
        policy, self.commits = config.policy, dict[str, str]()
        if (source := policy.source) is not None:
            directory, commit = model_directory(source)
            policy = policy.model_copy(update={"path": directory, "hub": None})
            self.commits |= {f"policy {source}": commit} if commit else {}
        progress.starts(f"loading the weights of {source}" if source else "building the policy")
        self.model, self.tokenizer = load_policy(
            policy, config.tokenizer, seed=config.run.seed, device=config.run.device
        )
        check_policy(config, self.model)
        check_optimizer(config.optimizer, dict(self.model.named_parameters()))
        if told := unread_sampling(self.model):
            announce(told)
        self.model.train()
        inputs = settings(config) | policy_digests(self.model, self.tokenizer)
        progress.starts("reading the data")
        sizes = self.model.config
        limits = {"context_length": sizes.max_position_embeddings, "vocab_size": sizes.vocab_size}
        self.train_set, self.eval_sets = load_prompts(config, self.tokenizer, **limits)
        for prompts in (self.train_set, *self.eval_sets.values()):
            self.commits |= {f"data {name}": commit for name, commit in prompts.commits.items()}
        if told := overlong_told(config, self.train_set, self.eval_sets):
            announce(told)
        if config.warm_start.steps:
            targets = encode_targets(self.train_set, self.tokenizer, **limits)
            batch = min(config.warm_start.batch_size, len(targets))
            config.consistency.gradient_leaves.parts(batch)
            self.warm_start_targets = targets
        evaluations = self.eval_sets.values()
        given, found = rewards
        sets = self.train_set, *evaluations
        self.rewards = fitting_rewards(config, *sets, given=given, found=found)
        self.reference = copy.deepcopy(self.model) if config.algorithm.kl_coefficient else None
        self.reference_digest: str | None = None
        self.critic = Critic(config, self.model, stack) if config.algorithm.of_ppo else None
        progress.starts("patching the policy")
        session = stack.enter_context(patch(self.model, **config.training.patch))
        if not current().stock:
            session.verify()
        self.fingerprint = fingerprint_of(config)
        inputs |= data_digests(self.train_set, self.eval_sets) | reward_digests(self.rewards)
        self.continued_under = Fingerprint(self.fingerprint.entries | inputs)
        self.warm_start_loss, self.resumed = float("nan"), False
        self.wandb_run_id, self.first_step = uuid4().hex[:8], 1
        self.mlflow_run_id: str | None = None
        self.no_signal = NoSignal(announce)
        self.failure: Exception | None = None

    def begin(self, *, overwrite: bool) -> int:
        """Open the run directory and do the warm start; returns the first step."""
        with self.world.agreed("a new run directory"):
            if self.first:
                self.directory.mkdir(parents=True, exist_ok=True)
                self.stack.enter_context(locked(self.directory))
                open_directory(self.config, overwrite=overwrite, commits=self.commits)
                self._open_step_files()
        self._join()
        if self.config.warm_start.steps:
            self.progress.starts("warm start")
            self.warm_start_loss = warm_start(
                self.train_set.prompts,
                self.warm_start_targets,
                self.config.warm_start,
                self.ranks,
                parts=self.train_set.parts,
                seed=self.config.run.seed,
                announce=self.announce,
            )
        if self.reference is not None:
            save = partial(save_weights, self.directory / REFERENCE, self.model)
            with whole_weights(self.model):
                self._freeze_reference(self.world.from_first("the reference", save))
        self._assemble()
        return 1

    def restore(self) -> int:
        """Load the newest checkpoint, on every rank; returns the step that follows it."""
        self.progress.starts("resuming from the newest checkpoint")
        with self.world.agreed("the checkpoint"):
            checkpoint = newest_checkpoint(self.config, self.continued_under, CHANGEABLE)
            load_weights(self.model, checkpoint.weights)
            if self.critic is not None:
                self.critic.load(checkpoint)
        found = {"the checkpoint": str(checkpoint.step)}
        require_same_facts(self.world, found, when="before the first step")
        self._freeze_reference(checkpoint.extra["reference_digest"])
        with self.world.agreed("the run directory"):
            if self.first:
                self._open_step_files(checkpoint.extra["step_files"], checkpoint.changes)
                # All that may be refused has been: from here on the directory changes.
                remove_leftovers(self.directory)
                remove_leftovers(self.directory / CHECKPOINTS)
                write_config(self.config)
        self._join()
        self._assemble(checkpoint)
        self.optimizer.load(checkpoint.optimizer, checkpoint.schedule)
        self.hook.load_state_dict(checkpoint.totals)
        self.trainer.extra_rounds = checkpoint.extra["extra_rounds"]
        self.warm_start_loss = checkpoint.extra["warm_start_loss"]
        self.wandb_run_id, self.resumed = checkpoint.extra["wandb_run_id"], True
        self.mlflow_run_id = checkpoint.extra.get("mlflow_run_id")
        self.first_step = checkpoint.step + 1
        restore(checkpoint.extra["random_state"])
        self.began -= checkpoint.extra.get("seconds", 0.0)
        self.announce(f"resumed from {checkpoint.path}")
        for change in checkpoint.changes:
            told = "{key}: {old} until now, {new} from here on; moments are kept"
            self.announce(told.format(**change))
        return checkpoint.step + 1

    def _freeze_reference(self, digest: str | None) -> None:
        """Take the weights that the run began with from their file, for the KL term."""
        if self.reference is not None and digest is not None:
            with self.world.agreed("the reference"):
                load_weights(self.reference, read_weights(self.directory / REFERENCE, digest))
            self.stack.enter_context(patch(self.reference.requires_grad_(False)))
            self.reference_digest = digest

    def _join(self) -> None:
        self.ranks = build_strategy(self.config, self.world, self.model)
        self.stack.callback(self.ranks.close)

    @interrupts_heard()
    def step(self, step: int) -> dict[str, Any]:
        """One training step, with evaluation where it is due."""
        end_a_stray(self.process)
        every, last = self.config.training.eval_every, step == self.config.training.steps
        with self.progress.step(step):
            metrics = self.trainer.step(step)
            if every and (step % every == 0 or last):
                metrics |= self._evaluate(step)
        self.no_signal.look(step, metrics)
        for told in slow_checks(metrics) if step == 1 else ():
            self.announce(f"step {step}: {told}")
        return metrics

    def _evaluate(self, step: int) -> dict[str, Any]:
        """Metrics of an evaluation, after which random states are what they were: a run may have
        one more, at its end, than a longer one. Rewards that fail end the run after the step."""
        state, metrics = capture(), {}
        try:
            metrics = self.trainer.evaluate(step)
        except RewardError as error:
            self.failure = error
        restore(state)
        return metrics

    def opening_metrics(self) -> dict[str, Any]:
        """What is known before the first step; may be empty."""
        metrics = self._evaluate(0) if self.config.training.eval_every else {}
        if self.config.data.overlong_prompts != "error":
            metrics["data/overlong_prompts"] = self.train_set.overlong
        if self.config.warm_start.steps:
            metrics["warm_start/loss"] = self.warm_start_loss
        return metrics

    def save_if_due(self, step: int, *, ends: bool = False) -> None:
        """Write a checkpoint at the end, after a warm start, and as often as the recipe says."""
        every, last = self.config.training.save_every, step == self.config.training.steps
        warm = step == 0 and self.config.warm_start.steps > 0
        regular = every is not None and (warm or last or (every > 0 and step % every == 0))
        if regular or ends or (last and self.resumed):
            self.save(step, self.state())

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of now, beside weights and optimizers."""
        return {
            "random_state": capture(),
            "totals": self.hook.state_dict(),
            "extra_rounds": self.trainer.extra_rounds,
        }

    def save(self, step: int, end: Mapping[str, Any]) -> None:
        """Write the checkpoint of a step that ended in the state `end`. Every rank calls it."""
        end_a_stray(self.process)
        tensors = {"optimizer": self.optimizer.tensors()}
        tensors |= self.critic.saved() if self.critic else {}
        extra = {
            "random_state": end["random_state"],
            "extra_rounds": end["extra_rounds"],
            "seconds": time.perf_counter() - self.began,
            "wandb_run_id": self.wandb_run_id,
            "mlflow_run_id": self.mlflow_run_id,
            "warm_start_loss": self.warm_start_loss,
            "reference_digest": self.reference_digest,
            "critic_schedule": self.critic and self.critic.optimizer.schedule_state(),
        }
        write = lambda: save_checkpoint(  # noqa: E731
            self.directory / CHECKPOINTS,
            step=step,
            model=self.model,
            tokenizer=self.tokenizer,
            **tensors,
            schedule=self.optimizer.schedule_state(),
            totals=end["totals"],
            extra=extra | {"step_files": self.step_files.state()},
            fingerprint=self.continued_under,
            keep=self.config.training.keep_checkpoints,
        )
        with whole_weights(self.model):
            self.world.from_first("the checkpoint", write)

    def summarize(self) -> dict[str, Any]:
        """Write `summary.json` and return it."""
        seconds = time.perf_counter() - self.began
        found = summary_of(read_metrics(self.directory / METRICS), self.hook.summary())
        found["parameter_digest"] = parameter_digest(self.model)
        if self.critic is not None:
            found["critic_digest"] = self.critic.digest
        return write_summary(self.config, found, seconds, self.world.size, self.fingerprint)

    def _open_step_files(
        self,
        state: dict[str, Any] | None = None,
        changes: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        given = (lambda: self.hook.take_digests()), (lambda: self.trainer.samples)
        self.step_files = StepFiles(self.directory, state, *given, changes)
        self.stack.callback(self.step_files.close)

    def _assemble(self, checkpoint: Checkpoint | None = None) -> None:
        """Make optimizer, engine, hook and trainer around the weights as they are now."""
        config, tokenizer = self.config, cast(Any, self.tokenizer)
        self.progress.starts("building the optimizer and the rollout engine")
        self.optimizer = PolicyOptimizer(
            self.ranks, config.optimizer, total_steps=config.optimizer_steps
        )
        if self.critic is not None:
            self.critic.assemble(self.model, self.world, checkpoint)
        engine = engine_of(config, self.model, self.tokenizer)
        self.hook = ConsistencyHook(
            self.model,
            **config.consistency.model_dump(include=HOOK_SETTINGS),
            metrics_of=config.tracking.metrics_of,
            micro_batch_size=config.training.micro_batch_size,
            replay_dir=self.directory / REPLAY if self.first else None,
            config=config.model_dump(mode="json"),
            decode=tokenizer.decode,
            expected_fingerprint=engine.fingerprint,
            warn=self.announce,
            progress=self.progress.tell,
        )
        trainer = partial(PPOTrainer, critic=self.critic) if self.critic else GRPOTrainer
        self.trainer = trainer(
            model=self.model,
            tokenizer=self.tokenizer,
            engine=engine,
            optimizer=self.optimizer,
            ranks=self.ranks,
            config=config,
            train=self.train_set,
            evaluations=self.eval_sets,
            rewards=self.rewards,
            hook=self.hook,
            reference=self.reference,
            progress=self.progress.tell,
        )


@dataclass
class NoSignal:
    """Warns at the first of several steps in a row in which each group's rewards are all equal, or
    in which an update was skipped."""

    warn: Callable[[str], None]
    told: frozenset[str] = frozenset()

    def look(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Read the metrics of a step; warn at the first of several without a signal."""
        found: dict[str, str] = {}
        if metrics.get(EQUAL) == 1.0:
            found[EQUAL] = (
                "the rewards within each group are equal, so all advantages are 0 "
                "and nothing is learned from them. samples.jsonl shows completions; give easier or "
                "harder tasks, larger groups (rollout.sampling.n) or a finer reward"
            )
        if skipped := metrics.get(SKIPPED):
            found[SKIPPED] = (
                f"all completions of {skipped} updates were cut and are masked, so there was no "
                "update. Raise rollout.sampling.max_tokens, or set algorithm.overlong to keep"
            )
        for name in found.keys() - self.told:
            self.warn(f"step {step}: {found[name]}")
        self.told = frozenset(found)
