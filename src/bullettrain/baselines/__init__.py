"""What a user might train with instead: each a few settings, or a small piece, of the same engine.

Every function returns a :class:`~bullettrain.engine.BulletTrain` for one's own loop:

    train = baselines.fast(bt.TRADES(beta=6.0, eps=8 / 255))

docs/baselines.md says what each of them does, what it costs and when it fails.
"""

from bullettrain.baselines.fast import FAST, N_FGSM, fast, fast_budget, n_fgsm, n_fgsm_budget
from bullettrain.baselines.fgsm_pgi import FGSMPGI, fgsm_pgi, fgsm_pgi_budget
from bullettrain.baselines.free import Free, free, free_budget
from bullettrain.baselines.gat import GAT, gat, gat_budget
from bullettrain.baselines.gradalign import GradAlign, grad_align, grad_align_budget
from bullettrain.baselines.nuat import NuAT, nuat
from bullettrain.baselines.yopo import FirstLayer, yopo, yopo_budget

__all__ = [
    "FAST",
    "FGSMPGI",
    "GAT",
    "N_FGSM",
    "FirstLayer",
    "Free",
    "GradAlign",
    "NuAT",
    "fast",
    "fast_budget",
    "fgsm_pgi",
    "fgsm_pgi_budget",
    "free",
    "free_budget",
    "gat",
    "gat_budget",
    "grad_align",
    "grad_align_budget",
    "n_fgsm",
    "n_fgsm_budget",
    "nuat",
    "yopo",
    "yopo_budget",
]
