"""benchmarks/speedups.py draws what the CSVs of `bench` have."""

import pytest


@pytest.fixture
def speedups(load_script):
    return load_script("benchmarks/speedups.py")


def test_lines_are_of_weights_and_of_layers(speedups, tmp_path):
    (products := tmp_path / "a.csv").write_text(
        "scheme,m,n,k,ours_us,xla_bf16_us\nw4a16,1,64,32,2,4\nw4a16,16,64,32,4,2\nw4a16,1,96,32,1,8\n"
    )
    (layers := tmp_path / "b.csv").write_text(
        'scheme,network,layer,images,m,n,k,ours_us,xla_bf16_us\nconv,unet,"8x8x4, 3x3",8,512,4,36,3,6\n'
    )
    panels = speedups.read([products, layers])
    assert panels == {
        "w4a16": {" 64 32": {1: 2, 16: 0.5}, " 96 32": {1: 8}},
        "conv, unet": {"8x8x4, 3x3 4 36": {8: 2}},
    }
    assert speedups.means(panels["w4a16"].values()) == pytest.approx({1: 4, 16: 0.5})
    drawn = [axes for axes in speedups.draw(panels, "title").axes if axes.get_visible()]
    assert [axes.get_title() for axes in drawn] == ["w4a16", "conv, unet"]
    assert [axes.get_xlabel() for axes in drawn] == ["rows", "images"]
    assert [*drawn[0].lines[2].get_ydata()] == pytest.approx([4, 0.5])


@pytest.mark.parametrize("name", ["conv", "conv-w4a16", "w4a16", "w8a16", "fp8-block", "w8a8-block", "w4a8"])
def test_draws_what_is_stored(speedups, stored, name):
    panels = speedups.read([stored(f"{name}.csv")])
    assert len(speedups.draw(panels, name).axes) >= len(panels) > 0
