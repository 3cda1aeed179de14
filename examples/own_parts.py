"""Time an objective, a score and an allocation of your own against the built-in ones, captured on a GPU.

python examples/own_parts.py
"""

import time

import torch
import torch.nn.functional as F

import bullettrain as bt
from bullettrain.models import build
from bullettrain.objectives import AdversarialObjective


class LogitPairing(AdversarialObjective):
    """Cross-entropy of x' plus the distance between clean and adversarial logits."""

    attack_loss = "ce"
    random_start = "uniform"

    def loss(self, z, z_prime, y, touched=None, weight=None):  # type: ignore[no-untyped-def]
        """Return the mean loss of the mini-batch."""
        loss = F.cross_entropy(z_prime.float(), y, reduction="none")
        loss = loss + 0.5 * (z.float() - z_prime.float()).square().mean(dim=1)
        return loss.mean() if weight is None else (weight * loss).mean()


def confidence(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the probability (m,) of the predicted class, negative where the prediction is wrong."""
    top, predicted = logits.softmax(dim=1).max(dim=1)
    return torch.where(predicted == y, top, -top)


class ByConfidence:
    """Ten steps for the least confident correct predictions, down to one for the most; none for wrong ones."""

    uniform_steps = None

    def allocate(self, category, score=None, past=None):  # type: ignore[no-untyped-def]
        """Return the steps (m,)."""
        return torch.where(score < 0, 0, 1 + (9 * (1 - score)).round().long())

    def step_sizes(self, category, steps, eps):  # type: ignore[no-untyped-def]
        """Return the step sizes (m,)."""
        return 1.7 * eps / steps.clamp_min(1)


def milliseconds(train: bt.BulletTrain, device: str, m: int, steps: int) -> float:
    """Return the median time of a step: PreActResNet-18, captured, on a GPU; a small network on a CPU."""
    gpu = device == "cuda"
    model = build("preact-resnet-18" if gpu else "wrn-10-1").to(device)
    fast = bt.Captured(train, model, dtype=torch.bfloat16 if gpu else None, compile=gpu, on_message=print)
    optimizer, times = torch.optim.SGD(model.parameters(), lr=1e-3), []
    for _ in range(steps):
        x, y = torch.rand(m, 3, 32, 32, device=device), torch.randint(10, (m,), device=device)
        start = time.perf_counter()
        fast.step(x, y)
        optimizer.step()
        if gpu:
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - start))
    return sorted(times)[len(times) // 2]


if __name__ == "__main__":
    device, size, steps = ("cuda", 128, 200) if torch.cuda.is_available() else ("cpu", 16, 5)
    own = bt.BulletTrain(LogitPairing(eps=8 / 255), budget=ByConfidence(), score=confidence)
    print(f"own parts:      {milliseconds(own, device, size, steps):8.1f} ms per step")
    built_in = bt.BulletTrain(bt.TRADES(eps=8 / 255), budget=bt.StepBudget(boundary=10, robust=2))
    print(f"built-in parts: {milliseconds(built_in, device, size, steps):8.1f} ms per step")
