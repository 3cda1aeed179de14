"""The phases of Algorithm 2: functions of tensors that never read from the device; every size is an argument.

`step.algorithm` calls the phases through a runner, either eagerly or as captured CUDA graphs. A phase knows nothing of
static buffers or of other processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from bullettrain.allocation import Allocated
from bullettrain.attacks.norms import per_example
from bullettrain.attacks.pgd import AttackState, take
from bullettrain.attacks.schedule import round_up
from bullettrain.attacks.state import dynamic
from bullettrain.engine.forwards import Forwards
from bullettrain.history import margin_of, unseen_on_boundary
from bullettrain.mining import Category, Separation, SeparationWithModel, separate
from bullettrain.objectives import Objective
from bullettrain.precision import at_least_float32
from bullettrain.validation import check_returned, check_takes

if TYPE_CHECKING:
    from bullettrain.step import BulletTrain


class Runner(Protocol):
    """Runs phases."""

    def __call__(self, phase: Callable[..., Any], *args: Any) -> Any:
        """Return ``phase(*args)``, a tensor or a tuple of tensors."""
        ...

    def load(self, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return tensors that several phases read, at the place where the phases expect them."""
        ...


class Eager:
    """Runs phases as plain function calls."""

    def __call__(self, phase: Callable[..., Any], *args: Any) -> Any:
        """Call the phase."""
        return phase(*args)

    def load(self, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the tensors unchanged."""
        return tensors


EAGER = Eager()


class Batch(NamedTuple):
    """A mini-batch, and the starting point of its corruption."""

    x: Tensor
    """(m, …) clean examples."""
    y: Tensor
    """(m,) labels."""
    start: Tensor | None = None
    """Starting points (m, …) of an attack, or AugMix's random draws or views; None: they are drawn."""
    indices: Tensor | None = None
    """(m,) dataset indices, needed where the history is used."""


class Assignment(NamedTuple):
    """What was decided for each of R examples."""

    category: Tensor
    """(R,)."""
    steps: Tensor
    """(R,)."""
    svar: Tensor | None
    """(R,) scores; None with a uniform budget."""
    weight: Tensor | None
    """(R,) weights in the loss; None: 1 each."""


class JointScores(NamedTuple):
    """The scores of the same mini-batches over all processes."""

    values: Tensor | None
    """Of one mini-batch after the other; None with a uniform budget."""
    sizes: Sequence[int]
    """Sizes of these joint mini-batches."""
    local_ranges: Sequence[tuple[int, int]]
    """Where this process's examples begin and end among ``values``."""


class Learned(NamedTuple):
    """The result of a mini-batch's forward and backward."""

    loss: Tensor
    z: Tensor | None
    z_prime: Tensor
    counts: Tensor
    """(2,) number of correct predictions on x', and number of predictions."""
    score: Tensor | None
    """(m,) scores of z, for the history."""
    margin: Tensor | None
    """(m,) margins on x', for the history."""


class Phases:
    """The tensor operations of Algorithm 2.

    Args:
        train: objective, allocation, score, separation, F_R and history.
        forwards: runs the network.
        backward: called with each loss and with :attr:`accumulation` to compute gradients; None: the loss keeps its
            graph.
        record: called in :meth:`update_state` with loss, z, z', y, category, svar, and the factor that makes the mean
            loss a sum over examples.
        packs: schedule attacks as packed, where the attack runs in eval mode. Sizes then repeat, and the attack has one
            spare row for places that stand idle.
        size_multiple: sizes are rounded up to a multiple of this.
    """

    def __init__(
        self,
        train: BulletTrain,
        forwards: Forwards,
        *,
        backward: Callable[[Tensor, tuple[bool, float]], None] | None = None,
        record: Callable[..., None] | None = None,
        packs: bool = False,
        size_multiple: int = 1,
    ) -> None:
        self.train, self.objective, self.forwards = train, train.objective, forwards
        self.backward, self.record = backward, record
        # A batch norm without running statistics mixes the rows of an eval-mode batch, which packing puts together.
        mixes = any(isinstance(m, _BatchNorm) and m.running_mean is None for m in forwards.network.modules())
        self.packs = packs and not mixes and self.objective.attack_mode == "eval"
        """Whether attacks have a spare row, for places without an example."""
        self.size_multiple = size_multiple
        self.accumulation = (False, 1.0)
        """Whether gradients are added to the existing ones, and their scale."""
        fast = not forwards.keeps_graphs
        weight = next(forwards.network.parameters(), None)
        self.ascent = None
        """Compiled parts of the attack step."""
        if fast and weight is not None:
            self.ascent = self.objective.fast_functions(forwards.compiled, weight)
        self.loss_of, self.count = (forwards.compiled(f) for f in (self.objective.loss, train.robust_fraction.counts))
        self._compiled_update: Callable[..., Any] | None = None  # a bound method would be a reference cycle
        if fast and forwards.compile and weight is not None and weight.is_cuda:  # type: ignore[attr-defined]
            # Not on a CPU: compiled by torch 2.13, writes to a 0-d float64 tensor (F_R) are lost there.
            self._compiled_update = torch.compile(self._update)

    # ---------------------------------------------------------------------------------------- sizes, on the host

    @property
    def selects_by_loss_logits(self) -> bool:
        """Whether the training-mode logits of the loss select."""
        return self.objective.selection == "train" and self.objective.has_clean_logits

    def reuses_logits(self, batches: int) -> bool:
        """Whether the loss uses the logits that selected, with their graph."""
        return (
            self.train.needs_selection and self.selects_by_loss_logits and self.forwards.keeps_graphs and batches == 1
        )

    def num_touched(self, steps: Sequence[int]) -> int | None:
        """Return how many rows of a mini-batch are forwarded corrupted; None: all of them.

        That is the number of examples with steps, rounded up where filling rows change nothing.
        """
        touched, m = sum(count > 0 for count in steps), len(steps)
        if touched == m or not self.objective.has_clean_term:
            return None
        if touched < 2 or not self.forwards.pads:  # batch norm treats a single example differently
            return touched
        return min(round_up(touched, self.size_multiple), m)

    def attack_multiple(self, batches: int) -> int:
        """Return the multiple that attack sizes are rounded up to; it grows with k, so that few sizes occur."""
        return max(self.size_multiple, self.size_multiple * batches // 2) if self.size_multiple > 1 else 1

    # ------------------------------------------------------------------------------------------------ the phases

    def select(self, examples: Batch, sizes: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """Return the scores (R,) of the examples, and the clean logits (R, K) they were computed from, if any.

        Args:
            examples: R examples of one or several mini-batches.
            sizes: sizes of the mini-batches.
        """
        train, forwards, (x, y, _, index) = self.train, self.forwards, examples
        if train.selects_by_history:
            forwards.freeze()
            assert index is not None
            return train.history.of(index).score, None
        if self.selects_by_loss_logits:
            reuses = self.reuses_logits(len(sizes))
            logits = forwards.clean_logits(x) if reuses else forwards.logits_of_each(torch.split(x, list(sizes)))
        else:
            forwards.freeze()
            logits = forwards.frozen_logits(x, "train" if self.objective.selection == "train" else "eval")
        return self._score(logits.detach(), y), logits

    def _score(self, logits: Tensor, y: Tensor) -> Tensor:
        score = self.train.score(at_least_float32(logits), y)
        return check_returned(score, "the score", (len(y),), "floating-point")

    def allocate(
        self, examples: Batch, svar: Tensor | None, logits: Tensor | None, joint: JointScores
    ) -> tuple[Assignment, AttackState]:
        """Separate the examples, allocate their steps, and prepare the attack, without its target.

        Args:
            examples: R examples.
            svar: (R,) scores; None with a uniform budget.
            logits: (R, K) clean logits of the scores.
            joint: scores of the same mini-batches over all processes.
        """
        train, objective, (x, y, start, index), m = self.train, self.objective, examples, len(examples.y)
        if svar is None:
            self.forwards.freeze()
            category = torch.full_like(y, int(Category.BOUNDARY))
        else:
            category = self._separate(joint, x, y, logits)
        past = weight = None
        if index is not None and train.history.examples:
            past, weight = train.history.of(index), train.history.weight_of(index)
        try:
            allocated = Allocated.of(train.budget.allocate(category, svar, past))
        except AttributeError as error:
            if past is not None or "NoneType" not in str(error):
                raise
            give = "give BulletTrain dataset_size=, and every step index="
            raise ValueError(f"the budget reads past, but no history is kept ({error}); {give}") from error
        steps = check_returned(allocated.steps, "the budget's allocate", (m,), "integer").long()
        sizes = allocated.step_sizes
        if sizes is None:
            sizes = train.budget.step_sizes(category, steps, objective.unit)
        sizes = check_returned(sizes, "the budget's step_sizes", (m,), "floating-point")
        for name in ("eps", "weight"):
            if (value := getattr(allocated, name)) is not None:
                check_returned(value, f"the budget's {name}", (m,), "floating-point")
        if allocated.eps is not None and not objective.takes_eps:
            name, why = type(objective).__name__, "takes no eps for each example"
            raise ValueError(f"the budget allocates eps, but the attack of {name} {why}; leave eps out")
        if allocated.weight is not None:
            weight = allocated.weight if weight is None else weight * allocated.weight
        x_prime = objective.begin(x, start)
        x_prime = x.clone() if x_prime is x else torch.where(per_example(steps > 0, x, torch.bool), x_prime, x)
        size, eps = per_example(sizes, x), None if allocated.eps is None else per_example(allocated.eps, x)
        attack = AttackState(x_prime, x.detach(), y, None, size, eps, None if objective.needs_network else start)
        return Assignment(category, steps, svar, weight), attack.with_spare() if self.packs else attack

    def _separate(self, joint: JointScores, x: Tensor, y: Tensor, logits: Tensor | None) -> Tensor:
        """Return categories (R,), with a quantile for each mini-batch; all at once where the separation allows it."""
        train, (scores, sizes, local_ranges) = self.train, joint
        assert scores is not None
        F_R, separation = train.robust_fraction.value, train.separation_for_objective()

        def separated(score: Tensor, separation: Separation) -> Tensor:
            category = separation(score, F_R)
            category = category.flatten() if torch.is_tensor(category) and score.ndim > 1 else category
            return check_returned(category, "the separation", (score.numel(),), "integer").long()

        if isinstance(separation, SeparationWithModel):
            assert logits is not None
            with self.forwards.attacked("eval") as net:
                bound = separation.bind(net, x, y, logits.detach())
                return separated(torch.cat([scores[a:b] for a, b in local_ranges]), bound)
        together = getattr(separation, "over_batches", separation is separate)
        separation = unseen_on_boundary(separation) if train.selects_by_history else separation
        if len(sizes) > 1 and together and len(set(sizes)) == 1:
            category = separated(scores.view(len(sizes), -1), separation)
        else:
            category = torch.cat([separated(part, separation) for part in torch.split(scores, list(sizes))])
        return category if len(scores) == len(y) else torch.cat([category[a:b] for a, b in local_ranges])

    def target(self, x: Tensor, logits: Tensor | None) -> Tensor:
        """Return the clean predictions (R, K) that the attack moves away from.

        Args:
            x: (R, …) clean examples.
            logits: (R, K) their logits in the mode of the attack; None: the frozen network is run.
        """
        if logits is None:
            logits = self.forwards.frozen_logits(x, self.objective.attack_mode)
        target = self.objective.target_of(at_least_float32(logits))
        return torch.cat([target, target[:1]]) if self.packs else target

    def attack_step(self, attack: AttackState, rows: Tensor | None) -> Tensor | None:
        """Take one step of the corruption for ``rows`` (n,), or for all; ``attack.x_prime`` is changed in place."""
        if rows is None and self.packs:
            attack = attack.without_spare()
        if not self.objective.needs_network:
            return self.objective.corrupt(self.forwards.network, attack, rows, self.ascent)
        with self.forwards.attacked(self.objective.attack_mode) as net:
            logits = self.objective.corrupt(net, attack, rows, self.ascent)
        return logits if hasattr(self.train.budget, "revise") else None

    def learn(
        self,
        batch: Batch,
        x_prime: Tensor,
        assigned: Assignment,
        z: Tensor | None,
        num_touched: int | None,
        loss_weight: float,
        accumulation: tuple[bool, float],
    ) -> Learned:
        """Compute the loss and the gradients of one mini-batch.

        Args:
            batch: m examples.
            x_prime: (m, …) corrupted examples; AugMix: (2, m, …).
            assigned: category and steps of these examples.
            z: (m, K) clean logits of the loss, where they exist already.
            num_touched: number of rows that are forwarded corrupted, those with steps first; None: all.
            loss_weight: weight of this process in the joint batch.
            accumulation: see :attr:`accumulation`.
        """
        objective, (x, y, start, _), steps = self.objective, batch, assigned.steps
        has_views = x_prime.ndim > x.ndim  # AugMix: (2, m, …)
        x_prime = objective.corrupted_input(x, x_prime)
        clean = (x if objective.z_of == "x" else start) if objective.has_clean_term and z is None else None
        touched = None if num_touched is None else (steps == 0).long().argsort(stable=True)[:num_touched]
        is_real = None  # False: a filling row, whose corrupted logits are its clean ones
        if touched is not None and self.forwards.pads:
            is_real = (steps.index_select(0, touched) > 0).repeat(objective.num_views)
        corrupted = x_prime
        if objective.has_clean_term and touched is not None:
            corrupted = x_prime.index_select(1, touched) if has_views else take(x_prime, touched)
        z, corrupted_logits = self.forwards.learning_logits(
            clean, corrupted.flatten(0, 1) if has_views else corrupted, z, is_real
        )
        if z is None:
            assert corrupted_logits is not None
            z_prime = corrupted_logits
        else:
            if corrupted_logits is not None and is_real is not None:
                assert touched is not None
                clean_logits = z.index_select(0, touched).repeat(objective.num_views, 1).to(corrupted_logits.dtype)
                corrupted_logits = torch.where(is_real[:, None], corrupted_logits, clean_logits)
            z_prime = objective.fill_in(z, corrupted_logits, touched)
        # A batch without corrupted rows is rare, and would be compiled for itself.
        loss_of = objective.loss if num_touched == 0 else self.loss_of
        if not self.forwards.keeps_graphs:
            z_prime = dynamic(z_prime, z_prime.ndim - 2)
        weight = () if assigned.weight is None else (assigned.weight,)
        name = type(objective).__name__
        if weight:
            check_takes(objective.loss, f"{name}'s loss", ("z", "z_prime", "y", "touched", "weight"))
            check_takes(objective.penalty, f"{name}'s penalty", ("model", "x", "y", "start", "weight"))
        loss = check_returned(loss_of(z, z_prime, y, touched, *weight), f"{name}.loss", (), "floating-point")
        penalty = objective.penalty(self.forwards.model, x, y, start, *weight)
        if penalty is not None:
            loss = loss + check_returned(penalty, f"{name}.penalty", (), "floating-point")
        loss = loss if loss_weight == 1 else loss * loss_weight
        counts = self.count(z_prime, y)
        if self.backward is not None:
            self.backward(loss, accumulation)
            loss = loss.detach()
        z = None if z is None or not objective.has_clean_logits else z.detach()
        score = margin = None
        if self.train.history.examples:
            score = None if z is None else self._score(z, y)
            margin = margin_of(z_prime, y)
        return Learned(loss, z, z_prime.detach(), counts, score, margin)

    def update_state(
        self, learned: Learned, y: Tensor, assigned: Assignment, remembered: Sequence[Tensor | None], loss_weight: float
    ) -> None:
        """Update F_R, the history and the records after a mini-batch's backward; compiled on a GPU.

        Args:
            learned: its result, with the counts of all processes.
            y: (m,) labels.
            assigned: category, steps and scores.
            remembered: indices, scores, margins and steps of the examples of all processes; empty: no history.
            loss_weight: weight of this process in the joint batch.
        """
        decided = assigned.category, assigned.svar
        run = self._compiled_update or self._update
        run(learned.counts, remembered, learned[:3], y, *decided, loss_weight)

    def _update(
        self,
        counts: Tensor,
        remembered: Sequence[Tensor | None],
        losses: Sequence[Tensor | None],
        y: Tensor,
        category: Tensor,
        svar: Tensor | None,
        loss_weight: float,
    ) -> None:
        self.train.robust_fraction.update_from(counts)
        if remembered:
            self.train.history.keep(*remembered)  # type: ignore[arg-type]
        if self.record is not None:
            self.record(*losses, y, category, svar, len(y) / loss_weight)


def concatenate(objective: Objective, batches: Sequence[Batch], run: Runner) -> tuple[Batch, tuple[int, ...]]:
    """Draw missing starting points, concatenate the mini-batches, and return their sizes, too."""
    starts = [objective.initial_perturbation(b.x) if b.start is None else b.start for b in batches]
    columns = [b.x for b in batches], [b.y for b in batches], starts, [b.indices for b in batches]
    x, y, start, index = run.load(*(_cat(column) for column in columns))
    assert x is not None
    assert y is not None
    return Batch(x, y, start, index), tuple(len(b.y) for b in batches)


def _cat(parts: Sequence[Tensor | None]) -> Tensor | None:
    tensors = [part for part in parts if part is not None]
    if len(tensors) < len(parts):
        return None
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def slices(sizes: Sequence[int]) -> list[slice]:
    """Return the slices of parts of these sizes, one after the other."""
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


Rows = TypeVar("Rows", Batch, Assignment)


def rows_of(examples: Rows, rows: slice) -> Rows:
    """Return these rows of every tensor."""
    return type(examples)(*(None if values is None else values[rows] for values in examples))  # type: ignore[arg-type]
