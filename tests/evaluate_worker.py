"""One of several processes of an evaluation: python evaluate_worker.py TENSOR... Prints its scores.

The processes find each other through the environment variables of SLURM's srun.
"""

import json
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parent.parent))
    from swjax.training import distributed

    distributed.start()

    from test_evaluators import evaluate_sharded

    print(json.dumps([evaluate_sharded(int(tensor)) for tensor in sys.argv[1:]]))
