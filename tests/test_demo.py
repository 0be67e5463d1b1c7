import itertools
import sys

import jax
import numpy as np
import pytest
from flax import nnx
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from jax_qmm import __main__ as command_line, demo

TITLE = "digits"


@pytest.fixture(scope="module")
def results():
    train_images, test_images, train_labels, test_labels = demo.digits(seed=0)
    with jax.default_device(jax.devices("cpu")[0]):
        model = demo.train(train_images, train_labels, epochs=3, seed=0)
        return demo.compare(model, test_images, test_labels)


def test_digits_are_split_without_overlap():
    train_images, test_images, train_labels, test_labels = demo.digits(seed=0)
    assert train_images.shape == (1297, 8, 8) and test_images.shape == (500, 8, 8)
    assert train_images.min() == 0 and train_images.max() == 1
    # The data set has no image twice, so that a shared one would be a leak.
    assert len(np.unique(np.concatenate([train_images, test_images]), axis=0)) == 1797
    assert abs(np.bincount(test_labels) / 500 - np.bincount(train_labels) / 1297).max() < 1 / 500
    assert (demo.digits(seed=1)[1] != test_images).any()


def test_training_learns(results):
    assert results[0].accuracy > 0.5  # chance is 0.1; the whole training is too long for a test


def test_every_scheme_is_compared_with_float32(results):
    assert [r.name for r in results] == ["float32", *demo.SCHEMES]
    exact, *quantized = results
    assert exact.logit_difference == 0
    for r in quantized:
        assert 0 < r.logit_difference < (2 if r.name.startswith("int4") else 1)  # of logits that reach 5
        assert abs(r.accuracy - exact.accuracy) < 0.05


def test_bytes_are_those_of_the_arrays(results):
    model = nnx.eval_shape(lambda: demo.DigitTransformer(rngs=nnx.Rngs(0)))
    kernels = [module.kernel for _, module in nnx.iter_modules(model) if hasattr(module, "kernel")]
    before = sum(p.size * 4 for p in nnx.to_flat_state(nnx.state(model, nnx.Param)).leaves)
    symmetric = before - sum(k.size * 3 for k in kernels)  # and a float32 scale for each channel
    channels = (demo.WIDTH * 4 + 3 * demo.WIDTH) * demo.BLOCKS + demo.WIDTH + demo.CLASSES
    assert [r.nbytes for r in results[:4]] == [
        before,
        symmetric + 4 * channels,
        symmetric + 8 * channels,
        symmetric + 4 * channels,
    ]
    # Packed values in units of 128 columns where K is 64, and the scale of a channel
    assert results[4].nbytes < before and results[5].nbytes < results[4].nbytes


def test_the_table_says_what_ran_where(results):
    text = demo.table(results)
    for r in results:
        (line,) = [line for line in text.splitlines() if line.startswith(r.name) and line.endswith(r.runs_on)]
        assert f"{r.accuracy:.1%}" in line and f"{r.logit_difference:.4f}" in line
    assert results[1].runs_on == "reference: platform cpu has no kernels"
    assert text.count("14 of 15 layers quantized, not position (") == 6
    assert text.count("13 of 15 layers quantized, not embed (too small to gain") == 2
    assert text.count("block_scaled_mm (blocks of 64") >= 2 and "expand" in text
    for operands in ("int8[500,8,64] x int8[128,64]", "float8_e4m3fn[500,64] x float8_e4m3fn[10,64]"):
        assert operands in text


def test_the_figure_is_readable(results, tmp_path):
    drawing = demo.figure(results, TITLE)
    canvas = FigureCanvasAgg(drawing)
    canvas.draw()
    texts = [t for t in drawing.findobj(Text) if t.get_text() and t.get_visible()]
    shown = {t.get_text() for t in texts}
    assert {"accuracy", "float32", "fp8 e4m3", TITLE, f"{results[1].logit_difference:.3f}"} <= shown
    boxes = [t.get_window_extent() for t in texts if t.axes is None or t in visible(t.axes)]
    width, height = canvas.get_width_height()
    for box in boxes:
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height
    for one, other in itertools.combinations(boxes, 2):
        assert not one.overlaps(other)


def visible(axes):
    labels = axes.get_yticklabels() if axes.get_subplotspec().is_first_col() else []
    return [axes.title, *axes.texts, *labels]


def test_the_command_prints_the_table_and_writes_the_png(results, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(demo, "train", lambda *data, epochs, seed: None)
    monkeypatch.setattr(demo, "compare", lambda model, images, labels: results)
    png = tmp_path / "demo.png"
    assert command_line.main(["demo", "--png", str(png)]) == 0
    assert png.read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert demo.table(results) in out
    assert "Times of the reference" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--png", "/no/such/folder/x.png"], "there is no folder /no/such/folder"),
        (["--png", "/"], "/ is a folder"),
        (["--png", "demo.txt"], "demo.txt would be a PNG: name a file that ends in .png"),
        (["--epochs", "0"], "0 is not positive"),
    ],
)
def test_bad_arguments_are_refused_before_the_training(arguments, message, capsys):
    with pytest.raises(SystemExit):
        command_line.main(["demo", *arguments])
    assert message in capsys.readouterr().err


def test_a_missing_package_is_named_with_the_way_to_install_it(monkeypatch):
    monkeypatch.delitem(sys.modules, "jax_qmm.demo")
    monkeypatch.delattr("jax_qmm.demo")
    monkeypatch.setitem(sys.modules, "optax", None)
    with pytest.raises(SystemExit, match=r"'optax'.*pip install \"jax_qmm\[demo\]\""):
        command_line.main(["demo"])
