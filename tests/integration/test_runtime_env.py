"""Code that only a job's runtime environment contains, run by a real reward worker on a real Ray cluster."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

# A separate process, because Ray ties a runtime environment to a connection, and the other tests share one.
SCORE = """
import asyncio, sys
from pathlib import Path

import ray

from reward_servers.pool import RewardConfig, RewardPool
from services.stack.ray import ray_cluster
from services.jobs.needs import Needs
from services.jobs.runtime_env import for_ray
from tests.integration.test_reward_pool import group
from volley.job import RewardWorkersSpec
from volley.records import Prompt
from volley.runtime_env import RuntimeEnvSpec
from volley.scoring import PythonScorer

folder = Path(sys.argv[1])


async def main() -> None:
    config = RewardConfig(PythonScorer(target="shipped_rewards:score"), RewardWorkersSpec(), folder / "logs")
    pool = await RewardPool.start(config)
    scores = await pool.score(ray.put(group(("aaa", "a"))), Prompt("p", ""))
    await pool.stop()
    print([verdict.detail or verdict.reward for verdict in scores.verdicts])


shipped = RuntimeEnvSpec(working_dir=str(folder / "code"), env_vars={"POINTS_A_LETTER": "0.25"})
with ray_cluster(Needs(1, 0, 0, 256 << 20), runtime_env=for_ray(shipped)):
    try:
        import shipped_rewards
    except ImportError:
        asyncio.run(main())
"""


def test_a_scorer_is_shipped_with_its_environment(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "shipped_rewards.py").write_text(
        "import os\n\ndef score(sample, row):\n    return len(sample) * float(os.environ['POINTS_A_LETTER'])\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-c", SCORE, str(tmp_path)],
        capture_output=True,
        text=True,
        env={**environment, "PYTHONPATH": str(Path.cwd())},
        timeout=300,
        check=False,
    )
    assert done.stdout.strip() == "[0.75, 0.25]", done.stderr
