"""How many threads and which instruction set a process uses, and how its heap behaves."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from offload import _core

LEVELS = _core.simd_levels()


def python(script: str, **env: str) -> subprocess.CompletedProcess[str]:
    variables = {k: v for k, v in os.environ.items() if not k.startswith("OFFLOAD_")} | env
    return subprocess.run([sys.executable, "-c", script], env=variables, text=True, capture_output=True, timeout=120, check=False)


def answer(expression: str, **env: str) -> str:
    done = python(f"from offload import _core\ntry:\n  print({expression})\nexcept ValueError as e:\n  print('ValueError', e)", **env)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_forked_child_makes_threads_of_its_own() -> None:
    script = """
import os, numpy, offload.ops as ops
from offload import _core
def run():
    x = numpy.arange(1 << 20, dtype=numpy.float32); sums = numpy.zeros(256)
    _core.sumsq(x.ctypes.data, 0, x.size, sums.ctypes.data, 4)
    return sums.sum()
want = run()
child = os.fork()
if child == 0:
    os._exit(0 if run() == want else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert python(script).returncode == 0


def test_threads_follow_the_variable_and_the_affinity_and_not_openmp() -> None:
    here = answer("_core.default_threads()")
    assert answer("_core.default_threads()", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1") == here
    assert answer("_core.default_threads()", OFFLOAD_THREADS="7") == "7"
    assert answer("_core.default_threads()", LOCAL_WORLD_SIZE="1") == here
    assert answer("_core.default_threads()", LOCAL_WORLD_SIZE="2") == str(max(1, int(here) // 2))
    assert answer("_core.default_threads()", LOCAL_WORLD_SIZE="1000") == "1"
    for bad in ("0", "-1", "two", "3x", "99999999"):
        assert answer("_core.default_threads()", OFFLOAD_THREADS=bad).startswith("ValueError OFFLOAD_THREADS")
    one = next(iter(os.sched_getaffinity(0)))
    assert answer(f"(__import__('os').sched_setaffinity(0, {{{one}}}), _core.default_threads())[1]") == "1"


def write(path: pathlib.Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_hyperthreads_count_once(tmp_path: pathlib.Path) -> None:
    for cpu in range(8):
        topology = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        write(topology / "core_id", f"{cpu % 2}\n")
        write(topology / "physical_package_id", f"{cpu // 4}\n")
    assert _core.physical_cores(set(range(8)), str(tmp_path)) == 4
    assert _core.physical_cores({0, 2}, str(tmp_path)) == 1
    assert _core.physical_cores({100, 101}, str(tmp_path)) == 2
    assert _core.physical_cores(set(), str(tmp_path)) == 1


def test_clusters_number_their_cores_alike(tmp_path: pathlib.Path) -> None:
    for cpu in range(8):
        topology = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        write(topology / "core_id", f"{cpu % 4}\n")
        write(topology / "cluster_id", f"{cpu // 4}\n")
        write(topology / "physical_package_id", "0\n")
    assert _core.physical_cores(set(range(8)), str(tmp_path)) == 8


def test_cgroup_quotas(tmp_path: pathlib.Path) -> None:
    cgroup = tmp_path / "proc/self/cgroup"
    root = tmp_path / "sys/fs/cgroup"
    assert _core.quota_cpus(str(tmp_path)) == 0
    write(cgroup, "0::/a/b\n")
    write(root / "a/b/cpu.max", "max 100000\n")
    assert _core.quota_cpus(str(tmp_path)) == 0
    write(root / "a/cpu.max", "250000 100000\n")
    assert _core.quota_cpus(str(tmp_path)) == 3
    write(root / "a/b/cpu.max", "50000 100000\n")
    assert _core.quota_cpus(str(tmp_path)) == 1
    write(cgroup, "3:cpu,cpuacct:/docker/x\n2:memory:/docker/x\n")
    write(root / "cpu,cpuacct/cpu.cfs_quota_us", "400000\n")
    write(root / "cpu,cpuacct/cpu.cfs_period_us", "100000\n")
    assert _core.quota_cpus(str(tmp_path)) == 4
    write(root / "cpu,cpuacct/cpu.cfs_quota_us", "-1\n")
    assert _core.quota_cpus(str(tmp_path)) == 0


def test_the_level_follows_the_variable() -> None:
    for level in LEVELS:
        assert answer("_core.simd_level()", OFFLOAD_SIMD=level) == level
    assert answer("_core.simd_level()") == LEVELS[0] and LEVELS[-1] == "scalar"
    said = answer("_core.simd_level()", OFFLOAD_SIMD="sse9")
    assert said.startswith("ValueError OFFLOAD_SIMD") and "sse9" in said and all(level in said for level in LEVELS)
    with pytest.raises(ValueError, match="scalar"):
        _core.sumsq(0, 0, 0, 0, level="mmx")


def test_freed_heap_memory_is_kept_or_given_back() -> None:
    script = """
from offload import _core
import numpy
if not _core.keep_freed(False): raise SystemExit('mallopt refused')
def rss(): return int(open('/proc/self/statm').read().split()[1]) * 4096
def rise(each):
    before = rss()
    blocks = [numpy.ones(each) for _ in range(200)]
    full = rss()
    del blocks
    return full - before, rss() - before
returned = rise(200_000)
_core.keep_freed(True)
kept = rise(200_000)
_core.trim()
trimmed = rss()
again = rise(100_000)
_core.keep_freed(False)
_core.trim()
ok = returned[0] > 250 << 20 and returned[1] < 32 << 20 and kept[1] > 250 << 20 and again[1] > 120 << 20 and rss() - trimmed < 32 << 20
raise SystemExit(0 if ok else f'{returned} {kept} {again}')
"""
    done = python(script)
    assert done.returncode == 0, done.stderr
