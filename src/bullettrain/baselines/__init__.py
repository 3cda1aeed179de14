"""Methods of other authors, each a few settings or a small part of the same engine.

Every function returns a :class:`~bullettrain.BulletTrain` for your own loop:

    train = baselines.fast(bt.TRADES(beta=6.0, eps=8 / 255))

docs/baselines.md says what each does, what it costs and when it fails.
"""

from bullettrain.baselines.fast import FAST, N_FGSM, ONE_STEP, fast, fast_budget, n_fgsm, one_step
from bullettrain.baselines.fgsm_pgi import FGSMPGI
from bullettrain.baselines.free import Free
from bullettrain.baselines.gat import GAT
from bullettrain.baselines.gradalign import GradAlign
from bullettrain.baselines.nuat import NuAT
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
    "n_fgsm",
    "one_step",
    "yopo",
    "yopo_budget",
]
