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
from bullettrain.attacks.state import frozen, training
from bullettrain.checks import check_batch, check_count
from bullettrain.engine.copies import Joint, Shadow
from bullettrain.engine.memory import Memory, take
from bullettrain.engine.plan import Plan, allot, arrange
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
        joint: one forward and backward for the clean and the corrupted examples of an update, each with batch-norm
            statistics of their own, where the network allows it: the same figures from fewer, larger kernels.
    """

    group: int = 1
    bucket: int = 1
    fresh: int = 0
    half: bool = False
    compile: bool = False
    captured: bool = False
    joint: bool = False


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
        self.attacked: nn.Module = _compiled(self.shadow) if settings.compile else self.shadow
        self.learner: nn.Module = _compiled(network) if settings.compile else network
        self.joint: Joint | None = None  # where the network allows it, which the first batch shows
        self.joined: nn.Module | None = None
        norm, reach, bounds = self.objective.norm, self.objective.reach, self.objective.bounds

        def move(images: Tensor, gradient: Tensor, clean: Tensor, size: Tensor) -> Tensor:
            return norm.project(images + size * norm.direction(gradient), clean, reach, bounds)

        loss = self.objective.attack_loss
        self.ascent = gradient_at_logits(loss_named(loss) if isinstance(loss, str) else loss)
        self.move, self.loss, self.record = move, self.objective.loss, self._record
        if settings.compile:
            self.move = torch.compile(move, dynamic=True)
            self.loss, self.record = torch.compile(self.loss), torch.compile(self.record)
            self.ascent = torch.compile(self.ascent, dynamic=True)
        self.aims = loss == "kl"
        self.by_loss_logits = self.objective.selection == "train" and self.objective.has_clean_term
        self.memory: Memory | None = None
        self.kept: dict[int, Tensor] = {}

    # ------------------------------------------------------------------------------------------ the group

    def step(self, batches: Sequence[Batch]) -> list[StepOutput]:
        """Train on up to k mini-batches. The outputs are of the last of them valid until the next group."""
        for x, y, _ in batches:
            check_batch(x, y)
        sizes = tuple(len(y) for _, y, _ in batches)
        self._fill(batches, sum(sizes))
        keeps = self.selects and self.by_loss_logits and len(sizes) == 1 and not self.settings.captured
        if keeps:  # the loss's own logits select, and are not computed again
            self.run(("clean", sizes), lambda: self._clean(sizes[0]))
        if self.selects:
            self.run(("select", sizes, keeps), lambda: self._select(sizes, keeps))
            counts = self._memory.counts[: 2 + len(sizes)].tolist()  # the one host read
            plan = Plan.read(counts, sizes, self.budget, self.settings.bucket)
        else:
            self.run(("everyone", sizes), lambda: self._everyone(sizes))
            plan = Plan.uniform(sizes, self.budget)
        fresh = self.settings.fresh if len(sizes) > 1 else 0
        for n in plan.schedule[fresh:]:
            self.run(("attack", n), lambda n=n: self._attack_step(n))  # type: ignore[misc]
        self.run(("return", plan.total), lambda: self._return(plan.total))
        outputs, at = [], 0
        for touched, m in zip(plan.touched, sizes, strict=True):
            if fresh and touched:
                self.run(("fresh", touched), lambda t=touched: self._freshen(t, fresh))  # type: ignore[misc]
            if self.before is not None:
                self.before()
            self.run(("update", m, touched, keeps), lambda m=m, t=touched: self._update(m, t, keeps))  # type: ignore[misc]
            if self.after is not None:
                self.after()
            outputs.append(self._output(slice(at, at + m), self._work(plan, m, touched, keeps, fresh)))
            at += m
        self.train.steps_taken += len(sizes)
        return outputs

    # ------------------------------------------------------------------------------------------ the pieces

    def _clean(self, m: int) -> None:
        """z of the loss, with its graph."""
        with self._precision():
            self.kept[m] = forward(self.learner, self._memory.x[:m])

    def _select(self, sizes: tuple[int, ...], keeps: bool) -> None:
        """SVar, categories, order and steps of a group; the quantile is by mini-batch."""
        memory, rows = self._memory, sum(sizes)
        s = None
        if self.by_loss_logits:
            s = self.kept[rows].detach() if keeps else self._training_logits(sizes)
        if s is None or keeps:
            self.shadow.refresh()
        held = self._held_logits(memory.x[:rows]) if self.aims or s is None else None
        s = held if s is None else s
        assert s is not None
        svar = self.train.score(wide(s), memory.y[:rows])
        separation, F_R = self.train.separation, self.train.robust_fraction.value
        assert not isinstance(separation, SeparationWithModel)
        category = torch.cat([separation(part, F_R) for part in torch.split(svar, list(sizes))])
        order, local, counts = arrange(category, svar, sizes, self.budget, self.settings.bucket)
        memory.svar[:rows] = svar
        memory.local[:rows] = local
        memory.counts[: len(counts)] = counts
        self._lay_out(order, category, counts, held)

    def _everyone(self, sizes: tuple[int, ...]) -> None:
        """A group in which all get the same steps."""
        memory, rows = self._memory, sum(sizes)
        self.shadow.refresh()
        places = [torch.arange(size, device=memory.order.device) for size in sizes]
        memory.local[:rows] = torch.cat(places)
        everyone = torch.full_like(memory.counts[:3], rows)
        category = torch.full_like(memory.order[:rows], int(Category.BOUNDARY))
        held = self._held_logits(memory.x[:rows]) if self.aims and self.budget.boundary else None
        self._lay_out(torch.arange(rows, device=memory.order.device), category, everyone, held)

    def _lay_out(self, order: Tensor, category: Tensor, counts: Tensor, held: Tensor | None) -> None:
        """The rows in the order of their attack, with where it starts, its target and its step sizes."""
        memory, rows = self._memory, len(order)
        treated, steps, size = allot(counts, category[order], self.budget, self.objective.eps, memory.size.dtype)
        memory.order[:rows] = order
        memory.category.index_copy_(0, order, treated)
        memory.steps.index_copy_(0, order, steps)
        memory.step_size.index_copy_(0, order, size)
        memory.size[:rows] = size.view(-1, *(1,) * (memory.x.ndim - 1))
        memory.labels[:rows] = memory.y[order]
        clean, start = take(memory.x, order), take(memory.start, order)
        memory.clean[:rows] = clean
        memory.adv[:rows] = torch.where((steps > 0).view(-1, *(1,) * (memory.x.ndim - 1)), start, clean)
        if self.aims and held is not None:
            memory.goal[:rows] = wide(held).softmax(dim=1)[order]
        memory.at.zero_()

    def _attack_step(self, n: int) -> None:
        """One ascent step of the first n rows."""
        memory = self._memory
        images = memory.adv[:n].detach().requires_grad_()
        with torch.enable_grad():
            logits = self.attacked(_dynamic(images))
            direction = self.ascent(wide(logits.detach()), memory.labels[:n], memory.goal[:n] if self.aims else None)
            (gradient,) = torch.autograd.grad(logits, images, direction.to(logits.dtype))
        memory.adv[:n] = self.move(images.detach(), gradient, memory.clean[:n], memory.size[:n])

    def _return(self, rows: int) -> None:
        """x' to where the examples came from."""
        memory = self._memory
        memory.prime.index_copy_(0, memory.order[:rows], memory.adv[:rows])

    def _freshen(self, t: int, steps: int) -> None:
        """The last steps of the t examples of the next mini-batch that have any, with the weights it will change."""
        memory = self._memory
        self.shadow.refresh()
        rows = memory.at + memory.local.index_select(0, memory.at + torch.arange(t, device=memory.at.device))
        memory.clean[:t], memory.adv[:t] = take(memory.x, rows), take(memory.prime, rows)
        memory.labels[:t] = memory.y[rows]
        memory.size[:t] = memory.step_size[rows].view(-1, *(1,) * (memory.x.ndim - 1))
        if self.aims:
            memory.goal[:t] = wide(self._held_logits(memory.clean[:t])).softmax(dim=1)
        for _ in range(steps):
            self._attack_step(t)
        memory.prime.index_copy_(0, rows, memory.adv[:t])

    def _update(self, m: int, t: int, keeps: bool) -> None:
        """Loss, backward and update of the next mini-batch, t of whose m examples have steps."""
        memory = self._memory
        rows = memory.at + torch.arange(m, device=memory.at.device)
        touched, y = memory.local.index_select(0, rows[:t]), memory.y.index_select(0, rows)
        for parameter in self.network.parameters():
            parameter.grad = None
        z, moved = self._both_logits(rows, touched, keeps)
        z_prime = moved if moved is not None else z
        assert z_prime is not None
        if z is not None and 0 < t < m:
            z_prime = z.index_copy(0, touched, z_prime.to(z.dtype))
        given = [None if values is None else _dynamic(values) for values in (z, None if t == m else touched)]
        loss = self.loss(given[0], _dynamic(z_prime), _dynamic(y), given[1])
        loss.backward()  # type: ignore[no-untyped-call]
        if self.joint is not None:
            self.joint.give_back()
        self.update()
        self.record(rows, y, None if z is None else z.detach(), z_prime.detach(), loss.detach())

    def _record(self, rows: Tensor, y: Tensor, z: Tensor | None, z_prime: Tensor, loss: Tensor) -> None:
        """F_R and what is remembered of an update."""
        memory, m = self._memory, len(rows)
        self.train.robust_fraction.update(z_prime, y)
        memory.loss.copy_(loss)
        memory.z_prime[:m] = z_prime
        if z is not None:
            memory.z[:m] = z
        if self.observe is not None:
            category, steps, svar = (v.index_select(0, rows) for v in (memory.category, memory.steps, memory.svar))
            self.observe(self._views(m, category, steps, svar, take(memory.prime, rows)), y)
        memory.at.add_(m)

    def _both_logits(self, rows: Tensor, touched: Tensor, keeps: bool) -> tuple[Tensor | None, Tensor | None]:
        """Training-mode logits of a clean mini-batch (m, K), and of its t corrupted examples (t, K)."""
        memory, m, t = self._memory, len(rows), len(touched)
        corrupted = take(memory.prime, rows.index_select(0, touched) if self.objective.has_clean_term else rows)
        clean = take(memory.x, rows) if self.objective.has_clean_term and not keeps else None
        if self.joined is not None and not keeps and 1 not in (m, t):  # a lone example has no statistics
            logits = self._joint_logits(corrupted if clean is None else torch.cat([clean, corrupted]), m)
            return (None, logits) if clean is None else (logits[:m], logits[m:] if t else None)
        with self._precision():
            if not self.objective.has_clean_term:
                return None, forward(self.learner, _dynamic(corrupted))
            z = self.kept[m] if clean is None else forward(self.learner, _dynamic(clean))
            return z, forward(self.learner, _dynamic(corrupted)) if t else None

    # -------------------------------------------------------------------------- around them, not captured

    def tensors(self) -> list[Tensor]:
        """Everything that pieces change, besides what ``update`` and ``observe`` do."""
        buffers = [] if self.memory is None else [t for t in vars(self.memory).values() if torch.is_tensor(t)]
        return [*self.network.parameters(), *self.network.buffers(), self.train.robust_fraction.live, *buffers]

    def _fill(self, batches: Sequence[Batch], rows: int) -> None:
        """The group's examples into the static buffers, which grow where they are too small."""
        x, y, _ = batches[0]
        largest = max(len(y) for _, y, _ in batches)
        if self.memory is None or self.memory.too_small(x, rows, largest, len(batches)):
            with frozen(self.network), torch.no_grad(), self._precision():
                classes = self.network(x[:1]).shape[1]
            if self.memory is None and self.settings.joint and Joint.suits(self.network, x):
                self.joint = Joint(self.network, self.settings.half)
                # Without splitting: it makes two kernels of each sum over a few hundred rows.
                self.joined = _compiled(self.joint, split_reductions=False) if self.settings.compile else self.joint
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

    # --------------------------------------------------------------------------------------------- helpers

    @property
    def _memory(self) -> Memory:
        assert self.memory is not None
        return self.memory

    def _precision(self) -> torch.autocast:
        return torch.autocast(self._device_type, torch.bfloat16, enabled=self.settings.half)

    @property
    def _device_type(self) -> str:
        return next(self.network.parameters()).device.type

    def _held_logits(self, x: Tensor) -> Tensor:
        """Eval-mode logits; run like an attack's forward, so that no second version has to be compiled."""
        with torch.enable_grad():
            logits: Tensor = self.attacked(_dynamic(x.detach().requires_grad_(self.settings.compile)))
        return logits.detach()

    def _training_logits(self, sizes: tuple[int, ...]) -> Tensor:
        """Training-mode logits of each mini-batch.

        The attack sees the statistics after these forwards, as in the plain step; the network has them put back,
        for the updates forward the same examples again.
        """
        before, logits = [buffer.clone() for buffer in self.network.buffers()], []
        for part in torch.split(self._memory.x[: sum(sizes)], list(sizes)):
            if self.joined is not None and len(part) > 1:
                logits.append(self._joint_logits(part, len(part)).detach())
            else:
                with torch.no_grad(), self._precision():
                    logits.append(forward(self.network, part))
        self.shadow.refresh()
        with torch.no_grad():
            for buffer, value in zip(self.network.buffers(), before, strict=True):
                buffer.copy_(value)
        return torch.cat(logits)

    def _joint_logits(self, x: Tensor, count: int) -> Tensor:
        """Training-mode logits of two batches, the first of ``count`` examples."""
        assert self.joint is not None
        assert self.joined is not None
        self.joint.prepare(count)
        with training(self.network):
            logits: Tensor = self.joined(_dynamic(x))
        return logits

    def _views(self, m: int, category: Tensor, steps: Tensor, svar: Tensor, x_prime: Tensor) -> StepOutput:
        memory = self._memory
        return StepOutput(
            loss=memory.loss,
            category=category,
            steps=steps,
            svar=svar if self.selects else None,
            work=Work(m, 0, 0, 0),
            x_prime=x_prime,
            z=memory.z[:m] if self.objective.has_clean_term else None,
            z_prime=memory.z_prime[:m],
        )

    def _output(self, part: slice, work: Work) -> StepOutput:
        memory, m = self._memory, part.stop - part.start
        out = self._views(m, memory.category[part], memory.steps[part], memory.svar[part], memory.prime[part])
        return StepOutput(**{**out.__dict__, "work": work, "loss": memory.loss.clone()})

    def _work(self, plan: Plan, m: int, touched: int, keeps: bool, fresh: int) -> Work:
        """Passes of one mini-batch: its own update, and its share of the group's attack."""
        steps = sum(plan.schedule[fresh:]) * m / plan.total + touched * fresh
        work = self.objective.cost.work(examples=m, steps=steps, touched=touched, selects=self.selects)
        again = m if self.selects and self.by_loss_logits and not keeps else 0
        return Work(m, work.selection + again, work.attack + (touched if fresh and self.aims else 0), work.update)


def why_not(train: BulletTrain) -> str | None:
    """Why the group engine cannot take this engine's steps, if so: it slices, and slices need an order."""
    budget = train.budget
    if not isinstance(train.objective, AdversarialObjective):
        return "its objective is no attack"
    if train.objective.not_captured:
        return train.objective.not_captured
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


def _compiled(module: nn.Module, **options: bool) -> nn.Module:
    return torch.compile(module, options=dict(options) or None)  # type: ignore[return-value]
