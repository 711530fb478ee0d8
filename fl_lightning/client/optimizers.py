"""The clients' optimizers: inner optimizers, closures, numbers of steps, masks.

Optimizers that are not torch's may contain another optimizer (SAM, Lookahead) with its own options and
state, and may evaluate the loss several times by a closure. As under Lightning, every optimizer that
accepts a closure gets one. torch's optimizers except LBFGS, and our masked ones, need none.

Steps are counted without waiting for the device (`OptimizerSteps`). A local step takes no optimizer step
if ``training_step`` returned None to skip the batch, if a gradient scaler found gradients that are not
finite, or if the module's ``optimizer_step`` skips it. If ``training_step`` steps the optimizers by hand,
each of their steps on a gradient counts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import is_
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from fl_lightning.core.errors import ConfigurationError
from fl_lightning.sparsity.optimizers.masked_optimizer import MaskedOptimizer

# Called before a step with the optimizer and the step's arguments; it may return other arguments.
Before = Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], Any]


def and_inner(optimizer: Optimizer) -> list[Optimizer]:
    """Return an optimizer and the optimizers that it wraps in its attributes, also nested ones, each once.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> outer = torch.optim.SGD([weight], lr=0.1)
        >>> outer.base = torch.optim.Adam([weight])
        >>> [type(each).__name__ for each in and_inner(outer)]
        ['SGD', 'Adam']
    """
    found = [optimizer]
    for each in found:  # inner optimizers are appended
        values = vars(each).values()
        found += [v for v in values if isinstance(v, Optimizer) and all(v is not f for f in found)]
    return found


def is_torchs(optimizer: Optimizer) -> bool:
    """Return whether PyTorch itself defines an optimizer's ``step``, in `torch.optim`."""
    step: Any = optimizer.step
    return str(getattr(step, "__module__", "")).startswith("torch.optim")


def takes_closure(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is stepped with a closure that computes loss and gradients.

    Example:
        >>> weights = [torch.nn.Parameter(torch.ones(1))]
        >>> takes_closure(torch.optim.SGD(weights, lr=0.1)), takes_closure(LBFGS(weights))
        (False, True)
    """
    if isinstance(optimizer, LBFGS):
        return True
    if is_torchs(optimizer) or isinstance(optimizer, MaskedOptimizer):
        return False
    parameters = inspect.signature(optimizer.step).parameters
    return "closure" in parameters or any(
        p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()
    )


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's ``step`` requires a closure as argument."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def stepped_with_closure(
    optimizer: Optimizer, gradients: Callable[[], Tensor | None]
) -> Tensor | None:
    """Step an optimizer with a closure, and return the closure's last loss.

    Args:
        optimizer: an optimizer, which may evaluate the closure several times.
        gradients: computes the gradients and returns the loss, or None for a skipped batch.
    """
    found: list[Tensor | None] = [None]

    @torch.enable_grad()
    def closure() -> Tensor | None:
        found[0] = gradients()
        return found[0]

    optimizer.step(closure=closure)  # type: ignore[arg-type]
    return found[0]


class OutermostSteps:
    """Context that calls functions before and after each optimizer step, once even if the optimizer wraps another.

    The functions get the outer optimizer. If it steps an inner one within its step, they are called once;
    if only the inner one steps, they are called as for a step of the outer one.

    Args:
        optimizers: the outer optimizers.
        before: called before a step; see `Before`.
        after: called after a step.
    """

    def __init__(
        self,
        optimizers: Iterable[Optimizer],
        *,
        before: Before | None = None,
        after: Callable[[Optimizer], None] | None = None,
    ) -> None:
        self._outer = {each: outer for outer in optimizers for each in and_inner(outer)}
        self._before, self._after = before, after
        is_nested = any(each is not outer for each, outer in self._outer.items())
        self._sees_begin = is_nested or before is not None  # a hook costs a microsecond
        self._depth = 0

    def __enter__(self) -> Self:
        self._depth = 0
        self._handles = [each.register_step_post_hook(self._end) for each in self._outer]
        if self._sees_begin:
            self._handles += [each.register_step_pre_hook(self._begin) for each in self._outer]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def _begin(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._depth += 1
        if self._before is None or self._depth > 1:
            return None
        return self._before(self._outer[optimizer], args, kwargs)

    def _end(self, optimizer: Optimizer, *_: Any) -> None:
        self._depth -= self._sees_begin
        if self._after is not None and self._depth == 0:
            self._after(self._outer[optimizer])


class OptimizerSteps:
    """Context that counts how many steps each optimizer takes inside the block.

    Args:
        optimizers: the clients' optimizers.
        by_hand: count each step of an optimizer, instead of local steps.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = torch.optim.SGD([weight], lr=0.1)
        >>> with OptimizerSteps([optimizer]) as steps:
        ...     for loss in (weight.square().sum(), None):
        ...         optimizer.zero_grad()
        ...         if loss is not None:
        ...             loss.backward()
        ...         optimizer.step()
        ...         steps.end_step(loss)
        >>> steps.taken
        1
    """

    def __init__(self, optimizers: Sequence[Optimizer], *, by_hand: bool = False) -> None:
        self._optimizers, self._by_hand = list(optimizers), by_hand
        self._rates: dict[Optimizer, set[tuple[float, ...]]] = {}
        self._watched = OutermostSteps(self._optimizers, after=self._note)

    def __enter__(self) -> Self:
        self._counts = dict.fromkeys(self._optimizers, 0)
        self._has_stepped: set[Optimizer] = set()
        self._overflows: dict[Optimizer, list[Tensor]] = {each: [] for each in self._optimizers}
        self._rates = {each: set() for each in self._optimizers}
        self._watched.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._watched.__exit__(None, None, None)
        for optimizer, rates in self._rates.items():
            if rates:  # a schedule may have stepped after the last step
                rates.add(_rates(optimizer))

    def _note(self, optimizer: Optimizer) -> None:
        self._rates[optimizer].add(_rates(optimizer))
        if self._by_hand:
            self._counts[optimizer] += _has_gradient(optimizer)
        else:
            self._has_stepped.add(optimizer)
        # a gradient scaler always steps fused optimizers, which read ``found_inf`` themselves
        overflow = getattr(optimizer, "found_inf", None)
        if overflow is not None:
            self._overflows[optimizer].append(overflow)

    def end_step(self, loss: Tensor | None) -> None:
        """End a local step, and count its optimizer steps; those without loss and gradients were skipped."""
        for optimizer in self._has_stepped:
            # private steps return no loss but have gradients; skipped steps have neither
            self._counts[optimizer] += loss is not None or _has_gradient(optimizer)
        self._has_stepped.clear()

    def check_one_rate(self) -> None:
        """Check that the learning rate was the same in all steps of the client.

        Raises:
            ConfigurationError: if the model changed it from step to step.
        """
        for rates in self._rates.values():
            if len(rates) > 1:
                low, high = (f"{max(rate):g}" for rate in (min(rates), max(rates)))
                raise ConfigurationError(
                    "SCAFFOLD's option II and NormalisedMean need one learning rate in all local steps "
                    f"of a round, and the model changes it while a client trains (from {low} to "
                    f"{high}): change it between rounds, or use Scaffold with option I, or Mean"
                )

    @property
    def taken(self) -> int | tuple[int, ...]:
        """Number of optimizer steps taken; a tuple with one number per optimizer if there are several."""
        totals = [
            count - (int(torch.stack(found).count_nonzero()) if found else 0)
            for count, found in zip(self._counts.values(), self._overflows.values(), strict=True)
        ]
        return totals[0] if len(totals) == 1 else tuple(totals)


def _rates(optimizer: Optimizer) -> tuple[float, ...]:
    return tuple([float(group["lr"]) for group in optimizer.param_groups])


def _has_gradient(optimizer: Optimizer) -> bool:
    groups = optimizer.param_groups
    return any(param.grad is not None for group in groups for param in group["params"])


class OptimizerMasks:
    """The sparsity masks that a module's optimizers apply to its parameters.

    Args:
        module: the module.
        optimizers: optimizers over its parameters; some may be masked optimizers.
    """

    def __init__(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._module, self._optimizers = module, optimizers
        self._masked = [each for each in optimizers if isinstance(each, MaskedOptimizer)]
        self._noted: list[Any] = []

    def set(self, masks: Mapping[str, Tensor]) -> None:
        """Set masks, given by parameter name, in the optimizers that train these parameters.

        Raises:
            ConfigurationError: if there is no masked optimizer.
        """
        if not self._masked:
            raise ConfigurationError(
                f"masks need a masked optimizer, and configure_optimizers returns "
                f"{', '.join(type(each).__name__ for each in self._optimizers)}: return SparseSGDM or "
                "SparseAdamW"
            )
        params = dict(self._module.named_parameters())
        given = {params[name]: mask.to(params[name].device) for name, mask in masks.items()}
        owned = [_parameters(each) for each in self._masked]
        owned[0] |= given.keys() - set().union(*owned)  # it refuses what belongs to none
        for optimizer, own in zip(self._masked, owned, strict=True):
            optimizer.set_masks({p: mask for p, mask in given.items() if p in own})

    def active(self) -> dict[Tensor, Tensor]:
        """Return the indices of trainable entries of each masked parameter.

        Raises:
            ConfigurationError: if an optimizer would move entries that another optimizer's mask freezes.
        """
        active = {p: indices for each in self._masked for p, indices in each.active.items()}
        for optimizer in self._optimizers if len(self._optimizers) > 1 else ():
            own = optimizer.active if isinstance(optimizer, MaskedOptimizer) else {}
            for param in _parameters(optimizer) & active.keys():
                if param not in own or not torch.equal(own[param], active[param]):
                    raise ConfigurationError(
                        "a mask freezes entries of a parameter that another optimizer of the module, "
                        f"{type(optimizer).__name__}, would move: give a masked parameter to one "
                        "optimizer alone"
                    )
        return active

    def note(self) -> None:
        """Remember the current masks, so that `are_new` can tell whether they have changed since."""
        self._noted = self._present()

    @property
    def are_new(self) -> bool:
        """True if masks were set since the last `note`."""
        # a callback may have added a parameter group; the start of the next round reports that
        return bool(self._masked) and not all(map(is_, self._noted, self._present()))

    def _present(self) -> list[Any]:
        groups = (group for each in self._masked for group in each.param_groups)
        return [group.get("active") for group in groups]


def _parameters(optimizer: Optimizer) -> set[Tensor]:
    return {param for group in optimizer.param_groups for param in group["params"]}
