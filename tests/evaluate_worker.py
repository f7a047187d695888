"""One of two processes that evaluate together: python evaluate_worker.py RANK PORT. Prints its scores."""

import json
import sys
from pathlib import Path

import jax

if __name__ == "__main__":
    rank, port = sys.argv[1:]
    sys.path.append(str(Path(__file__).parent.parent))
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=int(rank))

    from test_evaluators import evaluate_sharded

    print(json.dumps(evaluate_sharded()))
