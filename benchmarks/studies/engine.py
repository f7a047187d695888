"""Many small training runs in few compiled programs: data on the device, steps in a scan, runs in a vmap.

The loss and its gradient are those of the trainer (`swjax.training.step.make_loss_and_grad`), as are the
clamp of the logit scale and the mask of the weight decay. Batches are drawn with replacement, and depend only
on the seed. The runs of one program may differ in the fields of `Hyper`.
"""

import functools
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import paired
from flax import nnx
from study import ROOT

from swjax import data
from swjax.models import clip
from swjax.optax import StableAdamWState, rms_by_path, stable_adamw
from swjax.training import config as config_lib
from swjax.training.step import make_loss_and_grad

CONTEXT = 12
CAPTIONS = 8  # per label, at most
CHUNK = 50  # steps per call of the compiled program


class Hyper(NamedTuple):
    """The settings that may differ between runs of a program: numbers, or arrays with one number per run."""

    seed: int = 0
    lr: float = 2e-3
    b2: float = 0.99
    threshold: float = 1.0  # inf: AdamW
    grad_clip: float = np.inf

    def typed(self) -> "Hyper":
        """The same numbers in the dtypes of a compiled program that takes one run."""
        return Hyper(*map(np.float32, self))._replace(seed=np.int32(self.seed))


class Corpus(NamedTuple):
    """Images and their captions.

    Attributes:
      image: uint8 [n, side, side, channels].
      label: int32 [n].
      row: int32 [n], the row of `captions` that holds an image's.
      captions: token ids, int32 [rows, captions, context].
    """

    image: np.ndarray
    label: np.ndarray
    row: np.ndarray
    captions: np.ndarray


@functools.cache
def corpora(name: str, side: int, directory: str) -> tuple[Corpus, Corpus, int]:
    """Loads (train split, test split, size of the vocabulary) of the emoji, or of synthetic data.

    Token ids are renumbered, so that the vocabulary has only the tokens that occur.
    """
    options = {"image_size": side, "classes": 30, "examples": 240} if name == "synthetic" else {}
    splits = [data.source(name, s, data_dir=directory, **options) for s in ("train", "test")]
    loaded = [load(source, side) for source in splits]
    ids = np.unique(np.concatenate([corpus.captions.ravel() for corpus in loaded]))
    renamed = [
        c._replace(captions=np.searchsorted(ids, c.captions).astype(np.int32)) for c in loaded
    ]
    return *renamed, len(ids)  # in the same order: padding is 0, and end of text the largest


def load(source, side: int, context: int = CONTEXT, captions: int = CAPTIONS) -> Corpus:
    """Loads every image of a source; labels with fewer than `captions` captions repeat them."""
    batches = data.loader(
        source, batch_size=64, train=False, image_size=side, context_length=context
    )
    rows = [{k: batch[k][batch["mask"]] for k in ("image", "label")} for batch in batches]
    image, label = (np.concatenate([row[k] for row in rows]) for k in ("image", "label"))
    said = []
    for index in range(len(source.class_names)):
        own = source.captions(index)
        said += [own[i % len(own)] for i in range(captions)]
    tokens = data.tokenize(said, context).reshape(-1, captions, context)
    label = label.astype(np.int32)
    return Corpus(image, label, label, tokens)


def draw(corpus: Corpus, batch: int, key) -> dict:
    """Draws a batch of pairs with replacement."""
    rows_key, caption_key = jax.random.split(jax.random.fold_in(key, 1))
    rows = jax.random.randint(rows_key, (batch,), 0, len(corpus.label))
    which = jax.random.randint(caption_key, (batch,), 0, corpus.captions.shape[1])
    text = corpus.captions[corpus.row[rows], which]
    return {"image": corpus.image[rows], "text": text, "label": corpus.label[rows]}


def kept(
    folder: Path, splits: Iterable[str], load: Callable[[str], Corpus], save: Callable = np.savez
) -> dict[str, Corpus]:
    """Loads the corpora by split; each is stored in a file, which all runs of a machine read."""
    from swjax.data.preparation import lock

    paths = {split: folder / f"{split}.npz" for split in splits}
    with lock(folder.with_suffix(".lock")):  # one process writes; reading needs no lock
        for split, path in paths.items():
            if not path.exists():
                folder.mkdir(parents=True, exist_ok=True)
                part = path.with_suffix(".part.npz")
                save(part, **load(split)._asdict())
                part.rename(path)
    found = {}
    for split, path in paths.items():
        with np.load(path) as arrays:
            found[split] = Corpus(**arrays)
    found["train"] = jax.tree.map(jnp.asarray, found["train"])  # one copy for all trainers
    return found


def model(vision: tuple, text: tuple, *, side: int, patch: int, vocabulary: int, **options):
    """A CLIP; vision and text are (width, layers, heads)."""
    names = ("width", "layers", "heads")
    usual = {"gelu": "tanh", "recipe": "standard", "attention": "xla", "scan_layers": True}
    return clip.config(
        "tiny",
        vision=dict(zip(names, vision, strict=True)) | {"image_size": side, "patch_size": patch},
        text=dict(zip(names, text, strict=True))
        | {"context_length": CONTEXT, "vocab_size": vocabulary},
        embed_dim=vision[0],
        **usual | options,
    )


def adamw(hyper: Hyper, schedule: Callable, decay: float) -> optax.GradientTransformation:
    """StableAdamW, or AdamW if the threshold is infinite.

    Args:
      hyper: settings of the run.
      schedule: step -> learning rate.
      decay: weight decay.
    """

    def b2_at(t):  # the moving average's factor at step t, debiased
        return hyper.b2 * (1 - hyper.b2 ** (t - 1)) / (1 - hyper.b2**t)

    return stable_adamw(
        schedule,
        b2=b2_at,
        weight_decay=decay,
        mask=clip.weight_decay_mask,
        block_axes=clip.block_axes,
        clip_threshold=hyper.threshold,
    )


def rms_of(opt_state) -> dict:
    """RMS of every tensor's update, by name; empty if the optimizer does not keep it."""
    is_stable = lambda node: isinstance(node, StableAdamWState)
    if not any(map(is_stable, jax.tree.leaves(opt_state, is_leaf=is_stable))):
        return {}
    return {f"rms/{path}": rms for path, rms in rms_by_path(opt_state).items()}


@functools.lru_cache(maxsize=1)  # the arms of a seed follow each other
def begin(trainer: "Trainer", hyper: Hyper, steps: int, path: Path | None = None):
    """The state from which the runs of a pair continue, on the host; see `Trainer.begin`.

    Args:
      trainer, hyper, steps: trainer, settings and number of the shared steps.
      path: a file for the result, so that other processes and machines continue from the same state.
    """
    if path is None:
        return trainer.begin(hyper, steps)
    shapes = jax.eval_shape(trainer.init, hyper)
    return paired.stored(path, shapes, lambda: trainer.begin(hyper, steps))


def nudged(params, seed: int):
    """Changes each element of the parameters by one part in a million, up or down."""
    signs = np.random.default_rng(seed)
    return jax.tree.map(
        lambda p: p * (1 + np.float32(2**-20) * signs.choice(np.float32([-1, 1]), p.shape)), params
    )


class Trainer:
    """Runs of one model, batch size and length.

    Args:
      cfg: model configuration.
      corpus: training data.
      steps, warmup: number of steps and of warm-up steps; the rate rises linearly, then falls as a cosine.
      start, end: learning rate of the first and of the last step, relative to the peak.
      batch: pairs per step.
      decay: weight decay.
      together: whether runs share a program in a `jax.vmap`; otherwise they run one after the other.
      optimizer: (hyper, schedule, weight decay) -> the optimizer.
    """

    def __init__(
        self,
        cfg,
        corpus: Corpus,
        *,
        steps,
        warmup,
        batch,
        start=0.02,
        end=0.1,
        decay=0.1,
        together=True,
        optimizer=adamw,
    ):
        self.cfg, self.steps, self.batch, self.decay = cfg, steps, batch, decay
        self.make_optimizer = optimizer
        self.shape = optax.warmup_cosine_decay_schedule(start, 1.0, warmup, steps, end)
        self.corpus = jax.tree.map(jnp.asarray, corpus)
        side = str(cfg.vision.image_size)
        pairs = [("data.image_size", side), ("data.augment.drawings", "true")]
        self.config = config_lib.load(f"{ROOT}/configs/openmoji.py", pairs)
        self.graphdef = nnx.graphdef(nnx.eval_shape(lambda: clip.CLIP(cfg, rngs=nnx.Rngs(0))))
        self.loss_and_grad = make_loss_and_grad(self.config, self.graphdef)
        wrap = jax.vmap if together else lambda f, *_: f
        self.together = together
        self.init = jax.jit(wrap(self._init))
        self.chunk = jax.jit(wrap(self._chunk, (0, 0, None, None)), donate_argnums=0)

    def train(self, hypers: list[Hyper]) -> tuple[dict, list[dict]]:
        """Trains a run for each of the settings.

        Returns:
          The parameters at the end, with a leading axis of runs, and for each run its measurements by name,
          each [steps] or [steps, blocks].
        """
        columns = zip(Hyper._fields, zip(*hypers, strict=True), strict=True)
        stacked = Hyper(
            *(jnp.asarray(x, "int32" if n == "seed" else "float32") for n, x in columns)
        )
        if self.together:
            params, measured = self._train(stacked)
            return params, [{k: v[i] for k, v in measured.items()} for i in range(len(hypers))]
        done = [self._train(jax.tree.map(lambda x, i=i: x[i], stacked)) for i in range(len(hypers))]
        return jax.tree.map(lambda *x: jnp.stack(x), *(p for p, _ in done)), [m for _, m in done]

    def begin(self, hyper: Hyper, steps: int):
        """The parameters and the optimizer's state after `steps` steps, on the host; not with `together`.

        Raises:
          ValueError: the steps are not whole chunks.
        """
        if steps % CHUNK:
            raise ValueError(f"steps must be a multiple of {CHUNK}, got {steps}")
        state, _ = self._advance(self.init(hyper), hyper, 0, steps)
        return jax.device_get(state)

    def resume(self, hyper: Hyper, state, step: int) -> tuple[dict, dict]:
        """Trains from the state that `begin` returned for `step` to the end: (parameters, measurements)."""
        return self._train(hyper, jax.tree.map(jnp.array, state), step)

    def _train(self, hyper, state=None, first=0):
        state = self.init(hyper) if state is None else state
        state, pieces = self._advance(state, hyper, first, self.steps)
        axis = int(self.together)
        joined = {k: np.concatenate([p[k] for p in pieces], axis) for k in pieces[0]}
        return state[0], {
            k: v[:, : self.steps - first] if axis else v[: self.steps - first]
            for k, v in joined.items()
        }

    def _advance(self, state, hyper, first: int, last: int):
        """Trains whole chunks; returns the state and the measurements of each chunk, on the host.

        Prints the loss, so that a run that does not train is visible early.
        """
        began, pieces = time.perf_counter(), []
        for start in range(first, last, CHUNK):
            state, measured = self.chunk(state, hyper, start, self.corpus)
            pieces.append(jax.device_get(measured))
            done = min(start + CHUNK, last)
            # The first line includes the time of compiling.
            if start == first or done == last or done % 200 == 0:
                seconds, loss = time.perf_counter() - began, pieces[-1]["loss"][..., -1].mean()
                print(f"  {done} of {last} steps in {seconds:.0f} s, loss {loss:.3f}", flush=True)
        return state, pieces

    def _init(self, hyper):
        network = clip.CLIP(self.cfg, rngs=nnx.Rngs(jax.random.key(hyper.seed)))
        params = nnx.to_pure_dict(nnx.state(network, nnx.Param))
        return params, self._optimizer(hyper).init(params)

    def _optimizer(self, hyper):
        return self.make_optimizer(hyper, lambda count: hyper.lr * self.shape(count), self.decay)

    def _chunk(self, state, hyper, start, corpus):
        none = jax.tree.map(lambda _: None, state[0])
        optimizer = self._optimizer(hyper)

        def step(state, t):
            params, opt_state = state
            key = jax.random.fold_in(jax.random.key(hyper.seed), t)
            batch = draw(corpus, self.batch, key)
            loss, aux, grads = self.loss_and_grad(params, none, batch, key)
            norm = optax.tree.norm(grads)
            factor = jnp.minimum(1.0, hyper.grad_clip / jnp.maximum(norm, 1e-12))
            grads = jax.tree.map(lambda g: g * factor, grads)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            params = clip.clamp_logit_scale(optax.apply_updates(params, updates))
            features = {k.removeprefix("stability/"): v for k, v in aux.items() if "feature_" in k}
            measured = {"loss": loss, "grad_norm": norm, **features, **rms_of(opt_state)}
            return (params, opt_state), measured

        return jax.lax.scan(step, state, start + jnp.arange(CHUNK))

    def accuracy(self, params, corpus: Corpus) -> list[float]:
        """Zero-shot top-1 of each run, with the first four captions of each label as prompts."""
        one = functools.partial(self._accuracy, corpus=jax.tree.map(jnp.asarray, corpus))
        return np.asarray(jax.jit(lambda p: jax.lax.map(one, p))(params)).tolist()

    def _accuracy(self, params, corpus):
        network = nnx.merge(self.graphdef, params)
        images, _ = network.encode_image(data.preprocess(corpus.image, None, corpus.image.shape[1]))
        prompts = corpus.captions[:, :4]  # the templates of swjax.data.emoji
        texts, _ = network.encode_text(prompts.reshape(-1, prompts.shape[-1]))
        names = jnp.mean(texts.reshape(*prompts.shape[:2], -1), 1)
        names /= jnp.linalg.norm(names, axis=-1, keepdims=True)
        return jnp.mean(jnp.argmax(images @ names.T, -1) == corpus.label)

    def embeddings(self, params, corpus: Corpus) -> tuple[np.ndarray, np.ndarray]:
        """Unit vectors of the images, [n, e], and of the captions, [rows, captions, e]."""
        tokens = corpus.captions.reshape(-1, corpus.captions.shape[-1])
        images = in_parts(lambda part: self._embed_images(params, part), corpus.image)
        texts = in_parts(lambda part: self._embed_texts(params, part), tokens)
        return images, texts.reshape(*corpus.captions.shape[:2], -1)

    @functools.partial(jax.jit, static_argnums=0)
    def _embed_images(self, params, images):
        pixels = data.preprocess(images, None, images.shape[1])
        return nnx.merge(self.graphdef, params).encode_image(pixels)[0]

    @functools.partial(jax.jit, static_argnums=0)
    def _embed_texts(self, params, tokens):
        return nnx.merge(self.graphdef, params).encode_text(tokens)[0]


def in_parts(function: Callable, rows: np.ndarray, size: int = 1024) -> np.ndarray:
    """The function's results for all rows, [n, ...]; each call has `size` rows, so that it compiles once."""
    size = min(size, len(rows))
    parts = [rows[start : start + size] for start in range(0, len(rows), size)]
    padding = [(0, size - len(parts[-1]))] + [(0, 0)] * (rows.ndim - 1)
    results = [function(part) for part in (*parts[:-1], np.pad(parts[-1], padding))]
    return np.concatenate([np.asarray(result) for result in results])[: len(rows)]
