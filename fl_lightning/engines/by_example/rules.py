"""Rules by operator: from how its arguments depend on the batch to how its results do.

What has no rule mixes examples as far as anybody knows. A rule may be too strict, never too lax.
Operators that write to an argument have the rule of the one that does not.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch

from fl_lightning.engines.by_example.kinds import ALIKE, ONE_EACH, Kind, mixed, rows, total
from fl_lightning.engines.by_example.record import Source
from fl_lightning.engines.by_example.seen import Seen

Rule = Callable[[Seen], Kind | list[Kind]]
RULES: dict[str, Rule] = {}


def rule(names: str) -> Callable[[Rule], Rule]:
    """Register a rule for operators, whose names are given without overloads."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names.split(), function))
        return function

    return register


def _not_plain(kind: Kind, what: str) -> Kind:
    if kind.name == "mixed":
        return kind
    if kind.name == "total":
        return mixed(f"{what} of a sum or mean over the batch")
    if kind.is_position:
        return mixed(f"{what} of the examples' positions in the batch")
    return mixed(f"{what} of a number that depends on the size of the batch")


def _first_not_plain(seen: Seen, names: list[str], what: str) -> Kind | None:
    kinds = [seen.kind(name) for name in names]
    return next((_not_plain(kind, what) for kind in kinds if not kind.is_plain), None)


@rule(
    "abs acos acosh asin asinh atan atan2 atanh bitwise_and bitwise_not bitwise_or bitwise_xor ceil "
    "celu clamp clamp_max clamp_min cos cosh digamma elu eq erf erfc erfinv exp exp2 expm1 floor "
    "fmod frac ge gelu gt hardshrink hardsigmoid hardswish hardtanh heaviside hypot isfinite isinf "
    "isnan le leaky_relu lerp lgamma log log10 log1p log2 log_sigmoid_forward logaddexp logical_and "
    "logical_not logical_or logical_xor logit lt maximum minimum mish nan_to_num ne polygamma pow "
    "prelu _prelu_kernel reciprocal relu remainder round rsqrt sgn sigmoid sign silu sin sinc sinh "
    "softplus softshrink sqrt square tan tanh threshold trunc xlogy"
)
def _entry_by_entry(seen: Seen) -> list[Kind]:
    return [_plain(seen)] * len(seen.call.results)


def _plain(seen: Seen) -> Kind:
    """Return the kind of what takes plain numbers entry by entry."""
    found = _first_not_plain(seen, list(seen.call.arguments), f"{_short(seen)} is taken")
    return found or seen.broadcast(seen.tensors())


@rule("neg alias detach clone contiguous lift_fresh positive view_as_real view_as_complex real")
def _same(seen: Seen) -> Kind:
    return seen.kind("self") if short_name(seen.call.name) != "neg" else seen.kind("self").times(0)


@rule("_to_copy")
def _copied(seen: Seen) -> Kind:
    kind, result = seen.kind("self"), seen.call.results[0]
    is_exact = result is not None and (result.dtype.is_floating_point or result.dtype.is_complex)
    return kind if is_exact or kind.is_plain else _not_plain(kind, "whole numbers are made")


_LINEAR_BACKWARD = {
    "elu_backward": "grad_output",
    "gelu_backward": "grad_output",
    "hardsigmoid_backward": "grad_output",
    "hardshrink_backward": "grad_out",
    "hardswish_backward": "grad_output",
    "hardtanh_backward": "grad_output",
    "leaky_relu_backward": "grad_output",
    "log_sigmoid_backward": "grad_output",
    "mish_backward": "grad_output",
    "native_dropout_backward": "grad_output",
    "sigmoid_backward": "grad_output",
    "silu_backward": "grad_output",
    "softplus_backward": "grad_output",
    "softshrink_backward": "grad_output",
    "tanh_backward": "grad_output",
    "threshold_backward": "grad_output",
}


@rule(" ".join(_LINEAR_BACKWARD))
def _linear_backward(seen: Seen) -> Kind:
    return _linear_in(seen, _LINEAR_BACKWARD[_short(seen)])


def _linear_in(seen: Seen, name: str) -> Kind:
    """Return the kind of what is linear in one argument and takes the others entry by entry."""
    others = seen.tensors(name)
    found = _first_not_plain(seen, others, f"{_short(seen)} is taken")
    kind = found or seen.broadcast([name, *others])
    linear = seen.kind(name)
    if kind.name == "mixed":
        return kind
    if linear.name == "total":
        return linear if kind.name == "alike" else mixed("a mean over the batch goes to examples")
    return Kind(kind.name, linear.degree, kind.axis, kind.layout)


@rule("mul")
def _mul(seen: Seen) -> Kind:
    one, two = seen.kind("self"), seen.kind("other")
    if one.is_count or two.is_count:
        return mixed("a count of examples is multiplied by")
    return _product(seen, "self", "other")


def _product(seen: Seen, first: str, second: str) -> Kind:
    one, two = seen.kind(first), seen.kind(second)
    kind = seen.broadcast([first, second])
    if kind.name == "mixed":
        return kind
    if one.is_position or two.is_position:
        return mixed("examples' positions in the batch are computed with")
    degree = None if None in (one.degree, two.degree) else (one.degree or 0) + (two.degree or 0)
    totals = [k for k in (one, two) if k.name == "total"]
    if totals:
        if len(totals) > 1 or kind.name == "rows":
            return mixed("a sum or mean over the batch is multiplied by what examples have")
        return total(degree)
    return Kind(kind.name, degree, kind.axis, kind.layout)


@rule("div true_divide")
def _div(seen: Seen) -> Kind:
    if seen["rounding_mode"] is not None:
        return _plain(seen)
    one, two = seen.kind("self"), seen.kind("other")
    if two.name == "mixed" or one.is_count:
        return two if two.name == "mixed" else mixed("a count of examples is divided")
    if two.name == "total" or two.degree is None or two.is_position:
        return mixed("a sum over the batch is divided by")
    kind = seen.broadcast(["self", "other"])
    if kind.name == "mixed" or one.is_position:
        return kind if kind.name == "mixed" else _not_plain(one, "the quotient is taken")
    degree = None if one.degree is None else one.degree - two.degree
    if one.name == "total":
        return total(degree) if kind.name == "alike" else mixed("a mean over the batch is divided")
    return Kind(kind.name, degree, kind.axis, kind.layout)


@rule("add sub rsub")
def _add(seen: Seen) -> Kind:
    if seen.degree("alpha"):
        return mixed("a number that depends on the size of the batch is multiplied by")
    return _sum_of(seen, seen.kind("self"), seen.kind("other"), ["self", "other"])


def _sum_of(seen: Seen, one: Kind, two: Kind, names: list[str]) -> Kind:
    kind = seen.broadcast(names)
    if kind.name == "mixed":
        return kind
    if one.is_position or two.is_position or one.is_count or two.is_count:
        return mixed("counts or positions of examples are computed with")
    both = [k for k in (one, two) if k.degree is not None]
    degrees = {k.degree for k in both}
    if "total" in (one.name, two.name):
        if kind.name == "rows":
            return mixed("a sum or mean over the batch is added to what examples have")
        if all(k.is_mean for k in (one, two)):
            return total(-1)
        is_sum = len(degrees) <= 1 and all(k.name == "total" for k in both)
        return (
            total(both[0].degree if both else None)
            if is_sum
            else mixed("sums and other numbers are added")
        )
    if len(degrees) > 1:
        return mixed("numbers are added that depend on the size of the batch in different ways")
    return Kind(kind.name, both[0].degree if both else None, kind.axis, kind.layout)


@rule("where")
def _where(seen: Seen) -> Kind:
    condition = seen.kind("condition")
    if not condition.is_plain:
        return _not_plain(condition, "a choice is made")
    one, two = seen.kind("self"), seen.kind("other")
    if "total" in (one.name, two.name):
        return _not_plain(one if one.name == "total" else two, "a choice is made")
    kind = _sum_of(seen, one, two, ["self", "other"])
    if kind.name == "mixed":
        return kind
    place = seen.broadcast(["condition", "self", "other"])
    return (
        place if place.name == "mixed" else Kind(place.name, kind.degree, place.axis, place.layout)
    )


@rule("masked_fill")
def _masked_fill(seen: Seen) -> Kind:
    if seen["value"] == 0:
        return _linear_in(seen, "self")
    return _plain(seen)


@rule("addcmul addcdiv")
def _addcmul(seen: Seen) -> Kind:
    return _plain(seen)


@rule("sum mean")
def _sum(seen: Seen) -> Kind:
    kind, dims, shape = seen.kind("self"), seen.dims(), seen.shape("self")
    if kind.name == "mixed" or kind.is_position:
        return kind if kind.name == "mixed" else _not_plain(kind, "a sum is taken")
    if kind.name != "rows":
        return kind.times(0)
    if kind.axis not in dims:
        return _without(kind, dims, keep=bool(seen["keepdim"]))
    if _short(seen) == "mean":
        return total(None if kind.degree is None else kind.degree - 1)
    if seen["self"].dtype == torch.bool and prod(shape) == seen.size and kind.degree == 0:
        return Kind("alike", degree=1, is_count=True)
    return total(kind.degree)


def _without(kind: Kind, dims: list[int], *, keep: bool) -> Kind:
    gone = 0 if keep else sum(dim < kind.axis for dim in dims)
    return kind.at(kind.axis - gone)


@rule(
    "all amax amin any argmax argmin argsort cummax cummin cumprod kthvalue linalg_vector_norm "
    "log_softmax logcumsumexp logsumexp max median min mode norm prod sort softmax std topk var "
    "var_mean std_mean _softmax _safe_softmax _log_softmax"
)
def _reduced(seen: Seen) -> list[Kind]:
    kind, what = seen.kind("self"), f"{_short(seen).strip('_')} is taken"
    count = len(seen.call.results)
    if not kind.is_plain:
        return [_not_plain(kind, what)] * count
    if kind.name == "alike":
        return [ALIKE] * count
    dims = seen.dims()
    if kind.axis in dims:
        return [mixed(f"{what} over examples")] * count
    keeps = len(seen.out) == len(seen.shape("self"))
    return [_without(kind.times(0), dims, keep=keeps)] * count


@rule("cumsum flip roll")
def _along(seen: Seen) -> Kind:
    kind = seen.kind("self")
    dims = seen.dims("dims" if "dims" in seen.call.arguments else "dim")
    if kind.name == "rows" and (kind.axis in dims or kind.is_position):
        return mixed(f"{_short(seen)} goes over examples")
    return kind


@rule("_softmax_backward_data _log_softmax_backward_data")
def _softmax_backward(seen: Seen) -> Kind:
    kind = _linear_in(seen, "grad_output")
    dim = seen["dim"] % max(1, len(seen.out))
    if kind.name == "rows" and kind.axis == dim:
        return mixed("softmax is taken over examples")
    return kind


@rule(
    "zeros zeros_like new_zeros zero empty new_empty empty_like empty_strided new_empty_strided "
    "empty_permuted ones ones_like new_ones full full_like new_full fill scalar_tensor rand randn "
    "randint rand_like randn_like randint_like bernoulli normal uniform exponential random"
)
def _created(seen: Seen) -> Kind:
    name, values = _short(seen), (seen["value"], seen["fill_value"], seen["s"])
    if any(seen.degree(n) for n in ("value", "fill_value", "s", "p", "mean", "std", "to", "high")):
        return mixed("a tensor is made of a number that depends on the size of the batch")
    if name in ("bernoulli", "normal") and not _first_is_shape(seen):
        return mixed(f"{name} draws with parameters that are tensors")
    is_zero = "zero" in name or any(value is not None and value == 0 for value in values)
    kind, like = seen.created(None if is_zero else 0), seen["self"]
    if kind.name == "rows" and isinstance(like, Source) and like.shape == seen.out:
        of_like = seen.kind("self")
        kind = kind.at(of_like.axis, of_like.layout) if of_like.name == "rows" else kind
    if name in _DRAWS and kind.layout[0] > 1:  # each client draws for its examples in their order
        return mixed("random numbers are drawn in another order than that of the examples")
    return kind


def _first_is_shape(seen: Seen) -> bool:
    return seen.call.name.split(".")[1].endswith("_")


_DRAWS = frozenset(
    [
        *("rand", "randn", "randint", "rand_like", "randn_like", "randint_like"),
        *("bernoulli", "normal", "uniform", "exponential", "random"),
    ]
)


@rule("native_dropout")
def _native_dropout(seen: Seen) -> list[Kind]:
    kind = seen.kind("input")
    kind = kind if kind.is_plain else _not_plain(kind, "dropout is taken")
    if kind.layout[0] > 1:
        kind = mixed("random numbers are drawn in another order than that of the examples")
    return [kind] * len(seen.call.results)


@rule("arange")
def _arange(seen: Seen) -> Kind:
    kind = seen.created()
    start, step = seen["start"] or 0, 1 if seen["step"] is None else seen["step"]
    if kind.name != "rows":
        return kind
    if kind.layout != ONE_EACH or start != 0 or step != 1:
        return mixed("arange goes over examples")
    return Kind("rows", is_position=True)


@rule("mm bmm")
def _mm(seen: Seen) -> Kind:
    return _matrices(seen, "self", "mat2")


@rule("mv")
def _mv(seen: Seen) -> Kind:
    return _matrices(seen, "self", "vec")


@rule("dot")
def _dot(seen: Seen) -> Kind:
    return _matrices(seen, "self", "tensor")


@rule("addmm baddbmm addmv")
def _addmm(seen: Seen) -> Kind:
    if seen.degree("alpha") or seen.degree("beta"):
        return mixed("a number that depends on the size of the batch is multiplied by")
    names = {"addmm": ("mat1", "mat2"), "baddbmm": ("batch1", "batch2"), "addmv": ("mat", "vec")}
    product, added = _matrices(seen, *names[_short(seen)]), seen.kind("self")
    if product.name == "alike" and added.name == "alike":
        same = product.degree == added.degree
        return product if same else mixed("numbers are added that depend on the size of the batch")
    if product.name != "rows" or not added.is_plain or product.degree != 0:
        return product if product.name == "mixed" else mixed("a product of matrices is added to")
    axis = product.axis - len(seen.out) + len(seen.shape("self"))
    is_row = added.name == "rows" and (added.axis, added.layout) == (axis, product.layout)
    is_alike = added.name == "alike" and (axis < 0 or seen.shape("self")[axis] == 1)
    return product if is_row or is_alike else mixed("a fixed tensor has a row for each example")


def _matrices(seen: Seen, first: str, second: str) -> Kind:
    """Return the kind of a product of matrices, or of stacks of them, or with vectors."""
    one, two = seen.kind(first), seen.kind(second)
    for kind in (one, two):
        if kind.name == "mixed" or kind.is_position or kind.is_count:
            return kind if kind.name == "mixed" else _not_plain(kind, "a product is taken")
    degree = None if None in (one.degree, two.degree) else (one.degree or 0) + (two.degree or 0)
    names = {one.name, two.name}
    if names == {"rows"}:
        return _product_of_rows(seen, first, second, degree)
    if "rows" in names:
        if "total" in names:
            return mixed("a sum or mean over the batch is multiplied by what examples have")
        return _rows_times_fixed(seen, first, second, degree)
    if names == {"total"}:
        return mixed("two sums over the batch are multiplied")
    return total(degree) if "total" in names else Kind("alike", degree)


def _summed_axes(seen: Seen, first: str, second: str) -> tuple[int, int]:
    return len(seen.shape(first)) - 1, max(0, len(seen.shape(second)) - 2)


def _product_of_rows(seen: Seen, first: str, second: str, degree: int | None) -> Kind:
    one, two = seen.kind(first), seen.kind(second)
    if one.layout != two.layout:
        return mixed("examples of a batch meet")
    if (one.axis, two.axis) == _summed_axes(seen, first, second):
        return total(degree)
    is_stack = len(seen.shape(first)) == len(seen.shape(second)) == 3 and one.axis == two.axis == 0
    return rows(0, one.layout, degree) if is_stack else mixed("examples of a batch meet")


def _rows_times_fixed(seen: Seen, first: str, second: str, degree: int | None) -> Kind:
    is_first = seen.kind(first).name == "rows"
    kind = seen.kind(first if is_first else second)
    if kind.axis == _summed_axes(seen, first, second)[not is_first]:
        return mixed("a sum over examples is taken with fixed numbers for each")
    if len(seen.shape(first)) == 3 and kind.axis == 0:
        return mixed("a fixed matrix is given for each example")
    axis = kind.axis if is_first else kind.axis - (len(seen.shape(second)) - len(seen.out))
    return rows(axis, kind.layout, degree)


@rule("embedding")
def _embedding(seen: Seen) -> Kind:
    weight, index = seen.kind("weight"), seen.kind("indices")
    if weight.name != "alike" or not index.is_plain:
        return mixed("an embedding is looked up in what depends on the batch")
    return index.times(weight.degree)


@rule("embedding_dense_backward")
def _embedding_backward(seen: Seen) -> Kind:
    grad, index = seen.kind("grad_output"), seen.kind("indices")
    is_row = grad.name == index.name == "rows"
    if seen["scale_grad_by_freq"] or not is_row or not index.is_plain:
        return mixed("gradients of an embedding are scaled by how often the batch has a word")
    same = (grad.axis, grad.layout) == (index.axis, index.layout)
    return total(grad.degree) if same else mixed("examples of a batch meet")


@rule("nll_loss_forward")
def _nll(seen: Seen) -> list[Kind]:
    logits, target = seen.kind("self"), seen.kind("target")
    weight, reduction = seen.kind("weight"), seen["reduction"]
    kinds = (logits, target)
    if not all(k.is_plain and k.name == "rows" and k.axis == 0 for k in kinds) or (
        weight.name != "alike" or logits.layout != target.layout
    ):
        return [mixed("a cross-entropy is taken of what is no row an example")] * 2
    if reduction == 0:
        return [rows(0, logits.layout), ALIKE]
    if reduction == 2:
        return [total(0), Kind("alike", degree=1, is_count=True)]
    if seen["weight"] is not None:
        return [mixed("the loss is divided by the sum of class weights in the batch")] * 2
    if logits.layout != ONE_EACH:
        return [mixed("the loss is divided by the number of targets that are not ignored")] * 2
    return [total(-1), Kind("alike", degree=1, is_count=True)]


@rule("nll_loss_backward")
def _nll_backward(seen: Seen) -> Kind:
    grad, logits = seen.kind("grad_output"), seen.kind("self")
    if grad.name == "mixed" or logits.name != "rows" or seen.kind("target").name != "rows":
        return grad if grad.name == "mixed" else mixed("examples of a batch meet")
    if seen["reduction"] == 0:
        same = grad.name == "rows" and grad.axis == 0 and grad.layout == logits.layout
        return rows(0, logits.layout, grad.degree) if same else mixed("examples of a batch meet")
    if grad.name != "alike":
        return mixed("the gradient of a loss depends on the batch")
    if seen["reduction"] == 2:
        return rows(0, logits.layout, grad.degree)
    if seen["weight"] is not None or logits.layout != ONE_EACH:
        return mixed("the loss is divided by a sum of weights in the batch")
    return rows(0, ONE_EACH, None if grad.degree is None else grad.degree - 1)


@rule("mse_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits")
def _loss(seen: Seen) -> Kind:
    names = seen.tensors()
    found = _first_not_plain(seen, names, f"{_short(seen)} is taken")
    ndim = max(len(seen.shape(name)) for name in names)
    kind = found or _rows_of_equal(seen, names, ndim)
    if kind.name != "rows" or seen["reduction"] == 0:
        return kind
    return total(-1) if seen["reduction"] in (1, None) else total(0)


def _rows_of_equal(seen: Seen, names: list[str], ndim: int) -> Kind:
    found = {
        (seen.kind(n).axis + ndim - len(seen.shape(n)), seen.kind(n).layout)
        for n in names
        if seen.kind(n).name == "rows"
    }
    if not found:
        return ALIKE
    if len(found) > 1:
        return mixed("examples of a batch meet")
    axis, layout = found.pop()
    for name in names:
        place = axis - ndim + len(seen.shape(name))
        if seen.kind(name).name == "alike" and place >= 0 and seen.shape(name)[place] != 1:
            return mixed("a fixed tensor has a row for each example")
    return rows(axis, layout)


@rule("mse_loss_backward smooth_l1_loss_backward huber_loss_backward binary_cross_entropy_backward")
def _loss_backward(seen: Seen) -> Kind:
    names = seen.tensors("grad_output")
    found = _first_not_plain(seen, names, f"{_short(seen)} is taken")
    kind, grad = found or seen.broadcast(names), seen.kind("grad_output")
    if kind.name == "mixed" or grad.name in ("mixed", "total"):
        return (
            kind if kind.name == "mixed" else mixed("the gradient of a loss depends on the batch")
        )
    if grad.name == "rows" and (kind.name != "rows" or grad.axis != kind.axis):
        return mixed("examples of a batch meet")
    lower = 1 if seen["reduction"] in (1, None) and kind.name == "rows" else 0
    return Kind(
        kind.name, None if grad.degree is None else grad.degree - lower, kind.axis, kind.layout
    )


def _short(seen: Seen) -> str:
    return short_name(seen.call.name)


def short_name(name: str) -> str:
    """Return an operator's name without overload and without the mark of what writes.

    Example:
        >>> short_name("aten.add_.Tensor"), short_name("aten.mean.dim")
        ('add', 'mean')
    """
    short = name.split(".")[1]
    return short[:-1] if short.endswith("_") and not short.endswith("__") else short
