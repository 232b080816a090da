"""The `flashbob` command: doctor, check, bench, kernels, cache.

Results go to stdout (with --json as one document), progress and messages to stderr. Exit codes: 0 passed, 1 a check
failed, 2 usage, 3 no usable GPU where one was asked for.
"""

from __future__ import annotations

import importlib
import json
import math
import multiprocessing
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from flashbob_cupy import __version__
from flashbob_cupy.errors import CompileError
from flashbob_cupy.kernels import cache_dir
from flashbob_cupy.plan import SHARED_LIMITS, Specialisation, specialisations

if TYPE_CHECKING:
    from flashbob_cupy.check import Result

FAILED, USAGE, NO_GPU = 1, 2, 3

json_option = click.option("--json", "as_json", is_flag=True, help="Write one JSON document to stdout.")


def message(text: str) -> None:
    click.echo(text, err=True)


def stop(text: str, code: int) -> NoReturn:
    message(f"Error: {text}")
    raise SystemExit(code)


def write_json(document: dict[str, Any]) -> None:
    click.echo(json.dumps(document, indent=1, allow_nan=False))


def write_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Columns as wide as their widest entry: the first to the left, numbers to the right."""
    table = [list(head), *map(list, rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(head))]
    numeric = [all(_is_number(row[column]) for row in table[1:]) for column in range(len(head))]
    for row in table:
        cells = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        )
        click.echo("  ".join(cells).rstrip())


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return text in ("", "-")
    return True


@contextmanager
def progress(length: int, label: str) -> Iterator[Callable[[], None]]:
    """A progress bar on stderr where that is a terminal, else nothing; gives the function that advances it."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    with click.progressbar(length=length, label=label, file=sys.stderr) as bar:
        yield lambda: bar.update(1)


def gpu_or_stop() -> None:
    from flashbob_cupy import doctor

    if doctor.usable_gpu() is None:
        report = doctor.examine()
        stop(f"no usable GPU. {report.verdict} {report.fix}".rstrip(), NO_GPU)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="flashbob")
def main() -> None:
    """Exact attention, its gradient and its double backward: check, measure and inspect."""


@main.command()
@json_option
def doctor(as_json: bool) -> None:
    """Report what this machine offers, with a verdict and its fix.

    Exits with 1 if something that is installed does not work.
    """
    from flashbob_cupy import doctor as environment

    report = environment.examine()
    if as_json:
        write_json(asdict(report))
    else:
        write_table(("what", "state", "found"), ((p.name, p.status, p.value) for p in report.probes))
        click.echo(f"\n{report.verdict}")
        if report.fix:
            click.echo(f"Fix: {report.fix}")
    if not report.healthy:
        raise SystemExit(FAILED)


def _bound(text: str) -> int | None:
    if text.lower() in ("none", "inf"):
        return None
    try:
        return int(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is neither a number of keys nor 'none'") from None


@main.command()
@click.option(
    "--input",
    "path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Check the tensors of a .npz or .safetensors file instead of the grid.",
)
@click.option(
    "--causal/--no-causal", default=None, help="Mask of the file; the default is what the file records, or no."
)
@click.option("--scale", type=float, help="Softmax scale of the file; the default is what it records, or 1/sqrt(D).")
@click.option(
    "--window",
    nargs=2,
    metavar="LEFT RIGHT",
    help="Keys visible to each side of the diagonal in the file; 'none' is unbounded.",
)
@click.option("--layout", type=click.Choice(["bhnd", "bnhd"]), help="Axis order of the file's arrays.")
@click.option(
    "--device",
    type=click.Choice(["all", "cpu", "cuda"]),
    default="all",
    show_default=True,
    help="Where to compute; 'all' is the CPU, and the GPU if there is one.",
)
@json_option
def check(
    path: Path | None,
    causal: bool | None,
    scale: float | None,
    window: tuple[str, str] | None,
    layout: str | None,
    device: str,
    as_json: bool,
) -> None:
    """Check results against float64, on every engine present.

    Without --input, a grid of problems is checked. With it, the file's tensors q, k, v, do, uq, uk, uv are: the
    library's results on them, and the file's own o, lse, dq, dk, dv, gq, gk, gv, gdo where it holds them. An error
    is relative, in the L2 norm; its budget is twice that of the same formulae in plain array code, and one rounding.
    """
    from flashbob_cupy import check as checks

    options = {
        "causal": causal,
        "scale": scale,
        "window": None if window is None else (_bound(window[0]), _bound(window[1])),
        "layout": layout,
    }
    if path is None and any(value is not None for value in options.values()):
        raise click.UsageError("--causal, --scale, --window and --layout describe a file: give --input FILE")
    if device == "cuda":
        gpu_or_stop()
    engines = checks.engines(device)
    try:
        if path is not None:
            file = checks.read_file(path, **options)
            if file.ignored:
                message(f"Not judged: {', '.join(file.ignored)}")
            subject = file.describe()
            results = list(checks.run_file(file, engines))
        else:
            cases = checks.grid()
            subject = f"{len(cases)} problems"
            results = _run_grid(cases, engines)
    except (checks.InputError, ValueError, TypeError) as error:
        stop(str(error), USAGE)
    failures = [result for result in results if not result.ok]
    if as_json:
        document = {"version": __version__, "subject": subject, "passed": not failures}
        # JSON has no infinity, which is the error of a result that holds NaN.
        rows = ({name: _finite(value) for name, value in asdict(result).items()} for result in results)
        write_json(document | {"results": list(rows)})
    else:
        click.echo(subject)
        _write_results(results if path else _worst(results))
        for result in failures if path is None else ():
            message(
                f"{result.source}, {result.output}: error {result.error:.2e} > {result.budget:.2e}: {result.problem}"
            )
        click.echo(f"{len(results) - len(failures)} of {len(results)} results within budget")
    if failures:
        raise SystemExit(FAILED)


def _run_grid(cases: Sequence[Any], engines: Sequence[Any]) -> list[Result]:
    from flashbob_cupy import check as checks

    results: list[Result] = []
    with progress(len(cases), "checking") as advance:
        for number, case in enumerate(cases):
            results += checks.run_case(case, number, engines)
            advance()
    return results


def _worst(results: Iterable[Result]) -> list[Result]:
    """The result nearest to its budget, or furthest over it, for each source and output."""
    worst: dict[tuple[str, str], Result] = {}
    for result in results:
        key = (result.source, result.output)
        if key not in worst or (not result.ok, result.ratio) > (not worst[key].ok, worst[key].ratio):
            worst[key] = result
    return list(worst.values())


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _write_results(results: Iterable[Result]) -> None:
    rows = (
        (r.source, r.op, r.output, f"{r.error:.2e}", f"{r.budget:.2e}", f"{r.ratio:.2f}", "ok" if r.ok else "FAILED")
        for r in results
    )
    write_table(("computed by", "op", "output", "error", "budget", "ratio", ""), rows)


@main.command()
@click.option("--op", "ops", type=click.Choice(["forward", "backward", "bob", "jvp", "step"]), multiple=True)
@click.option("--length", "-n", "lengths", type=click.IntRange(1), multiple=True, help="Rows of q, k and v.")
@click.option("--dim", "-d", type=click.IntRange(1), default=64, show_default=True, help="Head dimension.")
@click.option("--heads", type=click.IntRange(1), default=8, show_default=True)
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True)
@click.option(
    "--dtype", type=click.Choice(["float16", "bfloat16", "float32", "float64"]), help="Default: what the device is for."
)
@click.option("--causal/--no-causal", default=True, show_default=True)
@click.option("--deterministic", is_flag=True)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Default: the GPU if there is one.")
@json_option
def bench(
    ops: tuple[str, ...],
    lengths: tuple[int, ...],
    dim: int,
    heads: int,
    batch: int,
    dtype: str | None,
    causal: bool,
    deterministic: bool,
    device: str | None,
    as_json: bool,
) -> None:
    """Measure speed and memory, beside the implementations of PyTorch where it is installed.

    'step' is forward, backward and double backward through PyTorch's autograd. Peak memory is what a call takes
    beyond its inputs. TFLOP/s counts the matrix products that a call executes.
    """
    from flashbob_cupy import bench as benchmark
    from flashbob_cupy import doctor as environment

    if device == "cuda":
        gpu_or_stop()
    if device is None:
        device = "cpu" if environment.usable_gpu() is None else "cuda"
    dtype = dtype or ("bfloat16" if device == "cuda" else "float32")
    records = []
    for length in lengths or ((1024, 4096) if device == "cuda" else (512, 1024)):
        for op in ops or ("forward", "backward", "bob", "jvp"):
            case = benchmark.Case(op, batch, heads, heads, length, length, dim, dim, dtype, causal, deterministic)
            own = benchmark.families(case)[:1] if device == "cuda" else ["blocked"]
            for impl in [*own, *benchmark.peers(case, device)]:
                try:
                    on_gpu = device == "cuda"
                    found = benchmark.measure(case, impl, device) if on_gpu else benchmark.measure_apart(case, impl)
                    records.append(found)
                except (RuntimeError, NotImplementedError, MemoryError, ImportError) as error:
                    message(f"{impl} {op} N={length}: {(str(error) or type(error).__name__).splitlines()[0]}")
    if as_json:
        write_json({"version": __version__, "device": device, "measurements": records})
        return
    click.echo(f"{device}, B={batch} H={heads} D={dim} {dtype}, {'causal' if causal else 'not causal'}")
    fields = ("op", "impl", "N", "ms", "tflops", "host_us", "peak_mib")
    write_table(fields, ([("-" if r[f] is None else str(r[f])) for f in fields] for r in records))


@main.group()
def kernels() -> None:
    """List the CUDA kernels, and compile them ahead of time; no GPU is needed."""


arch_option = click.option(
    "--arch",
    "archs",
    type=click.Choice(list(SHARED_LIMITS)),
    multiple=True,
    help="An architecture; may be repeated. The default is all of them.",
)


@kernels.command("list")
@arch_option
@json_option
def list_kernels(archs: tuple[str, ...], as_json: bool) -> None:
    """List the specialisations that are compiled ahead of time; others are compiled when first used."""
    rows = [{"arch": arch, "kernel": str(spec)} for arch in archs or SHARED_LIMITS for spec in specialisations(arch)]
    if as_json:
        write_json({"version": __version__, "kernels": rows})
    else:
        write_table(("arch", "kernel"), ((row["arch"], row["kernel"]) for row in rows))


@kernels.command("compile")
@arch_option
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True, help="Processes to compile in.")
@click.option("--no-cache", is_flag=True, help="Compile again what is in the disk cache, and keep nothing.")
@json_option
def compile_kernels(archs: tuple[str, ...], jobs: int, no_cache: bool, as_json: bool) -> None:
    """Compile kernels into the disk cache; report registers, spills and shared memory.

    Exits with 1 if a kernel does not compile, spills registers, uses local memory or has a warning of the compiler. A
    kernel found in the cache has no report: see --no-cache.
    """
    try:
        importlib.import_module("cuda.core")
    except ImportError:
        stop("compiling needs cuda-core and NVRTC: pip install flashbob-cupy[cu13], or [cu12]", FAILED)
    work = [(spec, arch, not no_cache) for arch in archs or SHARED_LIMITS for spec in specialisations(arch)]
    rows = []
    with ExitStack() as stack:
        results: Iterable[dict[str, Any]] = map(_compile, work)
        if jobs > 1:
            # Workers start from nothing: a fork of this process would share the state of the compiler library.
            pool = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))
            results = stack.enter_context(pool).map(_compile, work)
        with progress(len(work), "compiling") as advance:
            for row in results:
                rows.append(row)
                advance()
    failures = [row for row in rows if row["problem"]]
    if as_json:
        write_json({"version": __version__, "passed": not failures, "kernels": rows})
    else:
        fields = ("arch", "registers", "spill_bytes", "stack_bytes", "shared_bytes", "state", "kernel")
        write_table(fields, (["-" if row[field] is None else str(row[field]) for field in fields] for row in rows))
        click.echo(f"{len(rows) - len(failures)} of {len(rows)} kernels compiled, with no spill and no warning")
    for row in failures:
        message(f"{row['arch']} {row['kernel']}: {row['problem']}")
    if failures:
        raise SystemExit(FAILED)


def _compile(work: tuple[Specialisation, str, bool]) -> dict[str, Any]:
    """One row of the report; `problem` is empty if the kernel is as it should be."""
    from flashbob_cupy import kernels as library

    spec, arch, cached = work
    row: dict[str, Any] = {"arch": arch, "kernel": str(spec), "registers": None, "spill_bytes": None}
    row |= {"stack_bytes": None, "shared_bytes": spec.shared_bytes, "state": "cached", "problem": ""}
    try:
        found = library.compile(spec, arch, cached=cached).resources
    except CompileError as error:
        return row | {"state": "FAILED", "problem": str(error)}
    if found is None:
        return row
    problems = [f"{found.spill_bytes} bytes spilled"] if found.spill_bytes else []
    problems += [f"{found.stack_bytes} bytes of local memory"] if found.stack_bytes else []
    row |= {name: getattr(found, name) for name in ("registers", "spill_bytes", "stack_bytes")}
    problem = "; ".join([*problems, *found.warnings])
    return row | {"state": "FAILED" if problem else "compiled", "problem": problem}


@main.group()
def cache() -> None:
    """Show or clear the disk cache of compiled kernels."""


@cache.command("path")
def cache_path() -> None:
    """Print the folder of the cache."""
    click.echo(cache_dir())


@cache.command("info")
@json_option
def cache_info(as_json: bool) -> None:
    """Show the folder of the cache, and how much it holds."""
    files = [path.stat().st_size for path in cache_dir().rglob("*") if path.is_file()]
    document = {"path": str(cache_dir()), "files": len(files), "bytes": sum(files)}
    if as_json:
        write_json(document)
    else:
        click.echo(f"{document['path']}: {len(files)} files, {sum(files) / 2**20:.1f} MiB")


@cache.command("clear")
def cache_clear() -> None:
    """Remove every compiled kernel from the cache."""
    folder = cache_dir()
    if not folder.exists():
        click.echo(f"{folder} does not exist")
        return
    try:
        from cuda.core.utils import FileStreamProgramCache
    except ImportError:
        stop(f"the cache is written and cleared by cuda-core, which is not installed. Remove {folder} by hand", FAILED)
    # Only what cuda-core wrote is removed: FLASHBOB_CACHE_DIR may name a folder that holds other files.
    with FileStreamProgramCache(folder) as stored:
        stored.clear()
    click.echo(f"{folder} is empty")
