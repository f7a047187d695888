"""One of two processes that restore a checkpoint: python restore_worker.py FOLDER. Prints its step.

Each process reads its own copy, FOLDER/<process number>, so that the copies can differ.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parent.parent))
    from swjax.training import distributed

    distributed.start()

    import jax
    from test_checkpoint import state_of

    from swjax.models import sharding
    from swjax.training.config import ConfigError
    from swjax.training.state.checkpoint import Checkpoints, check_shared, lock_workdir

    workdir = Path(sys.argv[1]) / str(jax.process_index())
    distributed.first_does(lambda: lock_workdir(workdir))
    try:
        check_shared(workdir)
    except ConfigError as error:
        print(error)
    rows = jax.NamedSharding(sharding.make_mesh(1, -1), jax.P("fsdp"))
    everywhere = jax.NamedSharding(rows.mesh, jax.P())
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=rows if x.ndim == 2 else everywhere
        ),
        jax.eval_shape(lambda: state_of(0)),
    )
    state, position = Checkpoints(workdir, keep=0).restore(like)
    print("restored", position["batches"], int(state["step"]))
