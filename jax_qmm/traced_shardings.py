"""What is known of the shardings of the values in a jaxpr, before the compiler chooses them."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal  # pyright: ignore[reportPrivateImportUsage]
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_qmm import _compat

UNSHARDED = NamedSharding(_compat.NO_MESH, PartitionSpec())


class TracedShardings:
    """The shardings of the values of one jaxpr.

    Types tell them on Explicit axes of a mesh. On Auto axes they are those of arguments and constants, as far as these
    reach an operation as they are: for what is computed from them the compiler chooses.
    """

    def __init__(self, known: dict[Any, NamedSharding | None], chosen: bool):
        self._known, self._chosen = known, chosen

    @classmethod
    def of_call(cls, closed: ClosedJaxpr, arguments: Sequence[Any]) -> "TracedShardings":
        """Those of a function that was traced with these arrays or ShapeDtypeStructs."""
        jaxpr = closed.jaxpr
        given = [*zip(jaxpr.invars, arguments), *zip(jaxpr.constvars, closed.consts)]
        known = {var: _sharding(array) for var, array in given}
        return cls(known, any(map(_is_chosen, known.values())) or _has_constraints(jaxpr))

    def of(self, var: Any) -> NamedSharding | None:
        """The sharding of a value; None where the compiler chooses it."""
        if _compat.explicit_mesh(var.aval) and not (self._chosen and _has_auto(var.aval.sharding)):
            return var.aval.sharding
        if isinstance(var, Literal):
            return _sharding(var.val)
        chosen = self._chosen and any(size != 1 for size in var.aval.shape)
        return self._known.get(var, None if chosen else UNSHARDED)

    def inside(self, eqn: Any, inner: Any) -> "TracedShardings":
        """Those of a jaxpr that is a parameter of an equation."""
        name, outer = eqn.primitive.name, eqn.invars
        if name == "shard_map":  # the values of one device, but of the axes that are left to the compiler
            return TracedShardings({}, any(_has_auto(var.aval.sharding) for var in inner.invars))
        if name == "cond":
            outer = outer[1:]
        elif name in ("scan", "while") or len(outer) != len(inner.invars):
            outer = ()
        return TracedShardings({var: self.of(each) for each, var in zip(outer, inner.invars)}, self._chosen)


def _sharding(array):
    sharding = getattr(array, "sharding", None)
    if sharding is None or sharding.num_devices == 1:
        return UNSHARDED
    return sharding if isinstance(sharding, NamedSharding) else None


def _is_chosen(sharding):
    """Whether the compiler chooses how what is computed from such an array is sharded."""
    return sharding is None or sharding.mesh.size > 1 and _has_auto(sharding)


def _has_auto(sharding):
    return AxisType.Auto in sharding.mesh.axis_types


def _has_constraints(jaxpr):
    """Whether a jaxpr shards by itself what its arguments don't: over Auto axes."""
    for eqn in jaxpr.eqns:
        named = [eqn.params.get("sharding"), *eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ())]
        if any(isinstance(each, NamedSharding) and _is_chosen(each) for each in named):
            return True
        if any(map(_has_constraints, inner_jaxprs(eqn))):
            return True
    return False


def inner_jaxprs(eqn: Any) -> Iterator[Jaxpr]:
    """The jaxprs among the parameters of an equation."""
    for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr):
        if _is_jaxpr(value):
            yield value.jaxpr if isinstance(value, ClosedJaxpr) else value


def _is_jaxpr(value):
    return isinstance(value, Jaxpr | ClosedJaxpr)
