"""The phases of Algorithm 2: functions of tensors, without a read by the host, with every size an argument.

`step.algorithm` calls them in turn, through a runner: at once, or each as a captured CUDA graph. They know nothing of
static buffers, nor of other processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from bullettrain.allocation import Allocated
from bullettrain.attacks.norms import per_example
from bullettrain.attacks.pgd import AttackState, take
from bullettrain.attacks.schedule import packed
from bullettrain.attacks.state import dynamic
from bullettrain.engine.forwards import Forwards
from bullettrain.history import margin_of, unseen_on_boundary
from bullettrain.mining import Category, SeparationWithModel, separate
from bullettrain.objectives import Objective
from bullettrain.precision import at_least_float32
from bullettrain.validation import check_category, check_loss, check_score, check_step_sizes, check_steps

if TYPE_CHECKING:
    from bullettrain.step import BulletTrain


class Runner(Protocol):
    """Runs phases."""

    def __call__(self, phase: Callable[..., Any], *args: Any) -> Any:
        """What ``phase(*args)`` returns: a tensor, or a tuple of tensors."""
        ...

    def load(self, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        """Tensors that several phases look at, where these will find them."""
        ...


class Eager:
    """Calls a phase."""

    def __call__(self, phase: Callable[..., Any], *args: Any) -> Any:
        """At once."""
        return phase(*args)

    def load(self, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        """As they are."""
        return tensors


EAGER = Eager()


class Batch(NamedTuple):
    """A mini-batch, and what its step is to start from."""

    x: Tensor
    """(m, …) clean examples."""
    y: Tensor
    """(m,) labels."""
    start: Tensor | None = None
    """What the corruption starts from: points (m, …), or AugMix's draws or views; None: it is drawn."""
    indices: Tensor | None = None
    """(m,) which examples of the dataset these are, where that is remembered."""


class Given(NamedTuple):
    """What the algorithm decided for each example of some mini-batches."""

    category: Tensor
    """(R,)."""
    steps: Tensor
    """(R,)."""
    svar: Tensor | None
    """(R,) scores; None: everybody gets the same."""
    weight: Tensor | None
    """(R,) in the loss; None: 1 each."""


class Learnt(NamedTuple):
    """What came of a mini-batch's forward and backward."""

    loss: Tensor
    z: Tensor | None
    z_prime: Tensor
    counts: Tensor
    """Right predictions on x', of how many."""
    score: Tensor | None
    """(m,) of z, and (m,) margins on x', where these are remembered."""
    margin: Tensor | None


class Phases:
    """What Algorithm 2 does with tensors.

    Args:
        train: objective, allocation, score, separation, F_R, history.
        forwards: how the network is run.
        backward: called with each loss, and with :attr:`accumulation`, to make gradients of it; None: the loss keeps
            its graph.
        record: called in :meth:`update` with loss, z, z', y, category and svar of a mini-batch, and with what makes its
            loss a sum over examples.
        packs: examples with few steps take turns under attack, where it runs in eval mode: sizes then repeat, and rows
            may stand idle, on a row more than there are examples.
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
        self.packs = self.spare = packs and self.objective.attack_mode == "eval"
        self.size_multiple = size_multiple
        self.accumulation = (False, 1.0)
        """Whether gradients are added to those that are there, and their scale."""
        fast = not forwards.keeps_graphs
        some = next(forwards.network.parameters(), None)
        self.fast = self.objective.fast_functions(forwards.compiled, some) if fast and some is not None else None
        self.loss_of, self.count = (forwards.compiled(f) for f in (self.objective.loss, train.robust_fraction.counts))
        self._update: Callable[..., Any] = self._move
        if fast and forwards.compile and some is not None and some.is_cuda:  # type: ignore[attr-defined]
            # Not on a CPU: torch 2.13 loses what compiled code writes to a 0-d float64 tensor there, as F_R is one.
            self._update = torch.compile(self._move)

    # ------------------------------------------------------------------------------------ sizes, on the host

    @property
    def selects_by_loss_logits(self) -> bool:
        """Whether the training-mode logits of the loss select."""
        return self.objective.selection == "train" and self.objective.has_clean_term

    def keeps_logits(self, batches: int) -> bool:
        """Whether the logits that select are those of the loss, with their graph."""
        return self.train.selects and self.selects_by_loss_logits and self.forwards.keeps_graphs and batches == 1

    def touched(self, counts: Sequence[int]) -> int | None:
        """Rows of a mini-batch that are forwarded corrupted: those with steps, rounded up where that changes nothing.

        None: all of them have steps, or the loss looks at no others.
        """
        t, m = sum(count > 0 for count in counts), len(counts)
        if t == m or not self.objective.has_clean_term:
            return None
        if t < 2 or not self.forwards.pads:  # a lone example is normalised in another way
            return t
        return min(-(-t // self.size_multiple) * self.size_multiple, m)

    def attack_multiple(self, batches: int) -> int:
        """What places under attack are rounded up to: it grows with a group, so that a long one has few sizes."""
        return max(self.size_multiple, self.size_multiple * batches // 2) if self.size_multiple > 1 else 1

    # ------------------------------------------------------------------------------------------- the phases

    def select(self, group: Batch, sizes: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """SVar (R,) and, where there are any, the clean logits (R, K) that it is of; ``sizes`` of the mini-batches."""
        train, forwards, (x, y, _, index) = self.train, self.forwards, group
        if train.selects_by_last:
            forwards.freeze()
            assert index is not None
            return train.history.of(index).score, None
        if self.selects_by_loss_logits:
            keeps = self.keeps_logits(len(sizes))
            s = forwards.clean_logits(x) if keeps else forwards.logits_of_each(torch.split(x, list(sizes)))
        else:
            forwards.freeze()
            s = forwards.frozen_logits(x, "train" if self.objective.selection == "train" else "eval")
        return check_score(train.score(at_least_float32(s.detach()), y), len(y)), s

    def allocate(
        self,
        group: Batch,
        svar: Tensor | None,
        s: Tensor | None,
        joint: Tensor | None,
        joint_sizes: Sequence[int],
        where: Sequence[tuple[int, int]],
    ) -> tuple[Given, AttackState]:
        """What each example gets, and all that an attack begins with, but for its target.

        Args:
            group: R examples.
            svar, s: of these; ``svar`` None: everybody gets the same.
            joint: scores of the same mini-batches over all processes, of ``joint_sizes``.
            where: this process's own among them.
        """
        train, objective, (x, y, start, index) = self.train, self.objective, group
        if svar is None:
            self.forwards.freeze()
            category = torch.full_like(y, int(Category.BOUNDARY))
        else:
            assert joint is not None
            category = self._separate(joint, x, y, s, joint_sizes, where)
        past = train.history.of(index) if index is not None and train.history.examples else None
        given = train.budget.allocate(category, svar, past)
        given = given if isinstance(given, Allocated) else Allocated(given)
        steps = check_steps(given.steps, len(y))
        sizes = given.step_sizes
        if sizes is None:
            sizes = train.budget.step_sizes(category, steps, objective.unit)
        sizes = check_step_sizes(sizes, len(y))
        x_prime = objective.begin(x, start)
        x_prime = x.clone() if x_prime is x else torch.where(per_example(steps > 0, x, torch.bool), x_prime, x)
        size, eps = per_example(sizes, x), None if given.eps is None else per_example(given.eps, x)
        attack = AttackState(x_prime, x.detach(), y, None, size, eps, None if objective.needs_network else start)
        return Given(category, steps, svar, given.weight), attack.with_spare() if self.spare else attack

    def _separate(
        self,
        joint: Tensor,
        x: Tensor,
        y: Tensor,
        s: Tensor | None,
        sizes: Sequence[int],
        where: Sequence[tuple[int, int]],
    ) -> Tensor:
        """Categories (R,), each mini-batch by its own quantile: all at once where the separation can do that."""
        train = self.train
        F_R, separation = train.robust_fraction.value, train.separation_for_objective()
        if isinstance(separation, SeparationWithModel):
            assert s is not None
            with self.forwards.attacked("eval") as net:
                separation = separation.bind(net, x, y, s.detach())
                own = torch.cat([joint[a:b] for a, b in where])
                return check_category(separation(own, F_R), len(y))
        together = getattr(separation, "over_batches", separation is separate)
        separation = unseen_on_boundary(separation) if train.selects_by_last else separation
        if len(sizes) > 1 and together and len(set(sizes)) == 1:
            several = separation(joint.view(len(sizes), -1), F_R)
            category = check_category(several.flatten() if torch.is_tensor(several) else several, len(joint))
        else:
            parts = torch.split(joint, list(sizes))
            category = torch.cat([check_category(separation(part, F_R), len(part)) for part in parts])
        return category if len(joint) == len(y) else torch.cat([category[a:b] for a, b in where])

    def target(self, x: Tensor, s: Tensor | None) -> Tensor:
        """Clean predictions (R, K) that the attack moves away from: those of ``s``, or of the frozen network."""
        if s is None:
            s = self.forwards.frozen_logits(x, self.objective.attack_mode)
        p = self.objective.target_of(at_least_float32(s))
        return torch.cat([p, p[:1]]) if self.spare else p

    def places(self, steps: Tensor, most: int, places: int) -> Tensor:
        """Who is where at each iteration of a packed attack, (most, places)."""
        return packed(steps, most, places)

    def attack_step(self, attack: AttackState, rows: Tensor | None) -> Tensor | None:
        """One step of the corruption for these rows (n,), or for all; ``attack.x_prime`` is changed in place."""
        if rows is None and self.spare:
            attack = attack.without_spare()
        if not self.objective.needs_network:
            return self.objective.corrupt(self.forwards.network, attack, rows, self.fast)
        with self.forwards.attacked(self.objective.attack_mode) as net:
            logits = self.objective.corrupt(net, attack, rows, self.fast)
        return logits if hasattr(self.train.budget, "revise") else None

    def learn(
        self,
        batch: Batch,
        x_prime: Tensor,
        given: Given,
        z: Tensor | None,
        t: int | None,
        loss_weight: float,
        accumulation: tuple[bool, float],
    ) -> Learnt:
        """Loss and gradients of one mini-batch.

        Args:
            batch, x_prime, given: of its m examples.
            z: (m, K) clean logits of the loss, where they are there already.
            t: how many of them have steps; where sizes are rounded up, some without are counted in. None: all.
            loss_weight: of this process.
            accumulation: see :attr:`accumulation`.
        """
        objective, (x, y, start, _), steps = self.objective, batch, given.steps
        views = x_prime.ndim - x.ndim
        x_prime = objective.learns_from(x, x_prime)
        clean = (x if objective.z_of == "x" else start) if objective.has_clean_term and z is None else None
        touched = None if t is None else (steps == 0).long().argsort(stable=True)[:t]
        valid = None if touched is None or not self.forwards.pads else steps.index_select(0, touched) > 0
        corrupted = x_prime
        if objective.has_clean_term and touched is not None:
            corrupted = x_prime.index_select(1, touched) if views else take(x_prime, touched)
        z, moved = self.forwards.learning_logits(
            clean, corrupted.flatten(0, 1) if views else corrupted, z, _repeated(valid, objective.num_views)
        )
        if z is None:
            assert moved is not None
            z_prime = moved
        else:
            if moved is not None and valid is not None:  # where a row only fills a size up, z' is z
                assert touched is not None
                own = z.index_select(0, touched).repeat(objective.num_views, 1)
                moved = torch.where(_repeated(valid, objective.num_views)[:, None], moved, own.to(moved.dtype))  # type: ignore[index]
            z_prime = objective.fill_in(z, moved, touched)
        # Nobody is a size that would be compiled for itself, and comes seldom.
        loss_of = objective.loss if t == 0 else self.loss_of
        if not self.forwards.keeps_graphs:
            z_prime = dynamic(z_prime, z_prime.ndim - 2)
        weight = () if given.weight is None else (given.weight,)
        name = type(objective).__name__
        loss = check_loss(loss_of(z, z_prime, y, touched, *weight), f"{name}.loss")
        penalty = objective.penalty(self.forwards.model, x, y, start)
        loss = loss if penalty is None else loss + check_loss(penalty, f"{name}.penalty")
        loss = loss if loss_weight == 1 else loss * loss_weight
        counts = self.count(z_prime, y)
        if self.backward is not None:
            self.backward(loss, accumulation)
            loss = loss.detach()
        z = None if z is None or not objective.sees_clean else z.detach()
        score = margin = None
        if self.train.history.examples:
            score = None if z is None else check_score(self.train.score(at_least_float32(z), y), len(y))
            margin = margin_of(z_prime, y)
        return Learnt(loss, z, z_prime.detach(), counts, score, margin)

    def update(
        self, learnt: Learnt, y: Tensor, given: Given, remembered: Sequence[Tensor | None], loss_weight: float
    ) -> None:
        """What follows a mini-batch's forward and backward: :meth:`_move`, compiled on a GPU."""
        decided = given.category, given.steps, given.svar
        self._update(learnt.counts, remembered, learnt[:3], y, *decided, loss_weight)

    def _move(
        self,
        counts: Tensor,
        remembered: Sequence[Tensor | None],
        learnt: Sequence[Tensor | None],
        y: Tensor,
        category: Tensor,
        steps: Tensor,
        svar: Tensor | None,
        loss_weight: float,
    ) -> None:
        """F_R, what is remembered of the examples, and records.

        Args:
            counts: right predictions on x', of how many, over all processes.
            remembered: index, score, margin and steps of the examples of all processes; empty: nothing is.
            learnt: loss, z and z'.
            y, category, steps, svar: of the mini-batch's own m examples.
            loss_weight: of this process.
        """
        self.train.robust_fraction.move(counts)
        if remembered:
            self.train.history.keep(*remembered)  # type: ignore[arg-type]
        if self.record is not None:
            self.record(*learnt, y, category, svar, len(y) / loss_weight)


def joined(objective: Objective, batches: Sequence[Batch], run: Runner) -> tuple[Batch, tuple[int, ...]]:
    """Mini-batches one after the other, with what their corruption starts from, drawn where it is not given."""
    starts = [objective.initial_perturbation(b.x) if b.start is None else b.start for b in batches]
    columns = [b.x for b in batches], [b.y for b in batches], starts, [b.indices for b in batches]
    x, y, start, index = run.load(*(_cat(column) for column in columns))
    assert x is not None
    assert y is not None
    return Batch(x, y, start, index), tuple(len(b.y) for b in batches)


def _cat(parts: Sequence[Tensor | None]) -> Tensor | None:
    there = [part for part in parts if part is not None]
    if len(there) < len(parts):
        return None
    return there[0] if len(there) == 1 else torch.cat(there)


def slices(sizes: Sequence[int]) -> list[slice]:
    """Where parts of these sizes lie, one after the other."""
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


Rows = TypeVar("Rows", Batch, Given)


def part_of(examples: Rows, rows: slice) -> Rows:
    """These rows of what is there of some examples."""
    return type(examples)(*(None if values is None else values[rows] for values in examples))  # type: ignore[arg-type]


def _repeated(valid: Tensor | None, views: int) -> Tensor | None:
    return valid if valid is None or views == 1 else valid.repeat(views)
