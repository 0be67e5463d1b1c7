"""How the leaves of a QArray are reshaped with it."""

import math

import jax


def reshaped(q, new):
    """`q` in the shape `new`, as `QArray.reshape` says."""
    stored = q.storage_axes()
    groups = [([stored[axis] for axis in axes], parts) for axes, parts in _groups(q.shape, new)]
    # New axes of 1 lie in front: the last axis in memory has the blocks and the packed columns.
    in_memory = sorted(range(len(groups)), key=lambda i: groups[i][0] or [-1])
    last, merged = q.ndim - 1, [*range(q.ndim - q.merged_axes, q.ndim)]
    undivided = q.is_packed or q.scale.shape[-1:] not in ((1,), q.values_shape[-1:])
    splits = lambda axes, parts: axes == [last] and len(parts) > 1 and undivided and not merged
    tag = q._merged if all(len(axes) == len(parts) == 1 for axes, parts in groups if {*axes} & {*merged}) else ()
    for axes, parts in groups:
        if splits(axes, parts) and any(new[part] != 1 for part in parts[:-1]):
            tag = tuple(new[part] for part in parts)

    def reshaped_leaf(leaf):
        out = []
        for axes, parts in (groups[i] for i in in_memory):
            if len(axes) == len(parts) == 1 and (tag or axes[0] not in merged):
                out.append(leaf.shape[axes[0]])
                continue
            if splits(axes, parts) or axes == merged != [] and len(parts) == 1:
                out += [1] * (len(parts) - 1) + [leaf.shape[last]]
                continue
            counts, whole = ([sizes[axis] for axis in axes] for sizes in (leaf.shape, q.values_shape))
            beside = axes == [*range(axes[0], axes[0] + len(axes))] if axes else True
            if {*axes} & {*merged} or not beside or counts != whole and any(count != 1 for count in counts):
                raise ValueError(f"{q} has no shape {new}: scales or memory divide the axes {axes} of its leaves")
            out += [new[part] if counts == whole else 1 for part in parts]
        return leaf.reshape(out)

    order = [part for i in in_memory for part in groups[i][1]]
    leaves = jax.tree.map(reshaped_leaf, q._replace(_permutation=(), _merged=tag))
    return leaves.transpose([order.index(i) for i in range(len(new))])


def _groups(old, new):
    """Axes of the shape `old` and those of `new` that hold the same values, as few at once as can be.

    >>> _groups((6, 4, 5), (2, 3, 20))
    [((0,), (0, 1)), ((1, 2), (2,))]
    >>> _groups((1, 6), (1, 2, 3))
    [((0,), (0,)), ((1,), (1, 2))]
    >>> _groups((0, 4), (7, 0))  # of no values: all at once, where the sizes don't tell
    [((0, 1), (0, 1))]
    """
    groups, i, j = [], 0, 0
    while i < len(old):
        if old[i : i + 1] == new[j : j + 1] != (0,):
            groups.append(((i,), (j,)))
            i, j = i + 1, j + 1
            continue
        ends = ((p, q) for p in range(i + 1, len(old) + 1) for q in range(j, len(new) + 1))
        same = [(p, q) for p, q in ends if math.prod(old[i:p]) == math.prod(new[j:q])]
        if not same:
            break
        p, q = same[0]
        groups.append((tuple(range(i, p)), tuple(range(j, q))))
        i, j = p, q
    if i < len(old) or math.prod(new[j:]) != 1:
        return [(tuple(range(len(old))), tuple(range(len(new))))]
    return groups + [((), (axis,)) for axis in range(j, len(new))]
