"""PGD-AT, TRADES and MART written out as their authors do, without the package: what uniform budgets must equal.

Eval mode for the attack, training mode for the loss; the TRADES target is computed once, as the values are the
same in every step.
"""

import torch
import torch.nn.functional as F


def sign_steps(net, x, start, steps, alpha, eps, value):
    x_adv = start.detach()
    for _ in range(steps):
        x_adv.requires_grad_()
        with torch.enable_grad():
            loss = value(net(x_adv))
        grad = torch.autograd.grad(loss, [x_adv])[0]
        x_adv = x_adv.detach() + alpha * torch.sign(grad.detach())
        x_adv = torch.min(torch.max(x_adv, x - eps), x + eps)
        x_adv = torch.clamp(x_adv, 0.0, 1.0)
    return x_adv.detach()


def pgd_at(net, x, y, start, steps, alpha, eps, beta):
    net.eval()
    x_adv = sign_steps(net, x, start, steps, alpha, eps, lambda z: F.cross_entropy(z, y, reduction="sum"))
    net.train()
    return x_adv, F.cross_entropy(net(x_adv), y)


def trades(net, x, y, start, steps, alpha, eps, beta):
    net.eval()
    with torch.no_grad():
        target = F.softmax(net(x), dim=1)
    x_adv = sign_steps(
        net, x, start, steps, alpha, eps, lambda z: F.kl_div(F.log_softmax(z, dim=1), target, reduction="sum")
    )
    net.train()
    z = net(x)
    z_adv = net(x_adv)
    robust = F.kl_div(F.log_softmax(z_adv, dim=1), F.softmax(z, dim=1), reduction="none").sum(dim=1).mean()
    return x_adv, F.cross_entropy(z, y) + beta * robust


def mart(net, x, y, start, steps, alpha, eps, beta):
    net.eval()
    x_adv = sign_steps(net, x, start, steps, alpha, eps, lambda z: F.cross_entropy(z, y, reduction="sum"))
    net.train()
    z = net(x)
    z_adv = net(x_adv)
    p, p_adv = F.softmax(z, dim=1), F.softmax(z_adv, dim=1)
    top = torch.argsort(p_adv, dim=1)[:, -2:]
    rival = torch.where(top[:, -1] == y, top[:, -2], top[:, -1])
    adversarial = F.cross_entropy(z_adv, y) + F.nll_loss(torch.log(1.0001 - p_adv + 1e-12), rival)
    true = torch.gather(p, 1, y[:, None])[:, 0]
    kl = F.kl_div(torch.log(p_adv + 1e-12), p, reduction="none").sum(dim=1)
    return x_adv, adversarial + beta * (kl * (1.0000001 - true)).mean()
