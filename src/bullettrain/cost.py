"""The cost of training: counted passes, and the paper's theoretical speed-up."""

from __future__ import annotations

from dataclasses import dataclass

from bullettrain.allocation import StepBudget
from bullettrain.validation import check_count


def theoretical_speedup(
    budget: StepBudget,
    *,
    boundary: float,
    robust: float,
    outlier: float,
    steps: int | None = None,
    views: int = 1,
) -> float:
    """Return the paper's theoretical speed-up: sequential passes of the plain algorithm over those with ``budget``.

    (N + 1) / (F_B·N_B + F_R·N_R + F_O·N_O + 1) for attacks; with ``views=2`` AugMix's 3 / (1 + 2·F_B).
    It is an upper bound for hardware without limits, not a measurement: see :class:`Cost`.

    Args:
        budget: N_B, N_R, N_O.
        boundary, robust, outlier: measured average fractions F_B, F_R, F_O.
        steps: N of the plain algorithm; None: N_B.
        views: forwards that one step of the corruption adds: 1 for an attack, 2 for AugMix.
    """
    plain = budget.boundary if steps is None else check_count(steps, "steps")
    spent = boundary * budget.boundary + robust * budget.robust + outlier * budget.outlier
    return (views * plain + 1) / (views * spent + 1)


@dataclass(frozen=True)
class Work:
    """Counted passes of one step, summed over the examples.

    A forward, a backward to the input and a backward to the weights count as one pass each.
    """

    examples: int
    selection: float
    """Passes of the selection: clean logits that nothing else needs."""
    attack: float
    """Passes of the corruption: the target of the attack, and its steps."""
    update: float
    """Passes of the update: training-mode forward and backward."""

    @property
    def total(self) -> float:
        """All passes of the step."""
        return self.selection + self.attack + self.update

    @property
    def per_example(self) -> float:
        """Passes per example: 27 for plain TRADES with ten steps."""
        return self.total / self.examples


@dataclass(frozen=True)
class Cost:
    """The cost of an objective's parts, in passes per example."""

    selection: int = 0
    """Selection forward; 0 if the logits of the loss select. A uniform budget does not select."""
    target: int = 0
    """Clean forward for the target of the attack (TRADES)."""
    shared: bool = False
    """Whether the forward that selects is also the attack's target."""
    step: float = 2
    """One attack step: forward, and backward to the input."""
    clean: int = 3
    """Update on the clean example; 0 if the loss has no clean term."""
    corrupted: int = 3
    """Update on the corrupted example (AugMix: its two views)."""
    untouched: int = 0
    """Update on an example without steps: 0 if its clean logits are used."""
    penalty: int = 0
    """A term of the loss that needs the network itself (GradAlign)."""

    def work(self, *, steps: float, touched: float, examples: int = 1, selects: bool = True) -> Work:
        """Return the passes of ``examples`` of which ``touched`` got ``steps`` in total.

        With one example and average fractions this is the expected work per example.
        """
        aimed = steps and not (selects and self.shared)
        return Work(
            examples=examples,
            selection=self.selection * examples if selects else 0,
            attack=(self.target * examples if aimed else 0) + self.step * steps,
            update=(self.clean + self.penalty) * examples
            + self.corrupted * touched
            + self.untouched * (examples - touched),
        )
