import jax
import jax.numpy as jnp
import pytest

from jax_qmm.models.layer_kinds import KernelUse
from jax_qmm.models.plan import make_plan
from jax_qmm.schemes import W4A16, W8A8, Rule

STATIC = W8A8(activation="per_tensor", symmetric=False)
USES = {
    "a": KernelUse("Linear", (-2,), (3, 4)),
    "b": KernelUse("Linear", (-2,), (3, 4)),
    "conv": KernelUse("Conv", reason="a convolution"),
}
KERNELS = {path: jax.ShapeDtypeStruct((3, 4), "float32") for path in USES}


def test_the_first_rule_that_matches_all_of_a_path_counts():
    rules = [Rule("a", W8A8()), Rule("a|c", STATIC), Rule("a|b", STATIC), Rule("con", STATIC), Rule("conv", STATIC)]
    plan = make_plan(USES, iter(rules), KERNELS)
    assert {path: each.scheme for path, each in plan.conversions.items()} == {"a": W8A8(), "b": STATIC}
    assert plan.skipped == {"conv": USES["conv"]}
    assert plan.unused_rules == (rules[1], rules[3])
    assert make_plan(USES, [], KERNELS).skipped["conv"].reason == "no rule matches"


@pytest.mark.parametrize("rules", [Rule(".*", W8A8()), [".*"], None])
def test_rules_of_a_wrong_type(rules):
    with pytest.raises(TypeError, match="sequence of jax_qmm.Rule"):
        make_plan(USES, rules, KERNELS)


def test_ranges_make_static_scales_for_those_that_were_reached():
    plan = make_plan(USES, [Rule(".*", STATIC)], KERNELS)
    assert plan.to_calibrate() == {"a", "b"}
    plan = plan.calibrated({"a": (jnp.zeros(2), jnp.array([2.55, 5.1]))})  # a stack of two
    (scale, zero_point), note = plan.conversions["a"].static, plan.conversions["b"].note
    assert jnp.allclose(scale, jnp.array([0.01, 0.02]), rtol=1e-6) and zero_point.tolist() == [-128, -128]
    assert plan.conversions["b"].static is None and "no calibration batch reached it" in note
    words = [str(plan.conversions[path]) for path in "ab"]
    assert words == ["int8, per_tensor static, asymmetric", "int8, per_tensor, asymmetric"]


def test_a_conversion_quantizes_the_kernel_of_its_layer():
    conversion = make_plan(USES, [Rule("a", W8A8())], KERNELS).conversions["a"]
    assert str(conversion.quantize(jnp.ones((3, 4)))) == "QArray(int8[3,4], scale=float32[1,4], stored=[4,3])"


def test_a_scheme_leaves_out_the_kernels_that_would_not_get_smaller():
    plan = make_plan(USES, [Rule("a", W8A8()), Rule("b", W4A16())], KERNELS)
    assert list(plan.conversions) == ["a"]
    assert plan.skipped["b"].reason == "too small to gain: its kernel of 48 bytes would take 272"
