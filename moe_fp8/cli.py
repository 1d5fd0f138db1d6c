"""`moe-fp8`: plan, build and check the kernels of a model, tune GEMM tiles, and diagnose this machine."""

from __future__ import annotations

import argparse
import json
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moe_fp8 import __version__
from moe_fp8.cli_tune import add_tune_arguments, run_tune
from moe_fp8.doctor import diagnose
from moe_fp8.errors import ConfigError, ToolchainError, UnsupportedError
from moe_fp8.integrations.supported import ENGINES
from moe_fp8.jit.build import BuildReport
from moe_fp8.jit.bundle import Bundle
from moe_fp8.jit.progress import show_time
from moe_fp8.jit.store import KernelStore
from moe_fp8.specs import GEMM_LAYOUTS, KernelSpec
from moe_fp8.warmup.arguments import (
    EXIT_CODES,
    EXIT_FAILED,
    EXIT_OK,
    MODEL_HELP,
    add_build_arguments,
    add_bundle_argument,
    add_model_argument,
    add_plan_arguments,
    add_serving_arguments,
    add_store_arguments,
    batch_invariant_from,
    extra_from,
    model_from,
    num_sms_from,
    options_from,
    plan_from,
    positive,
    run_command,
    store_from,
)
from moe_fp8.warmup.bundle import build_bundle
from moe_fp8.warmup.misses import Difference, Miss, explain_miss
from moe_fp8.warmup.models import read_config
from moe_fp8.warmup.options import every
from moe_fp8.warmup.run import build_plan, demand_kept, missing_kernels

#: Commands that only a source checkout has: package that runs, and help.
_IN_A_CHECKOUT = {
    "bench": ("benchmarks", "time the ops on this GPU; needs a source checkout"),
    "serve": ("server_example", "serve a model with the example server; needs a source checkout"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `moe-fp8` and return the exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    return run_command(lambda: _run(given))


def _run(given: list[str]) -> int:
    if given and given[0] in _IN_A_CHECKOUT:  # such a program parses all its arguments, --help too
        return _run_from_checkout(given[0], given[1:])
    arguments = _parser().parse_args(given)
    command: Callable[[argparse.Namespace], int] = arguments.command
    return command(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moe-fp8",
        description=__doc__,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"moe-fp8 {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(
        name: str, function: Callable[[argparse.Namespace], int], text: str
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name, help=text, description=text, epilog=EXIT_CODES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        sub.set_defaults(command=function)
        sub.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
        return sub

    plan = command("plan", _plan, "show every distinct kernel that a model can launch; compile nothing")
    _add_subject(plan)
    add_plan_arguments(plan)
    add_store_arguments(plan)
    plan.add_argument("--rows", action="store_true", help="also show every use: op, weights, rows, config")

    miss = command("explain", _explain_miss, "tell why a plan lacks a kernel that a frozen server asked for")
    miss.add_argument("kernel", metavar="KERNEL", help="as the error has it: 'name[macro=value,...]'")
    add_model_argument(miss)
    add_serving_arguments(miss)

    build = command("build", _build, "compile every kernel of a model's plan, without a GPU")
    add_model_argument(build)
    add_plan_arguments(build)
    add_store_arguments(build)
    add_build_arguments(build)
    add_bundle_argument(build, "also put the kernels into this bundle; create the folder if needed")
    build.add_argument("--force", action="store_true", help="replace an existing bundle")

    check = command("check", _check, "fail if a kernel of the plan has not been built; compile nothing")
    add_model_argument(check)
    add_plan_arguments(check)
    add_store_arguments(check)
    add_bundle_argument(check, "look only into this bundle")

    doctor = command("doctor", _doctor, "check this machine: driver, GPU, NVRTC, torch, kernel store")
    add_store_arguments(doctor)
    add_bundle_argument(doctor, "look at this bundle (default: $MOE_FP8_BUNDLE)")
    doctor.add_argument(
        "--engine", choices=sorted(ENGINES), default=None,
        help="also check the plug-in for this engine, and tell which kernels will serve its layers",
    )  # fmt: skip

    add_tune_arguments(
        command("tune", _tune, "time GEMM tiles on this GPU and correct its table; see docs/tuning.md")
    )

    for name, (_, text) in _IN_A_CHECKOUT.items():
        commands.add_parser(name, help=text)
    return parser


def _add_subject(parser: argparse.ArgumentParser) -> None:
    """Add the options that name a model or one GEMM."""
    either = parser.add_mutually_exclusive_group(required=True)
    either.add_argument("--model", metavar="PATH", help=MODEL_HELP)
    either.add_argument(
        "--diff", nargs=2, type=Path, metavar=("A", "B"),
        help="compare two plans: files that `moe-fp8 plan --json` wrote",
    )  # fmt: skip
    either.add_argument(
        "--explain", nargs=3, type=positive, metavar=("M", "N", "K"),
        help="show which config this GEMM gets and why; M: rows of A, or of one expert's buffer if masked",
    )  # fmt: skip
    parser.add_argument("--layout", choices=GEMM_LAYOUTS, default=None, help="layout for --explain")
    parser.add_argument("--experts", type=positive, default=None, help="experts for --explain, if grouped")
    parser.add_argument(
        "--expected-m", type=positive, default=None,
        help="expected rows of an expert for --explain, if grouped",
    )  # fmt: skip


#: Options that only `plan --explain` has.
_EXPLAIN = ("layout", "experts", "expected_m")


def _only(arguments: argparse.Namespace, least: Sequence[str], *used: str) -> None:
    """Raise ConfigError for an option that has no effect.

    `least`: the command line with its defaults; `used`: the options that have an effect there.
    """
    defaults = vars(_parser().parse_args(least))
    for name, value in vars(arguments).items():
        if name not in used and value != defaults[name]:
            raise ConfigError(
                f"--{name.replace('_', '-')}", f"to be left out of `{least[0]} {least[1]}`", value
            )


def _plan(arguments: argparse.Namespace) -> int:
    if arguments.explain is not None:
        return _explain(arguments)
    for name in _EXPLAIN:
        if getattr(arguments, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')}", "--explain, which it is for", "no --explain")
    if arguments.diff is not None:
        _only(arguments, ["plan", "--diff", "A", "B"], "diff", "json")
        return _tell(arguments, Difference.of(*(read_config(path) for path in arguments.diff)))
    with show_time("planning"):
        plan = plan_from(arguments)
    keys, cached = _state(plan.specs, arguments)
    if arguments.json:
        _print_json(plan.to_dict(keys, cached))
        return EXIT_OK
    from moe_fp8.warmup.tables import console, plan_table, rows_table  # which need rich

    out = console()
    out.print(plan_table(plan, keys, cached))
    if arguments.rows:
        out.print(rows_table(plan, keys, cached))
    return EXIT_OK


def _explain(arguments: argparse.Namespace) -> int:
    from moe_fp8.warmup.explain import explain, explanation_table
    from moe_fp8.warmup.tables import console

    used = "explain", *_EXPLAIN, "num_sms", "batch_invariant", "cache_dir", "json"
    _only(arguments, ["plan", "--explain", "1", "1", "1"], *used)
    m, n, k = arguments.explain
    sms, invariant = every(num_sms_from(arguments)), every(batch_invariant_from(arguments))
    for name, values in (("--num-sms", sms), ("--batch-invariant", invariant)):
        if len(values) > 1:
            raise ConfigError(name, "one value with --explain", ", ".join(map(str, values)))
    told = explain(
        arguments.layout or "dense",
        m,
        n,
        k,
        arguments.experts or 1,
        arguments.expected_m,
        num_sms=sms[0],
        batch_invariant=invariant[0],
    )
    keys, cached = _state(told.specs, arguments)
    if arguments.json:
        _print_json(told.to_dict(keys, cached))
    else:
        console().print(explanation_table(told, keys, cached))
    return EXIT_OK


def _explain_miss(arguments: argparse.Namespace) -> int:
    model = model_from(arguments.model, arguments)
    with show_time("planning with other options"):
        told = explain_miss(arguments.kernel, model, options_from(arguments), extra_from(arguments))
    return _tell(arguments, told)


def _tell(arguments: argparse.Namespace, told: Miss | Difference) -> int:
    if arguments.json:
        _print_json(told.to_dict())
    else:
        print("\n".join(told.lines()))
    return EXIT_OK


def _state(
    specs: Sequence[KernelSpec], arguments: argparse.Namespace
) -> tuple[dict[KernelSpec, str], set[KernelSpec]] | tuple[None, None]:
    """(keys, built kernels) of `specs`; without a compiler, (None, None) and a note on stderr."""
    try:
        store = store_from(arguments)
        keys = {spec: store.key(spec) for spec in specs}
    except ToolchainError as error:
        print(f"note: no keys are shown: {error}", file=sys.stderr)
        return None, None
    return keys, {spec for spec, key in keys.items() if store.get(key) is not None}


def _build(arguments: argparse.Namespace) -> int:
    if arguments.force and arguments.bundle is None:
        raise ConfigError("--force", "--bundle with the folder to replace", "no --bundle")
    with show_time("planning"):
        plan = plan_from(arguments)
    if not arguments.json:  # before the work, since it needs rich
        from moe_fp8.warmup.tables import build_table, console
    progress = False if arguments.quiet else None
    bundle = None
    store = None
    if arguments.bundle is None:
        store = store_from(arguments)
        report = build_plan(plan, store, jobs=arguments.jobs, progress=progress)
    else:
        report, bundle = build_bundle(
            plan,
            arguments.bundle,
            arguments.cache_dir,
            jobs=arguments.jobs,
            progress=progress,
            force=arguments.force,
        )
    if arguments.json:
        _print_json({**_build_dict(report), "bundle": None if bundle is None else bundle.to_dict()})
    else:
        console().print(build_table(report))
        if bundle is not None:
            print(f"\nbundle {bundle.path}: {bundle.summary()}")
    for row in report.rows:
        if row.spill_bytes:
            print(f"warning: {row.spec} spills {row.spill_bytes} bytes of registers", file=sys.stderr)
    if store is not None:
        demand_kept(report, store)
    return EXIT_OK


def _build_dict(report: BuildReport) -> dict[str, Any]:
    return {
        "compiled": report.compiled,
        "cached": report.cached,
        "seconds": report.seconds,
        "kernels": [
            {
                "kernel": str(row.spec),
                "key": row.key,
                "cached": row.cached,
                "seconds": row.seconds,
                "registers": row.registers,
                "spill_bytes": row.spill_bytes,
                "local_bytes": row.local_bytes,
                "warnings": list(row.warnings),
            }
            for row in report.rows
        ],
    }


def _check(arguments: argparse.Namespace) -> int:
    if arguments.bundle is not None and arguments.cache_dir is not None:
        raise ConfigError("--cache-dir", "to be left out with --bundle", arguments.cache_dir)
    with show_time("planning"):
        plan = plan_from(arguments)
    if arguments.bundle is None:
        store = store_from(arguments)
        places = [f"the bundle {store.bundle.path}"] if store.bundle is not None else []
        root = "no folder, since neither MOE_FP8_CACHE_DIR nor HOME names one"
        place = " or ".join([*places, root if store.root is None else str(store.root)])
        remedy = "run `moe-fp8 build` with the same arguments on this NVRTC version"
    else:
        store = KernelStore(None, bundle=Bundle.open(arguments.bundle))
        place = f"the bundle {arguments.bundle}"
        remedy = "add them by `moe-fp8 build --bundle` with the same arguments"
    with show_time("reading kernels"):
        missing = missing_kernels(plan, store)
    uses = {spec: [row.use for row in plan.rows if row.spec == spec] for spec in missing}
    if arguments.json:
        told = [{"kernel": str(spec), "key": key, "uses": uses[spec]} for spec, key in missing.items()]
        _print_json({"ok": not missing, "kernels": len(plan.specs), "missing": told})
    else:
        for spec, key in missing.items():
            print(f"missing {key} {spec}")
            for use in uses[spec]:
                print(f"        for {use}")
        print(f"{len(plan.specs) - len(missing)} of {len(plan.specs)} kernels are in {place}")
    if missing:
        print(f"error: {remedy}", file=sys.stderr)
    return EXIT_FAILED if missing else EXIT_OK


def _doctor(arguments: argparse.Namespace) -> int:
    findings = diagnose(arguments.cache_dir, arguments.bundle, arguments.engine)
    ok = all(finding.status != "fail" for finding in findings)
    if arguments.json:
        _print_json({"ok": ok, "findings": [finding.to_dict() for finding in findings]})
    else:
        for finding in findings:
            print(f"{finding.status:4}  {finding.name:14}  {finding.detail}")
            if finding.remedy:
                print(f"{'':22}remedy: {finding.remedy}")
    return EXIT_OK if ok else EXIT_FAILED


def _tune(arguments: argparse.Namespace) -> int:
    if arguments.fit or arguments.table:
        _only(arguments, ["tune", "--fit" if arguments.fit else "--table"], "timings", "out")
    return run_tune(arguments)


def _run_from_checkout(command: str, argv: Sequence[str]) -> int:
    """Hand `argv` to `python -m PACKAGE`, where the package lies beside moe_fp8 and not in the wheel.

    The folder is located beside the package: other distributions may install a package of the same name.
    """
    package, _ = _IN_A_CHECKOUT[command]
    checkout = Path(__file__).resolve().parent.parent
    if not all((checkout / part).is_file() for part in (f"{package}/__main__.py", "pyproject.toml")):
        raise UnsupportedError(
            f"{command}: expected a source checkout with {package}/ beside moe_fp8/, got {checkout}: the "
            f"wheel has no {package}; clone the repository, `pip install -e '.[server]'` there and try again"
        )
    sys.path.insert(0, str(checkout))
    sys.argv = [f"moe-fp8 {command}", *argv]
    try:
        runpy.run_module(package, run_name="__main__", alter_sys=True)
    except SystemExit as finished:
        if isinstance(finished.code, str):
            print(finished.code, file=sys.stderr)
            return EXIT_FAILED
        return EXIT_OK if finished.code is None else finished.code
    return EXIT_OK


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, indent=2))


if __name__ == "__main__":
    sys.exit(main())
