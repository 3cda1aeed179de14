"""The attacks of AutoAttack in L∞ without host synchronisation, so that CUDA graphs can run them.

They follow Croce and Hein (APGD and AutoAttack: arXiv 2003.01690; FAB: 1907.02044) and Andriushchenko et al. (Square:
1912.00049) with the settings of AutoAttack's standard version, and draw the same random numbers as the package
`pyautoattack`, in the same order. Buffers are static, so that :meth:`Search.step` can be captured and replayed.

Every attack returns, for each image, the candidate with the smallest margin (logit of the label minus the largest
other logit). The caller decides in float32 whether it is misclassified.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

Logits = Callable[[Tensor], Tensor]
MakeRunner = Callable[[Callable[[], Sequence[Tensor]]], Callable[[Callable[[], None]], object]]
"""Given a function that returns the buffers, returns a runner: it calls a step, or replays its first call."""

NEWTON_STEPS = 8
"""Newton steps of the projection in FAB; 6 are exact up to rounding."""
REPORT_EVERY = 25
"""Iterations between two progress reports."""


def eager(_: Callable[[], Sequence[Tensor]]) -> Callable[[Callable[[], None]], object]:
    """Return a runner that calls every step."""
    return lambda step: step()


def margins(logits: Tensor, y: Tensor) -> Tensor:
    """Return (n,) margins z_y − max of the other logits, of logits (n, K) and labels y (n,)."""
    own = logits.gather(1, y[:, None])
    others = logits.scatter(1, y[:, None], -torch.inf)
    return own[:, 0] - others.amax(dim=1)


class Search(ABC):
    """An attack on up to ``len(like)`` images at once.

    Args:
        network: returns logits (n, K) of images (n, C, H, W), differentiable in the images.
        like: (n, C, H, W) tensor with the shape, memory format and device of the buffers.
        eps: radius of the ball.
        make_runner: makes the runner of :meth:`step`.
    """

    iterations = 100
    evaluates_start = True
    """Whether the first call of :meth:`step` only evaluates the starting point."""

    def __init__(self, network: Logits, like: Tensor, eps: float, make_runner: MakeRunner = eager) -> None:
        self.network, self.eps, self.calls = network, eps, self.iterations + self.evaluates_start
        self.x, self.x_adv, self.candidate = (torch.zeros_like(like) for _ in range(3))
        self.y, self.target = (torch.zeros(len(like), dtype=torch.int64, device=like.device) for _ in range(2))
        self.margin = torch.zeros(len(like), device=like.device)
        """Smallest margin so far, which is that of ``candidate``."""
        self.iteration = torch.zeros(1, dtype=torch.int64, device=like.device)
        self.allocate(like)
        self._runner = make_runner(lambda: [value for value in vars(self).values() if torch.is_tensor(value)])

    def __call__(
        self,
        x: Tensor,
        y: Tensor,
        target: Tensor,
        generator: torch.Generator,
        tick: Callable[[float], None] = lambda share: None,
    ) -> tuple[Tensor, Tensor]:
        """Attack x (n, C, H, W) with labels y (n,). Targeted attacks aim at the classes ``target`` (n,).

        ``tick`` is called now and then with the share of the iterations that are done.

        Returns:
            Candidates (n, C, H, W), and their margins (n,) by the network.
        """
        n = len(x)
        with torch.no_grad():
            for buffer, values in ((self.x, x), (self.y, y), (self.target, target)):
                buffer[:n].copy_(values)
            self.candidate.copy_(self.x)
            self.margin.fill_(torch.inf)
            self.iteration.zero_()
            self.start(n, generator)
        for call in range(1, self.calls + 1):
            self._runner(self.step)
            if call % REPORT_EVERY == 0:
                if self.x.is_cuda:
                    torch.cuda.current_stream().synchronize()  # else the host runs ahead
                tick(call / self.calls)
        return self.candidate[:n].clone(), self.margin[:n].clone()

    def allocate(self, like: Tensor) -> None:  # noqa: B027 (optional)
        """Allocate further buffers."""

    @abstractmethod
    def start(self, n: int, generator: torch.Generator) -> None:
        """Initialize the buffers for n images."""

    @abstractmethod
    def step(self) -> None:
        """Run one iteration, in place."""

    def gradient(self, x: Tensor, loss: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the logits (n, K) of x, their ``loss`` (n,), and its gradient at x."""
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            logits = self.network(x)
            values = loss(logits)
            (gradient,) = torch.autograd.grad(values.sum(), x)
        return logits.detach(), values.detach(), gradient

    def target_lead(self, logits: Tensor) -> Tensor:
        """Return (n,) z_target − z_y."""
        return (logits.gather(1, self.target[:, None]) - logits.gather(1, self.y[:, None]))[:, 0]

    def keep(self, x: Tensor, logits: Tensor, allowed: Tensor | None = None) -> None:
        """Store those of x that have a smaller margin than any before."""
        margin = margins(logits, self.y)
        closer = margin < self.margin
        if allowed is not None:
            closer = closer & allowed
        self.margin.copy_(torch.where(closer, margin, self.margin))
        self.candidate.copy_(torch.where(rows(closer), x, self.candidate))

    def project(self, x: Tensor) -> Tensor:
        """Project x onto the ball and onto valid pixels."""
        return torch.minimum(torch.maximum(x, self.x - self.eps), self.x + self.eps).clamp(0, 1)


class UntargetedAPGD(Search):
    """Gradient ascent on cross-entropy with momentum. If it stalls: from the best point with half the step."""

    def allocate(self, like: Tensor) -> None:
        """Allocate what is compared at the checks of the step size."""
        self.x_old, self.x_best, self.grad_best = (torch.zeros_like(like) for _ in range(3))
        self.loss_best, self.loss_check, self.loss_last, self.rises, self.step_size = (
            torch.zeros_like(self.margin) for _ in range(5)
        )
        self.halved = torch.zeros_like(self.margin, dtype=torch.bool)
        self.windows = torch.tensor([0, *check_windows(self.iterations)], device=like.device)
        """For each call, iterations since the last check; 0: no check."""

    def start(self, n: int, generator: torch.Generator) -> None:
        """Start from uniform noise, scaled to the surface of the ball."""
        noise = 2 * torch.rand(self.x[:n].shape, generator=generator, device=self.x.device) - 1
        noise = noise / (rows(largest(noise)) + 1e-12)
        self.x_adv.copy_(self.x)
        self.x_adv[:n] = (self.x[:n] + self.eps * noise).clamp(0, 1)
        self.x_old.copy_(self.x_adv)
        self.loss_best.fill_(-torch.inf)
        self.step_size.fill_(2 * self.eps)
        self.halved.fill_(True)
        self.rises.zero_()

    def loss(self, logits: Tensor) -> Tensor:
        """Return (n,) losses to maximize."""
        return F.cross_entropy(logits, self.y, reduction="none")

    def step(self) -> None:
        """Evaluate the current point, then move; the first call evaluates the start."""
        logits, loss, grad = self.gradient(self.x_adv, self.loss)
        with torch.no_grad():
            self.keep(self.x_adv, logits)
            better = loss > self.loss_best
            self.loss_best.copy_(torch.where(better, loss, self.loss_best))
            self.x_best.copy_(torch.where(rows(better), self.x_adv, self.x_best))
            self.grad_best.copy_(torch.where(rows(better), grad, self.grad_best))
            # The loss before the first move counts as 0, as in the package.
            first = self.iteration == 0
            self.rises.add_((loss > self.loss_last) & ~first)
            self.loss_last.copy_(loss.masked_fill(first, 0))

            window = self.windows.index_select(0, self.iteration)
            stalls = (self.rises <= 0.75 * window) | (~self.halved & (self.loss_check >= self.loss_best))
            check = window > 0
            halve = check & stalls
            self.halved.copy_(torch.where(check, halve, self.halved))
            self.step_size.copy_(torch.where(halve, self.step_size / 2, self.step_size))
            self.loss_check.copy_(torch.where(check | first, self.loss_best, self.loss_check))
            self.rises.masked_fill_(check, 0)

            here = torch.where(rows(halve), self.x_best, self.x_adv)
            grad = torch.where(rows(halve), self.grad_best, grad)
            share = 0.75 + 0.25 * first
            moved = self.project(here + rows(self.step_size) * grad.sign())
            self.x_adv.copy_(self.project(here + (moved - here) * share + (here - self.x_old) * (1 - share)))
            self.x_old.copy_(here)
            self.iteration.add_(1)


def check_windows(iterations: int) -> list[int]:
    """Return, for each iteration, the number since the last check of the step size; 0: no check."""
    window, shrink, least = (max(int(share * iterations), 1) for share in (0.22, 0.03, 0.06))
    windows, since = [], 0
    for _ in range(iterations):
        since += 1
        due = since == window
        windows.append(window if due else 0)
        if due:
            since, window = 0, max(window - shrink, least)
    return windows


class TargetedAPGD(UntargetedAPGD):
    """APGD on the targeted difference of logits ratio."""

    def loss(self, logits: Tensor) -> Tensor:
        """Return (n,) losses, larger nearer to the target."""
        top = logits.topk(4, dim=1).values
        return self.target_lead(logits) / (top[:, 0] - 0.5 * (top[:, 2] + top[:, 3]) + 1e-12)


class FAB(Search):
    """Steps onto the linearized boundary to a target class, with a pull to the image; keeps points in the ball."""

    evaluates_start = False
    OVERSHOOT, BACK, MOST = 1.05, 0.9, 0.1

    def start(self, n: int, generator: torch.Generator) -> None:
        """Start from the images."""
        self.x_adv.copy_(self.x)

    def step(self) -> None:
        """Project onto the linearized boundary, and evaluate the new point."""
        _, ahead, grad = self.gradient(self.x_adv, self.target_lead)
        with torch.no_grad():
            level = (grad * self.x_adv).sum(dim=(1, 2, 3)) - ahead
            from_here, from_image = (onto_plane(start, grad, level) for start in (self.x_adv, self.x))
            here, image = (largest(change).clamp_min(1e-8) for change in (from_here, from_image))
            share = rows((here / (here + image)).clamp(0, self.MOST))
            moved = (self.x_adv + self.OVERSHOOT * from_here) * (1 - share)
            moved = (moved + (self.x + self.OVERSHOOT * from_image) * share).clamp(0, 1)
            logits = self.network(moved)
            self.keep(moved, logits, largest(moved - self.x) <= self.eps)
            beyond = rows(logits.argmax(dim=1) != self.y)
            self.x_adv.copy_(torch.where(beyond, self.x + (moved - self.x) * self.BACK, moved))


def onto_plane(x: Tensor, normal: Tensor, level: Tensor) -> Tensor:
    """Return the smallest d in L∞ with normal·(x + d) = level (n,) and x + d in [0, 1], for x (n, C, H, W).

    If the plane is out of reach, d comes as close as possible. Every pixel moves by λ against the sign of its normal,
    or up to its bound. This is a concave, piecewise linear equation in λ: Newton's method from 0 stays below the root
    and is exact once it has passed the last kink before it.
    """
    excess = rows((normal * x).sum(dim=(1, 2, 3)) - level)
    normal = normal * (2 * (excess >= 0).to(x.dtype) - 1)
    excess, weight = excess.abs(), normal.abs()
    room = torch.where(normal < 0, 1 - x, x)
    move = torch.zeros_like(excess)
    for _ in range(NEWTON_STEPS):
        reached = (weight * torch.minimum(room, move)).sum(dim=(1, 2, 3), keepdim=True)
        slope = (weight * (room > move)).sum(dim=(1, 2, 3), keepdim=True)
        move = (move + (excess - reached).clamp_min(0) / slope).masked_fill(slope == 0, 1).clamp_max(1)
    return -normal.sign() * torch.minimum(room, move)


class Square(Search):
    """Random search without gradients: sets a square of the image to the edge of the ball if that lowers the margin."""

    iterations = 5000

    def allocate(self, like: Tensor) -> None:
        """Allocate the squares to try."""
        channels, height, width = like.shape[1:]
        self.squares = torch.zeros(self.calls, 4, dtype=torch.int64, device=like.device)
        """For each call: top, bottom, left and right of its square; an empty one at the first call."""
        self.signs = torch.zeros(self.calls, channels, device=like.device)
        self.row = torch.arange(height, device=like.device)[:, None]
        self.column = torch.arange(width, device=like.device)[None, :]

    def start(self, n: int, generator: torch.Generator) -> None:
        """Start from stripes, and draw all squares."""
        _, channels, height, width = self.x.shape
        # On the CPU: thousands of small draws are slow on a GPU.
        draws = generator if generator.device.type == "cpu" else torch.Generator().manual_seed(generator.initial_seed())
        stripes = (2 * torch.rand(n, channels, 1, width, generator=draws) - 1).sign().to(self.x.device)
        self.candidate[:n] = (self.x[:n] + self.eps * stripes).clamp(0, 1)
        squares, signs = [[0, 0, 0, 0]], [torch.zeros(channels)]
        for query in range(self.iterations):
            side = square_size(query, height, width)
            top = int((height - side) * torch.rand(1, generator=draws))
            left = int((width - side) * torch.rand(1, generator=draws))
            squares.append([top, top + side, left, left + side])
            signs.append((2 * torch.rand(channels, 1, 1, generator=draws) - 1).sign().flatten())
        self.squares.copy_(torch.tensor(squares))
        self.signs.copy_(torch.stack(signs))

    def step(self) -> None:
        """Try one square."""
        with torch.no_grad():
            top, bottom, left, right = self.squares.index_select(0, self.iteration)[0].unbind()
            rows_inside, columns_inside = (
                (place >= low) & (place < high)
                for place, low, high in ((self.row, top, bottom), (self.column, left, right))
            )
            sign = self.signs.index_select(0, self.iteration)[0][:, None, None]
            tried = self.project(self.candidate + 2 * self.eps * sign * (rows_inside & columns_inside))
            self.keep(tried, self.network(tried))
            self.iteration.add_(1)


def square_size(query: int, height: int, width: int, share: float = 0.8) -> int:
    """Return the side of the square at this query; squares shrink over time."""
    bounds = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)
    share /= 2 ** sum(query > bound for bound in bounds)
    return min(max(round(math.sqrt(share * height * width)), 1), height, width)


ATTACKS: dict[str, type[Search]] = {"apgd-ce": UntargetedAPGD, "apgd-t": TargetedAPGD, "fab-t": FAB, "square": Square}
"""The attacks of the standard version, by AutoAttack's names."""


def rows(values: Tensor) -> Tensor:
    """Reshape (n,) to (n, 1, 1, 1)."""
    return values[:, None, None, None]


def largest(change: Tensor) -> Tensor:
    """Return the (n,) L∞ norms of (n, C, H, W)."""
    return change.abs().amax(dim=(1, 2, 3))
