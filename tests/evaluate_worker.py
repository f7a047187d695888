"""One of some processes that evaluate together: python evaluate_worker.py TENSOR... Prints its scores.

They find each other as steps of SLURM, by what its srun sets in the environment.
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
