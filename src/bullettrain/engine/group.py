"""The same step over a group of mini-batches, on static buffers: what can be captured, and what a large GPU wants.

A group of k mini-batches is selected and attacked with the same weights, as one large batch; then the k updates
are taken one after the other. k = 1 is the paper's algorithm. Every piece of it is a function of static buffers
and of sizes that repeat, run by a runner: at once, or as a captured CUDA graph (graphed.py).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bullettrain.allocation import StepBudget, Work
from bullettrain.attacks.losses import gradient_at_logits, loss_named
from bullettrain.attacks.state import frozen
from bullettrain.checks import check_batch, check_count
from bullettrain.engine.copies import Shadow, Twin
from bullettrain.engine.memory import Memory
from bullettrain.engine.plan import Plan, arrange
from bullettrain.engine.step import BulletTrain, StepOutput
from bullettrain.mining import Category, SeparationWithModel
from bullettrain.objectives import AdversarialObjective
from bullettrain.objectives.base import forward
from bullettrain.precision import wide

Batch = tuple[Tensor, Tensor, Tensor]
"""x (m, …), y (m,), and the points (m, …) that its attack starts from."""

Runner = Callable[[Hashable, Callable[[], None]], None]
"""Runs a function of static buffers; the key names it and its sizes."""


def at_once(key: Hashable, function: Callable[[], None]) -> None:
    """The plain runner."""
    function()


@dataclass(frozen=True)
class GroupSettings:
    """How groups are made.

    Args:
        group: mini-batches that are attacked at once, k.
        bucket: sizes are rounded up to a multiple of this; 1 is exact.
        fresh: the last steps of each budget that are taken on the mini-batch itself, with its own weights.
        half: run the network in bf16.
        compile: compile the network, once for all sizes.
        captured: pieces are captured as CUDA graphs, so that no autograd graph may outlive its piece.
        parallel: the clean and the corrupted forward and backward of an update side by side on the GPU, for
            networks that do not fill it alone; the batch-norm statistics come out as one after the other.
    """

    group: int = 1
    bucket: int = 1
    fresh: int = 0
    half: bool = False
    compile: bool = False
    captured: bool = False
    parallel: bool = False


class GroupEngine:
    """Takes whole groups of training steps: selection, attack, updates, F_R.

    Args:
        train: score, separation, budget, objective and F_R.
        network: the bare module; its weights change.
        update: called after each backward, to move the weights.
        observe: called with each update's output; for records.
        before, after: called around each update, outside of any piece; for the learning rate and the like.
        settings: see :class:`GroupSettings`.
        runner: how pieces are run. ``update`` and ``observe`` are part of a piece.
    """

    def __init__(
        self,
        train: BulletTrain,
        network: nn.Module,
        update: Callable[[], None],
        *,
        observe: Callable[[StepOutput, Tensor], None] | None = None,
        before: Callable[[], None] | None = None,
        after: Callable[[], None] | None = None,
        settings: GroupSettings = GroupSettings(),  # noqa: B008 (frozen)
        runner: Runner = at_once,
    ) -> None:
        if reason := why_not(train):
            raise ValueError(f"the group engine cannot be used: {reason}")
        assert isinstance(train.objective, AdversarialObjective)
        assert isinstance(train.budget, StepBudget)
        self.train, self.objective, self.budget = train, train.objective, train.budget
        self.network, self.update, self.observe, self.settings, self.run = network, update, observe, settings, runner
        self.before, self.after = before, after
        self.selects = self.budget.uniform_steps is None
        least = next((n for n in (self.budget.outlier, self.budget.robust) if n), self.budget.boundary)
        if check_count(settings.fresh, "fresh") > least:
            raise ValueError(
                f"fresh is {settings.fresh}, but some examples get {least} steps in all; give at most that"
            )
        # A copy for the attack: in eval mode, without gradients for weights, in the attack's precision.
        self.shadow = Shadow(network, settings.half)
        self.learner: nn.Module = network
        self.attacked: nn.Module = self.shadow
        norm, eps, bounds = self.objective.norm, self.objective.eps, self.objective.bounds

        def move(images: Tensor, gradient: Tensor, clean: Tensor, size: Tensor) -> Tensor:
            return norm.project(images + size * norm.direction(gradient), clean, eps, bounds)

        self.move = move
        if settings.compile:
            self.learner, self.attacked = torch.compile(network), torch.compile(self.shadow)  # type: ignore[assignment]
            self.move = torch.compile(move, dynamic=True)
        loss = self.objective.attack_loss
        self.ascent = gradient_at_logits(loss_named(loss) if isinstance(loss, str) else loss)
        self.aims = loss == "kl"
        self.by_loss_logits = self.objective.selection == "train" and self.objective.has_clean_term
        self.memory: Memory | None = None
        self.rows = 0  # of the group at hand
        self.kept: dict[int, Tensor] = {}
        self.twin = Twin(network) if settings.parallel and self.objective.has_clean_term else None
        self.second: nn.Module | None = None if self.twin is None else self.twin.copy
        if settings.compile and self.twin is not None:
            self.second = torch.compile(self.twin.copy)  # type: ignore[assignment]

    # ------------------------------------------------------------------------------------------ the group

    def step(self, batches: Sequence[Batch]) -> list[StepOutput]:
        """Train on up to k mini-batches. The outputs are of the last of them valid until the next group."""
        for x, y, _ in batches:
            check_batch(x, y)
        sizes = tuple(len(y) for _, y, _ in batches)
        rows = sum(sizes)
        self.rows = rows
        self._fill(batches, rows)
        keeps = self.selects and self.by_loss_logits and len(sizes) == 1 and not self.settings.captured
        if keeps:  # the loss's own logits select, and are not computed again
            self.run(("clean", rows), lambda: self._clean(rows))
        self.run("refresh", self.shadow.refresh)
        if self.selects:
            self.run(("select", sizes, keeps), lambda: self._select(sizes, keeps))
            counts = self._memory.counts[: 2 + len(sizes)].tolist()  # the one host read
            plan = Plan.read(counts, sizes, self.budget, self.settings.bucket)
        else:
            plan = Plan.uniform(sizes, self.budget)
            if self.aims and plan.rows:
                self.run(("aim", rows), lambda: self._aim(rows))
        fresh = self.settings.fresh if len(sizes) > 1 else 0
        self._label(plan, rows, sizes)
        self._attack(self._memory.order[: plan.rows], plan.schedule[fresh:], from_start=True)
        outputs, at = [], 0
        for touched, size in zip(plan.touched, sizes, strict=True):
            part = slice(at, at + size)
            if fresh and touched:
                self._freshen(part, touched, fresh)
            if self.before is not None:
                self.before()
            self._learn(part, touched, keeps)
            if self.after is not None:
                self.after()
            outputs.append(self._output(part, self._work(plan, rows, size, touched, keeps, fresh)))
            at += size
        self.train.steps_taken += len(sizes)
        return outputs

    # ------------------------------------------------------------------------------------------ the pieces

    def _clean(self, m: int) -> None:
        """z of the loss, with its graph."""
        with self._precision():
            self.kept[m] = forward(self.learner, self._memory.x[:m])

    def _select(self, sizes: tuple[int, ...], keeps: bool) -> None:
        """SVar, categories and order of a group; the quantile is by mini-batch."""
        memory, rows = self._memory, sum(sizes)
        if keeps:
            logits = self.kept[rows].detach()
        elif self.by_loss_logits:
            logits = self._training_logits(sizes)
        else:
            logits = self._held_logits(memory.x[:rows])
        logits, y = wide(logits), memory.y[:rows]
        if self.aims:
            memory.target[:rows] = (self._held_logits(memory.x[:rows]) if self.by_loss_logits else logits).softmax(
                dim=1
            )
        svar = self.train.score(logits, y)
        assert not isinstance(self.train.separation, SeparationWithModel)
        F_R = self.train.robust_fraction.value
        category = torch.cat([self.train.separation(part, F_R) for part in torch.split(svar, list(sizes))])
        order, local, counts = arrange(category, svar, sizes, self.budget, self.settings.bucket)
        memory.svar[:rows] = svar
        memory.category[:rows] = category
        memory.order[:rows] = order
        memory.local[:rows] = local
        memory.counts[: len(counts)] = counts

    def _aim(self, rows: int) -> None:
        """The KL's target for everyone."""
        memory = self._memory
        memory.target[:rows] = wide(self._held_logits(memory.x[:rows])).softmax(dim=1)

    def _attack_step(self, n: int) -> None:
        """One ascent step of the first n rows."""
        memory = self._memory
        images = memory.adv[:n].detach().requires_grad_()
        with torch.enable_grad():
            logits = self.attacked(_dynamic(images))
            direction = self.ascent(wide(logits.detach()), memory.labels[:n], memory.goal[:n] if self.aims else None)
            (gradient,) = torch.autograd.grad(logits, images, direction.to(logits.dtype))
        memory.adv[:n] = self.move(images.detach(), gradient, memory.clean[:n], memory.size[:n])

    def _update(self, m: int, t: int, keeps: bool) -> None:
        """Loss, backward and update of the mini-batch that was laid out, t of whose m examples have steps."""
        memory, objective = self._memory, self.objective
        y, rows = memory.batch_y[:m], memory.batch_rows[:t]
        for parameter in self.network.parameters():
            parameter.grad = None
        with self._precision():
            z, moved = self._both_logits(m, t, keeps)
        z_prime = moved if moved is not None else z
        assert z_prime is not None
        if z is not None and 0 < t < m:
            z_prime = z.index_copy(0, rows, z_prime.to(z.dtype))
        loss = objective.loss(z, z_prime, y, None if t == m else rows)
        loss.backward()  # type: ignore[no-untyped-call]
        if self.twin is not None and self.twin.before:
            self.twin.settle()
        self.update()
        self.train.robust_fraction.update(z_prime, y)
        memory.loss.copy_(loss.detach())
        memory.z_prime[:m] = z_prime.detach()
        if z is not None:
            memory.z[:m] = z.detach()
        if self.observe is not None:
            self.observe(self._views(slice(0, m), memory.batch_category, memory.batch_steps, memory.batch_svar), y)

    def _both_logits(self, m: int, t: int, keeps: bool) -> tuple[Tensor | None, Tensor | None]:
        """Training-mode logits of the clean mini-batch (m, K), and of its t corrupted examples (t, K)."""
        memory = self._memory
        corrupted = _dynamic(memory.batch_prime[:t])
        if not self.objective.has_clean_term:
            return None, forward(self.learner, corrupted)
        if self.twin is not None and self.second is not None and t:
            with self.twin.beside():
                moved = forward(self.second, corrupted)
            z = forward(self.learner, _dynamic(memory.batch_x[:m]))
            self.twin.join()
            return z, moved
        z = self.kept[m] if keeps else forward(self.learner, _dynamic(memory.batch_x[:m]))
        return z, forward(self.learner, corrupted) if t else None

    # -------------------------------------------------------------------------- around them, not captured

    def tensors(self) -> list[Tensor]:
        """Everything that pieces change, besides what ``update`` and ``observe`` do."""
        buffers = [] if self.memory is None else [t for t in vars(self.memory).values() if torch.is_tensor(t)]
        return [*self.network.parameters(), *self.network.buffers(), self.train.robust_fraction.live, *buffers]

    def _fill(self, batches: Sequence[Batch], rows: int) -> None:
        """The group's examples into the static buffers, which grow where they are too small."""
        x, y, _ = batches[0]
        if self.memory is None or self.memory.too_small(x, rows, max(len(y) for _, y, _ in batches), len(batches)):
            with frozen(self.network), torch.no_grad(), self._precision():
                classes = self.network(x[:1]).shape[1]
            largest = max(len(y) for _, y, _ in batches)
            self.memory = Memory(x, max(rows, largest * self.settings.group), largest, classes, len(batches))
            self.kept.clear()
            self.train.robust_fraction.to(x.device)
            reset = getattr(self.run, "reset", None)
            if reset is not None:
                reset()
        at = 0
        for x, y, start in batches:
            part = slice(at, at + len(y))
            self._memory.x[part], self._memory.y[part], self._memory.start[part] = x, y, start
            at += len(y)

    def _label(self, plan: Plan, rows: int, sizes: tuple[int, ...]) -> None:
        """Write down what each row of the order is, and the size of its steps."""
        memory, eps = self._memory, self.objective.eps
        if not self.selects:
            memory.order[:rows] = torch.arange(rows, device=memory.order.device)
            memory.local[:rows] = torch.cat([torch.arange(size) for size in sizes]).to(memory.local.device)
            memory.category[:rows] = int(Category.BOUNDARY)
            memory.steps[:rows] = plan.budget.boundary
            memory.size[:rows] = plan.budget.boundary_step(eps)
            return
        # On the host: one copy, not a dozen small fills. Examples without steps stay what they were found to be.
        ranked = torch.zeros((2, plan.rows), dtype=torch.int64)
        step_size = torch.zeros(plan.rows, dtype=memory.size.dtype)
        at = 0
        for up_to, steps, category in plan.levels:
            size = plan.budget.step_sizes(torch.tensor([int(category)]), torch.tensor([steps]), eps)
            ranked[0, at:up_to], ranked[1, at:up_to], step_size[at:up_to] = int(category), steps, float(size)
            at = max(at, up_to)
        ranked = ranked.to(memory.order.device, non_blocking=True)
        memory.steps.zero_()
        memory.category.index_copy_(0, memory.order[: plan.rows], ranked[0])
        memory.steps.index_copy_(0, memory.order[: plan.rows], ranked[1])
        step_size = step_size.to(memory.size.device, non_blocking=True)
        memory.size[: plan.rows] = step_size.view(-1, *(1,) * (memory.x.ndim - 1))

    def _attack(self, rows: Tensor, schedule: Sequence[int], *, from_start: bool) -> None:
        """Attack ``rows`` of the group, the first of them longest, and write x' where they came from."""
        memory, n = self._memory, len(rows)
        if from_start:
            memory.prime.copy_(memory.x)
        if not n:
            return
        source = memory.start if from_start else memory.prime
        memory.adv[:n] = source.index_select(0, rows)
        memory.clean[:n] = memory.x.index_select(0, rows)
        memory.labels[:n] = memory.y.index_select(0, rows)
        if self.aims:
            memory.goal[:n] = memory.target.index_select(0, rows)
        for size in schedule:
            self.run(("attack", size), lambda size=size: self._attack_step(size))  # type: ignore[misc]
        memory.prime.index_copy_(0, rows, memory.adv[:n])

    def _freshen(self, part: slice, touched: int, steps: int) -> None:
        """The last steps of a mini-batch, with the weights that it is about to change."""
        memory = self._memory
        self.run("refresh", self.shadow.refresh)
        rows = memory.local[part][:touched] + part.start
        if self.aims:
            held = memory.clean[:touched]
            held.copy_(memory.x.index_select(0, rows))
            self.run(("aim again", touched), lambda: self._aim_again(touched))
            memory.target.index_copy_(0, rows, memory.goal[:touched])
        # The step sizes lie in the order of the group's attack: take this mini-batch's, and put them back after.
        ranked, order = memory.size.clone(), memory.order[: self.rows]
        by_row = torch.empty_like(ranked).index_copy_(0, order, ranked[: self.rows])
        memory.size[:touched] = by_row.index_select(0, rows)
        self._attack(rows, [touched] * steps, from_start=False)
        memory.size.copy_(ranked)

    def _aim_again(self, n: int) -> None:
        memory = self._memory
        memory.goal[:n] = wide(self._held_logits(memory.clean[:n])).softmax(dim=1)

    def _learn(self, part: slice, touched: int, keeps: bool) -> None:
        memory, m = self._memory, part.stop - part.start
        memory.batch_x[:m], memory.batch_y[:m] = memory.x[part], memory.y[part]
        memory.batch_category[:m], memory.batch_steps[:m] = memory.category[part], memory.steps[part]
        memory.batch_svar[:m] = memory.svar[part]
        everyone = touched == m or not self.objective.has_clean_term
        if everyone:
            memory.batch_prime[:m] = memory.prime[part]
        else:
            memory.batch_rows[:touched] = memory.local[part][:touched]
            memory.batch_prime[:touched] = memory.prime[part].index_select(0, memory.batch_rows[:touched])
        size = m if everyone and not self.objective.has_clean_term else touched
        self.run(("update", m, size, keeps), lambda: self._update(m, size, keeps))

    # --------------------------------------------------------------------------------------------- helpers

    @property
    def _memory(self) -> Memory:
        assert self.memory is not None
        return self.memory

    def _precision(self) -> torch.autocast:
        # Two forwards side by side must not share casts that one of them made.
        cache = not self.settings.parallel
        return torch.autocast(self._device_type, torch.bfloat16, enabled=self.settings.half, cache_enabled=cache)

    @property
    def _device_type(self) -> str:
        return next(self.network.parameters()).device.type

    def _held_logits(self, x: Tensor) -> Tensor:
        """Eval-mode logits; run like an attack's forward, so that no second version has to be compiled."""
        with torch.enable_grad():
            logits: Tensor = self.attacked(_dynamic(x.detach().requires_grad_(self.settings.compile)))
        return logits.detach()

    def _training_logits(self, sizes: tuple[int, ...]) -> Tensor:
        """Training-mode logits of each mini-batch, with the statistics put back."""
        with frozen(self.network, "train"), torch.no_grad(), self._precision():
            return torch.cat([self.network(part) for part in torch.split(self._memory.x[: sum(sizes)], list(sizes))])

    def _views(self, part: slice, category: Tensor, steps: Tensor, svar: Tensor) -> StepOutput:
        memory, m = self._memory, part.stop - part.start
        return StepOutput(
            loss=memory.loss,
            category=category[part],
            steps=steps[part],
            svar=svar[part] if self.selects else None,
            work=Work(m, 0, 0, 0),
            x_prime=memory.prime[part],
            z=memory.z[:m] if self.objective.has_clean_term else None,
            z_prime=memory.z_prime[:m],
        )

    def _output(self, part: slice, work: Work) -> StepOutput:
        memory = self._memory
        out = self._views(part, memory.category, memory.steps, memory.svar)
        return StepOutput(**{**out.__dict__, "work": work, "loss": memory.loss.clone()})

    def _work(self, plan: Plan, rows: int, m: int, touched: int, keeps: bool, fresh: int) -> Work:
        """Passes of one mini-batch: its own update, and its share of the group's attack."""
        steps, at = 0, 0
        for up_to, each, _ in plan.levels:
            steps += each * max(up_to - at, 0)
            at = max(at, up_to)
        work = self.objective.cost.work(examples=m, steps=steps * m / rows, touched=touched, selects=self.selects)
        again = m if self.selects and self.by_loss_logits and not keeps else 0
        return Work(m, work.selection + again, work.attack + (touched if fresh and self.aims else 0), work.update)


def why_not(train: BulletTrain) -> str | None:
    """Why the group engine cannot take this engine's steps, if so: it slices, and slices need an order."""
    budget = train.budget
    if not isinstance(train.objective, AdversarialObjective):
        return "its objective is no attack"
    if train.objective.attack_mode != "eval":
        return "its attack runs in training mode"
    if not isinstance(budget, StepBudget) or not budget.boundary >= budget.robust >= budget.outlier:
        return "its step counts are not in the order boundary ≥ robust ≥ outlier"
    if isinstance(train.separation, SeparationWithModel):
        return "its separation looks at the network"
    if not train.objective.has_clean_term and train.objective.selection == "train":
        return "it selects by training-mode logits that its loss does not have"
    return None


def _dynamic(x: Tensor) -> Tensor:
    """Tell the compiler that the batch's size varies; without compilation this does nothing."""
    if x.is_cuda:
        torch._dynamo.maybe_mark_dynamic(x, 0)
    return x
