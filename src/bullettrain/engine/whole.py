"""The plain step on static buffers, as one piece: what cannot be taken apart can still be captured as it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from bullettrain.attacks import frozen
from bullettrain.attacks.state import uncompiled
from bullettrain.checks import check_batch, check_labels, check_logits, check_network
from bullettrain.engine.memory import like
from bullettrain.engine.runner import Batch, Runner, at_once
from bullettrain.engine.step import BulletTrain, StepOutput
from bullettrain.precision import wide

Buffers = tuple[Tensor, Tensor, Tensor]
"""x, y, and what the corruption starts from."""


class WholeEngine:
    """Takes `BulletTrain.step`, backward and update as one piece a batch size.

    For methods that give everyone the same steps: then the host need not know what the device finds.

    Args:
        train: objective and budget; where steps differ from example to example, a ValueError.
        model: returns logits; may be compiled.
        update: called after each backward, to move the weights.
        observe: called with each update's output; for records.
        half: run the network in bf16.
        runner: how pieces are run. ``update`` and ``observe`` are part of a piece.
    """

    def __init__(
        self,
        train: BulletTrain,
        model: nn.Module,
        update: Callable[[], None],
        *,
        observe: Callable[[StepOutput, Tensor], None] | None = None,
        half: bool = False,
        runner: Runner = at_once,
    ) -> None:
        if train.budget.uniform_steps is None:
            raise ValueError("a step is not captured as a whole: its examples get different steps")
        self.train, self.model, self.network = train, model, uncompiled(model)
        self.update, self.observe, self.half, self.run = update, observe, half, runner
        self.reset: Callable[[], None] | None = getattr(runner, "reset", None)
        self.memory: Buffers | None = None
        self._out: dict[int, StepOutput] = {}  # by batch size; its tensors are where the piece writes
        self._carried: list[int] = []  # where the objective's own tensors lie

    def step(self, batches: Sequence[Batch]) -> list[StepOutput]:
        """Train on mini-batches, one after the other."""
        return list(self.updates(batches))

    def updates(self, batches: Sequence[Batch]) -> Iterator[StepOutput]:
        """The same one by one: what a mini-batch's update gave, before the next one's is taken."""
        for x, y, start, *_ in batches:  # everyone gets the same, whoever they are
            m, batch = len(y), (x, y, start)
            memory = self._buffers(batch)
            carried = [tensor.data_ptr() for tensor in self.train.objective.carried(memory[0])]
            if carried != self._carried:  # loaded anew, or grown by a step that was not taken here
                self._carried = carried
                if self.reset is not None:
                    self.reset()
            for mine, new in zip(memory, batch, strict=True):
                mine[:m] = new
            self.run(("step", m), lambda m=m: self._piece(m))  # type: ignore[misc]
            self.train.steps_taken += 1
            yield self._out[m].clone()  # graphs share their memory, and the next one writes over this one's

    def _piece(self, m: int) -> None:
        """Everything of a step, on the first ``m`` rows of the buffers."""
        assert self.memory is not None
        x, y, start = (part[:m] for part in self.memory)
        train = self.train
        taken, looks = train.steps_taken, train.check_every
        train.check_every = 0  # a look waits for the device
        for parameter in self.network.parameters():
            parameter.grad = None
        try:
            with torch.autocast(x.device.type, torch.bfloat16, enabled=self.half):
                out = train.step(self.model, x, y, start=start)
        finally:
            train.steps_taken, train.check_every = taken, looks
        out.loss.backward()  # type: ignore[no-untyped-call]
        out = dataclasses.replace(out, loss=out.loss.detach())
        self.update()
        if self.observe is not None:
            self.observe(out, y)
        self._out[m] = out

    def tensors(self) -> list[Tensor]:
        """Everything that pieces change, besides what ``update`` and ``observe`` do."""
        assert self.memory is not None
        carried = self.train.objective.carried(self.memory[0])
        return [*self.network.parameters(), *self.network.buffers(), self.train.robust_fraction.live, *carried]

    def _buffers(self, batch: Buffers) -> Buffers:
        """Where batches lie. One that is larger than all before it, or of another shape, gets new buffers."""
        memory = self.memory
        if memory is None or len(batch[1]) > len(memory[1]) or any(map(_differ, batch, memory)):
            self._look(batch)
            x, y, start = (like(part, len(part)) for part in batch)
            self.memory = memory = x, y, start
            self.train.robust_fraction.to(x.device)
            self._out.clear()
            if self.reset is not None:
                self.reset()
        return memory

    def _look(self, batch: Buffers) -> None:
        """What the plain step looks at once in a while; it waits for the device, so only with new buffers."""
        x, y, _ = batch
        check_batch(x, y)
        check_network(self.network)
        if not self.train.check_every:
            return
        self.train.objective.check_inputs(x)
        with frozen(self.network), torch.no_grad(), torch.autocast(x.device.type, torch.bfloat16, enabled=self.half):
            logits = wide(self.network(x))
        check_logits(logits, self.train.steps_taken + 1)
        check_labels(y, logits.shape[1])


def _differ(new: Tensor, old: Tensor) -> bool:
    return new.shape[1:] != old.shape[1:] or new.dtype != old.dtype or new.device != old.device
