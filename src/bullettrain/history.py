"""The history of each example of a dataset: last score, last margin, last steps, visits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Sampler

from bullettrain.mining import Category, Separation
from bullettrain.precision import at_least_float32
from bullettrain.validation import described


class Past(NamedTuple):
    """The history of the examples of a batch, (m,) each; 0 for examples that have not been seen."""

    score: Tensor
    """Last score of the clean logits of the loss."""
    margin: Tensor
    """Last margin on x': probability of the true class minus the largest other one, averaged over views."""
    steps: Tensor
    """Last number of steps."""
    visits: Tensor
    """Number of times the example was trained on."""


class History:
    """The last score, last margin on x', last steps and number of visits of each example.

    Allocations receive the rows of their batch as ``past``; ``selection="last"`` selects by the last score. Tensors are
    changed in place, where captured graphs read them.

    Args:
        examples: size of the dataset. Indices are 0 to ``examples`` − 1, each at most once in a batch.
    """

    def __init__(self, examples: int) -> None:
        self.score, self.margin = torch.zeros(examples), torch.zeros(examples)
        self.steps, self.visits = (torch.zeros(examples, dtype=torch.int64) for _ in range(2))

    @property
    def examples(self) -> int:
        """Size of the dataset."""
        return len(self.score)

    def tensors(self) -> list[Tensor]:
        """Return the tensors that steps change."""
        return [self.score, self.margin, self.steps, self.visits]

    def to(self, device: torch.device) -> None:
        """Move the history to a device."""
        if self.score.device != device:
            self.score, self.margin, self.steps, self.visits = (t.to(device) for t in self.tensors())

    def of(self, index: Tensor) -> Past:
        """Return the history of the examples ``index`` (m,)."""
        return Past(*(t.index_select(0, index) for t in self.tensors()))

    def keep(self, index: Tensor, score: Tensor | None, margin: Tensor, steps: Tensor) -> None:
        """Store new values for the examples ``index`` (m,); NaN, from a forward that overflowed, becomes 0."""
        for mine, new in ((self.score, score), (self.margin, margin), (self.steps, steps)):
            if new is not None:
                mine.index_copy_(0, index, new.to(mine.dtype).nan_to_num(nan=0.0) if mine.is_floating_point() else new)
        self.visits.index_add_(0, index, torch.ones_like(index))

    def clear(self) -> None:
        """Reset all values to 0."""
        for tensor in self.tensors():
            tensor.zero_()

    def state_dict(self) -> dict[str, Tensor]:
        """Return a copy on the CPU."""
        names = ("score", "margin", "steps", "visits")
        return {name: t.to("cpu", copy=True) for name, t in zip(names, self.tensors(), strict=True)}

    def check_state(self, state: object) -> None:
        """Raise ValueError if ``state`` cannot be loaded."""
        own = self.state_dict()
        if (
            not isinstance(state, Mapping)
            or state.keys() != own.keys()
            or not all(map(torch.is_tensor, state.values()))
        ):
            raise ValueError(f"the state's history has to have {', '.join(own)}; give what state_dict() returned")
        for name, value in state.items():
            if value.ndim != 1 or value.is_floating_point() != own[name].is_floating_point():
                raise ValueError(f"the state's {name} are no row of numbers; give what state_dict() returned")
            if len(value) != self.examples:
                raise ValueError(f"the state has a history of {len(value)} examples; there are {self.examples} here")

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the result of :meth:`state_dict`."""
        self.check_state(state)
        for mine, name in zip(self.tensors(), ("score", "margin", "steps", "visits"), strict=True):
            mine.copy_(state[name])


class HistorySampler(Sampler[int]):
    """A sampler that chooses the examples of each epoch from the history, for a ``DataLoader`` that returns indices.

        def hard_half(history: History) -> Tensor:  # the half with the lowest margins, in random order
            hard = history.margin.argsort()[: history.examples // 2]
            return hard[torch.randperm(len(hard))]

        loader = DataLoader(dataset, batch_size=128, sampler=HistorySampler(train.history, hard_half))

    Args:
        history: the history of a `BulletTrain`.
        choose: called at the start of each epoch; returns the indices (n,) of its examples, in order. To reweight the
            chosen examples, let an allocation return ``Allocated(…, weight=…)``.
    """

    def __init__(self, history: History, choose: Callable[[History], Tensor]) -> None:
        self.history, self.choose = history, choose
        self._length = history.examples

    def __iter__(self) -> Iterator[int]:
        chosen = self.choose(self.history)
        if not torch.is_tensor(chosen) or chosen.ndim != 1 or chosen.is_floating_point() or chosen.dtype == torch.bool:
            raise TypeError(f"choose returned {described(chosen)}; it has to return (n,) indices of examples")
        self._length = len(chosen)
        return iter(chosen.tolist())

    def __len__(self) -> int:
        """Number of examples of the current epoch; before the first, the size of the dataset."""
        return self._length


def margin_of(z_prime: Tensor, y: Tensor) -> Tensor:
    """Return margins (m,) of logits (m, K): true class probability minus the largest other; (v, m, K): their mean."""
    p = at_least_float32(z_prime.detach()).softmax(dim=-1)
    true = (y[:, None] == torch.arange(p.shape[-1], device=y.device)).expand_as(p)
    margin = torch.where(true, p, 0).sum(dim=-1) - torch.where(true, 0, p).amax(dim=-1)
    return margin if margin.ndim == 1 else margin.mean(dim=0)


def unseen_on_boundary(separation: Separation) -> Separation:
    """Return the same separation for last scores, with examples that have not been seen (score 0) on the boundary.

    In the quantile they count as the safest of their batch, so that they do not make others robust.
    """

    def separated(score: Tensor, robust_fraction: Tensor) -> Tensor:
        new = (score == 0) & ~torch.signbit(score)
        category = separation(torch.where(new, score.amax(dim=-1, keepdim=True), score), robust_fraction)
        return torch.where(new, int(Category.BOUNDARY), category) if torch.is_tensor(category) else category

    return separated
