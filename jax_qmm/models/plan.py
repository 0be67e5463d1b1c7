"""Rules and the layers of a model make a plan: which kernels are quantized, and how."""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from jax_qmm.models.layer_kinds import KernelUse
from jax_qmm.qarray import QArray
from jax_qmm.schemes import Rule, Scheme

Static = tuple[jax.Array, jax.Array | None]


@dataclasses.dataclass(frozen=True)
class Conversion:
    """How one layer is quantized.

    Attributes:
      use: what the layer does with its kernel.
      scheme: that of the first rule that matches.
      static: scale and zero point (or None) of its input from a calibration, or None for those of the scheme.
      note: a remark for the report.
    """

    use: KernelUse
    scheme: Scheme
    static: Static | None = None
    note: str = ""

    def quantize(self, kernel: jax.Array) -> QArray:
        """The layer's kernel quantized, with its shape."""
        return self.scheme.quantize_weight(kernel, self.use.contracted)

    def __str__(self):
        # The static scales of a stack are no scalars, which a scheme does not take.
        static = self.static and (1.0, None if self.scheme.symmetric else 0)
        return str(self.scheme.with_static(*static) if static else self.scheme)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What becomes of each layer.

    Attributes:
      conversions: by path, of the layers that are quantized.
      skipped: by path, the use of the other layers' kernels, with a reason.
      unused_rules: the rules that were first to match no layer.
    """

    conversions: Mapping[str, Conversion]
    skipped: Mapping[str, KernelUse]
    unused_rules: tuple[Rule, ...]

    def to_calibrate(self) -> set[str]:
        """The paths of the layers whose static scale a calibration is to find."""
        return {path for path, each in self.conversions.items() if each.scheme.takes_calibration}

    def calibrated(self, ranges: Mapping[str, tuple[jax.Array, jax.Array]]) -> "Plan":
        """The plan with static scales for the ranges that a calibration saw, by path."""
        conversions = dict(self.conversions)
        for path in self.to_calibrate():
            if path in ranges:
                scheme: Any = conversions[path].scheme  # one that takes a calibration
                static = scheme.static_range(*ranges[path])
                conversions[path] = dataclasses.replace(conversions[path], static=static)
            else:
                note = "no calibration batch reached it: its scale is computed at each call"
                conversions[path] = dataclasses.replace(conversions[path], note=note)
        return dataclasses.replace(self, conversions=conversions)


def make_plan(uses: Mapping[str, KernelUse], rules: Sequence[Rule], kernels: Mapping[str, Any]) -> Plan:
    """Finds for each layer the first rule whose regular expression matches all of its path.

    Args:
      uses: what each layer does with its kernel, by path.
      rules: in order.
      kernels: those of the layers that can be quantized, by path; they may be abstract.

    Raises:
      TypeError: if rules are no `Rule`s.

    >>> from jax_qmm import W8A8
    >>> uses = {name: KernelUse("Linear", (-2,), (3, 4)) for name in ("attn.query", "head")}
    >>> kernels = {name: jax.ShapeDtypeStruct((3, 4), "float32") for name in uses}
    >>> plan = make_plan(uses, [Rule(r".*\\.query", W8A8()), Rule("mlp", W8A8())], kernels)
    >>> [*plan.conversions], {path: use.reason for path, use in plan.skipped.items()}, len(plan.unused_rules)
    (['attn.query'], {'head': 'no rule matches'}, 1)
    """
    given = rules
    rules = tuple(rules) if isinstance(rules, Iterable) else (rules,)
    if isinstance(given, Rule) or not all(isinstance(rule, Rule) for rule in rules):
        raise TypeError(f"rules must be a sequence of jax_qmm.Rule, got {given!r}")
    conversions, skipped, used = {}, {}, set()
    for path, use in uses.items():
        i, rule = next((each for each in enumerate(rules) if re.fullmatch(each[1].path, path)), (None, None))
        used.add(i)
        if rule is None:
            reason = "no rule matches"
        else:
            reason = use.reason or use.why_not(rule.scheme) or rule.scheme.why_not(kernels[path], use.contracted)
        if rule is None or reason:
            skipped[path] = dataclasses.replace(use, reason=reason)
        else:
            conversions[path] = Conversion(use, rule.scheme)
    return Plan(conversions, skipped, tuple(rule for i, rule in enumerate(rules) if i not in used))
