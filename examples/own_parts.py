"""An objective, a score and an allocation of your own: on a GPU they are captured like the built-in ones.

python examples/own_parts.py
"""

import time

import torch
import torch.nn.functional as F

import bullettrain as bt
from bullettrain.models import build
from bullettrain.objectives import AdversarialObjective


class LogitPairing(AdversarialObjective):
    """Cross-entropy of x', and clean and adversarial logits that agree."""

    attack_loss = "ce"
    random_start = "uniform"

    def loss(self, z, z_prime, y, touched=None, weight=None):  # type: ignore[no-untyped-def]
        """The mean over the mini-batch."""
        return F.cross_entropy(z_prime.float(), y) + 0.5 * (z.float() - z_prime.float()).square().mean()


def confidence(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Probability of the predicted class, negative where that is wrong."""
    top, predicted = logits.softmax(dim=1).max(dim=1)
    return torch.where(predicted == y, top, -top)


class ByConfidence:
    """From ten steps for the least confident right predictions down to one for the most; none for wrong ones."""

    uniform_steps = None

    def allocate(self, category, score=None, past=None):  # type: ignore[no-untyped-def]
        """Steps (m,)."""
        return torch.where(score < 0, 0, 1 + (9 * (1 - score)).round().long())

    def step_sizes(self, category, steps, eps):  # type: ignore[no-untyped-def]
        """Step sizes (m,)."""
        return 1.7 * eps / steps.clamp_min(1)


def milliseconds(train: bt.BulletTrain, device: str, m: int, steps: int) -> float:
    """Of one captured step of PreActResNet-18, or of a small network on a CPU; the median."""
    gpu = device == "cuda"
    model = build("preact-resnet-18" if gpu else "wrn-10-1").to(device)
    fast = bt.Captured(train, model, dtype=torch.bfloat16 if gpu else None, compile=gpu, say=print)
    optimizer, times = torch.optim.SGD(model.parameters(), lr=1e-3), []
    for _ in range(steps):
        x, y = torch.rand(m, 3, 32, 32, device=device), torch.randint(10, (m,), device=device)
        began = time.perf_counter()
        fast.step(x, y)
        optimizer.step()
        if gpu:
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - began))
    return sorted(times)[len(times) // 2]


if __name__ == "__main__":
    where, size, number = ("cuda", 128, 200) if torch.cuda.is_available() else ("cpu", 16, 5)
    own = bt.BulletTrain(LogitPairing(eps=8 / 255), budget=ByConfidence(), score=confidence)
    print(f"own parts:      {milliseconds(own, where, size, number):8.1f} ms a step")
    built_in = bt.BulletTrain(bt.TRADES(eps=8 / 255), budget=bt.StepBudget(boundary=10, robust=2))
    print(f"built-in parts: {milliseconds(built_in, where, size, number):8.1f} ms a step")
