"""What this machine offers to flashbob_cupy: an environment report in which every probe is guarded.

No probe needs more than the base install, and none creates a CUDA context.
"""

from __future__ import annotations

import importlib
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from flashbob_cupy.driver import Driver, DriverError, driver
from flashbob_cupy.plan import Device

MINIMUM_NVRTC = (12, 8)


@dataclass(frozen=True, slots=True)
class Probe:
    """One line of the report. `status` is "ok", "absent" (not there, and perhaps not needed) or "broken"."""

    name: str
    status: str
    value: str


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device as the driver describes it."""

    name: str
    memory_bytes: int
    device: Device

    def describe(self) -> str:
        major, minor = self.device.capability
        return (
            f"{self.name}, compute capability {major}.{minor}, {self.memory_bytes / 2**30:.0f} GiB, "
            f"{self.device.multiprocessors} SMs, {self.device.shared_limit / 1024:.0f} KiB shared memory per block"
        )


@dataclass(frozen=True, slots=True)
class Report:
    """Every probe and what follows; `healthy` is False where something that is present does not work."""

    probes: tuple[Probe, ...]
    verdict: str
    fix: str
    gpu_usable: bool
    healthy: bool

    def record(self) -> dict[str, object]:
        return asdict(self)


def gpus() -> tuple[Gpu, ...]:
    """Every device of the driver; none where there is no driver or it does not work, which the report's probe tells."""
    try:
        cuda = driver()
        return tuple(Gpu(*cuda.name_and_memory(index), cuda.device(index)) for index in range(cuda.device_count()))
    except DriverError:
        return ()


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _installed(distribution: str) -> Callable[[], Probe]:
    def probe() -> Probe:
        version = _version(distribution)
        return Probe(distribution, "ok" if version else "absent", version or "not installed")

    return probe


def _python() -> Probe:
    return Probe("python", "ok", f"{platform.python_version()} on {platform.platform()}")


def _package() -> Probe:
    import flashbob_cupy

    return Probe("flashbob_cupy", "ok", f"{flashbob_cupy.__version__} from {Path(flashbob_cupy.__file__).parent}")


def _driver() -> Probe:
    try:
        cuda = driver()
    except DriverError as error:
        # Nothing to load is a machine without a GPU; anything else is a driver that should work and does not.
        return Probe("driver", "absent" if isinstance(error.__cause__, OSError) else "broken", str(error))
    return Probe("driver", "ok", f"supports CUDA {_cuda(cuda)}, {cuda.device_count()} device(s)")


def _cuda(cuda: Driver) -> str:
    return f"{cuda.version // 1000}.{cuda.version % 1000 // 10}"


def _gpu(ordinal: int, gpu: Gpu) -> Callable[[], Probe]:
    return lambda: Probe(f"gpu {ordinal}", "ok", gpu.describe())


def _cupy() -> Probe:
    wheels = [d for d in ("cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x", "cupy") if _version(d) is not None]
    if not wheels:
        return Probe("cupy", "absent", "not installed")
    if len(wheels) > 1:
        return Probe("cupy", "broken", f"{' and '.join(wheels)} overwrite each other: keep one")
    module = importlib.import_module("cupy")
    return Probe("cupy", "ok", f"{wheels[0]} {module.__version__}")


def _cuda_core() -> Probe:
    version = _version("cuda-core")
    if version is None:
        return Probe("cuda-core", "absent", "not installed")
    importlib.import_module("cuda.core")
    return Probe("cuda-core", "ok", f"{version}, cuda-bindings {_version('cuda-bindings')}")


def _nvrtc() -> Probe:
    if _version("cuda-bindings") is None:
        return Probe("nvrtc", "absent", "cuda-bindings is not installed")
    nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    pathfinder = importlib.import_module("cuda.pathfinder")
    path = pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path
    _, major, minor = nvrtc.nvrtcVersion()
    _, architectures = nvrtc.nvrtcGetSupportedArchs()
    if (major, minor) < MINIMUM_NVRTC:
        return Probe(
            "nvrtc", "broken", "{}.{} is too old, {}.{} or later is needed".format(major, minor, *MINIMUM_NVRTC)
        )
    return Probe("nvrtc", "ok", f"{major}.{minor}, architectures {min(architectures)} to {max(architectures)}, {path}")


def _cache() -> Probe:
    from flashbob_cupy import kernels

    folder = kernels.cache_dir()
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    if not os.access(existing, os.W_OK):
        return Probe("kernel cache", "broken", f"{folder} cannot be written")
    count = sum(1 for path in folder.rglob("*") if path.is_file()) if folder.exists() else 0
    return Probe("kernel cache", "ok", f"{folder}, {count} file(s)")


def _record() -> Probe:
    script = Path(__file__).resolve().parent.parent / "tools" / "gpu_run.py"
    if not script.exists():
        return Probe("gpu record", "absent", "not a source tree")
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, timeout=60, check=False)
    lines = (done.stdout + done.stderr).strip().splitlines()
    return Probe("gpu record", "ok" if done.returncode == 0 else "absent", "; ".join(lines))


def _guarded(name: str, probe: Callable[[], Probe]) -> Probe:
    """A probe that raises is a finding, not the end of the report."""
    try:
        return probe()
    except Exception as error:
        text = str(error).strip().splitlines()
        return Probe(name, "broken", f"{type(error).__name__}: {text[0] if text else 'no message'}")


NEEDED_BY_KERNELS = (("cupy", _cupy), ("cuda-core", _cuda_core), ("nvrtc", _nvrtc))


def usable_gpu() -> Gpu | None:
    """Device 0 if kernels can run on it, else None; `examine` says why."""
    found = gpus()
    if not found:
        return None
    probes = {name: _guarded(name, probe) for name, probe in (("driver", _driver), *NEEDED_BY_KERNELS)}
    return found[0] if _judge(probes, found)[2] else None


def examine() -> Report:
    """Run every probe and judge the result."""
    found = gpus()
    table: list[tuple[str, Callable[[], Probe]]] = [
        ("python", _python),
        ("flashbob_cupy", _package),
        *((name, _installed(name)) for name in ("numpy", "ml-dtypes", "torch", "jax")),
        ("driver", _driver),
        *((f"gpu {ordinal}", _gpu(ordinal, gpu)) for ordinal, gpu in enumerate(found)),
        *NEEDED_BY_KERNELS,
        ("kernel cache", _cache),
        ("gpu record", _record),
    ]
    probes = {name: _guarded(name, probe) for name, probe in table}
    verdict, fix, gpu_usable = _judge(probes, found)
    broken = any(probe.status == "broken" for probe in probes.values())
    return Report(tuple(probes.values()), verdict, fix, gpu_usable, not broken and gpu_usable == bool(found))


def _judge(probes: Mapping[str, Probe], found: Sequence[Gpu]) -> tuple[str, str, bool]:
    """The verdict, its fix ("" if nothing is to be done), and whether kernels can run on device 0."""
    cpu = "CPU arrays work; "
    if probes["driver"].status == "broken":
        return cpu + "the NVIDIA driver does not.", f"Repair or update the driver: {probes['driver'].value}.", False
    if not found:
        return cpu + "there is no GPU here.", "", False
    gpu = found[0]
    if not gpu.device.arch:
        return cpu + f"{gpu.name} is older than Ampere (compute capability 8.0).", "Use a newer GPU.", False
    install = f'pip install "flashbob-cupy[{"cu13" if driver().version >= 13000 else "cu12"}]"'
    needed = [probes[name] for name, _ in NEEDED_BY_KERNELS]
    broken = [f"{probe.name} ({probe.value})" for probe in needed if probe.status == "broken"]
    if broken:
        return cpu + f"{gpu.name} is held up by {', '.join(broken)}.", f"In a new virtual environment: {install}", False
    absent = [probe.name for probe in needed if probe.status == "absent"]
    if absent:
        return cpu + f"{gpu.name} waits for {', '.join(absent)}.", install, False
    return f"Ready: {gpu.name} and CPU arrays.", "", True
