"""Attacks as text."""

import pytest

from bullettrain.config.settings import ConfigError
from bullettrain.evaluation.specs import (
    PGD,
    AutoAttack,
    Clean,
    Corruptions,
    Defaults,
    as_dict,
    few_steps,
    parse_attacks,
    radius,
)


def one(text, defaults=None):
    (attack,) = parse_attacks([text], defaults)
    return attack


def test_the_papers_pgd20():
    assert one("pgd20") == PGD(20, 1, 0.003, "ce", "linf", 0.031) == PGD()


@pytest.mark.parametrize(
    ("text", "steps", "restarts"), [("pgd100x10", 100, 10), ("pgd1000x5", 1000, 5), ("pgd50x1", 50, 1)]
)
def test_named_attacks(text, steps, restarts):
    assert one(text) == PGD(steps, restarts, 0.003, "ce", "linf", 0.031)


@pytest.mark.parametrize("defaults", [Defaults(), Defaults("linf", 0.1, 0.02, 10), Defaults("l2", 0.5)])
def test_another_step_size_than_the_default_is_told(defaults):
    """The name of an attack does not tell it."""
    for text in ("pgd20", "pgd3x2", "autoattack", "clean", "corruptions", "pgd:steps=40,eps=0.2"):
        assert defaults.is_usual(as_dict(one(text, defaults)))
    assert not defaults.is_usual(as_dict(one("pgd:steps=20,step=1e-6", defaults)))


@pytest.mark.parametrize("text", ["PGD20", "pgd-20", "PGD_20", " Pgd-20x1"])
def test_case_and_hyphens_of_a_name_do_not_count(text):
    assert one(text) == one("pgd20")
    assert one("Auto-Attack:norm=l2,eps=0.5") == AutoAttack("l2", 0.5)


def test_every_parameter_and_fractions():
    attack = one("pgd:steps=7,restarts=3,step=2/255,loss=margin,norm=l2,eps=128/255")
    assert attack == PGD(7, 3, 2 / 255, "margin", "l2", 128 / 255)
    assert one("autoattack:norm=l2,eps=1/2") == AutoAttack("l2", 0.5)


def test_several_between_commas_and_again():
    attacks = parse_attacks(["clean,pgd20,pgd:steps=50, restarts=2", "autoattack", "clean", "corruptions"])
    assert attacks == [
        Clean(),
        PGD(20, 1, 0.003, "ce", "linf", 0.031),
        PGD(50, 2, 0.003, "ce", "linf", 0.031),
        AutoAttack("linf", 0.031),
        Corruptions(),
    ]


def test_what_an_attack_does_not_say_is_the_runs():
    run = Defaults("linf", 0.3, step=0.01, steps=100)
    assert one("pgd100x20", run) == PGD(100, 20, 0.01, "ce", "linf", 0.3)
    assert one("pgd20", run).step == pytest.approx(0.03)  # the run's step is for a hundred of them
    assert one("pgd100:eps=0.1", run).step == pytest.approx(0.01)  # a tenth of its own ε
    assert one("autoattack", run) == AutoAttack("linf", 0.3)
    assert one("pgd20:norm=l2", run) == PGD(20, 1, 0.05, "ce", "l2", 0.5)


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 10, 19, 20, 100])
def test_default_steps_reach_across_the_ball(steps):
    attack = one(f"pgd{steps}:eps=0.1")
    assert attack.steps * attack.step >= 0.1
    assert few_steps(steps, 0.1) <= 0.125


def test_steps_that_do_not_reach_the_edge_are_told():
    assert PGD().shortfall == PGD(3, step=0.1, eps=0.3).shortfall == ""  # 3 × 0.1 is more than 0.3 by rounding, or less
    short = PGD(3, 2, 0.01, "kl", "l2", 8 / 255).shortfall
    assert short.startswith("pgd3x2-kl moves by 3 × 0.01 at most, less than ε = 8/255: it is weaker")


MISTAKES = {
    "nothing": ("pgf20", "there is no attack 'pgf20'; there are clean, pgd20, pgd100x10, pgd1000x5"),
    "letters": ("pdg50x2", "corruptions; did you mean 'pgd50x2'?"),
    "a letter less": ("autoatack", "corruptions; did you mean 'autoattack'?"),
    "all are listed": ("fgsm", "autoattack, autoattack:norm=linf|l2,eps=…, apgd"),
    "parameter": ("pgd:stps=3", "no parameter 'stps'; there are steps, restarts, step, loss, norm, eps; did you mean"),
    "of autoattack": ("autoattack:steps=3", "there is no parameter 'steps'; there are norm, eps"),
    "no value": ("pgd:steps", "'steps' is no parameter"),
    "nothing said": ("pgd:", "write pgd:steps=20"),
    "twice": ("pgd:eps=0.1,eps=0.2", "eps is given twice"),
    "in the name": ("pgd20:steps=3", "steps is given twice"),
    "loss": ("pgd:loss=dlr", "there are ce, kl, margin"),
    "norm": ("pgd:norm=l1", "there are linf, l2"),
    "number": ("pgd:eps=much", "no number"),
    "whole": ("pgd:steps=2.5", "whole number"),
    "none": ("pgd:steps=0", "steps is 0; it has to be at least 1"),
    "restarts": ("pgd20x0", "restarts is 0"),
    "negative": ("pgd:step=-1", "step is -1.0; it has to be at least 1e-30"),
    "of 255": ("pgd20:eps=8", "did you mean 8/255?"),
    "step of 255": ("pgd:step=5", "step is 5, but pixels are in [0, 1]; did you mean 5/255?"),
    "nan": ("pgd20:eps=nan", "above 0"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_says_what_there_is(mistake):
    text, message = MISTAKES[mistake]
    with pytest.raises(ConfigError) as error:
        parse_attacks([text])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("eps", "text"), [(8 / 255, "8/255"), (0.031, "0.031"), (0.3, "0.3"), (51 / 255, "0.2"), (1.0, "1"), (0.5, "0.5")]
)
def test_radii_as_people_write_them(eps, text):
    assert radius(eps) == text
