"""The attack of a batch: which rows take a step at each iteration, from their step counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from bullettrain.attacks.pgd import AttackState
from bullettrain.attacks.schedule import packed_sizes, ragged
from bullettrain.engine.phases import Phases, Runner


def attack(
    phases: Phases,
    run: Runner,
    state: AttackState,
    steps: Tensor,
    counts: Sequence[int],
    batches: int = 1,
) -> tuple[Tensor, int]:
    """All steps of a corruption; ``state.x_prime`` is changed in place.

    Args:
        phases, run: what is run, and how.
        state: the batch of R examples; with a spare row where the phases have one.
        steps: (R,) of each example.
        counts: the same on the host.
        batches: k, mini-batches of the group.

    Returns:
        (R,) the steps that each example took; and how many were taken in all, idle places included.
    """
    if hasattr(phases.train.budget, "revise"):
        return _revised(phases, run, state, steps)
    taken = 0
    for rows in _rows(phases, run, steps, counts, phases.attack_multiple(batches)):
        run(phases.attack_step, state, rows)
        taken += len(counts) if rows is None else len(rows)
    return steps, taken


def _rows(phases: Phases, run: Runner, steps: Tensor, counts: Sequence[int], multiple: int) -> Iterator[Tensor | None]:
    """Rows at each iteration; None: all."""
    most = max(counts)
    if not phases.packs or min(counts) == most:
        yield from ragged(steps, counts)
        return
    sizes = packed_sizes(counts, multiple)
    places = run(phases.places, steps, most, sizes[0])
    for t, n in enumerate(sizes):
        yield places[t, :n]


def _revised(phases: Phases, run: Runner, state: AttackState, steps: Tensor) -> tuple[Tensor, int]:
    """Ragged, with an allocation that may shorten attacks after each iteration: one host read in each."""
    revise = phases.train.budget.revise  # type: ignore[attr-defined]
    multiple = phases.size_multiple if phases.packs else 1
    remaining, made, taken, t = steps.clone(), torch.zeros_like(steps), 0, 0
    while n := int((remaining > 0).sum()):
        rows = (remaining == 0).long().argsort(stable=True)[:n]
        idle = min(-(-n // multiple) * multiple, len(steps)) - n
        padded = torch.cat([rows, rows.new_full((idle,), len(steps))]) if idle else rows
        logits = run(phases.attack_step, state, padded)
        left = remaining.index_select(0, rows) - 1
        if logits is not None:
            said = revise(t, logits[:n], state.labels.index_select(0, rows), left)
            left = torch.minimum(said.to(left).clamp_min(0), left)
        remaining.index_copy_(0, rows, left)
        made.index_add_(0, rows, torch.ones_like(rows))
        taken, t = taken + n + idle, t + 1
    return made, taken
