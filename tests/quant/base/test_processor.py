"""The limits of a container are read as the kernel writes them; the trees here are those of real machines, cut down."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quant.base import processor
from quant.calibration import session
from quant.cli.main import COMMANDS

GIB = 1 << 30
V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
    "32 31 0:29 {root} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
)
CGROUP_V1 = "5:memory:{path}\n2:cpu,cpuacct:{path}\n1:name=systemd:/x\n0::/\n"
CALM = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "5000"}
UNLIMITED = "9223372036854771712\n"


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="ascii")
    return root


def test_a_machine_without_control_groups_has_no_limits(tmp_path: Path) -> None:
    root = machine(tmp_path, {"proc/meminfo": "MemTotal: 8000 kB\nMemAvailable:    6000 kB\n"})
    assert processor.quota(root) is None and processor.memory_limit(root) is None
    assert processor.memory_left(root) == 6000 * 1024
    assert processor.memory_left(tmp_path / "nothing") is None


def test_the_tightest_of_nested_groups_counts(tmp_path: Path) -> None:
    """A pod with 2 CPUs and 8 GiB, and in it a container with 4 CPUs and 16 GiB."""
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/kube/pod/box\n",
            "proc/self/mountinfo": V2,
            "proc/meminfo": f"MemAvailable: {64 << 20} kB\n",
            "sys/fs/cgroup/kube/pod/box/cpu.max": "400000 100000\n",
            "sys/fs/cgroup/kube/pod/box/memory.max": f"{16 * GIB}\n",
            "sys/fs/cgroup/kube/pod/box/memory.current": f"{3 * GIB}\n",
            "sys/fs/cgroup/kube/pod/cpu.max": "200000 100000\n",
            "sys/fs/cgroup/kube/pod/memory.max": f"{8 * GIB}\n",
            "sys/fs/cgroup/kube/pod/memory.current": f"{6 * GIB}\n",
            "sys/fs/cgroup/kube/pod/memory.stat": f"anon 1\ninactive_file {2 * GIB}\nactive_file {GIB}\nshmem 5\n",
            "sys/fs/cgroup/kube/cpu.max": "max 100000\n",
            "sys/fs/cgroup/kube/memory.max": "max\n",
        },
    )
    assert processor.quota(root) == 2.0
    assert processor.memory_limit(root) == 8 * GIB
    assert processor.memory_left(root) == 5 * GIB  # of the 6 that the pod holds, 3 are page cache


def test_a_soft_limit_counts_too(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/a\n", "proc/self/mountinfo": V2, "sys/fs/cgroup/a/memory.high": "1000\n"}
    assert processor.memory_limit(machine(tmp_path, files)) == 1000


@pytest.mark.parametrize(
    ("path", "shown", "folder"),
    [
        ("/docker/abc", "/", "docker/abc/"),  # sees the whole tree
        ("/docker/abc", "/docker/abc", ""),  # sees its own part as the top
        ("/docker/abc", "/docker/other", ""),  # a tree that is mounted from elsewhere
        ("/../../abc", "/", ""),  # outside of the namespace of the process
    ],
)
def test_version_one(path: str, shown: str, folder: str, tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": CGROUP_V1.format(path=path),
            "proc/self/mountinfo": V1.format(root=shown),
            f"sys/fs/cgroup/cpu,cpuacct/{folder}cpu.cfs_quota_us": "150000\n",
            f"sys/fs/cgroup/cpu,cpuacct/{folder}cpu.cfs_period_us": "100000\n",
            f"sys/fs/cgroup/memory/{folder}memory.limit_in_bytes": f"{4 * GIB}\n",
            f"sys/fs/cgroup/memory/{folder}memory.usage_in_bytes": f"{2 * GIB}\n",
            f"sys/fs/cgroup/memory/{folder}memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB}\n",
        },
    )
    assert processor.quota(root) == 1.5
    assert processor.memory_limit(root) == 4 * GIB
    assert processor.memory_left(root) == 3 * GIB


def test_version_one_without_limits(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": CGROUP_V1.format(path="/"),
            "proc/self/mountinfo": V1.format(root="/"),
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": UNLIMITED,
        },
    )
    assert processor.quota(root) is None and processor.memory_limit(root) is None


@pytest.mark.parametrize(
    ("given", "allowed", "wanted", "said"),
    [
        ({}, None, CALM, None),
        ({}, 1.5, CALM | {"OMP_NUM_THREADS": "2"}, "2 threads: the quota of this container"),
        ({}, 0.5, CALM | {"OMP_NUM_THREADS": "1"}, "1 thread: the quota of this container"),
        ({}, 7.5, CALM, None),
        ({"OMP_NUM_THREADS": "4"}, 1.5, CALM | {"OMP_NUM_THREADS": "4"}, None),
        ({"OMP_WAIT_POLICY": "active"}, None, {"OMP_WAIT_POLICY": "active"}, None),
        ({"GOMP_SPINCOUNT": "9"}, None, {"GOMP_SPINCOUNT": "9"}, None),
    ],
)
def test_what_the_user_set_stays(
    given: dict[str, str],
    allowed: float | None,
    wanted: dict[str, str],
    said: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processor, "cores", lambda: 8)
    monkeypatch.setattr(processor, "quota", lambda: allowed)
    environment = dict(given)
    found = processor.set_up_threads(environment)
    assert environment == wanted
    assert found is None if said is None else found is not None and found.startswith(said)


@pytest.mark.parametrize(
    ("start", "wanted"), [("quant.cli.doctor_command import doctor_command as c; c", "passive"), ("", "-")]
)
def test_commands_soon_stop_spinning_and_an_import_changes_nothing(start: str, wanted: str) -> None:
    """libgomp reads the variable once, when torch loads it, so that must come after."""
    code = f"import os, sys, quant; from {start}(['--json'], standalone_mode=False)" if start else "import os, quant"
    code += "; print(os.environ.get('OMP_WAIT_POLICY', '-'))"
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("OMP", "GOMP", "KMP"))}
    ran = subprocess.run([sys.executable, "-c", code], env=clean, capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == wanted


def test_no_command_loads_torch_before_it_runs() -> None:
    """Else its threads would be set up too late."""
    modules = sorted({where.partition(":")[0] for where, _ in COMMANDS.values()})
    code = f"import sys, {', '.join(modules)}; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"


def test_the_memory_of_a_run_ends_at_the_limit_of_its_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "memory_left", lambda: 5)
    monkeypatch.setattr(session, "memory_limit", lambda: 8)
    assert [session.Session(memory=allowed).usable_memory() for allowed in (None, 7, 9)] == [5, 7, 8]
    monkeypatch.setattr(session, "memory_limit", lambda: None)
    assert session.Session(memory=9).usable_memory() == 9


def test_the_processor_has_a_name(tmp_path: Path) -> None:
    info = "processor : 0\nmodel name\t: EPYC 7\nflags\t: sse avx2 avx512f\n\nprocessor : 1\nflags : sse\n"
    assert processor.describe_processor(machine(tmp_path, {"proc/cpuinfo": info})) == "EPYC 7, AVX-512"
