"""Methods of other authors, each a few settings or a small part of the same engine.

Every function returns a :class:`~bullettrain.BulletTrain` for your own loop:

    train = baselines.fast(bt.TRADES(beta=6.0, eps=8 / 255))

docs/baselines.md says what each does, what it costs and when it fails.
"""

from bullettrain.baselines.fast import FAST, N_FGSM, ONE_STEP, fast, fast_budget, n_fgsm
from bullettrain.baselines.fgsm_pgi import FGSMPGI, fgsm_pgi
from bullettrain.baselines.free import Free, free
from bullettrain.baselines.gat import GAT, gat
from bullettrain.baselines.gradalign import GradAlign, grad_align
from bullettrain.baselines.nuat import NuAT, nuat
from bullettrain.baselines.yopo import FirstLayer, yopo, yopo_budget

__all__ = [
    "FAST",
    "FGSMPGI",
    "GAT",
    "N_FGSM",
    "ONE_STEP",
    "FirstLayer",
    "Free",
    "GradAlign",
    "NuAT",
    "fast",
    "fast_budget",
    "fgsm_pgi",
    "free",
    "gat",
    "grad_align",
    "n_fgsm",
    "nuat",
    "yopo",
    "yopo_budget",
]
