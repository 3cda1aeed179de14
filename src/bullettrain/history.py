"""The history of each example of a dataset, and samplers that choose the examples of an epoch from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.utils.data import Sampler

from bullettrain.mining import Category, Separation
from bullettrain.precision import at_least_float32
from bullettrain.validation import check_count, check_number, described


class Past(NamedTuple):
    """The history of the examples of a batch, (m,) each; 0 for examples that have not been seen."""

    score: Tensor
    """Last score of the clean logits of the loss; a score of 0 is stored as the smallest positive number."""
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
        self.weight: Tensor | None = None
        """(examples,) weights in the loss, set by :meth:`weigh`; None: 1 each."""

    @property
    def examples(self) -> int:
        """Size of the dataset."""
        return len(self.score)

    def tensors(self) -> Past:
        """Return the tensors that steps change, with a row for each example of the dataset."""
        return Past(self.score, self.margin, self.steps, self.visits)

    def to(self, device: torch.device) -> None:
        """Move the history to a device."""
        if self.score.device != device:
            self.score, self.margin, self.steps, self.visits = (t.to(device) for t in self.tensors())
            self.weight = None if self.weight is None else self.weight.to(device)

    def of(self, index: Tensor) -> Past:
        """Return the history of the examples ``index`` (m,)."""
        return Past(*(t.index_select(0, index) for t in self.tensors()))

    def weight_of(self, index: Tensor) -> Tensor | None:
        """Return the weights (m,) of the examples ``index`` (m,); None: 1 each."""
        return None if self.weight is None else self.weight.index_select(0, index)

    def keep(self, index: Tensor, score: Tensor | None, margin: Tensor, steps: Tensor) -> None:
        """Store new values for the examples ``index`` (m,); NaN, from a forward that overflowed, becomes 0."""
        if score is not None:  # +0.0 means not seen, −0.0 is a wrong prediction's
            score = score.to(self.score.dtype)
            zero = (score == 0) & ~torch.signbit(score)
            score = score.masked_fill(zero, torch.finfo(score.dtype).tiny)
        for mine, new in ((self.score, score), (self.margin, margin), (self.steps, steps)):
            if new is not None:
                mine.index_copy_(0, index, new.to(mine.dtype).nan_to_num(nan=0.0) if mine.is_floating_point() else new)
        self.visits.index_add_(0, index, torch.ones_like(index))

    def weigh(self, weight: Tensor) -> None:
        """Set the weight (examples,) of each example in the loss of all further steps, in place after the first call.

        A weight that an allocation returns is multiplied by it.
        """
        if weight.shape != self.score.shape or not weight.is_floating_point():
            raise ValueError(f"weight is {described(weight)}; it has to be floating-point of shape ({self.examples},)")
        if self.weight is None:
            self.weight = torch.ones_like(self.score)
        self.weight.copy_(weight)

    def clear(self) -> None:
        """Reset all values to 0, and all weights to 1."""
        for tensor in self.tensors():
            tensor.zero_()
        self.weight = None

    def state_dict(self) -> dict[str, Tensor]:
        """Return a copy on the CPU; with the weights, if they are set."""
        own = self.tensors()._asdict()
        own |= {} if self.weight is None else {"weight": self.weight}
        return {name: t.to("cpu", copy=True) for name, t in own.items()}

    def check_state(self, state: object) -> None:
        """Raise ValueError if ``state`` cannot be loaded."""
        own = {"weight": self.score, **self.tensors()._asdict()}
        if (
            not isinstance(state, Mapping)
            or {"weight", *state} != own.keys()
            or not all(map(torch.is_tensor, state.values()))
        ):
            names = ", ".join(Past._fields)
            raise ValueError(f"the state's history has to have {names}; give what state_dict() returned")
        for name, value in state.items():
            if value.ndim != 1 or value.is_floating_point() != own[name].is_floating_point():
                raise ValueError(f"the state's {name} are no row of numbers; give what state_dict() returned")
            if len(value) != self.examples:
                raise ValueError(f"the state has a history of {len(value)} examples; there are {self.examples} here")

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the result of :meth:`state_dict`."""
        self.check_state(state)
        for name, mine in self.tensors()._asdict().items():
            mine.copy_(state[name])
        if "weight" in state:
            self.weigh(state["weight"])
        else:
            self.weight = None


class HistorySampler(Sampler[int]):
    """A sampler that chooses the examples of each epoch from the history, for a ``DataLoader`` that returns indices.

        def hard_half(history: History) -> Tensor:  # the half with the lowest margins, in random order
            hard = history.margin.argsort()[: history.examples // 2]
            return hard[torch.randperm(len(hard))]

        loader = DataLoader(dataset, batch_size=128, sampler=HistorySampler(train.history, hard_half))

    Args:
        history: the history of a `BulletTrain`.
        choose: called at the start of each epoch; returns the indices (n,) of its examples, in order. To reweight the
            chosen examples, let it call :meth:`History.weigh`, as :class:`LeaveOut` does, or let an allocation return
            ``Allocated(…, weight=…)``. In several processes it has to choose the same.
        num_replicas: number of processes that share the examples; each gets every so manieth of the chosen ones, and a
            rest is left out. Leave it at 1 where Lightning or Accelerate divide the batches.
        rank: number of this process.
    """

    def __init__(
        self, history: History, choose: Callable[[History], Tensor], *, num_replicas: int = 1, rank: int = 0
    ) -> None:
        if not history.examples:
            raise ValueError("the history has no examples; give BulletTrain dataset_size=, how many there are")
        self.history, self.choose = history, choose
        self.num_replicas = check_count(num_replicas, "num_replicas", least=1)
        self.rank = check_count(rank, "rank", below=num_replicas)
        self._length = history.examples // num_replicas

    def __iter__(self) -> Iterator[int]:
        chosen = self.choose(self.history)
        if not torch.is_tensor(chosen) or chosen.ndim != 1 or chosen.is_floating_point() or chosen.dtype == torch.bool:
            raise TypeError(f"choose returned {described(chosen)}; it has to return (n,) indices of examples")
        self._length = len(chosen) // self.num_replicas
        return iter(chosen[self.rank :: self.num_replicas][: self._length].tolist())

    def __len__(self) -> int:
        """Number of this process's examples of the current epoch; before the first, its share of the dataset."""
        return self._length

    def set_epoch(self, epoch: int) -> None:
        """Set the next epoch of :class:`LeaveOut`, for example when a training resumes."""
        if hasattr(self.choose, "epoch"):
            self.choose.epoch = epoch


LeftOutBy = Literal["margin", "chance"]


class LeaveOut:
    """Leave examples that are learnt well out of an epoch at random, and let those like them count more (InfoBatch).

    After Qin et al., "InfoBatch", ICLR 2024. Candidates are the examples whose last margin on x' is above the mean. Of
    these, ``share`` are left out, and the others weigh 1 / (1 − ``share``) in the loss, with the share after rounding.
    So the expected gradient of an epoch is that of the whole dataset. Examples that have not been seen yet are never
    left out.

    The paper compares last losses. A step computes only their mean over a batch, whereas the history has the margin of
    each example; a small loss is a large margin.

        sampler = HistorySampler(train.history, LeaveOut(epochs=30, multiple=128))
        loader = DataLoader(dataset, batch_size=128, sampler=sampler)

    Args:
        share: r in [0, 1), share of the candidates that are left out.
        epochs: number of epochs of the whole training.
        until: δ in [0, 1], share of the epochs after which nothing is left out.
        by: "margin", or as a control "chance": as many are left out, but of all examples that have been seen.
        multiple: the number left out is rounded down to a multiple of this. With the batch size, the batches of every
            epoch have the sizes of a whole one.
        seed: of the choice; the same in all processes.
    """

    def __init__(
        self,
        share: float = 0.5,
        *,
        epochs: int,
        until: float = 0.875,
        by: LeftOutBy = "margin",
        multiple: int = 1,
        seed: int = 0,
    ) -> None:
        self.share = check_number(share, "share", least=0, below=1)
        self.until = check_number(until, "until", least=0, most=1)
        self.epochs, self.multiple = check_count(epochs, "epochs"), max(1, check_count(multiple, "multiple"))
        if by not in get_args(LeftOutBy):
            raise ValueError(f"by is {by!r}; it has to be 'margin' or 'chance'")
        self.by, self.seed = by, seed
        self.epoch = 0
        """Next epoch, counted from 0; set it, or call the sampler's ``set_epoch``, when a training resumes."""

    def __call__(self, history: History) -> Tensor:
        """Choose the examples of the next epoch, set their weights, and return their indices in random order."""
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        weight = self.weights(history, self.epoch, generator)
        history.weigh(weight)
        self.epoch += 1
        chosen = weight.nonzero()[:, 0]
        return chosen[torch.randperm(len(chosen), generator=generator)]

    def weights(self, history: History, epoch: int, generator: torch.Generator) -> Tensor:
        """Return the weights (n,) of the examples in an epoch, with an expected value of 1 each; 0: left out.

        Args:
            history: of the examples.
            epoch: counts from 0.
            generator: of the choice, on the CPU, where the weights are computed, so that processes agree.
        """
        weight, margin, seen = torch.ones(history.examples), history.margin.double().cpu(), history.visits.cpu() > 0
        if epoch + 1 > self.until * self.epochs or not seen.any():
            return weight
        mean = margin[seen].mean().clamp_min(margin[seen].min())  # if all are equal, rounding must not put them above
        candidates = seen & (margin > mean)
        number = int(self.share * int(candidates.sum())) // self.multiple * self.multiple
        rows = (seen if self.by == "chance" else candidates).nonzero()[:, 0]
        rows = rows[torch.randperm(len(rows), generator=generator)]
        weight[rows] = len(rows) / max(len(rows) - number, 1)
        weight[rows[:number]] = 0.0
        return weight


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
