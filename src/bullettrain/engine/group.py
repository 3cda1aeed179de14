"""The same step over a group of mini-batches, on static buffers: what can be captured, and what a large GPU wants.

A group of k mini-batches is selected and attacked with the same weights, as one large batch; then the k updates
are taken one after the other. k = 1 is the paper's algorithm. Every piece of it is a function of static buffers
and of sizes that repeat, run by a runner: at once, or as a captured CUDA graph (graphed.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bullettrain.allocation import StepBudget, Work
from bullettrain.attacks import frozen
from bullettrain.checks import (
    check_batch,
    check_category,
    check_count,
    check_index,
    check_labels,
    check_logits,
    check_network,
    check_no_nan,
    check_score,
    check_selection,
)
from bullettrain.engine.corruption import AttackPieces, CorruptionPieces, ViewPieces
from bullettrain.engine.joint import Joint
from bullettrain.engine.learner import Learner, dynamic
from bullettrain.engine.memory import Memory, take
from bullettrain.engine.parts import check_last, why_not_grouped
from bullettrain.engine.plan import Plan, allot, arrange
from bullettrain.engine.runner import Batch, Runner, at_once
from bullettrain.engine.step import BulletTrain, StepOutput
from bullettrain.engine.still import Still
from bullettrain.mining import Category, SeparationWithModel, separate
from bullettrain.objectives import AdversarialObjective, AugMix
from bullettrain.precision import wide


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


ONE_BY_ONE = GroupSettings()
"""Groups of one, nothing rounded."""


class GroupEngine:
    """Takes whole groups of training steps: selection, corruption, updates, F_R.

    Args:
        train: score, separation, budget, objective and F_R.
        network: the bare module; its weights change.
        update: called after each backward, to move the weights.
        observe: called with each update's output; for records.
        settings: see :class:`GroupSettings`.
        runner: how pieces are run. ``update`` and ``observe`` are part of a piece.
        say: told in one line what cannot be had.
    """

    def __init__(
        self,
        train: BulletTrain,
        network: nn.Module,
        update: Callable[[], None],
        *,
        observe: Callable[[StepOutput, Tensor], None] | None = None,
        settings: GroupSettings = ONE_BY_ONE,
        runner: Runner = at_once,
        say: Callable[[str], None] = print,
    ) -> None:
        if reason := why_not_grouped(train):
            raise ValueError(f"the group engine cannot be used: {reason}")
        assert isinstance(train.budget, StepBudget)
        self.train, self.objective, self.budget = train, train.objective, train.budget
        self.network, self.update, self.observe, self.settings, self.run = network, update, observe, settings, runner
        self.selects = self.budget.uniform_steps is None
        self.remembers = train.remembers
        check_last(train.objective, train.budget, train.separation, train.last.examples)
        self.by_loss_logits = self.objective.selection == "train" and self.objective.has_clean_term
        half, compile = settings.half, settings.compile
        held = isinstance(self.objective, AdversarialObjective) or (
            self.selects and not self.by_loss_logits and not self.remembers
        )
        self.still = Still(network, half=half, compile=compile) if held else None
        self.corruption: CorruptionPieces
        if isinstance(self.objective, AdversarialObjective):
            assert self.still is not None
            self.corruption = AttackPieces(self.objective, self.budget, self.still)
            least = next((n for n in (self.budget.outlier, self.budget.robust) if n), self.budget.boundary)
        else:
            assert isinstance(self.objective, AugMix)
            self.corruption, least = ViewPieces(self.objective), 0
        if check_count(settings.fresh, "fresh") > least:
            some = f"some examples get {least} steps in all; give at most that" if least else "AugMix has no such steps"
            raise ValueError(f"fresh is {settings.fresh}, but {some}")
        self.learner = Learner(network, half=half, compile=compile, joint=settings.joint, say=say)
        self.loss, self.record = self.objective.loss, self._record
        if compile:
            self.loss = torch.compile(self.loss)
        if compile and next(network.parameters()).is_cuda:
            # Not on a CPU: torch 2.13 loses what compiled code writes to a 0-d float64 tensor there, as F_R is one.
            self.record = torch.compile(self.record)
        self.reset: Callable[[], None] | None = getattr(runner, "reset", None)
        self.memory: Memory | None = None
        self._looking = self._looking_at_score = False  # at what is selected, once for new buffers
        self.kept: dict[int, Tensor] = {}

    @property
    def joint(self) -> Joint | None:
        """What forwards two batches at once, where the network allows it; the first batch shows that."""
        return self.learner.joint

    @property
    def seconds(self) -> float:
        """Spent on a first batch, on what it shows and on compiling for it; captures are the runner's."""
        return self.learner.seconds + (0.0 if self.still is None else self.still.seconds)

    # ------------------------------------------------------------------------------------------ the group

    def step(self, batches: Sequence[Batch]) -> list[StepOutput]:
        """Train on up to k mini-batches.

        The outputs' tensors are valid until the next group; z and z' are those of the last mini-batch only.
        """
        return list(self.updates(batches))

    def updates(self, batches: Sequence[Batch]) -> Iterator[StepOutput]:
        """The same one by one: what a mini-batch's update gave, before the next one's is taken.

        What is between two of them (a learning rate, an average of weights) is for the caller to do.
        """
        batches = [Batch(*batch) for batch in batches]
        for batch in batches:
            check_batch(batch.x, batch.y)
        sizes = tuple(len(batch.y) for batch in batches)
        memory = self._fill(batches, sum(sizes))
        self._name(batches)
        fresh = self.settings.fresh if len(sizes) > 1 else 0
        keeps = self.selects and self.by_loss_logits and len(sizes) == 1 and not self.settings.captured
        if keeps:  # the loss's own logits select, and are not computed again
            self.run(("clean", sizes), lambda: self._clean(sizes[0]))
        if self.selects:
            self.run(("select", sizes, keeps), lambda: self._select(sizes, keeps, fresh))
            self._look_at_selection(sum(sizes))
            counts = memory.counts[: 2 + len(sizes)].tolist()  # the one host read
            plan = Plan.read(counts, sizes, self.budget, self.settings.bucket, fresh)
        else:
            self.run(("everyone", sizes), lambda: self._everyone(sizes, fresh))
            plan = Plan.uniform(sizes, self.budget, fresh)
        for key, piece in self.corruption.pieces(memory, plan):
            self.run(key, piece)
        at = 0
        for touched, m in zip(plan.touched, sizes, strict=True):
            for key, piece in self.corruption.fresh_pieces(memory, touched, fresh):
                self.run(key, piece)
            self.run(("update", m, touched, keeps), lambda m=m, t=touched: self._update(m, t, keeps))  # type: ignore[misc]
            self.train.steps_taken += 1
            if self._looking_at_score:  # the first that is remembered
                check_no_nan(self.train.score(memory.z[:m], memory.y[at : at + m]))
                self._looking_at_score = False
            yield self._output(slice(at, at + m), self._work(plan, m, touched, keeps))
            at += m

    # ------------------------------------------------------------------------------------------ the pieces

    def _clean(self, m: int) -> None:
        """z of the loss, with its graph."""
        z, _ = self.learner.both(self._memory.x[:m], self._memory.x[:0], None)
        assert z is not None
        self.kept[m] = z

    def _select(self, sizes: tuple[int, ...], keeps: bool, fresh: int) -> None:
        """SVar, categories, order and steps of a group; the quantile is by mini-batch."""
        memory, rows = self._memory, sum(sizes)
        x, corruption = memory.x[:rows], self.corruption
        if self.remembers:
            self._hold()
            s, held = None, self._held_logits(x) if corruption.aims else None
        elif not self.by_loss_logits or keeps:
            self._hold()
            held = None if keeps and not corruption.aims else self._held_logits(x)
            s = self.kept[rows].detach() if keeps else held
        else:  # as in the plain step the attack sees the statistics after these forwards
            s = self.learner.one_by_one(torch.split(x, list(sizes)), meanwhile=self._hold)
            held = self._held_logits(x) if corruption.aims else None
        if s is None:
            svar = self.train.last.of(memory.index[:rows])
        else:
            svar = check_score(self.train.score(wide(s), memory.y[:rows]), rows)
        category = self._separate(svar, sizes)
        order, local, counts = arrange(category, svar, sizes, self.budget, self.settings.bucket, fresh)
        memory.svar[:rows], memory.selected[:rows] = svar, category
        memory.local[:rows] = local
        memory.counts[: len(counts)] = counts
        self._lay_out(order, category, counts, held, fresh)

    def _separate(self, svar: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """Categories, each mini-batch by itself: all of them at once where the separation can do that."""
        separation, F_R = self.train.separation, self.train.robust_fraction.value
        assert not isinstance(separation, SeparationWithModel)
        together = getattr(separation, "over_batches", separation is separate)
        separation = self.train.last.careful(separation) if self.remembers else separation
        if together and len(set(sizes)) == 1:
            several = separation(svar.view(len(sizes), -1), F_R)
            return check_category(several.flatten() if torch.is_tensor(several) else several, len(svar))
        parts = torch.split(svar, list(sizes))
        return torch.cat([check_category(separation(part, F_R), len(part)) for part in parts])

    def _everyone(self, sizes: tuple[int, ...], fresh: int) -> None:
        """A group in which all get the same steps."""
        memory, rows = self._memory, sum(sizes)
        self._hold()
        places = [torch.arange(size, device=memory.order.device) for size in sizes]
        memory.local[:rows] = torch.cat(places)
        everyone = torch.full_like(memory.counts[:3], rows)
        category = torch.full_like(memory.order[:rows], int(Category.BOUNDARY))
        aims = self.corruption.aims and self.budget.boundary
        held = self._held_logits(memory.x[:rows]) if aims else None
        self._lay_out(torch.arange(rows, device=memory.order.device), category, everyone, held, fresh)

    def _lay_out(self, order: Tensor, category: Tensor, counts: Tensor, held: Tensor | None, fresh: int) -> None:
        """Who gets what, and the rows in the order of their corruption."""
        memory = self._memory
        treated, steps, size = allot(counts, category[order], self.budget, self.objective.unit, memory.step_size.dtype)
        memory.order[: len(order)] = order
        memory.category.index_copy_(0, order, treated)
        memory.steps.index_copy_(0, order, steps)
        memory.step_size.index_copy_(0, order, size)
        memory.at.zero_()
        self.corruption.lay_out(memory, order, counts, held, fresh)

    def _update(self, m: int, t: int, keeps: bool) -> None:
        """Loss, backward and update of the next mini-batch, t of whose m examples have steps."""
        memory, has_clean = self._memory, self.objective.has_clean_term
        rows = memory.at + torch.arange(m, device=memory.at.device)
        touched, y = memory.local.index_select(0, rows[:t]), memory.y.index_select(0, rows)
        clean = take(memory.x, rows) if has_clean and not keeps else None
        moving = rows.index_select(0, touched) if has_clean else rows
        corrupted = torch.cat([take(prime, moving) for prime in memory.prime])
        for parameter in self.network.parameters():
            parameter.grad = None
        z, moved = self.learner.both(clean, corrupted, self.kept[m] if keeps else None)
        z_prime = moved if z is None else self.objective.fill_in(z, moved, touched)
        assert z_prime is not None
        given = [None if values is None else dynamic(values) for values in (z, None if t == m else touched)]
        loss_of = self.loss if t else self.objective.loss  # nobody is a size that is compiled apart, and comes seldom
        loss = loss_of(given[0], dynamic(z_prime, z_prime.ndim - 2), dynamic(y), given[1])
        loss.backward()  # type: ignore[no-untyped-call]
        self.learner.give_back()
        self.update()
        self.record(rows, y, None if z is None else z.detach(), z_prime.detach(), loss.detach())

    def _record(self, rows: Tensor, y: Tensor, z: Tensor | None, z_prime: Tensor, loss: Tensor) -> None:
        """F_R and what is remembered of an update."""
        memory, m = self._memory, len(rows)
        self.train.robust_fraction.update(z_prime, y)
        if self.remembers:
            assert z is not None
            self.train.last.keep(memory.index.index_select(0, rows), check_score(self.train.score(wide(z), y), m))
        memory.loss.copy_(loss)
        memory.z_prime[..., :m, :] = z_prime
        if z is not None:
            memory.z[:m] = z
        if self.observe is not None:
            category, steps, svar = (v.index_select(0, rows) for v in (memory.category, memory.steps, memory.svar))
            x_prime = memory.prime.index_select(1, rows)
            self.observe(self._as_output(m, category, steps, svar, x_prime[0] if len(x_prime) == 1 else x_prime), y)
        memory.at.add_(m)

    # -------------------------------------------------------------------------- around them, not captured

    def tensors(self) -> list[Tensor]:
        """Everything that pieces change, besides what ``update`` and ``observe`` do."""
        buffers: list[Tensor] = []
        if self.memory is not None:
            buffers = [t for t in vars(self.memory).values() if torch.is_tensor(t)] + self.corruption.tensors()
        last = [self.train.last.live] if self.remembers else []
        return [*self.network.parameters(), *self.network.buffers(), self.train.robust_fraction.live, *last, *buffers]

    def _fill(self, batches: Sequence[Batch], rows: int) -> Memory:
        """The group's examples into the static buffers, which grow where they are too small."""
        x, y, start, *_ = batches[0]
        largest = max(len(batch[1]) for batch in batches)
        memory = self.memory
        if memory is None or memory.too_small(x, start, rows, largest, len(batches)):
            if self.still is not None:
                self.still.look_at(x)
            memory = Memory(
                x,
                start,
                max(rows, largest * self.settings.group),
                largest,
                classes=self.learner.look_at(x),
                batches=len(batches),
                copies=self.corruption.copies,
            )
            check_network(self.network)
            if self.train.check_every:
                self._check(batches, memory.z.shape[1])
                self._looking, self._looking_at_score = True, self.remembers
            self.memory = memory
            self.corruption.allocate(memory)
            self.kept.clear()
            self.train.robust_fraction.to(x.device)
            self.train.last.to(x.device)
            if self.reset is not None:
                self.reset()
        at = 0
        for x, y, start, *_ in batches:
            part = slice(at, at + len(y))
            memory.x[part], memory.y[part], memory.start[part] = x, y, start
            at += len(y)
        return memory

    def _name(self, batches: Sequence[Batch]) -> None:
        """Which examples the group has, where that is wanted."""
        if not self.remembers:
            return
        at, memory, examples = 0, self._memory, self.train.last.examples
        for batch in batches:
            part = slice(at, at + len(batch.y))
            memory.index[part] = check_index(batch.which, batch.y, examples, look=self._looking)
            at = part.stop

    def _check(self, batches: Sequence[Batch], classes: int) -> None:
        """What the plain step looks at once in a while; here it waits for the device, so only with new buffers."""
        for x, y, *_ in batches:
            self.objective.check_inputs(x)
            check_labels(y, classes)

    def _look_at_selection(self, rows: int) -> None:
        """The same of what was selected, once."""
        if not self._looking:
            return
        memory = self._memory
        svar = memory.svar[:rows]
        if torch.isnan(svar).any():  # the network's fault, or the score's
            with frozen(self.network), torch.no_grad():
                check_logits(self.network(memory.x[:rows]), self.train.steps_taken + 1)
        check_selection(svar, memory.selected[:rows], list(Category))
        self._looking = False

    # --------------------------------------------------------------------------------------------- helpers

    @property
    def _memory(self) -> Memory:
        assert self.memory is not None
        return self.memory

    def _hold(self) -> None:
        """The network as it is now is what is attacked, and what selects in eval mode."""
        if self.still is not None:
            self.still.refresh()

    def _held_logits(self, x: Tensor) -> Tensor:
        assert self.still is not None
        return self.still.logits(x)

    def _as_output(self, m: int, category: Tensor, steps: Tensor, svar: Tensor, x_prime: Tensor) -> StepOutput:
        memory = self._memory
        return StepOutput(
            loss=memory.loss,
            category=category,
            steps=steps,
            svar=svar if self.selects else None,
            work=Work(m, 0, 0, 0),
            x_prime=x_prime,
            z=memory.z[:m] if self.objective.has_clean_term else None,
            z_prime=memory.z_prime[..., :m, :],
        )

    def _output(self, part: slice, work: Work) -> StepOutput:
        memory, m = self._memory, part.stop - part.start
        out = self._as_output(m, memory.category[part], memory.steps[part], memory.svar[part], memory.corrupted(part))
        return StepOutput(**{**out.__dict__, "work": work, "loss": memory.loss.clone()})

    def _work(self, plan: Plan, m: int, touched: int, keeps: bool) -> Work:
        """Passes of one mini-batch: its own update, and its share of the group's attack."""
        steps = sum(plan.schedule) * m / plan.total + touched * plan.fresh
        work = self.objective.cost.work(examples=m, steps=steps, touched=touched, selects=self.selects)
        again = m if self.selects and self.by_loss_logits and not keeps else 0
        aimed = touched if plan.fresh and self.corruption.aims else 0
        if self.selects and (self.by_loss_logits or self.remembers) and self.corruption.aims and not steps:
            aimed += m  # the target is there before anybody knows that nobody needs it
        return Work(m, work.selection + again, work.attack + aimed, work.update)
