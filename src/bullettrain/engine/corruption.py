"""How a group's examples are corrupted: pieces that work on static buffers, the most careful rows first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator
from functools import partial

import torch
from torch import Tensor

from bullettrain.allocation import StepBudget
from bullettrain.attacks.losses import gradient_at_logits
from bullettrain.augmix import ViewMaker
from bullettrain.engine.learner import dynamic
from bullettrain.engine.memory import Memory, like, some, take
from bullettrain.engine.plan import Plan, turns
from bullettrain.engine.still import Still
from bullettrain.objectives import AdversarialObjective, AugMix
from bullettrain.precision import wide

Piece = tuple[Hashable, Callable[[], None]]
"""A function of static buffers, with a key that names it and its sizes."""


class CorruptionPieces(ABC):
    """What the group engine asks of a corruption. By default it has no buffers and no target."""

    copies = 1
    """Corrupted copies of each example."""
    aims = False
    """Whether it moves away from clean logits."""

    def allocate(self, memory: Memory) -> None:  # noqa: B027 (nothing to do by default)
        """Make buffers for a group."""

    def tensors(self) -> list[Tensor]:
        """The buffers that pieces change."""
        return []

    @abstractmethod
    def lay_out(self, memory: Memory, order: Tensor, counts: Tensor, held: Tensor | None, fresh: int) -> None:
        """Prepare the rows.

        Args:
            memory: the group.
            order, counts: of :func:`arrange`.
            held: (R, K) clean logits where it aims.
            fresh: the last steps of each row, which are not among ``pieces``.
        """

    @abstractmethod
    def pieces(self, memory: Memory, plan: Plan) -> Iterator[Piece]:
        """The corruption of a group, but for its last steps where those are taken fresh."""

    def fresh_pieces(self, memory: Memory, t: int, steps: int) -> Iterator[Piece]:
        """The last ``steps`` of the next mini-batch's t examples that have any."""
        return iter(())


class AttackPieces(CorruptionPieces):
    """PGD on a copy of the network: eval mode, no gradient for weights, in the attack's precision.

    Args:
        objective: its loss, norm, radius and bounds.
        budget: steps; where classes have different ones, rows with few take turns.
        still: what is attacked; refreshed before each attack.
    """

    def __init__(self, objective: AdversarialObjective, budget: StepBudget, still: Still) -> None:
        self.budget, self.still, compile = budget, still, still.compile
        self.in_turns = any(0 < steps < budget.boundary for steps in (budget.robust, budget.outlier))
        ball = objective.ball.on(next(still.network.parameters()))

        # Buffers with the rows to look at in them: compiled, the looking up is part of the kernel.
        def move(images: Tensor, gradient: Tensor, clean: Tensor, size: Tensor, rows: Tensor | None) -> Tensor:
            return ball.step(images, some(clean, rows), gradient, some(size, rows))

        self.aims = objective.attack_loss == "kl"
        climb = gradient_at_logits(objective.ascended)

        def ascent(logits: Tensor, labels: Tensor, goal: Tensor | None, rows: Tensor | None) -> Tensor:
            return climb(logits, some(labels, rows), None if goal is None else some(goal, rows))

        self.move = torch.compile(move) if compile else move
        self.ascent = torch.compile(ascent) if compile else ascent

    def allocate(self, memory: Memory) -> None:
        """Buffers in the order of the attack: the examples, where they have got to, labels, targets, step sizes.

        One row more than there are examples: what fills a size up is taken from there, and never moves.
        """
        x, rows, classes = memory.x, len(memory.y) + 1, memory.z.shape[1]
        self.clean, self.adv, self.labels = like(x, rows), like(x, rows), memory.y.new_zeros(rows)
        self.goal = memory.z.new_zeros(rows, classes)
        self.size = x.new_zeros(rows, *(1,) * (x.ndim - 1))
        # Who is under attack in which iteration, and which is next.
        self.turns, self.turn = memory.y.new_zeros(self.budget.boundary, rows), memory.y.new_zeros(1)

    def tensors(self) -> list[Tensor]:
        """What pieces change."""
        return [self.clean, self.adv, self.labels, self.goal, self.size, self.turns, self.turn]

    def lay_out(self, memory: Memory, order: Tensor, counts: Tensor, held: Tensor | None, fresh: int) -> None:
        """The rows in the order of their attack, and their turns; a KL aims away from ``held``."""
        rows, column = len(order), (-1, *(1,) * (memory.x.ndim - 1))
        self.labels[:rows] = memory.y[order]
        self.size[:rows] = memory.step_size[order].view(column)
        self.clean[:rows] = take(memory.x, order)
        moves = (memory.steps[order] > 0).view(column)
        self.adv[:rows] = torch.where(moves, take(memory.start, order), self.clean[:rows])
        if self.aims and held is not None:
            self.goal[:rows] = wide(held).softmax(dim=1)[order]
        if self.in_turns and self.budget.boundary > fresh:
            who = turns(counts, rows, self.budget, fresh)
            self.turns[: len(who), :rows] = torch.where(who < rows, who, len(self.size) - 1)
            self.turn.zero_()

    def pieces(self, memory: Memory, plan: Plan) -> Iterator[Piece]:
        """The attack of a group, but for its last steps where those are taken fresh."""
        step = self._turn if self.in_turns else self._step
        for n in plan.schedule:
            yield ("attack", n), partial(step, n)
        yield ("return", plan.total), partial(self._return, memory, plan.total)

    def fresh_pieces(self, memory: Memory, t: int, steps: int) -> Iterator[Piece]:
        """The last steps of the next mini-batch's t examples that have any, with the weights it will change."""
        if t and steps:
            yield ("fresh", t), partial(self._freshen, memory, t, steps)

    def _step(self, n: int) -> None:
        """One ascent step of the first n rows."""
        clean, labels, goal, size = (values[:n] for values in (self.clean, self.labels, self.goal, self.size))
        self.adv[:n] = self._ascend(self.adv[:n], clean, labels, goal, size, None)

    def _turn(self, n: int) -> None:
        """One ascent step of the n rows whose turn it is."""
        rows = self.turns.index_select(0, self.turn)[0, :n]
        moved = self._ascend(take(self.adv, rows), self.clean, self.labels, self.goal, self.size, rows)
        self.adv.index_copy_(0, rows, moved)
        self.turn.add_(1)

    def _ascend(
        self, adv: Tensor, clean: Tensor, labels: Tensor, goal: Tensor, size: Tensor, rows: Tensor | None
    ) -> Tensor:
        """``adv`` (n, …) after a step; what belongs to them is the others' ``rows``, or all there is."""
        images = adv.detach().requires_grad_()
        if rows is not None:
            rows = dynamic(rows)
        with torch.enable_grad():
            logits = self.still.net(dynamic(images))
            seen = dynamic(wide(logits.detach()))
            direction = self.ascent(seen, dynamic(labels), dynamic(goal) if self.aims else None, rows)
            (gradient,) = torch.autograd.grad(logits, images, direction.to(logits.dtype))
        return self.move(dynamic(images.detach()), dynamic(gradient), dynamic(clean), dynamic(size), rows)

    def _return(self, memory: Memory, rows: int) -> None:
        """x' to where the examples came from."""
        memory.prime[0].index_copy_(0, memory.order[:rows], self.adv[:rows])

    def _freshen(self, memory: Memory, t: int, steps: int) -> None:
        self.still.refresh()
        rows = memory.at + memory.local.index_select(0, memory.at + torch.arange(t, device=memory.at.device))
        self.clean[:t], self.adv[:t] = take(memory.x, rows), take(memory.prime[0], rows)
        self.labels[:t] = memory.y[rows]
        self.size[:t] = memory.step_size[rows].view(-1, *(1,) * (memory.x.ndim - 1))
        if self.aims:
            self.goal[:t] = wide(self.still.logits(self.clean[:t])).softmax(dim=1)
        for _ in range(steps):
            self._step(t)
        memory.prime[0].index_copy_(0, rows, self.adv[:t])


class ViewPieces(CorruptionPieces):
    """AugMix's views, which no network has a part in.

    Args:
        objective: how views are made, and how many of each example.
    """

    def __init__(self, objective: AugMix) -> None:
        assert isinstance(objective.views, ViewMaker)
        self.maker, self.copies = objective.views, objective.copies

    def lay_out(self, memory: Memory, order: Tensor, counts: Tensor, held: Tensor | None, fresh: int) -> None:
        """Examples without views stand for themselves."""
        memory.prime[:, : len(order)] = memory.x[: len(order)]

    def pieces(self, memory: Memory, plan: Plan) -> Iterator[Piece]:
        """The views of all rows that get any; they do not become stale."""
        for n in plan.schedule:
            yield ("views", n), partial(self._make, memory, n)

    def _make(self, memory: Memory, n: int) -> None:
        rows = memory.order[:n]
        views = self.maker(take(memory.x, rows), memory.start.index_select(0, rows))
        for prime, view in zip(memory.prime, views, strict=True):
            prime.index_copy_(0, rows, view)
