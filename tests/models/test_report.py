from jax_qmm import _extension
from jax_qmm.models.layer_kinds import KernelUse
from jax_qmm.models.plan import Conversion, Plan
from jax_qmm.models.report import LayerRow, Report, make_report
from jax_qmm.schemes import W4A8, W4A16, W8A8, Rule


def test_report_prints_every_row_with_its_reason():
    rows = (
        LayerRow("attn.query", "Linear", "int8, per_token", "reference: no kernels", 4096, 1100),
        LayerRow("", "Embed", "", "", 640, 640, "looked up"),
    )
    text = str(Report(rows, (Rule("x", W8A8()),), 4736, 1740))
    assert text.splitlines() == [
        "path         op      scheme           bytes               reason",
        "attn.query   Linear  int8, per_token  4.0 KiB -> 1.1 KiB",
        "(the model)  Embed   skipped          640 B               looked up",
        "matched nothing: Rule(path='x', scheme=W8A8(int8, per_token))",
        "the quantized layers run on the reference: no kernels",
        "1 of 2 layers quantized, all parameters 4.6 KiB -> 1.7 KiB",
    ]


def test_layers_that_run_differently_say_so_each():
    rows = (
        LayerRow("up", "Linear", "int8, per_token", "kernel", 4096, 1100),
        LayerRow("down", "Linear", "int8, per_token", "reference: no kernels", 4096, 1100),
    )
    _, up, down, total = str(Report(rows, (), 8192, 2200)).splitlines()
    assert "  kernel  " in up and "  reference: no kernels  " in down and total.startswith("2 of 2 layers")


def test_report_of_a_model_without_weights():
    assert str(Report((), (), 0, 0)).startswith("no layer holds a weight")


def test_a_layer_runs_where_its_scheme_has_kernels(monkeypatch):
    """Turing has kernels for 8-bit operands, none for weights alone."""
    turing = lambda platform, devices, oldest: "runs code for 7.5" if oldest > 75 else None
    monkeypatch.setattr(_extension, "fallback_reason", turing)
    use = KernelUse("Linear", (-2,), (256, 256))
    plan = Plan({"up": Conversion(use, W8A8()), "down": Conversion(use, W4A16())}, {}, ())
    sizes = {"up": 1, "down": 1}
    rows = make_report(plan, sizes, sizes, (2, 2), {}).rows
    assert [row.runs_on for row in rows] == ["kernel", "reference: runs code for 7.5"]


def test_blocks_that_no_kernel_takes_are_named(monkeypatch):
    monkeypatch.setattr(_extension, "fallback_reason", lambda *where: None)
    schemes = {"a": W4A16(24), "b": W4A16(48), "c": W4A16(None), "d": W4A16(500)}
    use = KernelUse("LinearGeneral", (-3, -2), (4, 25, 256))
    plan = Plan({name: Conversion(use, scheme) for name, scheme in schemes.items()}, {}, ())
    rows = make_report(plan, dict.fromkeys(schemes, 1), dict.fromkeys(schemes, 1), (4, 4), {}).rows
    why = "reference: blocks have 24 columns; kernels serve multiples of 16"
    assert [row.runs_on for row in rows] == [why, "kernel", "kernel", "kernel"]


def test_blocks_on_both_sides_that_no_kernel_takes_are_named(monkeypatch):
    oldest = []
    monkeypatch.setattr(_extension, "fallback_reason", lambda platform, devices, *arch: oldest.append(arch))
    inner = {"a": 32, "b": 80, "c": 256, "d": 256, "e": 80}
    uses = {name: KernelUse("LinearGeneral", (-3, -2), (4, size, 256)) for name, size in inner.items()}
    schemes = {"a": W8A8(tile_size=64), "b": W8A8(tile_size=64), "c": W8A8(tile_size=1024), "d": W4A8()}
    schemes |= {"e": W4A8(64, activation_dtype="fp8")}
    plan = Plan({name: Conversion(uses[name], scheme) for name, scheme in schemes.items()}, {}, ())
    rows = make_report(plan, dict.fromkeys(schemes, 1), dict.fromkeys(schemes, 1), (4, 4), {}).rows
    why = "reference: blocks have 16 columns; kernels serve 32, 64, 128, 256"
    assert [row.runs_on for row in rows] == ["kernel", why, "kernel", "kernel", "kernel"]  # e has its axes merged
    assert oldest == [(80,), (80,), (0,), (0,), (80,)]  # c and d are products with one scale for a token
