from jax_qmm.models.report import LayerRow, Report
from jax_qmm.schemes import W8A8, Rule


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
