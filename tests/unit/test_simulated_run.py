"""The real control plane, with real Redis, recorder and pools, over the benchmark's simulated cluster, in small."""

import json
import subprocess
import sys
from pathlib import Path


def test_a_simulated_run_trains_all_planned_groups_within_the_lag(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.control_plane.simulate", "--actors", "4", "--groups", "80"]
    done = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (measured,) = json.loads((tmp_path / "control_plane.json").read_text())
    assert measured["groups"] == 80
    assert set(measured["lags"]) <= {"0", "1", "2"}
    assert abs(sum(measured["lags"].values()) - 1) < 1e-9
    # A step writes one row of metrics and one timeline, whatever its batch size.
    assert measured["redis_calls"]["xadd"] * measured["groups"] >= 2 * 10
    assert (tmp_path / "control_plane.png").stat().st_size > 0
