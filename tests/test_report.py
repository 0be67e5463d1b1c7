import jax
import jax.numpy as jnp
import pytest

from jax_qmm import report
from jax_qmm.report import LayerRow, Report
from jax_qmm.schemes import W8A8, Rule


def test_report_prints_every_row_with_its_reason():
    rows = (
        LayerRow("attn.query", "Linear", "int8, per_token", "reference: no kernels", 4096, 1100),
        LayerRow("", "Embed", "", "", 640, 640, "looked up"),
    )
    text = str(Report(rows, (Rule("x", W8A8()),), 4736, 1740))
    assert text.splitlines() == [
        "path         op      scheme           runs on                bytes               reason",
        "attn.query   Linear  int8, per_token  reference: no kernels  4.0 KiB -> 1.1 KiB",
        "(the model)  Embed   skipped                                 640 B               looked up",
        "matched nothing: Rule(path='x', scheme=W8A8(int8, per_token))",
        "1 of 2 layers quantized, all parameters 4.6 KiB -> 1.7 KiB",
    ]


def test_report_of_a_model_without_weights():
    assert str(Report((), (), 0, 0)).startswith("no layer holds a weight")


@pytest.mark.parametrize("n, text", [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (2**40, "1024.0 GiB")])
def test_bytes(n, text):
    assert report.format_bytes(n) == text


def test_platform_is_the_default_device_also_while_tracing():
    assert report.platform() == "cpu"
    jax.eval_shape(lambda x: [report.platform(), x][1], jnp.ones(3))
    with jax.set_mesh(jax.make_mesh((4,), ("x",))):
        assert report.platform() == "cpu"
