"""What can be reproduced."""

from __future__ import annotations

from bullettrain.checks import instead
from bullettrain.reproduction import paper_figures as figures
from bullettrain.reproduction import paper_tables as tables
from bullettrain.reproduction.study import RATIOS, Study
from bullettrain.training.settings import ConfigError

ROBUST = ("clean", "pgd20", "autoattack")
STUDIES = {
    study.name: study
    for study in (
        Study(
            "table-trades",
            "TRADES with and without BulletTrain",
            tables.trades,
            ROBUST,
            tables.trades_claims,
            columns=(*ROBUST, "shares", *RATIOS),
        ),
        Study(
            "table-mart",
            "MART with and without BulletTrain",
            tables.mart,
            ROBUST,
            tables.mart_claims,
            columns=(*ROBUST, "shares", *RATIOS),
        ),
        Study(
            "table-augmix",
            "AugMix with and without BulletTrain",
            tables.augmix,
            ("clean", "corruptions"),
            tables.augmix_claims,
            columns=("corruptions", "clean", "boundary", *RATIOS),
            figure="corrupted",
        ),
        Study(
            "table-fast",
            "Fewer steps for all, or for some: multi-step FAST",
            tables.fast,
            ("clean", "pgd20"),
            tables.fast_claims,
        ),
        Study(
            "fig-oracle",
            "Which examples need steps (MNIST, true classes)",
            figures.oracle,
            ("clean", "pgd100x20"),
            figures.oracle_claims,
            columns=("clean", "pgd100x20"),
            figure="oracle",
        ),
        Study(
            "fig-shares",
            "Shares of the classes over training",
            figures.looked_at,
            ("clean",),
            figures.shares_claims,
            columns=("robust_rise", "outlier_fall", "boundary_least"),
            figure="shares",
            about="First to last record of training, in points; the last column is how much smaller the share of "
            "boundary examples is than the next one, at the end.",
        ),
        Study(
            "fig-svar",
            "SVar of the classes over training",
            figures.looked_at,
            ("clean",),
            figures.svar_claims,
            columns=("svar_order",),
            figure="svar",
            about="The share of training records in which the three means are in order.",
        ),
        Study(
            "fig-allocation",
            "One mini-batch by SVar, and the steps it is given",
            lambda scale: (tables.TRADES_NR2,),
            ("clean",),
            columns=("shares",),
            figure="allocation",
            about="The table has the shares of the whole training, the pictures one mini-batch at its end.",
        ),
        Study(
            "fig-gamma",
            "Accuracy and speed-up over γ",
            figures.gamma,
            ("clean", "pgd20"),
            figures.gamma_claims,
            figure="gamma",
        ),
        Study(
            "fig-nr",
            "Accuracy and speed-up over N_R",
            figures.nr,
            ("clean", "pgd20"),
            figures.nr_claims,
            figure="robust_steps",
        ),
        Study(
            "strong-attacks",
            "Stronger attacks than those of the tables",
            figures.strong,
            ("clean", "pgd20", "pgd100x10", "pgd1000x5", "autoattack"),
            figures.strong_claims,
            columns=("clean", "pgd20", "pgd100x10", "pgd1000x5", "autoattack"),
            about="The figure beside AutoAttack is RobustBench's, of the TRADES authors' network.",
        ),
        Study(
            "uncertainty",
            "Other scores in the place of SVar",
            figures.uncertainty,
            ("clean", "pgd20"),
            figures.uncertainty_claims,
            columns=("clean", "pgd20", "rank", "rank_correct", "theoretical"),
            figure="ranks",
            ranks=True,
            about="Rank correlation of the score with the classes that ten PGD steps find, over all training "
            "examples looked at, and over the correctly classified ones alone, where the sign does not help.",
        ),
        Study(
            "plane",
            "Accuracy under AutoAttack over training time: what a user chooses from",
            figures.plane,
            ROBUST,
            figures.plane_claims,
            columns=("clean", "pgd20", "autoattack", "minutes", "work"),
            figure="plane",
            about="Not of the paper, but for what it says of GradAlign. Minutes are of training with the device to "
            "itself, without compilation. Methods on TRADES or MART are compared with these, the others with PGD-AT.",
        ),
    )
}


def find_study(name: str) -> Study:
    """The study called ``name``; ConfigError with what there is otherwise."""
    if name not in STUDIES:
        raise ConfigError(f"there is nothing called {name!r} to reproduce{instead(name, STUDIES)}")
    return STUDIES[name]
