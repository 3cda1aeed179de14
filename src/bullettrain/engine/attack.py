"""The attack of a batch: which rows take a step at each iteration, from their step counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from bullettrain.attacks.pgd import AttackState
from bullettrain.attacks.schedule import packed, packed_sizes, ragged, round_up
from bullettrain.engine.phases import Assignment, Phases, Runner
from bullettrain.validation import check_returned


def run_attack(
    phases: Phases, run: Runner, attack: AttackState, assigned: Assignment, host_steps: Sequence[int], batches: int = 1
) -> tuple[Assignment, int]:
    """Take all steps of a corruption; ``attack.x_prime`` is changed in place.

    Args:
        phases: what is run.
        run: runs it.
        attack: R examples, with a spare row if ``phases.packs``.
        assigned: their steps, among others.
        host_steps: these steps on the host.
        batches: k, number of mini-batches that are attacked together.

    Returns:
        The same with the steps that each example took, and the number of steps in all, idle places included.
    """
    if hasattr(phases.train.budget, "revise"):
        taken, total = _revised(phases, run, attack, assigned.steps)
        return assigned._replace(steps=taken), total
    total = 0
    for rows in _schedule(phases, run, assigned.steps, host_steps, phases.attack_multiple(batches)):
        run(phases.attack_step, attack, rows)
        total += len(host_steps) if rows is None else len(rows)
    return assigned, total


def _schedule(
    phases: Phases, run: Runner, steps: Tensor, host_steps: Sequence[int], multiple: int
) -> Iterator[Tensor | None]:
    """Yield the rows of each iteration; None: all."""
    most = max(host_steps)
    if not phases.packs or min(host_steps) == most:
        yield from ragged(steps, host_steps)
        return
    sizes = packed_sizes(host_steps, multiple)
    places = run(packed, steps, most, sizes[0])
    for t, n in enumerate(sizes):
        yield places[t, :n]


def _revised(phases: Phases, run: Runner, attack: AttackState, steps: Tensor) -> tuple[Tensor, int]:
    """Run a ragged attack that the allocation may shorten after each iteration, with one host read in each."""
    revise = phases.train.budget.revise  # type: ignore[attr-defined]
    multiple = phases.size_multiple if phases.packs else 1
    remaining, taken, total, t = steps.clone(), torch.zeros_like(steps), 0, 0
    while n := int((remaining > 0).sum()):
        rows = (remaining == 0).long().argsort(stable=True)[:n]
        idle = min(round_up(n, multiple), len(steps)) - n
        padded = torch.cat([rows, rows.new_full((idle,), len(steps))]) if idle else rows
        logits = run(phases.attack_step, attack, padded)
        left = remaining.index_select(0, rows) - 1
        if logits is not None:
            revised = revise(t, logits[:n], attack.labels.index_select(0, rows), left)
            revised = check_returned(revised, "the budget's revise", (n,), "integer")
            left = torch.minimum(revised.to(left).clamp_min(0), left)
        remaining.index_copy_(0, rows, left)
        taken.index_add_(0, rows, torch.ones_like(rows))
        total, t = total + n + idle, t + 1
    return taken, total
