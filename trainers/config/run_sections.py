"""The sections `run`, `consistency` and `tracking`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer

from rl_consistency.distributed.leaves import LeafOrder
from rl_consistency.numerics.strict import OPS, Strictness, current, strict
from rl_consistency.parity.foreign_drift import Trainer
from rl_consistency.trainers.config.section import Count, CountOrZero, Int, LocalPath, Name, Section


class RunSection(Section):
    """The run as a whole."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Letters, digits, `.`, `_`, `-`; names the output directory and the tracked run."""
    output_dir: LocalPath = Field(
        default_factory=lambda data: Path("runs") / data.get("name", ""), validate_default=True
    )
    """Where config, metrics, summary, report and checkpoints go; default runs/<name>."""
    seed: Annotated[Int, Field(ge=0, lt=2**63)] = 0
    """Seeds the data order, the sampler, the weights of a built policy and the generated task."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where a process computes; cuda is an NVIDIA GPU of compute capability 8.0 or later."""
    num_threads: Annotated[Count, Field(le=1024)] | None = None
    """CPU threads; part of the fingerprint. Tiny models run fastest on 1; null = torch's choice."""
    collective_timeout: Annotated[Count, Field(le=86_400)] = 600
    """Seconds that a process waits for the others before it gives up."""


def _known_ops(names: tuple[str, ...]) -> tuple[str, ...]:
    if unknown := sorted(set(names) - set(OPS)):
        raise ValueError(f"unknown op {', '.join(unknown)}; the ops are {', '.join(sorted(OPS))}")
    return names


def _leaf_order(value: Any) -> Any:
    if isinstance(value, LeafOrder):
        return value
    numbers = value if isinstance(value, list | tuple) else [value]
    if len(numbers) not in (1, 2) or not all(type(n) is int and n > 0 for n in numbers):
        raise ValueError(f"a positive number, or two: [in a group, groups]; got {value!r}")
    return LeafOrder(*numbers)


def _plain_leaves(order: LeafOrder) -> int | list[int]:
    return order.inner if order.outer == 1 else [order.inner, order.outer]


class ConsistencySection(Section):
    """What is checked while training, and what happens when a check fails."""

    strict: bool | None = None
    """Canonical reduction orders; false runs the stock ops and promises nothing; null = canonical,
    unless the environment variable RL_CONSISTENCY_STRICT says otherwise."""
    strict_except: Annotated[tuple[str, ...], AfterValidator(_known_ops)] = ()
    """Ops that run stock although strict is on (for ablations)."""
    gradient_leaves: Annotated[
        LeafOrder,
        BeforeValidator(_leaf_order, json_schema_input_type=int | list[int]),
        PlainSerializer(_plain_leaves),
    ] = LeafOrder(1)
    """Parts into which the sequences of an optimizer step are cut; their gradients are added in
    order, on 1 to as many processes with the same bits. [B, A]: A groups of B, for several nodes.
    Another number is another order, with other bits."""
    ordered: bool = True
    """Whether gradients are added in one order. false leaves several processes to the strategy's
    stock sum: rollout still equals training, but the weights depend on their number."""
    gradient_check_every: CountOrZero = 0
    """Recompute the gradients under other groupings every this many steps; 0 = never."""
    gradient_check_sequences: Count | None = None
    """Completions regrouped in such a check, the first of the step; null = all, which is slow."""
    value_check_every: CountOrZero = 0
    """Recompute the critic's values under another grouping every this many steps; 0 = never. Only
    in PPO."""
    shadow_every: CountOrZero = 0
    """Measure the drift of the stock path on the same tokens every this many steps; 0 = never."""
    on_drift: Literal["raise", "warn", "record"] = "raise"
    """What happens when a logprob, a gradient or a sampled library product differs. Differing
    tokens are saved for replay in every case; the rollout engine also warns of a product."""

    def of_the_hook(self) -> dict[str, Any]:
        """What `ConsistencyHook` is given."""
        others = {"strict", "strict_except", "gradient_leaves", "ordered"}
        return self.model_dump(exclude=others)

    def strictness(self) -> AbstractContextManager[Strictness]:
        """What the section says of strictness, else what holds outside the block."""
        if self.strict is None and not self.strict_except:
            return strict(except_=current().stock)
        return strict(self.strict is not False, except_=self.strict_except)


class WandbSection(Section):
    """Weights & Biases."""

    project: Name
    """Project the run is logged to."""
    name: Name | None = None
    """Name of the run there; null = run.name."""
    mode: Literal["offline", "online"] = "offline"
    """offline needs neither key nor network."""


class TrackingSection(Section):
    """Where metrics go, in addition to metrics.jsonl."""

    console: bool = True
    """Show the live progress table."""
    samples: CountOrZero = 2
    """Completions of each step that samples.jsonl, the report and wandb show: the best and the
    worst by reward of the step's first prompt, then of its second, and so on; 0 = none."""
    wandb: WandbSection | None = None
    """Log to Weights & Biases; null = do not."""
    metrics_of: tuple[Trainer, ...] = ()
    """Trainers whose drift metrics are logged too, by their own names and definitions."""
