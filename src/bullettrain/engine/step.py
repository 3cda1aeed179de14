"""One training step: the paper's Algorithm 2, top to bottom."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bullettrain.allocation import Allocation, Work
from bullettrain.attacks import bare
from bullettrain.brief import brief
from bullettrain.checks import (
    buffers_restored_on_error,
    check_batch,
    check_category,
    check_count,
    check_index,
    check_labels,
    check_logits,
    check_logits_shape,
    check_loss,
    check_module,
    check_network,
    check_no_nan,
    check_score,
    check_selection,
    check_steps,
    check_unnormalised,
)
from bullettrain.engine.parts import check_last, check_parts, restore_fraction, restore_generators, restore_scores
from bullettrain.engine.workers import Workers
from bullettrain.mining import (
    Category,
    LastScores,
    RobustFraction,
    Score,
    Separation,
    SeparationForObjective,
    SeparationWithModel,
    separate,
    signed_prediction_variance,
)
from bullettrain.objectives import Objective


@dataclass(frozen=True)
class StepOutput:
    """What one step computed. Only ``loss`` carries a graph."""

    loss: Tensor
    """0-d: call ``.backward()`` on it. With several workers it is weighted by this one's share of the batch."""
    category: Tensor
    """(m,) of :class:`Category`. With equal steps for everyone nothing is selected, and all are BOUNDARY."""
    steps: Tensor
    """(m,) steps that each example got."""
    svar: Tensor | None
    """(m,) scores; None where nothing was selected."""
    work: Work
    """Passes that were made."""
    x_prime: Tensor
    """(m, …) corrupted examples; AugMix: (2, m, …)."""
    z: Tensor | None
    """(m, K) clean training-mode logits; None for PGD-AT, whose loss has none."""
    z_prime: Tensor
    """(m, K) corrupted training-mode logits; AugMix: (2, m, K)."""

    @property
    def shares(self) -> dict[str, float]:
        """The shares of "outlier", "boundary" and "robust" examples, which add up to 1; waits for the device."""
        counts = self.category.bincount(minlength=len(Category)).tolist()
        return {category.name.lower(): counts[category] / len(self.category) for category in Category}

    def clone(self) -> StepOutput:
        """A copy with tensors of its own; the loss without its graph."""
        copies = {name: value.detach().clone() for name, value in vars(self).items() if torch.is_tensor(value)}
        return StepOutput(**{**vars(self), **copies})

    def __repr__(self) -> str:
        counts = self.category.bincount(minlength=len(Category)).tolist()
        classes = ", ".join(f"{category.name.lower()}={counts[category]}" for category in Category)
        steps, passes = self.steps.float().mean().item(), self.work.per_example
        return f"StepOutput(loss={self.loss.item():.4g}, {classes}, mean_steps={steps:.2f}, passes={passes:.2f})"


class BulletTrain:
    """Robust training that spends the effort on boundary examples. Attach it to your own loop:

        train = BulletTrain(TRADES(beta=6.0, eps=8/255), budget=StepBudget(boundary=10, robust=2), gamma=0.8)
        for x, y in loader:
            out = train.step(model, x, y)
            out.loss.backward(); optimizer.step(); optimizer.zero_grad()

    Args:
        objective: PGDAT, TRADES, MART or AugMix.
        budget: steps for each class; ``StepBudget.uniform(n)`` is the plain algorithm.
        gamma: γ in (0, 1], how far F_R is trusted; smaller is more careful.
        momentum: p in [0, 1) of F_R's moving average.
        score: (logits, labels) → (m,), negative where misclassified, larger where safer.
        separation: (score, F_R) → categories (m,), or an oracle that sees the network.
        examples: how many there are, for an objective with ``selection="last"``.
        check_every: steps between the checks of values that wait for the device (input range, label range,
            NaN or infinite logits); the first step is always checked. 0: never.
    """

    def __init__(
        self,
        objective: Objective,
        *,
        budget: Allocation,
        gamma: float = 0.8,
        momentum: float = 0.9,
        score: Score = signed_prediction_variance,
        separation: Separation | SeparationWithModel = separate,
        examples: int = 0,
        check_every: int = 100,
    ) -> None:
        check_parts(objective, budget, score, separation)
        check_last(objective, budget, separation, check_count(examples, "examples"))
        self.objective = objective
        self.budget = budget
        self.robust_fraction = RobustFraction(gamma, momentum)
        self.last = LastScores(examples)
        self.score = score
        self.separation = separation
        self._suited()  # refuses one that does not go with the objective
        self.check_every = check_count(check_every, "check_every")
        self.steps_taken = 0
        self._checked = False  # in this process
        self._seen = False  # a network whose parts all go with the method
        self._looking = False

    def __repr__(self) -> str:
        fraction = self.robust_fraction
        parts = {"budget": self.budget, "gamma": fraction.gamma, "momentum": fraction.momentum}
        parts |= {"score": self.score, "separation": self.separation, "check_every": self.check_every}
        parts |= {"examples": self.last.examples} if self.remembers else {}
        settings = ", ".join(f"{name}={brief(part)}" for name, part in parts.items())
        return f"BulletTrain({self.objective!r}, {settings})"

    def step(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        *,
        start: Tensor | None = None,
        index: Tensor | None = None,
    ) -> StepOutput:
        """Loss of one mini-batch; F_R moves on. The caller takes the gradient and the optimiser's step.

        Args:
            model: returns logits (n, K); may be compiled, or wrapped in DistributedDataParallel.
            x: (m, …) clean examples in the objective's bounds.
            y: (m,) int64 labels.
            start: (m, …) points that the attack starts from, to fix its noise; for AugMix (2, m, …), the
                views themselves, or what its ``draw`` gave.
            index: (m,) int64, which examples these are; wanted, and looked at, where the last logits select.

        A compiled model is best compiled in the default mode: "reduce-overhead" keeps outputs in buffers that
        the attack's forwards overwrite. With several workers compile first, then wrap.
        """
        check_module(model)
        check_batch(x, y)
        with self._watching(model, x, y):
            out = self._algorithm(model, x, y, start, index)
        self.steps_taken += 1
        return out

    def _algorithm(
        self, model: nn.Module, x: Tensor, y: Tensor, start: Tensor | None, index: Tensor | None
    ) -> StepOutput:
        objective, workers = self.objective, Workers(model, y)
        selects = self.budget.uniform_steps is None
        check_last(objective, self.budget, self.separation, self.last.examples)
        if selects:
            s = None if self.remembers else objective.selection_logits(model, x)  # h(x)
            svar = self._svar(s, y, index)
            category = self._separate(model, x, y, s, svar, workers)
        else:  # equal steps for everyone: nothing to select, no forward for it
            s, svar, category = None, None, torch.full_like(y, int(Category.BOUNDARY))
        steps = check_steps(self.budget.allocate(category, svar), len(y))
        sizes = self.budget.step_sizes(category, steps, objective.unit)
        counts = self._on_host(steps)  # the host has to know how the batch shrinks

        x_prime = objective.corrupt(model, x, y, s, counts, sizes, start=start)  # no steps: untouched
        if self._looking:
            objective.check_perturbed(x, x_prime)
        z = objective.clean_logits(model, x, s)
        z_prime = objective.corrupted_logits(model, x_prime, z, counts)  # no steps: z again
        touched = counts.nonzero()[:, 0]
        some = None if len(touched) == len(y) else touched.to(y.device, non_blocking=True)
        name = type(objective).__name__
        loss = check_loss(objective.loss(z, z_prime, y, some), f"{name}.loss")
        penalty = objective.penalty(model, x, y, start)  # a term that few objectives have
        loss = loss if penalty is None else loss + check_loss(penalty, f"{name}.penalty")
        loss = loss * workers.loss_weight
        self.robust_fraction.update(z_prime, y, group=workers.group)  # F_R
        if self.remembers:
            self._remember(z, y, index, workers)
        return StepOutput(
            loss=loss,
            category=category,
            steps=steps,
            svar=svar,
            work=self._work(len(y), int(counts.sum()), len(touched), selects),
            x_prime=x_prime.detach(),
            z=None if z is None else z.detach(),
            z_prime=z_prime.detach(),
        )

    @property
    def remembers(self) -> bool:
        """Whether examples are selected by the logits that they had last."""
        return self.objective.selection == "last" and self.budget.uniform_steps is None

    def _svar(self, s: Tensor | None, y: Tensor, index: Tensor | None) -> Tensor:
        """Scores (m,): of the logits ``s``, or those of the last time."""
        if s is not None:
            return check_score(self.score(s.detach(), y), len(y))
        self.last.to(y.device)
        return self.last.of(check_index(index, y, self.last.examples, look=self._looking))

    def _remember(self, z: Tensor | None, y: Tensor, index: Tensor | None, workers: Workers) -> None:
        assert z is not None
        assert index is not None
        score = check_score(self.score(z.detach(), y), len(y))
        if self._looking:
            check_no_nan(score)
        self.last.keep(workers.gather(index)[0], workers.gather(score)[0])

    def _separate(
        self, model: nn.Module, x: Tensor, y: Tensor, s: Tensor | None, svar: Tensor, workers: Workers
    ) -> Tensor:
        F_R = self.robust_fraction.value
        separation = self._suited()
        if isinstance(separation, SeparationWithModel):
            assert s is not None
            category = separation.bind(bare(model), x, y, s.detach())(svar, F_R)
        else:
            joint, mine = workers.gather(svar)  # the quantile is over the batch of all workers
            category = (self.last.careful(separation) if self.remembers else separation)(joint, F_R)[mine]
        category = check_category(category, len(y))
        if self._looking:
            check_selection(svar, category, list(Category))
        return category

    def _suited(self) -> Separation | SeparationWithModel:
        """The separation, with the objective's settings where it takes any."""
        separation = self.separation
        return separation.suited_to(self.objective) if isinstance(separation, SeparationForObjective) else separation

    def _on_host(self, steps: Tensor) -> Tensor:
        """Step counts (m,) on the host: waits for the device, unless everybody gets the same number anyway."""
        same = self.budget.uniform_steps
        counts = steps.cpu() if same is None else torch.full(steps.shape, same)
        check_count(int(counts.min()), "steps")
        return counts

    def _work(self, m: int, steps: int, touched: int, selects: bool) -> Work:
        work = self.objective.cost.work(examples=m, steps=steps, touched=touched, selects=selects)
        if selects and isinstance(self.separation, SeparationWithModel):
            extra = m * self.separation.passes_per_example
            work = Work(m, work.selection + extra, work.attack, work.update)
        return work

    @contextmanager
    def _watching(self, model: nn.Module, x: Tensor, y: Tensor) -> Iterator[None]:
        """On a step that is checked: look at x, y and the logits of every forward; undo on an error."""
        due = not self._checked or self.steps_taken % self.check_every == 0 if self.check_every else False
        if due or not self._seen:
            check_network(model)
            self._seen = True
        if not due:
            yield
            return
        self.objective.check_inputs(x)

        def look(module: nn.Module, args: tuple[Any, ...], logits: Tensor) -> None:
            check_logits_shape(logits, len(args[0]))
            check_labels(y, logits.shape[1])
            check_logits(logits, self.steps_taken + 1)
            check_unnormalised(logits)

        # Not traced where net.compile() has hooks compiled too: it waits for the device, and a graph breaks there.
        hook = bare(model).register_forward_hook(torch.compiler.disable(look))  # type: ignore[no-untyped-call]
        self._looking = True
        try:
            with buffers_restored_on_error(bare(model)):
                yield
            self._checked = True
        finally:
            self._looking = False
            hook.remove()

    def state_dict(self) -> dict[str, Any]:
        """F_R and the number of steps taken, as plain numbers, what the objective carries, where generators are, and
        the last scores, where those select."""
        return {
            "robust_fraction": self.robust_fraction.state_dict(),
            "steps_taken": self.steps_taken,
            "objective": self.objective.state_dict(),
            **(self.last.state_dict() if self.remembers else {}),
            "generators": {name: generator.get_state() for name, generator in self._generators().items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`, with the γ and the momentum that it was made with.

        Noise goes on where it was if objective and separation have generators of their own; torch's is the caller's.
        """
        if missing := {"robust_fraction", "steps_taken"} - state.keys():
            raise ValueError(f"{' and '.join(sorted(missing))} missing; give what state_dict() of BulletTrain returned")
        if self.remembers and "scores" in state:
            self.last.fits(state["scores"])  # before anything is changed
        restore_generators(self._generators(), state.get("generators", {}))
        restore_fraction(self.robust_fraction, state["robust_fraction"])
        self.steps_taken = check_count(state["steps_taken"], "steps_taken")
        self.objective.load_state_dict(state.get("objective", {}))
        if self.remembers:
            restore_scores(self.last, state)

    def _generators(self) -> dict[str, torch.Generator]:
        """Sources of noise that are not torch's own."""
        parts = {"objective": self.objective, "separation": self.separation}
        found = {name: getattr(part, "generator", None) for name, part in parts.items()}
        return {name: generator for name, generator in found.items() if isinstance(generator, torch.Generator)}
