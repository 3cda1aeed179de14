"""One training step: the paper's Algorithm 2, top to bottom."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bullettrain import validation
from bullettrain.allocation import Allocation, selects
from bullettrain.attacks.state import bare
from bullettrain.brief import brief
from bullettrain.cost import Work
from bullettrain.engine.attack import attack
from bullettrain.engine.distributed import Workers, find_group
from bullettrain.engine.forwards import Forwards
from bullettrain.engine.phases import EAGER, Batch, Given, Learnt, Phases, Runner, joined, part_of, slices
from bullettrain.history import History
from bullettrain.mining import (
    Category,
    RobustFraction,
    Score,
    Separation,
    SeparationForObjective,
    SeparationWithModel,
    separate,
    signed_prediction_variance,
)
from bullettrain.objectives import Objective


def algorithm(
    train: BulletTrain, phases: Phases, batches: Sequence[Batch], run: Runner = EAGER
) -> Iterator[StepOutput]:
    """Algorithm 2 for k mini-batches that are selected and attacked with the same weights; k = 1 is the paper.

    Yields what each mini-batch gave; the caller moves the weights before the next one's turn. Comments name the lines
    of the paper's listing; `tests/reference.py` has it once more, literally, one example at a time.
    """
    group, m = joined(train.objective, batches, run)  # line 3: x, y
    workers = Workers(train.process_group(), m, group.x.device)  # several processes may share each mini-batch
    svar, s = run(phases.select, group, m) if train.selects else (None, None)  # line 4: SVar of h(x)
    joint = workers.gather(svar), *workers.shares  # the quantile is over the examples of all processes
    given, state = run(phases.allocate, group, svar, s, *joint)  # line 5: f(SVar, F_R), and steps for each category
    counts = train.on_host(s, group.y, given)  # the one thing that the host has to know: how the batch shrinks
    if train.objective.needs_target and any(counts):
        state = state._replace(target=run(phases.target, group.x, train.shared(s)))
    steps, taken = attack(phases, run, state, given.steps, counts, len(m))  # line 6: x' = G(x)
    given = given._replace(steps=steps)
    z = s if phases.keeps_logits(len(m)) else None  # the loss's own logits selected: they are there already
    for i, rows in enumerate(slices(m)):
        batch, own, x_prime = part_of(group, rows), part_of(given, rows), state.x_prime_of(rows)
        train.look_at_attack(batch.x, x_prime, None if state.eps is None else state.eps[rows])
        t, share = phases.touched(counts[rows]), workers.loss_weight(i)
        learnt = run(phases.learn, batch, x_prime, own, z, t, share, phases.accumulation)  # lines 7 and 9: z', ∇L
        workers.sum_(learnt.counts)
        remembered = train.remembered(workers, i, batch.indices, learnt, own.steps)
        run(phases.update, learnt, batch.y, own, remembered, share)  # line 8: F_R
        train.steps_taken += 1
        work = train.work(counts[rows], t, taken * m[i] / len(counts), phases, len(m))
        yield StepOutput(learnt.loss, own.category, own.steps, own.svar, work, x_prime, learnt.z, learnt.z_prime)


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
        examples: how many the dataset has, for what is remembered of each: ``selection="last"``, allocations that ask
            for it. Steps are then told which ones they see.
        check_every: steps between the checks of values that wait for the device (input range, label range,
            NaN or infinite logits, x' in its ball); the first step is always checked. 0: never.
        group: the processes whose mini-batches are one; None: all, where a process group is initialised.
        joint: False: each process by itself, whatever is initialised.
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
        group: dist.ProcessGroup | None = None,
        joint: bool = True,
    ) -> None:
        validation.check_parts(objective, budget, score, separation)
        self.objective = objective
        self.budget = budget
        self.robust_fraction = RobustFraction(gamma, momentum)
        self.history = History(validation.check_count(examples, "examples"))
        self.score = score
        self.separation = separation
        self.check_settings()
        self.group, self.joint = group, joint
        self.check_every = validation.check_count(check_every, "check_every")
        self.steps_taken = 0
        self.looking = False
        """Whether this step's values are looked at."""
        self._checked = False  # any step in this process
        self._seen = False  # a network whose parts all go with the method

    def __repr__(self) -> str:
        fraction = self.robust_fraction
        parts = {"budget": self.budget, "gamma": fraction.gamma, "momentum": fraction.momentum}
        parts |= {"score": self.score, "separation": self.separation, "check_every": self.check_every}
        parts |= {"examples": self.history.examples} if self.history.examples else {}
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
            index: (m,) int64, which examples of the dataset these are; wanted where the last logits select.

        A compiled model is best compiled in the default mode: "reduce-overhead" keeps outputs in buffers that
        the attack's forwards overwrite. With several workers compile first, then wrap.
        """
        batch = Batch(x, y, start, index)
        validation.check_module(model)
        with self.validated(model, [batch]), self.forwards_watched(model, y):
            (out,) = algorithm(self, Phases(self, Forwards(model)), [batch])
        return out

    def updates(self, phases: Phases, batches: Sequence[Batch], run: Runner = EAGER) -> Iterator[StepOutput]:
        """Algorithm 2 on some mini-batches, by phases and a runner of one's own; `Captured` is made of this."""
        return algorithm(self, phases, batches, run)

    # ------------------------------------------------------------------------------- what Algorithm 2 asks for

    @property
    def selects(self) -> bool:
        """Whether anything has to be selected: not where everybody gets the same steps."""
        return selects(self.budget)

    @property
    def selects_by_last(self) -> bool:
        """Whether examples are selected by the logits that they had last."""
        return self.objective.selection == "last" and self.selects

    def process_group(self) -> dist.ProcessGroup | None:
        """The processes that share a mini-batch; None: this one alone."""
        return find_group(self.group, self.joint)

    def separation_for_objective(self) -> Separation | SeparationWithModel:
        """The separation, with the objective's settings where it takes any."""
        separation = self.separation
        return separation.suited_to(self.objective) if isinstance(separation, SeparationForObjective) else separation

    def shared(self, s: Tensor | None) -> Tensor | None:
        """The logits that select, where they are also what the attack moves away from."""
        return s if self.objective.selection == self.objective.attack_mode == "eval" else None

    def on_host(self, s: Tensor | None, y: Tensor, given: Given) -> list[int]:
        """Steps of each example on the host: waits for the device, unless everybody gets the same number anyway."""
        if self.looking and s is not None:
            validation.check_logits(s.detach(), self.steps_taken + 1)
            validation.check_labels(y, s.shape[1])
            validation.check_unnormalised(s.detach())
        if self.looking and given.svar is not None:
            validation.check_selection(given.svar, given.category, list(Category))
        same = self.budget.uniform_steps
        counts: list[int] = given.steps.tolist() if same is None else [same] * len(given.steps)
        validation.check_count(min(counts), "steps")
        most = self.objective.max_steps
        if most is not None and max(counts) > most:
            raise ValueError(f"the budget allocated {max(counts)} steps; {type(self.objective).__name__} has {most}")
        return counts

    def look_at_attack(self, x: Tensor, x_prime: Tensor, eps: Tensor | None) -> None:
        """On a step that is checked: is x' where it may be?"""
        if self.looking:
            self.objective.check_perturbed(x, x_prime, eps)

    def remembered(
        self, workers: Workers, batch: int, index: Tensor | None, learnt: Learnt, steps: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Index, score, margin and steps of the examples of all processes, as far as they are remembered."""
        if index is None or not self.history.examples:
            return ()
        if self.looking and learnt.score is not None:
            validation.check_no_nan(learnt.score)
        return tuple(workers.gather_batch(known, batch) for known in (index, learnt.score, learnt.margin, steps))

    def work(self, counts: Sequence[int], t: int | None, steps: float, phases: Phases, batches: int) -> Work:
        """Passes of one mini-batch: its update, with ``t`` rows forwarded corrupted, and its share of the attack."""
        m, touched = len(counts), sum(n > 0 for n in counts) if t is None else t
        work = self.objective.cost.work(examples=m, steps=steps, touched=touched, selects=self.selects)
        selection = work.selection
        if self.selects and isinstance(self.separation, SeparationWithModel):
            selection += m * self.separation.passes_per_example
        if self.selects and phases.selects_by_loss_logits and not phases.keeps_logits(batches):
            selection += m  # once more, for the update
        return Work(m, selection, work.attack, work.update)

    # ------------------------------------------------------------------------- validation: once a step, here alone

    def check_settings(self) -> None:
        """ValueError where its parts do not go together."""
        self.objective.check_budget(self.budget)
        validation.check_last(self.objective, self.budget, self.separation, self.history.examples)
        self.separation_for_objective()  # refuses one that does not go with the objective

    def is_due(self, steps: int = 1) -> bool:
        """Whether one of the next ``steps`` is one whose values are looked at, which waits for the device."""
        every = self.check_every
        return bool(every) and (not self._checked or -self.steps_taken % every < steps)

    @contextmanager
    def validated(self, network: nn.Module, batches: Sequence[Batch]) -> Iterator[None]:
        """Check settings and shapes; on a step that is due, values too, here and (:attr:`looking`) in the block."""
        due = self.is_due(len(batches))
        self.check_settings()
        for batch in batches:
            validation.check_batch(batch.x, batch.y)
            if self.selects_by_last or (batch.indices is not None and self.history.examples):
                validation.check_index(batch.indices, batch.y, self.history.examples, look=due)
                self.history.to(batch.y.device)
            if due:
                self.objective.check_inputs(batch.x)
        if due or not self._seen:
            validation.check_network(network)
            self._seen = True
        self.looking = due
        try:
            yield
            self._checked = self._checked or due
        finally:
            self.looking = False

    @contextmanager
    def forwards_watched(self, model: nn.Module, y: Tensor) -> Iterator[None]:
        """On a step that is due: look at the logits of every forward, and undo what it did to buffers on an error."""
        if not self.looking:
            yield
            return

        def look(module: nn.Module, args: tuple[Any, ...], logits: Tensor) -> None:
            validation.check_logits_shape(logits, len(args[0]))
            validation.check_labels(y, logits.shape[1])
            validation.check_logits(logits, self.steps_taken + 1)
            validation.check_unnormalised(logits)

        # Not traced where net.compile() has hooks compiled too: it waits for the device, and a graph breaks there.
        hook = bare(model).register_forward_hook(torch.compiler.disable(look))  # type: ignore[no-untyped-call]
        try:
            with validation.buffers_restored_on_error(bare(model)):
                yield
        finally:
            hook.remove()

    # ----------------------------------------------------------------------------------------------- its state

    def state_dict(self) -> dict[str, Any]:
        """F_R and the number of steps taken, as plain numbers, what the objective keeps, where generators are, and the
        history, where there is one."""
        return {
            "robust_fraction": self.robust_fraction.state_dict(),
            "steps_taken": self.steps_taken,
            "objective": self.objective.state_dict(),
            **({"history": self.history.state_dict()} if self.history.examples else {}),
            "generators": {name: generator.get_state() for name, generator in self._generators().items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`, with the γ and the momentum that it was made with.

        Noise goes on where it was if objective and separation have generators of their own; torch's is the caller's.
        """
        if missing := {"robust_fraction", "steps_taken"} - state.keys():
            raise ValueError(f"{' and '.join(sorted(missing))} missing; give what state_dict() of BulletTrain returned")
        if self.history.examples and "history" in state:
            self.history.check_state(state["history"])  # before anything is changed
        self._restore_generators(state.get("generators", {}))
        before = brief((self.robust_fraction.gamma, self.robust_fraction.momentum))
        self.robust_fraction.load_state_dict(state["robust_fraction"])
        now = brief((self.robust_fraction.gamma, self.robust_fraction.momentum))
        if now != before:
            said = f"the state was made with (gamma, momentum) = {now}, used from here on, not {before}"
            warnings.warn(f"{said}; to change that, set robust_fraction.gamma after loading", stacklevel=2)
        self.steps_taken = validation.check_count(state["steps_taken"], "steps_taken")
        self.objective.load_state_dict(state.get("objective", {}))
        if self.history.examples and "history" in state:
            self.history.load_state_dict(state["history"])
        elif self.history.examples:
            self.history.clear()
            if self.selects_by_last:
                lost = "the state has no last scores: until they are trained on again all are on the boundary"
                warnings.warn(lost, stacklevel=2)

    def _restore_generators(self, states: Mapping[str, Any]) -> None:
        own = self._generators()
        for name, kept in states.items():
            if name not in own:
                lost = f"the state holds a generator of the {name}, which has none here: noise differs"
                warnings.warn(lost, stacklevel=3)
                continue
            try:
                own[name].set_state(kept.cpu())
            except RuntimeError:  # that of a GPU has another size
                where = own[name].device
                raise ValueError(f"the {name}'s generator is on {where}, that of the state was elsewhere") from None

    def _generators(self) -> dict[str, torch.Generator]:
        """Sources of noise that are not torch's own."""
        parts = {"objective": self.objective, "separation": self.separation}
        found = {name: getattr(part, "generator", None) for name, part in parts.items()}
        return {name: generator for name, generator in found.items() if isinstance(generator, torch.Generator)}
