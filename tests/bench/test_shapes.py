import argparse

import pytest

from jax_qmm.bench import shapes
from jax_qmm.tuning import Product


def parse(*arguments):
    parser = argparse.ArgumentParser()
    shapes.add_arguments(parser)
    return shapes.products(**vars(parser.parse_args(arguments)))


def test_defaults_are_a_models_layers_in_both_dtypes():
    products = parse()
    assert len(products) == 4 * 11 * 2
    assert products[0] == Product(1, 6144, 4096, 1, "int8", "bfloat16", False)
    assert products[-1] == Product(8192, 4096, 14336, 1, "float8_e4m3fn", "bfloat16", True)


def test_a_models_layers_are_those_of_its_configuration():
    hidden, heads, kv_heads, head, ffn = 8192, 64, 8, 128, 28672  # of Llama 3 70B
    assert shapes.MODELS["llama-3-70b"] == (
        ((heads + 2 * kv_heads) * head, hidden),
        (hidden, heads * head),
        (2 * ffn, hidden),
        (hidden, ffn),
    )
    hidden, heads, kv_heads, head, ffn = 4096, 32, 8, 128, 14336  # of Llama 3 8B
    assert shapes.MODELS["llama-3-8b"] == (
        ((heads + 2 * kv_heads) * head, hidden),
        (hidden, heads * head),
        (2 * ffn, hidden),
        (hidden, ffn),
    )


def test_shapes_by_hand():
    products = parse("--shapes", "32,16", "48,64", "32,16", "--m", "1,3", "--dtype", "fp8")
    assert [product[:3] for product in products] == [(1, 32, 16), (3, 32, 16), (1, 48, 64), (3, 48, 64)]
    assert products == parse("--model", "custom", "--shapes", "32,16", "48,64", "--m", "1,3", "--dtype", "fp8")
    assert all(product.fast_accum and product.dtype == "float8_e4m3fn" for product in products)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--m", "1,x"], "1,x is no list of numbers with commas between them"),
        (["--m", "0"], "0 holds a number that is no positive 32-bit integer"),
        (["--m", "1,2147483648"], "no positive 32-bit integer"),
        (["--shapes", "4096"], "4096 is no pair N,K such as 6144,4096"),
        (["--shapes", "16,-16"], "no positive 32-bit integer"),
        (["--shapes", "4096x4096"], "4096x4096 is no pair N,K such as 6144,4096"),
        (["--model", "gpt-2"], "llama-3-70b"),
        (["--dtype", "int4"], "int4"),
        (["--model", "llama-3-8b", "--shapes", "16,16"], "--model custom needs --shapes, and no other model"),
        (["--model", "custom"], "--model custom needs --shapes, and no other model"),
    ],
)
def test_bad_arguments_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit:
        parse(*arguments)
    assert exit.value.code == 2
    assert message in capsys.readouterr().err
