"""Input validation. Every error is one sentence that says what is wrong and what to do."""

from __future__ import annotations

import dataclasses
import inspect
import math
import numbers
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from bullettrain.errors import guesses, raised_as

T = TypeVar("T")
RANGE_TOLERANCE = 1e-4
"""Tolerance at the bounds of the input range, for the rounding of interpolation."""


LIMITS = {
    "least": ("at least", operator.ge),
    "above": ("above", operator.gt),
    "most": ("at most", operator.le),
    "below": ("below", operator.lt),
}
"""The limits of a number: their words, and their comparisons, of which NaN satisfies none."""


PARTS = {
    "objective": (("corrupt", "loss"), "an instance, e.g. TRADES()"),
    "budget": (
        ("allocate", "uniform_steps", "step_sizes"),
        "a StepBudget, e.g. StepBudget(boundary=10, robust=2), or an object that has all of Allocation",
    ),
}
"""What the parts of a training step have, and which to give instead of something else."""
UNSUPPORTED_LAYERS = {
    "SyncBatchNorm": "BatchNorm",
    "FSDPModule": "DistributedDataParallel",
    "FullyShardedDataParallel": "DistributedDataParallel",
}
"""Layers that wait for forwards of other processes, and what to use instead."""


class DivergedError(ValueError):
    """The network returns NaN or infinity."""


class SettingsError(ValueError):
    """An invalid combination of arguments, with the arguments that would fix it.

    The command line replaces the Python arguments in the message by its own options.
    """

    def __init__(self, wrong: str, **mend: object) -> None:
        super().__init__(f"{wrong} {', '.join(f'{key}={value!r}' for key, value in mend.items())}")
        self.wrong, self.mend = wrong, mend


def instead(name: str, names: Iterable[str], listed: str = "") -> str:
    """Return the end of an error message about an unknown ``name``: the known names, and the nearest of them.

    Args:
        name: what was given.
        names: known names, in lower case.
        listed: where the known names are listed, if there are too many for the message.
    """
    names = list(dict.fromkeys(names))
    near = " or ".join(map(repr, guesses(name, names)))
    there = listed or f"there are {', '.join(names)}"
    return f"; {there}; did you mean {near}?" if near else f"; {there}"


def check_known(
    value: T, names: Iterable[Any], said: str, *, error: type[ValueError] = ValueError, listed: str = ""
) -> T:
    """Return ``value``, one of ``names``.

    Args:
        value: what was given.
        names: known names, in lower case.
        said: start of the error message: "there is no norm".
        error: raised for another value.
        listed: where the known names are listed, if there are too many for the message.
    """
    if value in (names := list(names)):
        return value
    raise error(f"{said} {value!r}{instead(str(value), names, listed)}")


def check_number(
    value: Any, name: str, *, whole: bool = False, error: type[ValueError] = ValueError, **limits: float
) -> float:
    """Return ``value``, a finite number within ``limits``.

    Args:
        value: what was given.
        name: its name for the message.
        whole: whether it has to be an integer. A float is refused, even 3.0.
        error: raised for a number outside the limits.
        **limits: any of ``least``, ``above``, ``most`` and ``below``.

    Raises:
        TypeError: the value is no number, or not whole.
    """
    if isinstance(value, bool) or not (hasattr(value, "__index__") if whole else isinstance(value, numbers.Real)):
        raise TypeError(f"{name} is {shown(value)}; it has to be a {'whole number (an int)' if whole else 'number'}")
    number = value.__index__() if whole else value
    if not -math.inf < number < math.inf or not all(LIMITS[key][1](number, limit) for key, limit in limits.items()):
        words = " and ".join(f"{LIMITS[key][0]} {limit:g}" for key, limit in limits.items())
        raise error(f"{name} is {value}; it has to be {words or 'finite'}")
    return number if whole else float(number)


def check_count(value: int, name: str, least: int = 0, **limits: Any) -> int:
    """Return ``value`` as an int of at least ``least``."""
    return int(check_number(value, name, whole=True, least=least, **limits))


def limits(**limits: float) -> dict[str, Any]:
    """Return the metadata of a dataclass field for `check_limits`: a number, or a tuple of numbers, in ``limits``."""
    return {"limits": limits}


def check_limits(values: Any, prefix: str = "", error: type[ValueError] = ValueError) -> None:
    """Check the fields of a dataclass that have `limits`. None and booleans are left alone where the type has them."""
    for field in dataclasses.fields(values):
        value, kind, declared = getattr(values, field.name), str(field.type), field.metadata.get("limits")
        if declared and not (value is None and "None" in kind) and not (isinstance(value, bool) and "bool" in kind):
            for part in value if isinstance(value, tuple) else (value,):
                check_number(part, prefix + field.name, whole="int" in kind, error=error, **declared)


def check_returned(value: Any, what: str, shape: tuple[int, ...], kind: Literal["floating-point", "integer"]) -> Tensor:
    """Return the tensor that ``what``, a part of a training step, returned.

    Args:
        value: the returned value.
        what: the part, for the message: "the score".
        shape: expected shape.
        kind: expected kind of dtype.

    Raises:
        TypeError: the value is no tensor, or has another shape or kind of dtype.
    """
    fits = torch.is_tensor(value) and value.shape == shape and value.dtype != torch.bool
    if fits and value.is_floating_point() == (kind == "floating-point"):
        return value  # type: ignore[no-any-return]
    wanted = f"{kind} tensor of shape {shape}" if shape else f"0-d {kind} tensor"
    wanted += ", e.g. by .long()" if kind == "integer" and getattr(value, "shape", None) == shape else ""
    raise TypeError(f"{what} returned {described(value)}; it has to return: {wanted}")


def check_integers(values: Tensor, count: int, what: str, known: str) -> None:
    """Check that integers lie in [0, count); ``what`` and ``known`` name both; synchronises with the device."""
    low, high = (int(v) for v in torch.aminmax(values))
    if low < 0 or high >= count:
        raise ValueError(f"{what} from {low} to {high}; {known} 0 to {count - 1}")


def check_index(index: Tensor | None, y: Tensor, examples: int, *, look: bool) -> Tensor:
    """Check the dataset indices (m,) of a batch; ``look``: also their range, which synchronises with the device."""
    if not torch.is_tensor(index) or index.dtype != torch.int64 or index.shape != y.shape:
        wanted = f"({len(y)},) int64, the dataset indices of the batch"
        given = "missing" if index is None else described(index)
        raise ValueError(f"the history of {examples} examples is used, and index is {given}; give {wanted}")
    if index.device != y.device:
        raise ValueError(f"index is on {index.device}, but the labels are on {y.device}")
    if look and len(index):
        check_integers(index, examples, "index goes", "there are examples")
    return index


def check_repeated(index: Tensor) -> None:
    """Warn if indices (m,) of a mini-batch, of all processes, name examples repeatedly; synchronises."""
    if repeated := len(index) - len(set(index.tolist())):
        wrong = f"{repeated} of {len(index)} examples of a mini-batch, over all processes, are repeated"
        warnings.warn(f"{wrong}, and the history keeps one of each; look at the sampler", stacklevel=5)


def check_no_nan(score: Tensor) -> None:
    """Check scores for NaN; synchronises with the device."""
    if torch.isnan(score).any():
        raise ValueError("the score returned NaN, which says nothing about an example; look at the score")


def check_score_sign(score: Tensor, logits: Tensor, y: Tensor) -> None:
    """Check that a score is negative for misclassified examples; synchronises with the device."""
    wrong = logits.argmax(dim=1) != y
    if bool(wrong.any()) and not bool((torch.signbit(score) & wrong).any()):
        none = f"the score is negative for none of {int(wrong.sum())} misclassified examples"
        raise ValueError(f"{none}, so that there would be no outliers; it has to be, where the prediction is wrong")


def check_parts(objective: Any, budget: Any, score: object, separation: object) -> None:
    """Check that the parts of a training step have the methods and signatures that the step calls."""
    parts = {"objective": objective, "budget": budget, "score": score, "separation": separation}
    for name, part in parts.items():
        if isinstance(part, type):
            raise TypeError(f"the {name} is {part.__name__}; give an instance, e.g. {part.__name__}(…)")
    if hasattr(objective, "corrupt") and not hasattr(objective, "selection"):
        raise TypeError(f"{type(objective).__name__} was not set up; call super().__init__() in its __init__")
    for name, (attributes, give) in PARTS.items():
        if missing := [attribute for attribute in attributes if not hasattr(parts[name], attribute)]:
            raise TypeError(f"the {name} is {shown(parts[name])}, which has no {missing[0]}; give {give}")
    if callable(budget.uniform_steps):
        raise TypeError(f"{type(budget).__name__}.uniform_steps is a method; make it a property")
    for name in ("score", "separation"):
        if not (callable(parts[name]) or hasattr(parts[name], "bind")):
            raise TypeError(f"the {name} is {shown(parts[name])}; give a function")
    called: dict[str, tuple[Any, ...]] = {
        "score": (score, "logits", "labels"),
        "separation": (separation, "score", "robust_fraction"),
        "budget's allocate": (budget.allocate, "category", "score", "past"),
        "budget's step_sizes": (budget.step_sizes, "category", "steps", "eps"),
        "objective's loss": (objective.loss, "z", "z_prime", "y", "touched"),
        "objective's attack_loss": (getattr(objective, "attack_loss", None), "logits", "labels", "target"),
    }
    for name, (function, *arguments) in called.items():
        if callable(function):  # not a separation that sees the network, nor the name of a loss
            check_takes(function, name, arguments)


def check_takes(function: Callable[..., Any], name: str, arguments: Sequence[str]) -> None:
    """Check that a function can be called with these positional arguments."""
    with suppress(ValueError):  # a built-in function that does not say
        own = inspect.signature(function)
        wrong = f"the {name} takes {own}; it is called with ({', '.join(arguments)})"
        if inspect.ismethod(function) and "self" not in inspect.signature(function.__func__).parameters:
            wrong += "; declare it with staticmethod"
        with raised_as(TypeError, wrong, TypeError):
            own.bind(*arguments)


def check_last(objective: Any, separation: object, examples: int) -> None:
    """Check that ``selection="last"`` is possible with these parts."""
    if not objective.has_clean_logits:
        name = type(objective).__name__
        raise ValueError(f"selection is 'last', but the loss of {name} has no clean logits; give selection='eval'")
    if hasattr(separation, "bind"):
        raise ValueError("selection is 'last', but the separation looks at what logits are now; give 'eval' or 'train'")
    if not examples:
        raise ValueError(
            "selection is 'last'; give dataset_size=, how many there are, and every step index=, which it has"
        )


def check_module(model: object) -> None:
    """Check that the model is an ``nn.Module``: a function has no weights, mode or statistics to hold."""
    if not isinstance(model, nn.Module):
        name = getattr(model, "__name__", type(model).__name__)
        raise TypeError(f"the model is {name}; give an nn.Module, an instance of it")


def check_network(model: nn.Module) -> None:
    """Refuse layers that synchronise in their forward: workers forward different numbers of attacked examples.

    They are recognised by the names of types, because importing those of sharding takes a second.
    """
    for kind in (kind.__name__ for module in model.modules() for kind in type(module).__mro__):
        if kind in UNSUPPORTED_LAYERS:
            why = "which waits for forwards that other workers do not make"
            raise ValueError(f"the network has {kind}, {why}; use {UNSUPPORTED_LAYERS[kind]}")


def check_batch(x: Tensor, y: Tensor) -> None:
    """Check shapes and dtypes of a batch, without synchronising."""
    if not torch.is_tensor(x) or not torch.is_tensor(y):
        raise TypeError("x and y have to be tensors: images (m, …) and class indices (m,)")
    if not x.is_floating_point():
        raise TypeError(f"x is {_dtype(x)}; give floating-point images, e.g. x.float() / 255 for uint8")
    if y.is_floating_point():
        wrong = f"labels are {described(y)}; soft labels (mixup) are not supported"
        raise TypeError(f"{wrong}; give class indices as int64, and the objective label_smoothing= to smooth them")
    if y.ndim == 2 and y.dtype != torch.bool:  # of one column argmax would make 0 everywhere
        mend = "look one-hot; give class indices, e.g. y.argmax(1)" if y.shape[1] > 1 else "are a column; give y[:, 0]"
        raise ValueError(f"labels have the shape {tuple(y.shape)} and {mend}")
    if y.dtype != torch.int64:
        raise TypeError(f"labels are {_dtype(y)}; give class indices as int64, e.g. y.long()")
    if x.ndim < 2:
        raise ValueError(f"x has the shape {tuple(x.shape)}; give a batch, (m, …) with one row an example")
    if len(x) == 0:
        raise ValueError("the batch is empty; skip it, or use drop_last=True in the loader")
    if y.shape != (len(x),):
        raise ValueError(f"labels have the shape {tuple(y.shape)}; {len(x)} examples need ({len(x)},)")
    if x.device != y.device:
        raise ValueError(f"x is on {x.device} and the labels are on {y.device}; move them to one device")


@contextmanager
def dtypes_named(network: nn.Module, x: Tensor) -> Iterator[None]:
    """Let an error about dtypes name those of ``x`` and of the weights. A network may convert its input itself."""
    try:
        yield
    except RuntimeError as error:
        weight = next((weight for weight in network.parameters() if weight.is_floating_point()), x)
        if x.dtype == weight.dtype or "type" not in str(error):
            raise
        wrong = f"x is {_dtype(x)}, but the network's weights are {_dtype(weight)}"
        raise TypeError(f"{wrong}; give x.to({weight.dtype})") from error


def check_start(start: Tensor, x: Tensor) -> Tensor:
    """Return the starting points of an attack on ``x`` (m, …), detached."""
    if start.shape != x.shape:
        raise ValueError(f"start has the shape {tuple(start.shape)}; it has to be x's, {tuple(x.shape)}")
    if not start.is_floating_point():
        raise TypeError(f"start is {_dtype(start)}; give floating-point starting points, as x is")
    if start.device != x.device:
        raise ValueError(f"start is on {start.device} and x on {x.device}; move them to one device")
    return start.detach().to(x.dtype)


def check_range(x: Tensor, bounds: tuple[float | Tensor, float | Tensor], name: str = "x") -> None:
    """Check that ``x`` (m, …), in pixels, lies within ``bounds``, feature by feature; synchronises with the device."""
    low, high = x.detach().amin(dim=0), x.detach().amax(dim=0)
    if not bool(torch.isfinite(low).all() & torch.isfinite(high).all()):
        raise ValueError(f"{name} has NaN or infinite values; look at the input pipeline")
    tolerance = RANGE_TOLERANCE + rounding(x, x.dtype)
    if bool((low < bounds[0] - tolerance).any() | (high > bounds[1] + tolerance).any()):
        valid = ", ".join(f"{v:g}" if isinstance(v, float) else described(v) for v in map(_number, bounds))
        wrong = f"{name} ranges over [{float(low.min()):.4g}, {float(high.max()):.4g}] in pixels, outside [{valid}]"
        give = "bounds=(low, high), or for normalised images norm=bullettrain.Normalized(mean, std)"
        raise ValueError(f"{wrong}; scale the images and normalise inside the network, or give {give}")


def rounding(x: Tensor, dtype: torch.dtype) -> float:
    """Return two units in the last place of ``dtype`` at the largest absolute value of ``x``; synchronises."""
    return 2 * torch.finfo(dtype).eps * float(x.detach().abs().max())


def _number(value: float | Tensor) -> float | Tensor:
    """Return a tensor with one element as a float, any other as it is."""
    return float(value) if not isinstance(value, Tensor) or value.numel() == 1 else value


def check_logits_shape(logits: object, m: int) -> None:
    """Check that the network's output is (m, K) with K ≥ 2, without synchronising."""
    if not torch.is_tensor(logits):
        wrap = f"; wrap it in a module whose forward returns {part}" if (part := _logits_in(logits)) else ""
        raise TypeError(f"the network returned {type(logits).__name__}; it has to return logits, a tensor (m, K){wrap}")
    if logits.ndim != 2 or logits.shape[0] != m or logits.shape[1] < 2:
        wrong = f"the network returned the shape {tuple(logits.shape)} for {m} examples"
        raise ValueError(f"{wrong}; it has to return logits ({m}, K) with K ≥ 2 classes")
    if not logits.is_floating_point():
        raise TypeError(f"the network returned {_dtype(logits)}; logits are floating-point")


def _logits_in(output: object) -> str | None:
    """Return an expression that gets the logits out of a network's structured output, if one is apparent."""
    if hasattr(output, "logits"):
        return "model(x).logits"
    if isinstance(output, Mapping) and output:
        return f"model(x)[{('logits' if 'logits' in output else next(iter(output)))!r}]"
    return "model(x)[0]" if isinstance(output, (tuple, list)) and output else None


def check_logits(logits: Tensor, y: Tensor, step: int) -> None:
    """Check logits for NaN and infinity, and that they have the classes of labels y; synchronises with the device."""
    if not torch.isfinite(logits).all():
        wrong = f"the network returned {'NaN' if torch.isnan(logits).any() else 'infinite'} logits at step {step}"
        raise DivergedError(f"{wrong}; lower the learning rate, clip gradients, or look at the weights")
    check_integers(y, logits.shape[-1], "labels range", f"the network has {logits.shape[-1]} classes,")


def check_unnormalised(logits: Tensor) -> None:
    """Check that logits are no probabilities; synchronises with the device."""
    tolerance = 1e-4 if logits.element_size() > 2 else 1e-2
    if len(logits) > 1 and bool((logits >= 0).all() & ((logits.sum(dim=1) - 1).abs() < tolerance).all()):
        raise ValueError("the network returned probabilities: rows add up to 1; leave out its last softmax")


def check_bounds(bounds: object) -> Any:
    """Return bounds as a pair (low, high) of numbers or tensors with low < high; None means unbounded."""
    if bounds is None:
        return -math.inf, math.inf
    try:
        if isinstance(bounds, Tensor):
            raise TypeError
        low, high = (v if isinstance(v, Tensor) and v.numel() > 1 else float(v) for v in bounds)  # type: ignore[attr-defined]
    except (TypeError, ValueError, RuntimeError):  # the last is a tensor's
        raise TypeError(f"bounds are {shown(bounds)}; give two numbers (low, high)") from None
    below = low < high
    if not (bool(below.all()) if isinstance(below, Tensor) else below):
        values = ", ".join(f"{v:g}" if isinstance(v, float) else described(v) for v in (low, high))
        raise ValueError(f"bounds are ({values}); give (low, high) with low < high")
    return low, high


@contextmanager
def buffers_restored_on_error(model: nn.Module) -> Iterator[None]:
    """Restore the buffers (batch-norm statistics) if the block raises."""
    saved = [(buffer, buffer.clone()) for buffer in model.buffers() if not nn.parameter.is_lazy(buffer)]
    try:
        yield
    except BaseException:
        for buffer, value in saved:
            # .data: as batch norm's own updates, this is no change that a graph made before has to mind.
            buffer.data.copy_(value)
        raise


def described(value: object) -> str:
    """Describe a value for a message: a tensor by dtype and shape, anything else by its type."""
    return f"{_dtype(value)} of shape {tuple(value.shape)}" if torch.is_tensor(value) else type(value).__name__


def shown(value: object) -> str:
    """Return the ``repr`` of a setting for a message, with tensors described by dtype and shape."""
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(shown, value))})"
    return described(value) if hasattr(value, "dtype") and hasattr(value, "shape") else repr(value)


def _dtype(t: Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")
