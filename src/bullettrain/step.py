"""One training step: the paper's Algorithm 2, top to bottom."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bullettrain import validation
from bullettrain.allocation import Allocation, ShuffledBudget, StepBudget, needs_selection
from bullettrain.attacks.norms import Ball
from bullettrain.attacks.pgd import AttackState
from bullettrain.attacks.state import bare
from bullettrain.brief import brief
from bullettrain.cost import Work
from bullettrain.engine.attack import run_attack
from bullettrain.engine.distributed import JointBatches, checksum, find_group
from bullettrain.engine.forwards import Forwards
from bullettrain.engine.phases import (
    EAGER,
    Assignment,
    Batch,
    JointScores,
    Learned,
    Phases,
    Runner,
    concatenate,
    rows_of,
    slices,
)
from bullettrain.errors import raised_as
from bullettrain.history import History
from bullettrain.mining import (
    Category,
    RobustFraction,
    Score,
    Separation,
    SeparationWithModel,
    separate,
    signed_prediction_variance,
)
from bullettrain.objectives import Objective


def algorithm(
    train: BulletTrain, phases: Phases, batches: Sequence[Batch], run: Runner = EAGER
) -> Iterator[StepOutput]:
    """Algorithm 2 of the paper for k mini-batches that are selected and attacked with the same weights.

    k = 1 is the paper. Yields the output of each mini-batch; the caller updates the weights before it asks for the
    next. Phases are functions of tensors, which ``run`` calls directly or as CUDA graphs; reading from the device and
    talking to other processes happens between them. Comments name the lines of the paper's listing.
    `tests/reference.py` has the algorithm once more, one example at a time.
    """
    examples, sizes = concatenate(train.objective, batches, run)  # line 3: x, y
    # the mini-batches of all processes together
    world = JointBatches(train.process_group(), sizes, examples.x.device, train.weights_checksum)
    # line 4: SVar of h(x)
    svar, logits = run(phases.select, examples, sizes) if train.needs_selection else (None, None)
    joint_scores = JointScores(world.gather(svar), world.sizes, world.local_ranges)  # the quantile is over all of them
    decided, attack = run(phases.allocate, examples, svar, logits, joint_scores)  # line 5: f(SVar, F_R), and steps
    steps = train.read_steps(logits, examples.y, decided, attack)  # in one process the only read from the device
    if train.objective.needs_target and any(steps):
        attack = attack._replace(target=run(phases.target, examples.x, train.target_logits(logits)))
    decided, attack_steps = run_attack(phases, run, attack, decided, steps, len(sizes))  # line 6: x' = G(x)
    z = logits if phases.reuses_logits(len(sizes)) else None
    for i, rows in enumerate(slices(sizes)):
        batch, assigned, x_prime = rows_of(examples, rows), rows_of(decided, rows), attack.x_prime_of(rows)
        if train.checking:
            train.objective.check_perturbed(batch.x, x_prime, None if attack.eps is None else attack.eps[rows])
        num_touched = phases.num_touched(steps[rows])  # rows that are forwarded corrupted
        loss_weight = world.loss_weight(i)  # of this process
        # lines 7 and 9: z' = h(x'), and the gradient of the loss
        learned = run(phases.learn, batch, x_prime, assigned, z, num_touched, loss_weight, phases.accumulation)
        world.sum_(learned.counts)  # of correct predictions on x'
        remembered = train.remembered(world, i, batch.indices, learned, assigned.steps)  # for the history
        run(phases.update_state, learned, batch.y, assigned, remembered, loss_weight)  # line 8: F_R
        train.steps_taken += 1
        work = train.work(steps[rows], num_touched, attack_steps * sizes[i] / len(steps), phases, len(sizes))
        told = learned.loss, assigned.category, assigned.steps, assigned.svar
        yield StepOutput(*told, work, x_prime, learned.z, learned.z_prime)


@dataclass(frozen=True, eq=False)
class StepOutput:
    """The result of one training step. Only ``loss`` carries a graph."""

    loss: Tensor
    """0-d; call ``.backward()`` on it. With several processes it is weighted by this one's share of the batch."""
    category: Tensor
    """(m,) of :class:`Category`. With a uniform budget nothing is selected, and all examples are BOUNDARY."""
    steps: Tensor
    """(m,) attack steps of each example."""
    svar: Tensor | None
    """(m,) scores; None with a uniform budget."""
    work: Work
    """Counted forward and backward passes."""
    x_prime: Tensor
    """(m, …) corrupted examples; AugMix: (2, m, …)."""
    z: Tensor | None
    """(m, K) clean training-mode logits; None if the loss has none (PGD-AT, FGSM-PGI)."""
    z_prime: Tensor
    """(m, K) corrupted training-mode logits; AugMix: (2, m, K)."""

    @property
    def shares(self) -> dict[str, float]:
        """Shares of "outlier", "boundary" and "robust" examples, which sum to 1; synchronises with the device."""
        counts = self.category.bincount(minlength=len(Category)).tolist()
        return {category.name.lower(): counts[category] / len(self.category) for category in Category}

    def clone(self) -> StepOutput:
        """Return a copy of all tensors; the loss is detached."""
        copies = {name: value.detach().clone() for name, value in vars(self).items() if torch.is_tensor(value)}
        return StepOutput(**{**vars(self), **copies})

    def __repr__(self) -> str:
        counts = self.category.bincount(minlength=len(Category)).tolist()
        classes = ", ".join(f"{category.name.lower()}={counts[category]}" for category in Category)
        steps, passes = self.steps.float().mean().item(), self.work.per_example
        return f"StepOutput(loss={self.loss.item():.4g}, {classes}, mean_steps={steps:.2f}, passes={passes:.2f})"


class BulletTrain:
    """Robust training that spends the attack steps on boundary examples. Use it in your own training loop:

        train = BulletTrain(TRADES(beta=6.0, eps=8/255), budget=StepBudget(boundary=10, robust=2), gamma=0.8)
        for x, y in loader:
            out = train.step(model, x, y)
            out.loss.backward(); optimizer.step(); optimizer.zero_grad()

    Args:
        objective: PGDAT, TRADES, MART, AugMix, or an objective of your own.
        budget: attack steps for each category; ``StepBudget.uniform(n)`` is the plain algorithm.
        gamma: γ in (0, 1], scales the estimate F_R of the robust share. A smaller γ attacks more examples fully.
        momentum: p in [0, 1), momentum of F_R's moving average.
        score: function (logits, labels) → (m,); negative for misclassified examples, larger for safer ones.
        separation: function (score, F_R) → categories (m,), or a separation that sees the network (an oracle).
        dataset_size: number of examples of the dataset, if their history is used (``selection="last"``, some
            allocations). Steps then need ``index``.
        check_every: number of steps between checks of values, which synchronise with the device: input range, labels,
            NaN or infinite logits, and x' inside its ball. The first step is always checked. 0 disables the checks.
        group: process group whose mini-batches form one joint batch; None: the default group, if initialised.
        joint: False: each process computes its own quantile and F_R, even if a process group is initialised.
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
        dataset_size: int = 0,
        check_every: int = 100,
        group: dist.ProcessGroup | None = None,
        joint: bool = True,
    ) -> None:
        validation.check_parts(objective, budget, score, separation)
        self.objective = objective
        self.budget = budget
        self.robust_fraction = RobustFraction(gamma, momentum)
        self.history = History(validation.check_count(dataset_size, "dataset_size"))
        self.score = score
        self.separation = separation
        self.check_settings()
        own = budget.budget if isinstance(budget, ShuffledBudget) else budget
        if isinstance(own, StepBudget) and (short := own.shortfall(objective.unit, objective.moves_per_step)):
            warnings.warn(short, stacklevel=2)
        self.group, self.joint = group, joint
        self.check_every = validation.check_count(check_every, "check_every")
        self.steps_taken = 0
        self.checking = False
        """Whether the values of the current step are checked."""
        self.weights_checksum = 0
        """That of a checked step in several processes, else 0."""
        self._checked = False  # whether any step of this process was
        self._network_checked = False

    def __repr__(self) -> str:
        fraction = self.robust_fraction
        parts = {"budget": self.budget, "gamma": fraction.gamma, "momentum": fraction.momentum}
        parts |= {"score": self.score, "separation": self.separation, "check_every": self.check_every}
        parts |= {"dataset_size": self.history.examples} if self.history.examples else {}
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
        """Compute the loss of one mini-batch and update F_R.

        The caller runs ``backward()`` and the optimiser.

        Args:
            model: returns logits (n, K). It may be compiled, or wrapped in DistributedDataParallel (compile first, then
                wrap). Compile it in the default mode: "reduce-overhead" keeps outputs in buffers that the attack's
                forwards overwrite.
            x: (m, …) clean examples within the objective's bounds.
            y: (m,) int64 labels.
            start: (m, …) starting points of the attack, to fix its noise; for AugMix the views (2, m, …), or the
                result of its ``draw``.
            index: (m,) int64 dataset indices, needed if the history is used.
        """
        batch = Batch(x, y, start, index)
        validation.check_module(model)
        with self.validated(model, [batch]), self.checked_forwards(model, y):
            together = self.checking and self.process_group() is not None
            self.weights_checksum = checksum(model.parameters()) if together else 0
            (out,) = algorithm(self, Phases(self, Forwards(model)), [batch])
        return out

    def updates(self, phases: Phases, batches: Sequence[Batch], run: Runner = EAGER) -> Iterator[StepOutput]:
        """Run Algorithm 2 with other phases and another runner, as `Captured` does."""
        return algorithm(self, phases, batches, run)

    @property
    def gamma(self) -> float:
        """γ of F_R; it may change between steps."""
        return self.robust_fraction.gamma

    @gamma.setter
    def gamma(self, gamma: float) -> None:
        self.robust_fraction.gamma = gamma

    # ---------------------------------------------------------------------------- called by Algorithm 2

    @property
    def needs_selection(self) -> bool:
        """Whether the step has to separate the examples. With a uniform budget it does not."""
        return needs_selection(self.budget)

    @property
    def selects_by_history(self) -> bool:
        """Whether examples are selected by their logits of the last epoch."""
        return self.objective.selection == "last" and self.needs_selection

    def process_group(self) -> dist.ProcessGroup | None:
        """Return the processes that share a mini-batch; None: only this one."""
        return find_group(self.group, self.joint)

    def separation_for_objective(self) -> Separation | SeparationWithModel:
        """Return the separation, adapted to the objective if it supports that."""
        suited_to = getattr(self.separation, "suited_to", None)
        return self.separation if suited_to is None else suited_to(self.objective)

    def target_logits(self, logits: Tensor | None) -> Tensor | None:
        """Return the logits that selected, if the attack can use them as its target too."""
        return logits if self.objective.selection == self.objective.attack_mode == "eval" else None

    def read_steps(self, logits: Tensor | None, y: Tensor, assigned: Assignment, attack: AttackState) -> list[int]:
        """Return the steps of each example on the host; synchronises with the device unless the budget is uniform."""
        if self.checking and logits is not None:
            validation.check_logits(logits.detach(), y, self.steps_taken + 1)
            validation.check_unnormalised(logits.detach())
        if self.checking and assigned.svar is not None:
            validation.check_no_nan(assigned.svar)
            validation.check_integers(
                assigned.category, len(Category), "the separation returned categories", "there are"
            )
            if logits is not None and self.separation is separate:
                validation.check_score_sign(assigned.svar, logits, y)
        same = self.budget.uniform_steps
        if self.checking:
            self._check_allocated(assigned, attack, same)
        steps: list[int] = assigned.steps.tolist() if same is None else [same] * len(assigned.steps)
        validation.check_count(min(steps), "steps")
        most = self.objective.max_steps
        if most is not None and max(steps) > most:
            raise ValueError(f"the budget allocated {max(steps)} steps; {type(self.objective).__name__} has {most}")
        return steps

    def _check_allocated(self, assigned: Assignment, attack: AttackState, same: int | None) -> None:
        """Check the values that the budget decided on; synchronises with the device."""
        if same is not None and bool((assigned.steps != same).any()):
            raise ValueError(f"the budget's uniform_steps is {same}, but allocate returned other steps; let it be None")
        for name, values in (("step_sizes", attack.size), ("eps", attack.eps), ("weight", assigned.weight)):
            if values is not None and not bool((values.isfinite() & (values >= 0)).all()):
                raise ValueError(f"the budget's {name}: some are negative, NaN or infinite")
        if attack.eps is not None and isinstance(ball := getattr(self.objective, "ball", None), Ball):
            Ball.of(ball.norm, float(attack.eps.max().clamp_min(1e-30)), ball.bounds)

    def remembered(
        self, world: JointBatches, batch: int, index: Tensor | None, learned: Learned, steps: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Return index, score, margin and steps of the examples of all processes; empty without a history."""
        if index is None or not self.history.examples:
            return ()
        if self.checking and learned.score is not None:
            validation.check_no_nan(learned.score)
        indices = world.gather(index, batch)
        assert indices is not None
        if self.checking:
            validation.check_repeated(indices)
        return (indices, *(world.gather(values, batch) for values in (learned.score, learned.margin, steps)))

    def work(
        self, steps: Sequence[int], touched: int | None, attack_steps: float, phases: Phases, batches: int
    ) -> Work:
        """Count the passes of one mini-batch.

        Args:
            steps: of its examples.
            touched: rows that were forwarded corrupted; None: those with steps.
            attack_steps: its share of the attack steps of the group.
            phases: what was run.
            batches: k, mini-batches of the group.
        """
        m, touched = len(steps), sum(n > 0 for n in steps) if touched is None else touched
        work = self.objective.cost.work(examples=m, steps=attack_steps, touched=touched, selects=self.needs_selection)
        selection = work.selection
        if self.needs_selection and isinstance(self.separation, SeparationWithModel):
            selection += m * self.separation.passes_per_example
        if self.needs_selection and phases.selects_by_loss_logits and not phases.reuses_logits(batches):
            selection += m  # forwarded again for the update
        return Work(m, selection, work.attack, work.update)

    # ------------------------------------------------------------------------------------------ validation

    def check_settings(self) -> None:
        """Check that the parts go together."""
        self.objective.check_budget(self.budget)
        if self.selects_by_history:
            validation.check_last(self.objective, self.separation, self.history.examples)
        self.separation_for_objective()  # raises if the two do not go together

    def is_check_due(self, steps: int = 1) -> bool:
        """Return whether one of the next ``steps`` is checked."""
        every = self.check_every
        steps_to_next = -self.steps_taken % every if every else 0  # 0: it is the coming one
        return bool(every) and (not self._checked or steps_to_next < steps)

    @contextmanager
    def validated(self, network: nn.Module, batches: Sequence[Batch]) -> Iterator[None]:
        """Check settings and shapes, and on a checked step also values, here and (:attr:`checking`) in the block."""
        due = self.is_check_due(len(batches))
        self.check_settings()
        if not torch.is_grad_enabled():
            raise ValueError("gradients are disabled around a step (no_grad or inference_mode), which computes them")
        for batch in batches:
            validation.check_batch(batch.x, batch.y)
            if self.history.examples:
                validation.check_index(batch.indices, batch.y, self.history.examples, look=due)
                self.history.to(batch.y.device)
            elif batch.indices is not None:
                raise ValueError(
                    "index is given, but no history is kept; give BulletTrain dataset_size=, or leave it out"
                )
            if due:
                self.objective.check_inputs(batch.x)
        if due or not self._network_checked:
            validation.check_network(network)
            self._network_checked = True
        self.checking = due
        try:
            with validation.dtypes_named(network, batches[0].x):
                yield
            self._checked = self._checked or due
        finally:
            self.checking = False
            self.weights_checksum = 0

    @contextmanager
    def checked_forwards(self, model: nn.Module, y: Tensor) -> Iterator[None]:
        """On a checked step, check the logits of every forward, and restore the buffers if the block raises."""
        if not self.checking:
            yield
            return

        def check(module: nn.Module, args: tuple[Any, ...], logits: Tensor) -> None:
            validation.check_logits_shape(logits, len(args[0]))
            validation.check_logits(logits, y, self.steps_taken + 1)
            validation.check_unnormalised(logits)

        if "torch._dynamo" in sys.modules:  # it synchronises with the device, which would break a compiled graph
            check = torch.compiler.disable(check)  # type: ignore[no-untyped-call]
        hook = bare(model).register_forward_hook(check)
        try:
            with validation.buffers_restored_on_error(bare(model)):
                yield
        finally:
            hook.remove()

    # ----------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Return F_R, the number of steps, and the states of the objective, the history and the generators."""
        return {
            "robust_fraction": self.robust_fraction.state_dict(),
            "steps_taken": self.steps_taken,
            "objective": self.objective.state_dict(),
            **({"history": self.history.state_dict()} if self.history.examples else {}),
            "generators": {name: generator.get_state() for name, generator in self._generators().items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of :meth:`state_dict`, with its γ and momentum.

        Generators of the objective and the separation are restored; torch's global generator is up to the caller.
        """
        give = "give what state_dict() of BulletTrain returned"
        if not isinstance(state, Mapping):
            raise TypeError(f"the state is {validation.shown(state)}; {give}, from a file by torch.load")
        if missing := {"robust_fraction", "steps_taken"} - state.keys():
            raise ValueError(f"{' and '.join(sorted(missing))} missing; {give}")
        if self.history.examples and "history" in state:
            self.history.check_state(state["history"])  # before anything is changed
        steps_taken = validation.check_count(state["steps_taken"], "steps_taken")
        before = brief((self.robust_fraction.gamma, self.robust_fraction.momentum))
        with raised_as(
            ValueError, f"the state cannot be loaded ({{error}}); {give}", KeyError, TypeError, AttributeError
        ):
            RobustFraction().load_state_dict(state["robust_fraction"])  # before anything is changed
            self.objective.load_state_dict(state.get("objective", {}))
            self._restore_generators(state.get("generators", {}))
        self.robust_fraction.load_state_dict(state["robust_fraction"])
        now = brief((self.robust_fraction.gamma, self.robust_fraction.momentum))
        if now != before:
            said = f"the state was made with (gamma, momentum) = {now}, used from here on, not {before}"
            warnings.warn(f"{said}; to change that, set robust_fraction.gamma after loading", stacklevel=2)
        self.steps_taken = steps_taken
        if self.history.examples and "history" in state:
            self.history.load_state_dict(state["history"])
        elif "history" in state:
            lost = "the state has a history of the examples, which is lost; to keep it, give BulletTrain dataset_size="
            warnings.warn(lost, stacklevel=2)
        elif self.history.examples:
            self.history.clear()
            warnings.warn("the state has no history of the examples: all count as not seen yet", stacklevel=2)

    def _restore_generators(self, states: Mapping[str, Any]) -> None:
        own = self._generators()
        for name, kept in states.items():
            if name not in own:
                lost = f"the state holds a generator of the {name}, which has none here: noise differs"
                warnings.warn(lost, stacklevel=3)
                continue
            moved = f"the {name}'s generator is on {own[name].device}, that of the state was elsewhere"
            with raised_as(ValueError, moved, RuntimeError):  # that of a GPU has another size
                own[name].set_state(kept.cpu())

    def _generators(self) -> dict[str, torch.Generator]:
        """Return the generators of the parts, by part."""
        parts = {"objective": self.objective, "separation": self.separation}
        found = {name: getattr(part, "generator", None) for name, part in parts.items()}
        return {name: generator for name, generator in found.items() if isinstance(generator, torch.Generator)}
