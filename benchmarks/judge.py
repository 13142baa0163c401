"""Seconds to score one group with a judge that takes a second per answer.

    python -m benchmarks.judge [--samples 16] [--seconds 1] [--rounds 3]

The scorer is that of examples/judge, as a reward worker builds it; the judge is an HTTP server on this machine.
"""

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from reward_servers.scorers import build_scorer
from reward_servers.scorers.base import Place
from volley.records import Prompt
from volley.scoring import PythonScorer

EXAMPLE = Path(__file__).parent.parent / "examples" / "judge"
REPLY = json.dumps({"choices": [{"message": {"content": "Grade: 7"}}]}).encode()


class Judge(BaseHTTPRequestHandler):
    """Grades every answer with 7, after a while."""

    seconds = 1.0

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        time.sleep(self.seconds)
        self.send_response(200)
        self.send_header("Content-Length", str(len(REPLY)))
        self.end_headers()
        self.wfile.write(REPLY)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name in the base class
        """Quiet."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    Judge.seconds = args.seconds
    ThreadingHTTPServer.request_queue_size = args.samples
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ["JUDGE_URL"] = f"http://127.0.0.1:{server.server_port}/v1"
    sys.path.insert(0, str(EXAMPLE))
    with tempfile.TemporaryDirectory() as folder:
        measure(Place(Path(folder)), args.samples, args.rounds)
    server.shutdown()


def measure(place: Place, samples: int, rounds: int) -> None:
    """Print the seconds of ``rounds`` groups of different answers, and of the last group once more."""
    scorer = build_scorer(PythonScorer(target="judge:score", max_concurrent=samples, cache=100_000), place)
    prompt = Prompt("q", "Why?", {})
    scorer.score(prompt, ["starts the process"])
    for number in range(rounds + 1):
        kept = number == rounds
        begun = time.perf_counter()
        verdicts = scorer.score(prompt, [f"{number - kept} {index}" for index in range(samples)])
        seconds = time.perf_counter() - begun
        scored = sum(verdict.reward is not None for verdict in verdicts)
        print(f"{scored} of {samples} samples scored in {seconds:.2f} s{', the same again' if kept else ''}")
    scorer.close()


if __name__ == "__main__":
    main()
