"""Operands with labelled dimensions ("factors") on the devices of a mesh, through custom_partitioning."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning

from jax_qmm import _compat


def find_mesh(ctx):
    """The context of a lowering rule with the mesh by which custom_partitioning reads shardings.

    jit knows the mesh when an operand or a constraint in it has a NamedSharding. Under `jax.set_mesh` with
    nothing but unsharded arguments and bare PartitionSpecs it does not.

    Returns:
      A context for the lowering of a custom_partitioning; None where there is no use for one: inside a
      shard_map, on one device, or where no mesh is to be found, so that XLA gathers operands that are sharded
      all the same.
    """
    axis_context = ctx.module_context.axis_context
    if _compat.has_manual_axes(ctx) or getattr(axis_context, "num_devices", 1) == 1:
        return None
    mesh = axis_context.abstract_mesh or jax.sharding.get_abstract_mesh()
    if mesh.size != axis_context.num_devices:
        return None
    return ctx.replace(
        module_context=ctx.module_context.replace(
            axis_context=dataclasses.replace(axis_context, abstract_mesh=_in_prime_axes(mesh))
        )
    )


def _in_prime_axes(mesh):
    """The mesh with each axis as one for each of its prime factors, the first of them outermost.

    The compiler may shard a dimension by a part of an axis: one of 6 blocks by 2 of the 4 devices that share their
    columns. custom_partitioning can't read that by the axis as a whole, and fails.
    """
    parts = {f"{name}/{i}": p for name, size in mesh.shape.items() for i, p in enumerate(_prime_factors(size))}
    return jax.sharding.AbstractMesh(tuple(parts.values()), tuple(parts))


def _prime_factors(n):
    """
    >>> _prime_factors(12), _prime_factors(1)
    ([2, 2, 3], [])
    """
    least = next((p for p in range(2, n + 1) if n % p == 0), None)
    return [] if least is None else [least, *_prime_factors(n // least)]


def partitioned(local, operands, results, shapes, *, names, over=(), across=None, units=None):
    """`local` on operands that are sharded over several devices; dimensions of one factor are sharded alike.

    Two factors cannot have one mesh axis. Then the operands that have a factor of `over` decide before the
    others, factors that the result has sharded the same way before those that it has not, and those of `over`
    last. What loses an axis is gathered, as is a dimension that its axes don't divide.

    Args:
      local: function of the operands that one device holds.
      operands: for each operand the factors of its dimensions, as strings; None is a dimension that is not sharded.
      results: likewise for each result.
      shapes: of the operands. A dimension of 1 is not sharded with its factor.
      names: of the operands, for `Partitioned.exchanged`.
      over: the factors that are reduced.
      across: called with the mesh axes of `over` where there are some, gives the function in place of `local`.
      units: of factors whose dimensions differ in size, into how many equal parts each of them may be divided.
    """
    ones, units, given = (f"one{i}" for i in itertools.count()), units or {}, operands
    whole = lambda size, factor: factor is None or 1 in (size, units.get(factor))
    operands = [
        [next(ones) if whole(size, factor) else factor for size, factor in zip(shape, factors)]
        for shape, factors in zip(shapes, operands)
    ]
    known = set(itertools.chain(*operands))
    results = [[factor if factor in known else next(ones) for factor in factors] for factors in results]
    return Partitioned(local, operands, results, shapes, given, names, over, across, units)


@dataclasses.dataclass(frozen=True)
class Partitioned:
    """A function of operands that may be sharded, as `partitioned` makes it."""

    local: Callable
    operands: list[list[str]]
    results: list[list[str]]
    shapes: Sequence[tuple[int, ...]]
    given: Sequence[Sequence[str | None]]  # the factors of the operands, those that are not sharded too
    names: Sequence[str]
    over: Sequence[str]
    across: Callable | None
    units: dict[str, int]

    def __call__(self, *operands):
        rule, sizes = _sharding_rule(self.operands, self.results, self.shapes, self.units)
        wrapped = custom_partitioning(lambda *operands: self.local(*operands))
        wrapped.def_partition(partition=self._partition, sharding_rule=rule, **sizes)
        return wrapped(*operands)

    def _partition(self, mesh, args, outs):
        bare = not isinstance(outs, (list, tuple))  # as `local` returns it
        even = functools.partial(_even_spec, mesh, self.units)
        specs = [even(x.shape, factors, x.sharding.spec) for x, factors in zip(args, self.operands)]
        result_specs = [
            even(x.shape, factors, x.sharding.spec) for x, factors in zip([outs] if bare else outs, self.results)
        ]
        axes = _assign(self.operands, specs, self.results, result_specs, self.over)
        sharding = lambda factors: _named_sharding(mesh, [axes.get(factor) for factor in factors])
        reduced = tuple(axis for factor in self.over for axis in axes.get(factor, ()))
        out_shardings = [sharding(factors) for factors in self.results]
        lower = _without_mesh(self.across(reduced) if reduced else self.local)  # pyright: ignore[reportOptionalCall]
        return mesh, lower, out_shardings[0] if bare else out_shardings, tuple(map(sharding, self.operands))

    def exchanged(self, mesh, specs, results: Sequence[tuple[Any, Any]] | None = None) -> str:
        """What devices exchange for it, in words; "" for nothing.

        Args:
          mesh: that of the shardings.
          specs: the PartitionSpec of each operand; None where only the compiler knows it.
          results: shape and PartitionSpec of each result; None where the compiler chooses it.
        """
        even = functools.partial(_even_spec, mesh, self.units)
        fits = [None if spec is None else even(*of, spec) for *of, spec in zip(self.shapes, self.operands, specs)]
        unknown, axes = None in specs, dict[str, tuple[str, ...]]()
        if not unknown:
            result_specs = [even(shape, factors, spec) for (shape, spec), factors in zip(results or (), self.results)]
            axes = _assign(self.operands, fits, self.results, result_specs, self.over)
        gathers: dict[str, list[str]] = {}
        for name, shape, spec, fit, given, factors in zip(
            self.names, self.shapes, specs, fits, self.given, self.operands
        ):
            for i, wanted in enumerate(map(mesh_axes, spec or ())):
                fitting = () if factors[i].startswith("one") else fit[i]
                kept = fitting if unknown else axes.get(factors[i], ())
                lost = ", ".join(axis for axis in wanted if axis not in kept)
                if not lost:
                    continue
                if fitting:
                    who, why = name if results else "an operand", "another dimension has this axis"
                else:
                    parts = 1 if given[i] is None else self.units.get(given[i], shape[i])
                    who, why = name, f"whole parts: {parts}, devices: {math.prod(mesh.shape[a] for a in wanted)}"
                along = _DIMENSIONS.get(given[i], f"axis {i}")
                gathers.setdefault(f"along {along} over {lost} ({why})", []).append(who)
        words = [f"gathers {', '.join(dict.fromkeys(names))} {how}" for how, names in gathers.items()]
        reduced = ", ".join(axis for factor in self.over for axis in axes.get(factor, ()))
        words += [f"all-reduce over {reduced}"] if reduced else []
        words += [f"the compiler decides{' the rest' if words else ''}"] if unknown else []
        return "; ".join(words)


_DIMENSIONS = {"k": "K", "n": "N", "i": "images", "s": "spatial axes", "c": "input channels", "o": "output channels"}


def _sharding_rule(operands, results, shapes, units):
    """The factors as custom_partitioning takes them. A dimension with units is these and what each of them holds."""
    sizes, whole, split = {}, set(), set()

    def spell(factor, size):
        if factor not in units or size == units[factor]:
            whole.add(factor)
            return factor
        rest = f"{factor}in{len(sizes)}"
        sizes[rest] = size // units[factor]
        split.add(factor)
        return f"({factor} {rest})"

    inputs = ", ".join(" ".join(map(spell, factors, shape)) for factors, shape in zip(operands, shapes))
    sizes |= {factor: units[factor] for factor in split - whole}
    return f"{inputs} -> {', '.join(' '.join(factors) for factors in results)}", sizes


def _assign(operands, specs, results, result_specs, over):
    """The mesh axes of each factor, by the rules of `partitioned`."""
    wanted = dict(itertools.chain(*(zip(*pair) for pair in zip(results, result_specs))))
    claims = []  # (rank, factor, axes)
    for factors, spec in zip(operands, specs):
        deciding = any(factor in over for factor in factors)
        for factor, axes in zip(factors, spec):
            if axes and not factor.startswith("one"):
                claims.append(((not deciding, factor in over, wanted.get(factor) != axes), factor, axes))
    taken, assigned = set(), {}
    for _, factor, axes in sorted(claims, key=lambda claim: claim[0]):
        if factor not in assigned:
            axes = tuple(itertools.takewhile(lambda axis: axis not in taken, axes))
            if axes:
                assigned[factor] = axes
                taken |= set(axes)
    return assigned


def mesh_axes(entry):
    """The entry of a PartitionSpec as a tuple."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def _even_spec(mesh, units, shape, factors, spec):
    """The mesh axes of each dimension; none where they don't divide it, as XLA pads parts by junk."""
    sizes = [units.get(factor, size) for factor, size in zip(factors, shape)]
    spec = [mesh_axes(entry) for entry in spec]
    spec += [()] * (len(shape) - len(spec))
    return [axes if size % math.prod(mesh.shape[axis] for axis in axes) == 0 else () for axes, size in zip(spec, sizes)]


def _named_sharding(mesh, spec):
    """The sharding of an array with these mesh axes for each dimension."""
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*(axes or None for axes in spec)))


def _without_mesh(function):
    """`function` on the parts of one device, which the types of a mesh around the compilation don't fit."""

    def local(*operands):
        with jax.sharding.use_abstract_mesh(_compat.NO_MESH):
            return function(*operands)

    return local
