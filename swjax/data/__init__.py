"""Image-text data: sources of examples, batches, tokenized captions and preprocessed pixels."""

from swjax.data.augmentation import Augmentation
from swjax.data.batches import loader
from swjax.data.images import preprocess
from swjax.data.mixture import Mixture
from swjax.data.processes import LostProcess
from swjax.data.skipping import BadData, log_to
from swjax.data.sources import Source, fingerprint, source, templates
from swjax.data.tokenizer import check_tokenizer, tokenize
from swjax.fitting import Fitting

__all__ = [
    "Augmentation",
    "BadData",
    "Fitting",
    "LostProcess",
    "Mixture",
    "Source",
    "check_tokenizer",
    "fingerprint",
    "loader",
    "log_to",
    "preprocess",
    "source",
    "templates",
    "tokenize",
]
