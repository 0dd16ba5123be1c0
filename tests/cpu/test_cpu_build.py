"""The build of the CPU kernels: what is cached, what is rebuilt, and each way it can fail; and the thread pool."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from pathlib import Path

import psutil
import pytest
from thinned import every

from headrace.kernels.cpu import build, compiler, units
from headrace.kernels.cpu.compiler import BASE_FLAGS, compile_library, file_name, find_compiler, levels, sources_key
from headrace.kernels.cpu.linear import linear
from headrace.kernels.cpu.runtime import threads

REAL_FEATURES = build.cpu_features()
ONE_FUNCTION = 'extern "C" __attribute__((visibility("default"))) int answer() { return 42; }\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of C++ that compiles in a moment, so that failures can be provoked one by one."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "answer.cpp").write_text(ONE_FUNCTION)
    (folder / "other.cpp").write_text("namespace { int unused() { return 1; } }\nint other() { return unused(); }\n")
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path / "cache" / "kernels"


def answer_of(library: build.Library) -> int:
    return int(library.dll.answer())


class Said(logging.Handler):
    """What was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def failure_of(folder: Path) -> str:
    """The reason why `folder` gives no library; checks that it is told exactly once."""
    said = Said()
    build.logger.addHandler(said)
    try:
        first, second = build.attempt("native", folder), build.attempt("native", folder)
    finally:
        build.logger.removeHandler(said)
    assert isinstance(first, str)
    assert first == second
    assert said.lines == [f"The CPU kernels are not used, the torch reference is: {first}"]
    return first


def test_the_second_load_compiles_nothing(folder: Path, cache: Path) -> None:
    first, second = build.build("native", folder), build.build("native", folder)
    assert answer_of(first) == answer_of(second) == 42
    assert first.compiled
    assert not second.compiled
    assert [path.suffix for path in sorted(cache.iterdir())] == [".lock", ".so"]


def test_another_source_level_or_cpu_is_another_library(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [build.library_name(folder, "native"), build.library_name(folder, "portable")]
    (folder / "extra.h").write_text("// a header counts too\n")
    names.append(build.library_name(folder, "native"))
    monkeypatch.setattr(build, "cpu_features", lambda: frozenset({"sse2"}))
    names.append(build.library_name(folder, "native"))
    monkeypatch.setattr(build, "cpu_model", lambda: "model: 1")
    names.append(build.library_name(folder, "native"))
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("compiler", ["/nonexistent", "a folder without one", "broken", "another"])
def test_what_is_in_the_cache_needs_no_compiler(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, compiler: str
) -> None:
    caplog.set_level(logging.INFO)
    kept = build.build("native", folder)
    other = tmp_path / "compiler"
    other.write_text("#!/bin/sh\n" + ("echo 99" if compiler == "another" else "exit 4") + "\n")
    other.chmod(0o755)
    if compiler == "a folder without one":
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        monkeypatch.setenv("CXX", compiler if compiler == "/nonexistent" else str(other))
    again = build.build("native", folder)
    assert (again.path, again.compiled, answer_of(again)) == (kept.path, False, 42)
    assert [record.getMessage() for record in caplog.records] == [f"The CPU kernels of {kept.path} are loaded."]


def test_a_cache_that_cannot_be_written_is_read(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = build.build("native", folder)
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda dir: os.open(dir / "new", os.O_PATH))
    assert build.cache_folder() is None
    monkeypatch.setenv("CXX", "/nonexistent")
    assert build.build("native", folder).path == kept.path


def test_libraries_of_an_image_are_loaded_beside_the_users_cache(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = build.build("native", folder)
    monkeypatch.setattr(build, "SHARED_CACHE", tmp_path / "cache")
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "empty"))
    monkeypatch.setenv("CXX", "/nonexistent")
    assert build.build("native", folder).path == kept.path


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="levels of x86-64")
def test_without_a_compiler_a_library_for_lesser_cpus_is_loaded_and_none_for_greater_ones(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    features = build.cpu_features()
    monkeypatch.setattr(build, "cpu_features", lambda: features | {"avx9"})
    build.build("native", folder)
    monkeypatch.setattr(build, "cpu_features", lambda: features)
    monkeypatch.setenv("CXX", "/nonexistent")
    with pytest.raises(build.BuildError, match=r"CXX='/nonexistent' was not found.* does not fit: .*\.so needs avx9"):
        build.build("native", folder)
    monkeypatch.delenv("CXX")
    portable = build.build("portable", folder)
    monkeypatch.setenv("CXX", "/nonexistent")
    found = build.build("native", folder)
    assert (found.path, answer_of(found)) == (portable.path, 42)
    assert f"The CPU kernels are those of {portable.path}, not for just this CPU, as CXX=" in caplog.text


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="levels of x86-64")
def test_of_a_wheels_libraries_the_one_with_most_of_this_cpus_instructions_is_loaded_and_none_compiled(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever can write an installed library can write this module, so that its folder may belong to anyone."""
    wheel = folder / build.PREBUILT
    wheel.mkdir()
    monkeypatch.setattr(build, "FOLDER", folder)
    names = {}
    for name, level in levels().items():
        if level.in_wheels:
            names[name] = file_name(sources_key(folder, units.CORE), level)
            compile_library(folder, units.CORE, name, wheel / names[name], level.features)
    wheel.chmod(0o777)
    monkeypatch.setenv("CXX", "/nonexistent")
    for expected, lacks in (("avx512", {"avx512_vnni", "avx512_bf16"}), ("avx2", {"avx512f"}), ("", {"avx2"})):
        features = levels()["avx512_bf16"].features - lacks
        monkeypatch.setattr(build, "cpu_features", lambda features=features: features)
        if not expected:
            with pytest.raises(build.BuildError, match="was not found"):
                build.build("native", folder)
        elif features <= REAL_FEATURES:  # else this CPU could not run it
            assert build.build("native", folder).path == str(wheel / names[expected])


def test_what_was_compiled_for_just_this_cpu_goes_before_the_wheels(folder: Path) -> None:
    own = build.build("native", folder)
    (folder / build.PREBUILT).mkdir()
    of_wheel = folder / build.PREBUILT / file_name(sources_key(folder, units.CORE), levels()["portable"])
    compile_library(folder, units.CORE, "portable", of_wheel, frozenset())
    assert build.build("native", folder).path == own.path
    Path(own.path).unlink()
    assert build.build("native", folder).path == str(of_wheel)


def relink(path: Path) -> None:
    open_to_all = path.parents[2] / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    path.rename(open_to_all / "library.so")
    path.symlink_to(open_to_all / "library.so")


OPENED = {
    "the file": lambda path: path.chmod(0o666),
    "its group's file": lambda path: path.chmod(0o664),
    "the folder": lambda path: path.parent.chmod(0o777),
    "a folder above": lambda path: path.parents[1].chmod(0o777),
    "a link to it": relink,
}


@pytest.mark.parametrize("opened", every(4, OPENED))
def test_a_library_that_others_can_have_written_is_not_loaded(
    folder: Path, caplog: pytest.LogCaptureFixture, opened: str
) -> None:
    planted = build.build("native", folder)
    OPENED[opened](Path(planted.path))
    found = build.build("native", folder)
    assert found.compiled, "made anew"
    assert answer_of(found) == 42
    assert "can be written by other users" in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("what", every(3, ["the file", "its folder", "a folder above"]))
def test_a_library_of_another_user_is_not_loaded(folder: Path, caplog: pytest.LogCaptureFixture, what: str) -> None:
    path = Path(build.build("native", folder).path)
    os.chown({"the file": path, "its folder": path.parent, "a folder above": path.parents[1]}[what], 12345, -1)
    assert build.build("native", folder).compiled
    assert "belongs to user 12345" in caplog.text


def test_the_umask_does_not_open_what_is_compiled(folder: Path) -> None:
    before = os.umask(0)
    try:
        path = Path(build.build("native", folder).path)
    finally:
        os.umask(before)
    assert [each.stat().st_mode & 0o022 for each in (path, path.parent, path.parents[1])] == [0, 0, 0]
    assert not build.build("native", folder).compiled


def test_the_libraries_of_an_image_are_compiled_by_a_command(tmp_path: Path) -> None:
    """With a compiler that makes nothing of the sources but a library: compiling them takes minutes."""
    compiler = tmp_path / "compiler"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exec g++ --version\nfor last; do :; done\n'
        'case "$last" in *.so) echo | exec g++ -shared -x c++ - -o "$last";; *) : >"$last";; esac\n'
    )
    compiler.chmod(0o755)
    environment = {**os.environ, "CXX": str(compiler), "HEADRACE_CACHE": str(tmp_path / "image")}
    command = [sys.executable, "-m", "headrace.kernels.cpu.build", "portable"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    names = [build.library_name(build.FOLDER, "portable", part) for part in units.LIBRARIES]
    assert done.stdout.splitlines() == [str(tmp_path / "image" / "kernels" / name) for name in names]


def test_a_cache_from_another_cpu_is_not_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(build, "cpu_model", lambda: "the machine this cache was copied from")
        there = build.build("native", folder)
    here = build.build("native", folder)
    assert here.compiled
    assert here.path != there.path


def test_each_unit_is_in_one_library_but_for_what_all_need() -> None:
    core, packed, grouped = ({unit.name for unit in units.units(build.FOLDER, part)} for part in units.LIBRARIES)
    files = {path.relative_to(build.FOLDER).with_suffix("").as_posix() for path in build.FOLDER.rglob("*.cpp")}
    assert files <= core
    assert core & packed == core & grouped == packed & grouped == {"linear/write", "runtime/team"} <= files
    assert {"floats", "tiles_of_core"} == core - files
    assert {"quant_4", "tiles_of_packed"} <= packed
    assert {"groups_rounded_8", "tiles_of_grouped"} <= grouped


def test_what_the_table_of_units_names_exists() -> None:
    table = tomllib.loads((build.FOLDER / units.TABLE).read_text())
    named = [*(f"{name}.cpp" for kind in ("alone", "unrolled", "in_all") for name in table[kind])]
    named += [row["header"] for row in table["tiles"]]
    assert [name for name in named if not (build.FOLDER / name).is_file()] == []


def test_another_table_or_text_of_a_written_unit_is_another_library(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [build.library_name(folder, "native")]
    row = '[[tiles]]\nlibrary = "core"\nheader = "a.h"\nkernel = "Kernel"\nunits = { a = ["kA"%s] }\n'
    for types in ("", ', "kB"'):
        (folder / units.TABLE).write_text(row % types)
        names.append(build.library_name(folder, "native"))
    monkeypatch.setattr(units, "_TILES", units._TILES + "// more\n")
    names.append(build.library_name(folder, "native"))
    (folder / "room").mkdir()
    (folder / "answer.cpp").rename(folder / "room" / "answer.cpp")
    names.append(build.library_name(folder, "native"))
    assert len(set(names)) == len(names)


def test_packed_weights_alone_need_their_library(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    attempt = build.attempt
    if isinstance(attempt("native", build.FOLDER, units.CORE), str):
        pytest.skip("no compiler")

    def without_packed(level: str, folder: Path, part: str) -> build.Library | str:
        return "the disk is full." if part == units.PACKED else attempt(level, folder, part)

    monkeypatch.setattr(build, "attempt", without_packed)
    weight = torch.randn(8, 32)
    assert torch.allclose(linear.pack(weight).apply(torch.eye(32)), weight.T)
    with pytest.raises(ValueError, match="The weight cannot be packed: the disk is full"):
        linear.pack(linear.quantise(weight, 8))


@pytest.mark.parametrize("damage", every(3, ["truncated", "changed", "emptied"]))
def test_a_damaged_file_is_built_again(folder: Path, damage: str) -> None:
    path = Path(build.build("native", folder).path)
    content = path.read_bytes()
    # Replaced, not written into: this process has the good file mapped.
    path.unlink()
    if damage == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "changed":
        path.write_bytes(content[:5000] + bytes([content[5000] ^ 1]) + content[5001:])
    else:
        path.write_bytes(b"")
    again = build.build("native", folder)
    assert again.compiled
    assert answer_of(again) == 42


def test_a_missing_compiler_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nonexistent/compiler")
    assert failure_of(folder) == "CXX='/nonexistent/compiler' was not found; set CXX to a C++17 compiler or unset it."


def test_no_compiler_at_all_says_what_to_install(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert failure_of(folder).startswith("no C++ compiler was found; install g++ or clang++")


def test_a_compiler_that_fails_is_quoted(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho 'internal compiler error: out of luck' >&2\nexit 4\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert "(status 4): internal compiler error: out of luck" in failure_of(folder)


@pytest.mark.skipif(not any(each.in_wheels for each in levels().values()), reason="wheels have no kernels for this CPU")
def test_a_wheel_takes_the_kernels_that_an_earlier_build_has_kept_and_compiles_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, wheel = tmp_path / "kept", tmp_path / "wheel"
    kept.mkdir()
    first, *rest = compiler.for_wheels()
    for name in (*rest, "cpu-of-other-sources.so"):
        (kept / name).write_bytes(name.encode())
    compiled: list[tuple[str, str, Path]] = []

    def compile_one(folder: Path, part: str, level: str, target: Path, features: frozenset[str]) -> None:
        compiled.append((level, part, target))
        target.write_bytes(first.encode())

    monkeypatch.setattr(sys, "argv", ["compiler", str(wheel), str(kept)])
    monkeypatch.setenv("CXX", "/nonexistent/compiler")
    assert compiler.main() == compiler.EXIT_NO_COMPILER
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(compiler, "compile_library", compile_one)
    assert compiler.main() == 0
    assert compiled == [(*compiler.for_wheels()[first], kept / first)]
    monkeypatch.setenv("CXX", "/nonexistent/compiler")
    assert compiler.main() == 0, "all are kept now"
    assert {path.name: path.read_text() for path in wheel.iterdir()} == {name: name for name in compiler.for_wheels()}


def test_a_source_that_does_not_compile_is_named(folder: Path, cache: Path) -> None:
    (folder / "wrong.cpp").write_text("int wrong() { return undeclared; }\n")
    reason = failure_of(folder)
    assert "failed at compiling answer, other, wrong (status 1)" in reason
    assert "wrong.cpp:1:" in reason
    assert "undeclared" in reason
    assert not list(cache.glob("*.so"))
    assert not list(cache.glob(".build-*"))


def test_a_missing_symbol_fails_at_the_link_and_not_at_the_first_call(folder: Path) -> None:
    (folder / "wrong.cpp").write_text("int missing();\nint wrong() { return missing(); }\n")
    assert "failed at linking" in failure_of(folder)


def test_an_empty_folder_is_an_incomplete_installation(tmp_path: Path) -> None:
    assert "the installation is incomplete" in failure_of(tmp_path / "nothing")


@pytest.mark.parametrize("why", ["a file is in the way", "the folder cannot be written"])
def test_without_a_cache_folder_the_library_is_built_for_this_process(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, why: str
) -> None:
    place = tmp_path / "place"
    if why == "a file is in the way":
        place.write_text("")
    else:
        # No process can create files there, root included.
        place = Path("/proc/self")
    monkeypatch.setenv("HEADRACE_CACHE", str(place))
    assert build.cache_folder() is None
    library = build.build("native", folder)
    assert answer_of(library) == 42
    assert library.compiled
    assert not os.path.exists(library.path)
    (record,) = caplog.records
    assert record.getMessage().startswith("The CPU kernels are compiled at every start")
    assert str(place / "kernels") in record.getMessage()


def test_a_folder_without_write_permission_is_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere; test_without_a_cache_folder covers root")
    (tmp_path / "kernels").mkdir(mode=0o500)
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    assert build.cache_folder() is None


BUILDER = """
import sys
from pathlib import Path
from headrace.kernels.cpu import build
sys.stdin.readline()
library = build.build("native", Path(sys.argv[1]))
print(int(library.compiled), library.dll.answer())
"""


def test_two_processes_building_at_once_both_get_the_library(folder: Path) -> None:
    builders = [
        subprocess.Popen(
            [sys.executable, "-c", BUILDER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    for builder in builders:
        assert builder.stdin is not None
        builder.stdin.write("go\n")
        builder.stdin.flush()
    said = sorted(builder.communicate(timeout=120)[0].strip() for builder in builders)
    assert said == ["0 42", "1 42"]  # the second waited for the first and compiled nothing


def test_a_compiler_ends_with_a_parent_that_is_killed_and_what_it_left_is_swept(
    folder: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, pids = tmp_path / "compiler", tmp_path / "pids"
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exec g++ --version\nsleep 60 &\necho $! >> {pids}\nwait\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    builder = subprocess.Popen([sys.executable, "-c", BUILDER, str(folder)], stdin=subprocess.PIPE, text=True)
    assert builder.stdin is not None
    builder.stdin.write("go\n")
    builder.stdin.flush()
    end_s = time.monotonic() + 60
    while not (pids.exists() and pids.read_text().endswith("\n")):
        assert time.monotonic() < end_s, "the compiler was not started"
        time.sleep(0.01)
    builder.kill()
    builder.communicate()
    started = [psutil.Process(int(pid)) for pid in pids.read_text().split() if psutil.pid_exists(int(pid))]
    _, alive = psutil.wait_procs(started, 60)
    assert not alive, "what the compiler started lives on"
    (left,) = cache.glob(".build-*")
    monkeypatch.delenv("CXX")
    assert answer_of(build.build("native", folder)) == 42
    assert left.exists(), "another may be building there"
    os.utime(left, (0, 0))
    (folder / "other.cpp").write_text("int other() { return 2; }\n")
    assert answer_of(build.build("native", folder)) == 42
    assert not left.exists()


def test_an_unknown_level_lists_the_known_ones(folder: Path) -> None:
    with pytest.raises(build.BuildError, match=r"'avx9' is unknown here; there are native, "):
        build.build("avx9", folder)


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="levels of x86-64")
def test_a_level_beyond_the_cpu_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "cpu_features", lambda: levels()["avx2"].features)
    with pytest.raises(build.BuildError, match=r"this CPU lacks avx512bw, avx512dq, avx512f, avx512vl"):
        build.build("avx512", folder)


OTHER_CPUS = (
    "-march=sandybridge",  # AVX
    "-march=ivybridge",  # and F16C
    "-march=bdver2",  # and FMA
    "-march=haswell -mno-f16c",
    "-march=skylake-avx512 -mno-avx512vl",
    "-march=skylake-avx512",
)


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="CPUs of x86-64")
@pytest.mark.parametrize(
    "cpu",
    [
        "-march=sapphirerapids",
        *(
            pytest.param(cpu, marks=pytest.mark.system)
            for cpu in ("-march=x86-64", "-march=haswell -mno-fma", *OTHER_CPUS)
        ),
    ],
)
def test_the_sources_compile_for_every_mixture_of_features(tmp_path: Path, cpu: str) -> None:
    small = tmp_path / "small.cpp"  # which the build compiles as one, too
    small.write_text("".join(unit.text for unit in units.units(build.FOLDER, units.CORE) if not unit.alone))
    flags = [*BASE_FLAGS, "-I", str(build.FOLDER), "-O0", "-fsyntax-only", *cpu.split()]
    done = subprocess.run([*find_compiler(), *flags, str(small)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


CROSS_COMPILER = "aarch64-linux-gnu-g++"


@pytest.mark.skipif(shutil.which(CROSS_COMPILER) is None, reason=f"{CROSS_COMPILER} is not installed")
@pytest.mark.parametrize("cpu", ["armv8-a", "armv8.2-a+dotprod+fp16", "armv8.6-a+bf16+i8mm"])
def test_the_sources_compile_for_aarch64(tmp_path: Path, cpu: str) -> None:
    source = tmp_path / "unit.cpp"
    flags = [*BASE_FLAGS, "-I", str(build.FOLDER), "-O0", "-Wall", "-Werror", f"-march={cpu}"]
    for unit in {unit for part in units.LIBRARIES for unit in units.units(build.FOLDER, part)}:
        source.write_text(unit.text)
        command = [CROSS_COMPILER, *flags, "-c", str(source)]
        done = subprocess.run([*command, "-o", str(tmp_path / "unit.o")], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_threads_are_bounded_by_affinity_quota_and_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 3, 4, 6})
    monkeypatch.setattr(threads, "one_cpu_per_core", lambda cpus: cpus[::2])  # two hardware threads a core
    monkeypatch.setattr(threads, "cpu_quota", lambda: None)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert threads.plan().num_threads == 2
    assert threads.plan(3).num_threads == 3
    assert threads.plan(9).num_threads == 4
    monkeypatch.setenv("OMP_NUM_THREADS", "1,4")
    assert threads.plan().num_threads == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    assert threads.plan().num_threads == 2
    monkeypatch.setattr(threads, "cpu_quota", lambda: 1.5)
    assert threads.plan(4).num_threads == 2
    monkeypatch.setattr(threads, "cpu_quota", lambda: 0.2)
    assert threads.plan(4).num_threads == 1
    # Pinned to one CPU of each core, and only where they are ours.
    monkeypatch.setattr(threads, "cpu_quota", lambda: None)
    assert threads.plan(2, owned=True).cpus == (1, 4)
    assert threads.plan(2).cpus == ()
    assert threads.plan(4, owned=True).cpus == ()


def test_the_cgroups_quota_is_read(tmp_path: Path) -> None:
    assert threads.cpu_quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert threads.cpu_quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("250000 100000\n")
    assert threads.cpu_quota(tmp_path) == 2.5
    (tmp_path / "cpu.max").unlink()
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    assert threads.cpu_quota(tmp_path) is None
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("50000\n")
    assert threads.cpu_quota(tmp_path) == 0.5


def test_a_cpu_is_claimed_by_one_process_at_a_time(tmp_path: Path) -> None:
    mine = threads.claim_cpus([0, 1], tmp_path)
    assert mine is not None
    # flock belongs to the open file, so a second opening stands for a second process.
    assert threads.claim_cpus([1, 2], tmp_path) is None
    others = threads.claim_cpus([2, 3], tmp_path)
    assert others is not None  # the refused attempt left nothing locked
    for file in mine:
        os.close(file)
    again = threads.claim_cpus([0, 1], tmp_path)
    assert again is not None
    for file in [*again, *others]:
        os.close(file)


@pytest.fixture(scope="module")
def library() -> build.Library:
    found = build.load()
    assert found is not None
    return found


def sum_of(pool: threads.ThreadPool) -> bool:
    """Whether a product over all threads of the pool is right."""
    import torch

    runtime = linear.Runtime(pool.library, pool)
    weight, x = torch.arange(64 * 32.0).view(64, 32) % 5, torch.ones(3, 32)
    return bool(torch.equal(linear.pack(weight, runtime_=runtime).apply(x), x @ weight.T))


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_barriers_hold_with_more_threads_than_cores(
    library: build.Library, num_threads: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(threads, "cpu_quota", lambda: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(num_threads)))
    monkeypatch.setattr(threads, "claim_cpus", lambda cpus, folder=None: None)
    pool = threads.ThreadPool(library, num_threads)
    assert pool.num_threads == num_threads
    pool.run_barriers(500)
    assert sum_of(pool)
    pool.close()


def test_an_idle_pool_uses_no_cpu(library: build.Library) -> None:
    import resource

    pool = threads.ThreadPool(library, 2)
    pool.run_barriers(10)
    done = threading.Event()
    before = resource.getrusage(resource.RUSAGE_SELF)
    done.wait(0.5)  # the time over which use is measured
    after = resource.getrusage(resource.RUSAGE_SELF)
    used_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert used_s < 0.05
    pool.close()


def test_several_callers_share_a_pool(library: build.Library) -> None:
    pool = threads.ThreadPool(library, 2)
    right: list[bool] = []

    def call() -> None:
        right.extend(sum_of(pool) for _ in range(50))

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert right == [True] * 150
    pool.close()


def test_a_forked_child_can_use_the_pool(library: build.Library) -> None:
    pool = threads.ThreadPool(library, 2)
    assert sum_of(pool)
    child = os.fork()
    if child == 0:
        pool.run_barriers(100)
        os._exit(7)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    assert sum_of(pool)
    pool.close()


def test_threads_end_with_the_pool(library: build.Library) -> None:
    before = len(os.listdir("/proc/self/task"))
    pools = [threads.ThreadPool(library, 2) for _ in range(3)]
    assert len(os.listdir("/proc/self/task")) == before + sum(pool.num_threads - 1 for pool in pools)
    for pool in pools:
        pool.close()
    assert len(os.listdir("/proc/self/task")) == before


def test_the_kernels_load_and_export_the_ops(library: build.Library) -> None:
    for name in ("hr_op_linear", "hr_op_pack", "hr_op_embed", "hr_pool_run_op"):
        assert ctypes.cast(getattr(library.dll, name), ctypes.c_void_p).value
