"""Algorithm 2 once more, literally: one example at a time, in plain Python and float64.

It shares no code with the package. torch is here only to run a network on one example and to differentiate;
the network must have no batch norm, since one example at a time has no batch.
"""

import math

import torch


def softmax(logits):
    top = max(logits)
    exps = [math.exp(v - top) for v in logits]
    return [e / sum(exps) for e in exps]


def argmax(values):
    return max(range(len(values)), key=lambda k: (values[k], -k))  # the first of equals


def svar(logits, label):
    p = softmax(logits)
    mean = sum(p) / len(p)
    variance = sum((v - mean) ** 2 for v in p) / len(p)
    return variance if argmax(logits) == label else -variance


def quantile(values, q):
    ranked = sorted(values)
    position = q * (len(ranked) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ranked) - 1)
    return ranked[low] + (position - low) * (ranked[high] - ranked[low])


def separate(scores, F_R):
    threshold = quantile(scores, 1 - F_R)
    names = []
    for score in scores:
        if math.copysign(1, score) < 0:
            names.append("outlier")
        elif score < threshold:
            names.append("boundary")
        else:
            names.append("robust")
    return names


def updated_F_R(F_R, predictions, labels, gamma, p):
    correct = sum(prediction == label for prediction, label in zip(predictions, labels, strict=True))
    return p * F_R + (1 - p) * gamma * correct / len(labels)


def allocate(names, N_B, N_R, N_O, eps, alpha):
    table = {
        "boundary": (N_B, alpha),
        "robust": (N_R, 1.7 * eps / N_R if N_R else None),
        "outlier": (N_O, 1.7 * eps / N_O if N_O else None),
    }
    return [table[name] for name in names]


def clamp(v, low, high):
    return min(max(v, low), high)


def attack(net, x, label, kind, steps, step_size, start, eps):
    """x' of one example (C, H, W): sign ascent in the ball, in [0, 1]."""
    if steps == 0:
        return x.clone()
    target = torch.tensor(softmax(net(x[None])[0].tolist()), dtype=torch.float64)
    at = start.clone()
    for _ in range(steps):
        at.requires_grad_(True)
        log_p = net(at[None])[0].log_softmax(0)
        value = -log_p[label] if kind == "ce" else (target * (target.log() - log_p)).sum()
        (gradient,) = torch.autograd.grad(value, at)
        moved = []
        flat = (at.detach().flatten().tolist(), gradient.flatten().tolist(), x.flatten().tolist())
        for v, g, clean in zip(*flat, strict=True):
            sign = (g > 0) - (g < 0)
            moved.append(clamp(clamp(v + step_size * sign, clean - eps, clean + eps), 0.0, 1.0))
        at = torch.tensor(moved, dtype=torch.float64).view(x.shape)
    return at


def example_loss(objective, z, z_prime, label, beta):
    """One example's part of the loss from logits (K,); z_prime is z itself where it got no steps."""
    p, p_prime = z.softmax(0), z_prime.softmax(0)
    if objective == "pgd":
        return -z_prime.log_softmax(0)[label]
    if objective == "trades":
        robust = 0.0 if z_prime is z else (p * (p.log() - p_prime.log())).sum()
        return -z.log_softmax(0)[label] + beta * robust
    wrong = max((p_prime[k] for k in range(len(z)) if k != label), key=lambda v: v.item())
    boosted = -z_prime.log_softmax(0)[label] - torch.log(1.0001 - wrong + 1e-12)
    robust = 0.0 if z_prime is z else (p * (p.log() - torch.log(p_prime + 1e-12))).sum() * (1.0000001 - p[label])
    return boosted + beta * robust


def step(net, xs, labels, starts, *, objective, F_R, gamma, p, N_B, N_R, N_O, eps, alpha, beta):
    """One step over a list of examples. Returns everything the engine returns, example by example."""
    logits = [net(x[None])[0].tolist() for x in xs]
    scores = [svar(row, label) for row, label in zip(logits, labels, strict=True)]
    names = separate(scores, F_R)
    allocation = allocate(names, N_B, N_R, N_O, eps, alpha)
    if N_B == N_R == N_O:
        allocation = [(N_B, alpha)] * len(xs)
    kind = "kl" if objective == "trades" else "ce"
    x_primes, losses, predictions = [], [], []
    for x, label, start, (steps, size) in zip(xs, labels, starts, allocation, strict=True):
        x_prime = attack(net, x, label, kind, steps, size, start, eps)
        z = net(x[None])[0]
        z_prime = net(x_prime[None])[0] if steps else z
        x_primes.append(x_prime)
        predictions.append(argmax(z_prime.tolist()))
        losses.append(example_loss(objective, z, z_prime, label, beta))
    loss = sum(losses) / len(losses)
    gradients = torch.autograd.grad(loss, list(net.parameters()))
    return {
        "svar": scores,
        "names": names,
        "steps": [steps for steps, _ in allocation],
        "x_prime": x_primes,
        "loss": loss.item(),
        "gradients": gradients,
        "F_R": updated_F_R(F_R, predictions, labels, gamma, p),
    }
