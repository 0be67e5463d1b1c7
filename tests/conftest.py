"""Eight CPU devices for the sharding tests, and no tuning file of the machine's.

Tests marked `gpu` need a GPU that the installed kernels fit, or with --emulator the build of tests/emulator, which runs
the kernels on the CPU; then they alone run. One that can't says why in its marker: `gpu(not_emulated="...")`.
"""

import collections
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ["JAX_QMM_TUNING"] = "0"
os.environ["JAX_PLATFORM_NAME"] = "cpu"  # meshes are of the default platform's devices, also where there are GPUs

import hypothesis
import jax
import pytest

from jax_qmm import _extension

hypothesis.settings.register_profile("default", deadline=None, max_examples=25, derandomize=True)
hypothesis.settings.load_profile("default")


def pytest_addoption(parser):
    parser.addoption(
        "--emulator", action="store_true", help="run the tests marked gpu, on the emulator instead of a GPU"
    )


def pytest_configure(config):
    if config.getoption("--emulator"):
        _load_emulator()
    # Programs run once, on the CPU: LLVM would optimize for longer than that saves. XLA's own passes stay.
    jax.config.update("jax_disable_most_optimizations", config.getoption("--emulator") or _no_gpu() is not None)


def _load_emulator():
    """Makes the kernels of tests/emulator's build those of the package."""
    build = Path(__file__).parents[1] / "build" / "emulator"
    found = [*build.glob("_kernels*.so")]
    if not found:
        raise pytest.UsageError(f"--emulator: there are no kernels in {build}; run `python tests/emulator/build.py`")
    root = Path(__file__).parents[1]
    sources = [*root.glob("cuda/**/*.*"), *root.glob("tests/emulator/**/*.*"), root / "CMakeLists.txt"]
    compiled = (".cc", ".cu", ".h", ".cuh", ".def", ".txt", ".cmake")
    newest = max((path for path in sources if path.suffix in compiled), key=lambda path: path.stat().st_mtime)
    if newest.stat().st_mtime > found[0].stat().st_mtime:
        raise pytest.UsageError(f"--emulator: {newest} is newer than the kernels; run `python tests/emulator/build.py`")
    os.environ.setdefault("EMU_CHECK", "all")
    os.environ.setdefault("EMU_MAX_REPORTS", "5")
    spec = importlib.util.spec_from_file_location("jax_qmm._kernels", found[0])
    sys.modules["jax_qmm._kernels"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["jax_qmm._kernels"])
    _extension._load.cache_clear()
    _extension._load()


def _no_gpu():
    """Why tests marked `gpu` can't run here, or None."""
    if not _extension._gpus():
        return "no GPU (pytest --emulator runs these tests without one)"
    return _extension.fallback_reason(_extension.platform())


def pytest_collection_modifyitems(config, items):
    emulated, no_gpu, chosen = config.getoption("--emulator"), _no_gpu(), []
    for item in items:
        gpu, own = item.get_closest_marker("gpu"), item.get_closest_marker("emulator")
        if own or (gpu and emulated):
            reason = None if emulated else "a test of the emulator: pytest --emulator"
            reason = reason or (gpu and gpu.kwargs.get("not_emulated"))
        else:
            reason = gpu and no_gpu
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
        if gpu or own or not emulated:
            chosen.append(item)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


@pytest.fixture(autouse=True)
def device(request):
    """Tests marked `gpu` run where the kernels do, all others on the CPU."""
    platform = _extension.platform() if request.node.get_closest_marker("gpu") else "cpu"
    with jax.default_device(jax.devices(platform)[0]):
        yield


@pytest.fixture(autouse=True)
def no_unseen_report(request):
    """Fails a test that the emulator reported on, also where the test never asked for the result that has the error."""
    count = _extension._load()[0].calls_with_reports if request.config.getoption("--emulator") else lambda: 0
    before = count()
    yield
    assert count() == before, "the emulator's reports are in the output above"


@pytest.fixture
def emulated(request):
    """Whether the kernels run on the emulator: for tests that take smaller sizes there."""
    return request.config.getoption("--emulator")


@pytest.fixture
def extension():
    """The extension, whose host code needs no GPU, and whose choices a test may fix; skips where it is not built."""
    kernels, why = _extension._load()
    if kernels is None:
        pytest.skip(why)
    kernels.clear_scaled_mm_tuning()
    yield kernels
    kernels.clear_scaled_mm_tuning()


@pytest.fixture
def on_reference(monkeypatch):
    """Runs a function by the reference on the CPU, also where that is what the kernels run on (--emulator)."""

    def run(f, *args):
        cpu = jax.devices("cpu")[0]
        with monkeypatch.context() as patch, jax.default_device(cpu):
            patch.setattr(_extension, "fallback_reason", lambda *where: "a test asks for the reference")
            return jax.jit(lambda *args: f(*args))(*jax.device_put(args, cpu))

    return run


@pytest.fixture
def gpu(extension):
    """The extension's description of the GPU that tests marked `gpu` run on, or of an H200."""
    return _extension.gpu()


@pytest.fixture
def has_wgmma(gpu, extension):
    if gpu.arch != 90 or "90a" not in extension.architectures():
        pytest.skip("the GPU or the build is without wgmma")


@pytest.fixture
def all_kernels(extension):
    """The extension, of whose kernels for weights in blocks a test may leave some."""
    yield extension
    extension.restrict_block_scaled_mm("")


@pytest.fixture
def h200(hopper):
    """The extension's description of an H200."""
    return hopper("NVIDIA H200")


@pytest.fixture
def h100(hopper):
    """And of an H100."""
    return hopper("NVIDIA H100 80GB HBM3")


@pytest.fixture
def hopper(extension):
    """Describes a GPU of Hopper with 132 SMs by its name."""
    if "90a" not in extension.architectures():
        pytest.skip("the build is without Hopper's kernels")
    return lambda name: extension.Gpu(name, 132, 90)


@pytest.fixture(scope="session")
def stored():
    """The path of a file in benchmarks/h200, by its name; skips in a source distribution, which has none of them."""

    def find(name):
        path = Path(__file__).parents[1] / "benchmarks" / "h200" / name
        if not path.parent.is_dir():
            pytest.skip("source distributions are without the measurements")
        return path

    return find


@pytest.fixture(scope="session")
def load_script():
    """Imports a script that is no part of the package, by its path from the project's root."""

    def load(path):
        path = Path(__file__).parents[1] / path
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="session")
def run_for_h200():
    """Runs Python with these arguments, where it can compile for an H200 (`h200_topology`); gives what it prints."""
    pytest.importorskip("jax_plugins.xla_cuda13", reason="the plugin jax-cuda13-plugin is not installed")

    def run(*arguments):
        own = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "XLA_FLAGS")}
        path = os.pathsep.join([str(Path(__file__).parent / "ops"), *sys.path])
        own |= {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "PYTHONPATH": path}
        done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=300, env=own)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def pytest_collection_finish(session):
    """JAX_QMM_REQUIRE_GPU=1: no run passes because its GPU tests were skipped."""
    required = os.environ.get("JAX_QMM_REQUIRE_GPU") == "1"
    if required and any(item.get_closest_marker("gpu") for item in session.items) and (reason := _no_gpu()):
        raise pytest.UsageError(f"JAX_QMM_REQUIRE_GPU=1, and the tests marked gpu can't run: {reason}")


def pytest_terminal_summary(terminalreporter):
    """A line for each reason to skip: pytest's own have one for each reason and file."""
    reports = terminalreporter.stats.get("skipped", [])
    for reason, count in collections.Counter(report.longrepr[2] for report in reports).most_common():
        terminalreporter.write_line(f"{count} skipped: {reason.removeprefix('Skipped: ')}")
