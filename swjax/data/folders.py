"""Pictures in folders, captioned by a text file next to each picture or by the folder's name."""

import functools
import os
from collections.abc import Iterator
from pathlib import Path

from swjax.data import files
from swjax.data.labelled import TEMPLATES
from swjax.data.photographs import Photographs, Record, texts
from swjax.data.skipping import BadExample

_LARGEST_IMAGE = 2**28  # bytes
_LARGEST_TEXT = 2**20


class Folders(Photographs):
    """The pictures in a folder and its subfolders, in the order of their paths.

    A picture with a text file of the same name, such as `fox.jpg` and `fox.txt`, has the lines of that file
    as captions. Any other picture is captioned by its folder's name, in which "_" stands for a space:
    `red_fox/1.jpg` is "a photo of a red fox." If no picture has a text file, the folders are classes.

    Attributes:
      class_names: names of the folders if they are classes, else ().
      templates: prompts for zero-shot classification if the folders are classes, else ().
    """

    def __init__(self, split: str, *, template: str = TEMPLATES[0]):
        """Lists the pictures.

        Args:
          split: path of the folder.
          template: caption of a picture without a text file, with "{}" for its folder's name.

        Raises:
          ValueError: the folder does not exist or has no pictures, or the template has no "{}".
        """
        self._root, self._template = split, template
        if "{}" not in template:
            raise ValueError(
                f'the template {template!r} has no place for the name: write "{{}}" there'
            )
        if not Path(split).is_dir():
            raise ValueError(f"{split!r} is not a folder: give the folder of the pictures")
        self._pictures = files.below(split, files.PICTURES)
        if not self._pictures:
            raise ValueError(
                f"{split!r} contains no pictures: the endings {', '.join(files.PICTURES)} are read"
            )
        written = {_stem(path): path for path in files.below(split, (".txt",))}
        self._texts = [written.get(_stem(path)) for path in self._pictures]
        names = sorted({_folder_name(path) for path in self._pictures})
        if not any(self._texts) and "" not in names:
            self.class_names, self.templates = tuple(names), (template,)
        self._label = {name: label for label, name in enumerate(self.class_names)}

    def __len__(self) -> int:
        return len(self._pictures)

    def key(self, index: int) -> str:
        """Returns the path of a picture."""
        return os.path.join(self._root, self._pictures[index])

    def outline(self) -> Iterator[str | bytes]:
        """Yields the paths of the files relative to the folder, and the sizes of many."""
        yield self._template
        yield from (text or "no text" for text in self._texts)
        yield from files.outline(self._root, [*self._pictures, *filter(None, self._texts)])

    def record(self, index: int) -> Record:
        """Reads a picture and its captions."""
        return Record(files.read_whole(self.key(index), _LARGEST_IMAGE), self._captions(index))

    def stored(self, index: int) -> dict:
        """Returns image (file contents as bytes), label (its class, or the index) and captions."""
        image, captions = self.record(index)
        label = self._label[_folder_name(self._pictures[index])] if self._label else index
        return {"image": image, "label": label, "captions": captions}

    def captions(self, label: int) -> tuple[str, ...]:
        """Returns the captions of a class, or of a picture."""
        if self._label:
            return (self._template.replace("{}", self.class_names[label]),)
        return self._captions(label)

    def _captions(self, index: int) -> tuple[str, ...]:
        text = self._texts[index]
        if text:
            whole = files.read_whole(os.path.join(self._root, text), _LARGEST_TEXT)
            return texts(whole.splitlines())
        name = _folder_name(self._pictures[index])
        if not name:
            raise BadExample("the picture has neither a text file nor a folder of its own")
        return (self._template.replace("{}", name),)

    def __reduce__(self) -> tuple:
        return functools.partial(Folders, template=self._template), (self._root,)


def _stem(path: str) -> str:
    return os.path.splitext(path)[0]


def _folder_name(path: str) -> str:
    """The name of the folder that contains a picture; "" at the top level.

    >>> _folder_name("animals/red_fox/1.jpg"), _folder_name("1.jpg")
    ('red fox', '')
    """
    return os.path.basename(os.path.dirname(path)).replace("_", " ")
