"""Rules for operators that move entries about, look them up, or go over each example by itself."""

from __future__ import annotations

from math import prod

from fl_lightning.engines.by_example.kinds import ALIKE, ONE_EACH, Kind, mixed, rows, total
from fl_lightning.engines.by_example.record import Source
from fl_lightning.engines.by_example.rules import rule, short_name
from fl_lightning.engines.by_example.seen import Seen

# Whose numbers say how tensors are to lie, which their results' shapes show.
SHAPES = frozenset(
    [
        "view",
        "_unsafe_view",
        "reshape",
        "expand",
        "zeros",
        "ones",
        "full",
        "empty",
        "new_zeros",
        "new_ones",
        "new_full",
        "new_empty",
        "empty_strided",
        "new_empty_strided",
        "empty_permuted",
        "rand",
        "randn",
        "randint",
        "repeat",
        "slice_backward",
        "select_backward",
        "slice",
        "split",
        "split_with_sizes",
        "arange",
        "native_layer_norm",
        "native_layer_norm_backward",
        "native_group_norm",
        "native_group_norm_backward",
        "constant_pad_nd",
        "embedding_dense_backward",
    ]
)


@rule("view _unsafe_view reshape")
def _view(seen: Seen) -> Kind:
    kind, shape, out = seen.kind("self"), seen.shape("self"), seen.out
    if kind.name != "rows":
        return kind
    before, after = prod(shape[: kind.axis]), prod(shape[kind.axis + 1 :])
    outer, inner = kind.layout
    for axis, length in enumerate(out):
        ahead, behind = prod(out[:axis]), prod(out[axis + 1 :])
        if not ahead or not behind or (before * outer) % ahead or (after * inner) % behind:
            continue
        layout = before * outer // ahead, after * inner // behind
        if length == prod(layout) * seen.size:
            if kind.is_position and (layout != ONE_EACH or len(out) > 1):
                return mixed("examples' positions in the batch are computed with")
            return kind.at(axis, layout)
    return mixed("a view puts examples of a batch together")


@rule("expand")
def _expand(seen: Seen) -> Kind:
    kind = seen.kind("self")
    if kind.name == "rows":
        moved = kind.at(kind.axis + len(seen.out) - len(seen.shape("self")))
        return mixed("examples' positions are spread") if kind.is_position else moved
    spread = seen.created(kind.degree)
    if kind.name == "total" and spread.name == "rows":
        return mixed("a sum or mean over the batch goes to its examples")
    return kind if kind.name != "alike" or spread.name == "alike" else spread


@rule("repeat")
def _repeat(seen: Seen) -> Kind:
    kind, shape, out = seen.kind("self"), seen.shape("self"), seen.out
    if kind.name in ("mixed", "total") or kind.is_position:
        return kind if kind.name == "mixed" else mixed("a mean over the batch is repeated")
    if kind.name == "alike":
        return seen.created(kind.degree)
    axis = kind.axis + len(out) - len(shape)
    if out[axis] != shape[kind.axis]:
        return mixed("examples are repeated")
    return kind.at(axis)


@rule("t transpose permute")
def _permuted(seen: Seen) -> Kind:
    kind, ndim = seen.kind("self"), len(seen.shape("self"))
    if kind.name != "rows" or ndim < 2:
        return kind
    order = list(range(ndim))
    if short_name(seen.call.name) == "permute":
        order = [dim % ndim for dim in seen["dims"]]
    else:
        one, two = (0, 1) if short_name(seen.call.name) == "t" else (seen["dim0"], seen["dim1"])
        order[one % ndim], order[two % ndim] = order[two % ndim], order[one % ndim]
    return kind.at(order.index(kind.axis))


@rule("unsqueeze")
def _unsqueeze(seen: Seen) -> Kind:
    kind, dim = seen.kind("self"), seen["dim"] % len(seen.out)
    if kind.is_position:
        return mixed("examples' positions in the batch are computed with")
    return kind.at(kind.axis + (dim <= kind.axis)) if kind.name == "rows" else kind


@rule("squeeze")
def _squeeze(seen: Seen) -> Kind:
    kind, shape = seen.kind("self"), seen.shape("self")
    if kind.name != "rows":
        return kind
    dims = seen.dims() if "dim" in seen.call.arguments else range(len(shape))
    return kind.at(kind.axis - sum(d < kind.axis and shape[d] == 1 for d in set(dims)))


@rule("select")
def _select(seen: Seen) -> Kind:
    kind, dim = seen.kind("self"), seen["dim"] % len(seen.shape("self"))
    if kind.name != "rows":
        return kind
    if dim == kind.axis:
        return mixed("single examples are picked")
    return kind.at(kind.axis - (dim < kind.axis))


@rule("slice")
def _slice(seen: Seen) -> Kind:
    kind, dim = seen.kind("self"), (seen["dim"] or 0) % len(seen.out)
    is_whole = seen.out[dim] == seen.shape("self")[dim]
    if kind.name == "rows" and dim == kind.axis and not is_whole:
        return mixed("some examples are picked")
    return kind


@rule("split split_with_sizes unbind")
def _split(seen: Seen) -> list[Kind]:
    kind, dim = seen.kind("self"), (seen["dim"] or 0) % len(seen.shape("self"))
    if kind.name == "rows" and dim == kind.axis:
        kind = mixed("some examples are picked")
    elif kind.name == "rows" and short_name(seen.call.name) == "unbind":
        kind = kind.at(kind.axis - (dim < kind.axis))
    return [kind] * len(seen.call.results)


@rule("slice_backward select_backward")
def _slice_backward(seen: Seen) -> Kind:
    kind, dim = seen.kind("grad_output"), (seen["dim"] or 0) % len(seen.out)
    if kind.name != "rows":
        return kind if seen.created().name == "alike" else mixed("some examples were picked")
    if short_name(seen.call.name) == "select_backward":
        return kind.at(kind.axis + (dim <= kind.axis))
    is_whole = seen.out[dim] == seen.shape("grad_output")[dim]
    return mixed("some examples were picked") if dim == kind.axis and not is_whole else kind


@rule("cat stack")
def _cat(seen: Seen) -> Kind:
    sources = [s for s in seen["tensors"] if isinstance(s, Source) and s.shape != (0,)]
    kinds = [seen.kinds[s.number] for s in sources]
    if bad := next((k for k in kinds if k.name == "mixed"), None):
        return bad
    dim = (seen["dim"] or 0) % len(seen.out)
    degrees = {k.degree for k in kinds if k.degree is not None}
    if len({k.name for k in kinds}) > 1 or len(degrees) > 1 or any(k.is_position for k in kinds):
        return mixed("what examples have is put together with other numbers")
    first = kinds[0]
    degree = degrees.pop() if degrees else None
    if first.name != "rows":
        return Kind(first.name, degree)
    if len({(k.axis, k.layout) for k in kinds}) > 1:
        return mixed("examples of a batch meet")
    if short_name(seen.call.name) == "stack":
        return rows(first.axis + (dim <= first.axis), first.layout, degree)
    if dim == first.axis:
        return mixed("examples are put behind each other")
    return rows(first.axis, first.layout, degree)


@rule("constant_pad_nd")
def _pad(seen: Seen) -> Kind:
    kind, shape, out = seen.kind("self"), seen.shape("self"), seen.out
    if kind.name == "rows" and shape[kind.axis] != out[kind.axis]:
        return mixed("the batch is padded with examples")
    if seen["value"] not in (0, None) and not kind.is_plain:
        return mixed("a mean over the batch is padded")
    return kind


@rule("tril triu")
def _triangle(seen: Seen) -> Kind:
    kind, ndim = seen.kind("self"), len(seen.out)
    if kind.name == "rows" and kind.axis >= ndim - 2:
        return mixed("a triangle of examples is taken")
    return kind


@rule("gather")
def _gather(seen: Seen) -> Kind:
    kind, index, dim = seen.kind("self"), seen.kind("index"), seen["dim"] % max(1, len(seen.out))
    if kind.name == "mixed" or not index.is_plain:
        return kind if kind.name == "mixed" else mixed("entries are looked up by the batch")
    if kind.name == index.name == "rows":
        same = kind.axis == index.axis != dim and kind.layout == index.layout
        return rows(kind.axis, kind.layout, kind.degree) if same else mixed("examples meet")
    return (
        kind if kind.name == index.name == "alike" else mixed("entries are looked up by the batch")
    )


@rule("scatter scatter_add")
def _scatter(seen: Seen) -> Kind:
    dim = seen["dim"] % max(1, len(seen.out))
    names = [n for n in ("self", "index", "src") if isinstance(seen[n], Source)]
    kinds = [seen.kind(name) for name in names]
    if not all(k.name == "rows" and not k.is_position for k in kinds):
        return (
            ALIKE
            if all(k.name == "alike" and k.is_plain for k in kinds)
            else mixed("examples meet")
        )
    same = len({(k.axis, k.layout) for k in kinds}) == 1 and kinds[0].axis != dim
    degrees = {k.degree for k, name in zip(kinds, names, strict=True) if name != "index"} - {None}
    if "src" not in names and seen["value"] != 0:
        degrees.add(0)
    if not same or len(degrees) > 1 or not seen.kind("index").is_plain:
        return mixed("examples of a batch meet")
    return rows(kinds[0].axis, kinds[0].layout, degrees.pop() if degrees else None)


@rule("index _unsafe_index")
def _index(seen: Seen) -> Kind:
    kind, indices = seen.kind("self"), seen["indices"]
    given = [(place, s) for place, s in enumerate(indices) if isinstance(s, Source)]
    kinds = [seen.kinds[s.number] for _, s in given]
    if bad := next((k for k in (kind, *kinds) if k.name == "mixed"), None):
        return bad
    if _is_by_position(seen, kind):
        return rows(0, ONE_EACH, kind.degree)
    alike = all(k.name == "alike" and k.is_plain for k in kinds)
    if kind.name == "rows" and alike and kind.axis not in [place for place, _ in given]:
        before_only = all(place > kind.axis for place, _ in given)
        return kind if before_only and not kind.is_position else mixed("entries are looked up")
    if kind.name == "alike" and len(given) == 1 and given[0][0] == 0 and kinds[0].is_plain:
        return kinds[0].times(kind.degree)  # rows of a table
    return mixed("entries are looked up by the batch")


def _is_by_position(seen: Seen, kind: Kind) -> bool:
    """Return whether it is x[arange(B), classes], an entry of each example's row."""
    sources = seen["indices"]
    if len(sources) != 2 or not all(isinstance(s, Source) for s in sources):
        return False
    first, second = (seen.kinds[s.number] for s in sources)
    shapes = [s.shape for s in sources]
    is_pair = first.is_position and second.name == "rows" and second.is_plain
    is_flat = shapes[0] == shapes[1] == (seen.size,)
    return (
        is_pair and is_flat and kind.name == "rows" and kind.axis == 0 and kind.layout == ONE_EACH
    )


@rule("index_put")
def _index_put(seen: Seen) -> Kind:
    kind, values = seen.kind("self"), seen.kind("values")
    fits = kind.degree is None and values.name == "rows" and values.axis == 0
    if fits and _is_by_position(seen, kind):
        return rows(0, ONE_EACH, values.degree)
    sources = [s for s in seen["indices"] if isinstance(s, Source)]
    is_table = fits and seen["accumulate"] and kind.name == "alike" and len(sources) == 1
    if is_table and isinstance(seen["indices"][0], Source):
        index = seen.kinds[sources[0].number]
        if (
            index.name == "rows"
            and index.is_plain
            and (index.axis, index.layout) == (0, values.layout)
        ):
            return total(values.degree)
    return mixed("entries are written by the batch")


@rule("index_select")
def _index_select(seen: Seen) -> Kind:
    kind, index, dim = seen.kind("self"), seen.kind("index"), seen["dim"] % len(seen.out)
    if index.name == "alike" and index.is_plain and not (kind.name == "rows" and kind.axis == dim):
        return kind
    if kind.name == "alike" and index.is_plain and index.name == "rows":
        return rows(dim, index.layout, kind.degree)
    return mixed("entries are looked up by the batch")


_OVER_IMAGES = (
    "max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool1d adaptive_max_pool2d "
    "fractional_max_pool2d"
)
_LINEAR_OVER_IMAGES = (
    "avg_pool1d avg_pool2d avg_pool3d _adaptive_avg_pool2d adaptive_avg_pool2d "
    "adaptive_avg_pool1d _adaptive_avg_pool3d reflection_pad1d reflection_pad2d replication_pad1d "
    "replication_pad2d im2col col2im pixel_shuffle pixel_unshuffle upsample_nearest1d "
    "upsample_nearest2d upsample_bilinear2d upsample_bicubic2d upsample_linear1d"
)


@rule(_OVER_IMAGES)
def _over_images(seen: Seen) -> list[Kind]:
    kind = seen.kind("self")
    is_row = kind.is_plain and (kind.name == "alike" or kind.axis == 0)
    kind = kind if is_row else mixed("an operator on images takes more than one at once")
    return [kind] * len(seen.call.results)


@rule(_LINEAR_OVER_IMAGES)
def _linear_over_images(seen: Seen) -> Kind:
    kind = seen.kind("self")
    is_row = kind.name == "rows" and kind.axis == 0 and not kind.is_position
    return kind if is_row or kind.name == "alike" else mixed("images of a batch meet")


@rule(" ".join(f"{name}_backward" for name in f"{_OVER_IMAGES} {_LINEAR_OVER_IMAGES}".split()))
def _images_backward(seen: Seen) -> Kind:
    kinds = [seen.kind(name) for name in seen.tensors("grad_output")]
    grad = seen.kind("grad_output")
    if grad.name != "rows" or grad.axis != 0 or grad.is_position:
        return grad if grad.name == "mixed" else mixed("images of a batch meet")
    same = all(
        k.name == "rows" and k.axis == 0 and k.layout == grad.layout and k.is_plain for k in kinds
    )
    return grad if same else mixed("images of a batch meet")


@rule("convolution")
def _convolution(seen: Seen) -> Kind:
    kind, others = seen.kind("input"), [seen.kind("weight"), seen.kind("bias")]
    if not all(other.name == "alike" and other.is_plain for other in others):
        return mixed("a convolution's weights depend on the batch")
    is_row = kind.is_plain and (kind.name == "alike" or kind.axis == 0)
    return kind if is_row else mixed("a convolution takes more than one example at once")


@rule("convolution_backward")
def _convolution_backward(seen: Seen) -> list[Kind]:
    grad, given, weight = (seen.kind(n) for n in ("grad_output", "input", "weight"))
    is_row = grad.name == given.name == "rows" and grad.axis == given.axis == 0
    fits = is_row and given.is_plain and grad.layout == given.layout
    if not fits or weight.name != "alike" or not weight.is_plain:
        bad = grad if grad.name == "mixed" else mixed("a convolution takes more than one example")
        return [bad] * 3
    return [grad, total(grad.degree), total(grad.degree)]


@rule("native_layer_norm")
def _layer_norm(seen: Seen) -> list[Kind]:
    kind, others = seen.kind("input"), [seen.kind("weight"), seen.kind("bias")]
    ndim = len(seen.shape("input")) - len(seen["normalized_shape"])
    fits = kind.is_plain and all(k.name == "alike" and k.is_plain for k in others)
    if not fits or (kind.name == "rows" and kind.axis >= ndim):
        return [mixed("layer norm goes over examples")] * 3
    return [kind] * 3


@rule("native_layer_norm_backward")
def _layer_norm_backward(seen: Seen) -> list[Kind]:
    return _norm_backward(
        seen, len(seen.shape("input")) - len(seen["normalized_shape"]), "grad_out"
    )


@rule("native_group_norm")
def _group_norm(seen: Seen) -> list[Kind]:
    kind, others = seen.kind("input"), [seen.kind("weight"), seen.kind("bias")]
    fits = kind.is_plain and all(k.name == "alike" and k.is_plain for k in others)
    if not fits or (kind.name == "rows" and kind.axis != 0):
        return [mixed("group norm goes over examples")] * 3
    return [kind] * 3


@rule("native_group_norm_backward")
def _group_norm_backward(seen: Seen) -> list[Kind]:
    return _norm_backward(seen, 1, "grad_out")


def _norm_backward(seen: Seen, ndim: int, name: str) -> list[Kind]:
    grad, given, weight = seen.kind(name), seen.kind("input"), seen.kind("weight")
    fits = grad.name == given.name == "rows" and given.is_plain and weight.name == "alike"
    if not fits or (grad.axis, grad.layout) != (given.axis, given.layout) or grad.axis >= ndim:
        return [grad if grad.name == "mixed" else mixed("a norm goes over examples")] * 3
    return [grad, total(grad.degree), total(grad.degree)]


@rule("native_batch_norm cudnn_batch_norm _native_batch_norm_legit _batch_norm_with_update")
def _batch_norm(seen: Seen) -> list[Kind]:
    count, kind = len(seen.call.results), seen.kind("input")
    names = seen.tensors("input", "self")
    fits = kind.is_plain and all(
        seen.kind(n).name == "alike" and seen.kind(n).is_plain for n in names
    )
    if seen["training"] or not fits or (kind.name == "rows" and kind.axis == 1):
        return [mixed("batch norm takes the mean over examples")] * count
    return [kind, *[ALIKE] * (count - 1)]
