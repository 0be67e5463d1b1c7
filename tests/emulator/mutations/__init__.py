"""The mutants, and for each family of them the tests that must notice, in a file for each room of cuda/."""

from mutations import blocks, convolutions, products, quantizers, weights

_ROOMS = products, quantizers, convolutions, weights, blocks
MUTANTS = [mutant for room in _ROOMS for mutant in room.MUTANTS]
TESTS = {family: tests for room in _ROOMS for family, tests in room.TESTS.items()}
