"""Pictures in folders, captioned by text files, by a table of metadata or by the folders' names."""

import functools
import itertools
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from swjax.data import files
from swjax.data.index import checked_size_and_version
from swjax.data.labelled import NAMES, PROMPTS, TEMPLATES
from swjax.data.photographs import Photographs, Record, field, texts
from swjax.data.skipping import BadExample
from swjax.data.table import TEXTS, Layout
from swjax.safe_files import is_inside

_LARGEST_TEXT = 2**20
_LARGEST_METADATA = 2**30
_METADATA = ("metadata.jsonl", "metadata.csv")  # of the imagefolder of Hugging Face
# Text files that are about the whole folder.
_ABOUT = (NAMES, PROMPTS, "readme.txt", "license.txt", "licence.txt", "requirements.txt")
_NO_CAPTIONS = "labels"  # a folder of boxes, as YOLO writes them
_FEW = 3  # so many text files without a picture are said, not refused


class Folders(Photographs):
    """The pictures in a folder and its subfolders, in the order of their paths.

    The lines of a picture's text file are its captions. The text file of `images/fox.jpg` is
    `images/fox.txt`, `images/fox.jpg.txt`, or `fox.txt` in a folder without pictures next to `images`, such
    as `captions/fox.txt`. If the folder has a file `metadata.jsonl` or `metadata.csv`, as the imagefolder of
    Hugging Face, that file has the captions: its columns are `file_name` and `text`, `caption` or `title`,
    and several rows of a picture are several captions.
    Any other picture is captioned by its folder's name, in which "_" stands for a space: `red_fox/1.jpg` is
    "a photo of a red fox." If no picture has a text file, the folders are classes.

    Links are followed, but a text file that a link finds outside the folder is read only if it belongs to the
    picture: the picture is outside too, and the real text file has the ending .txt, and is in the same
    folder as the real picture, or has its name in a folder next to it. The links of a Hugging Face cache to
    its `blobs` are followed.

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
          ValueError: the folder does not exist or has no pictures, the template has no "{}", most text files
            match no picture, a picture has two text files, or the metadata cannot be read.
        """
        self._root, self._template = split, template
        if "{}" not in template:
            raise ValueError(
                f'the template {template!r} has no place for the name: write "{{}}" there'
            )
        if not Path(split).is_dir():
            raise ValueError(f"{split!r} is not a folder: give the folder of the pictures")
        paths = files.below(split, ("",))
        self._pictures = [path for path in paths if path.lower().endswith(files.PICTURES)]
        tables = [path for path in paths if os.path.basename(path).lower() in _METADATA]
        self._captioned = self._read_metadata(tables)
        written = [path for path in paths if path.lower().endswith(".txt") and not self._captioned]
        tables = tables if self._captioned else []
        other = files.not_read(sorted(set(paths) - {*self._pictures, *written, *tables}))
        if not self._pictures:
            raise ValueError(
                f"{split!r} contains no pictures: the endings {', '.join(files.PICTURES)} are read"
                + f"; {other}" * bool(other)
            )
        found = text_files(self._pictures, written)
        self._texts = [found.get(path) for path in self._pictures]
        unmatched = {*written} - {*found.values()}
        unmatched = {path for path in unmatched if os.path.basename(path).lower() not in _ABOUT}
        if len(unmatched) > max(len(found), len(self._pictures) // 2, _FEW):
            raise ValueError(
                f"{len(unmatched)} of {len(written)} text files in {split!r} match no picture, such as "
                f"{min(unmatched)!r}: name each as its picture, next to it or in a folder next to the "
                "picture's, or remove them"
            )
        note = (
            f"{len(unmatched)} text files match no picture, such as {min(unmatched, default='')!r}"
        )
        self.notes = tuple(filter(None, (other, note * bool(unmatched), self._unnamed())))
        names = sorted({_folder_name(path) for path in self._pictures})
        if not any(self._texts) and not self._captioned and "" not in names:
            self.class_names, self.templates = tuple(names), (template,)
        self._label = {name: label for label, name in enumerate(self.class_names)}

    def __len__(self) -> int:
        return len(self._pictures)

    def key(self, index: int) -> str:
        """Returns the path of a picture."""
        return os.path.join(self._root, self._pictures[index])

    def outline(self) -> Iterator[str | bytes]:
        """Yields the paths of the files relative to the folder, the sizes of many, and the metadata."""
        yield self._template
        yield from (text or "no text" for text in self._texts)
        yield from (f"{path} {value!r}" for path, value in sorted(self._captioned.items()))
        yield from files.outline(self._root, [*self._pictures, *filter(None, self._texts)])

    def record(self, index: int) -> Record:
        """Reads a picture and its captions."""
        return Record(files.read_whole(self.key(index)), self._captions(index))

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
        picture, text = self._pictures[index], self._texts[index]
        if self._captioned:
            if picture not in self._captioned:
                raise BadExample("the metadata have no row for the picture")
            return texts(self._captioned[picture])
        if text:
            path = os.path.join(self._root, text)
            if not _lies_with(path, self.key(index), self._root):
                raise BadExample("its text file is a link out of the folder: copy the file there")
            return texts(files.read_whole(path, _LARGEST_TEXT).splitlines())
        name = _folder_name(picture)
        if not name:
            raise BadExample("the picture has neither a text file nor a folder of its own")
        return (self._template.replace("{}", name),)

    def _read_metadata(self, paths: list[str]) -> dict[str, Any]:
        """Returns {picture: its text, of any type} from tables; {} if they have no text."""
        found: dict[str, Any] = {}
        for path in paths:
            whole = os.path.join(self._root, path)
            if not files.belongs(whole, self._root):
                raise ValueError(f"{whole} is a link out of the folder: copy the file there")
            size, _ = checked_size_and_version(whole)
            if size > _LARGEST_METADATA:
                raise ValueError(f"{whole} is larger than {_LARGEST_METADATA} bytes: use a table")
            files.close_all()  # the file may have been replaced since it was read last
            layout = Layout(whole, size)
            bounds = layout.scan(size).bounds.tolist()[1 if layout.columns else 0 :]
            for start, stop in itertools.pairwise(bounds):
                try:
                    row = layout.row(files.read(whole, start, stop))
                    name = str(field(row, "file_name;image")).replace("\\", "/")
                    value = field(row, TEXTS)
                except BadExample:
                    continue  # the picture of the row is counted as bad
                name = os.path.normpath(os.path.join(os.path.dirname(path), name))
                found[name] = [*_list(found[name]), *_list(value)] if name in found else value
        if found and not found.keys() & set(self._pictures) and self._pictures:
            raise ValueError(
                f"{os.path.join(self._root, paths[0])} names no picture of the folder, but "
                f"{min(found)!r}: write the pictures' paths relative to it into file_name"
            )
        return found

    def _unnamed(self) -> str:
        """A line about the rows of the metadata whose picture does not exist."""
        missing = self._captioned.keys() - set(self._pictures)
        if not missing:
            return ""
        return f"{len(missing)} rows of the metadata have no picture, such as {min(missing)!r}"

    def __reduce__(self) -> tuple:
        return functools.partial(Folders, template=self._template), (self._root,)


def text_files(pictures: Iterable[str], written: Iterable[str]) -> dict[str, str]:
    """Returns the text file of each picture that has one; see `Folders` for their names.

    Raises:
      ValueError: a picture has several text files, or a text file in another folder fits several pictures.

    >>> text_files(["a/1.jpg", "b/images/0.png"], ["a/1.jpg.txt", "b/texts/0.txt", "readme.txt"])
    {'a/1.jpg': 'a/1.jpg.txt', 'b/images/0.png': 'b/texts/0.txt'}
    """
    pictures = list(pictures)
    by_stem = {_stem(path): path for path in written}
    found: dict[str, str] = {}
    for picture in pictures:
        text = by_stem.get(picture) or by_stem.get(_stem(picture))
        if text:
            found[picture] = text
    filled = {os.path.dirname(picture) for picture in pictures}
    apart = defaultdict[tuple, set[str]](set)  # files in folders without pictures, by place
    for text in set(by_stem.values()) - set(found.values()):
        if os.path.dirname(text) not in filled:
            stem = _stem(text)
            short = _stem(stem) if stem.lower().endswith(files.PICTURES) else stem
            for place in (*_places(stem), *_places(short)):
                apart[place].add(text)
    owner: dict[str, str] = {}
    for picture in pictures if apart else ():
        fitting = sorted({t for place in _places(_stem(picture)) for t in apart.get(place, ())})
        if picture in found or not fitting:
            continue
        text = fitting[0]
        other = owner.setdefault(text, picture)
        if len(fitting) > 1 or _stem(other) != _stem(picture):
            owners = f"{picture!r} has" if len(fitting) > 1 else f"{other!r} and {picture!r} have"
            raise ValueError(
                f"{owners} {' and '.join(map(repr, fitting[:2]))} as text files: keep one for each "
                "picture, next to it"
            )
        found[picture] = text
    return found


def _list(value: Any) -> list:
    return value if isinstance(value, list) else [value]


def _places(stem: str) -> Iterator[tuple]:
    """The path without one of its folders: equal for files of one name in sibling folders."""
    *folders, name = stem.split("/")
    for i, folder in enumerate(folders):
        if folder.lower() != _NO_CAPTIONS:
            yield i, *folders[:i], *folders[i + 1 :], name


def _lies_with(text: str, picture: str, root: str) -> bool:
    """Whether a picture's text file may be read, see `Folders`."""
    if not os.path.islink(text) and _is_inside(os.path.dirname(text), root):
        return True
    if files.belongs(text, root):
        return True
    text, picture = os.path.realpath(text), os.path.realpath(picture)
    if files.belongs(picture, root) or not text.lower().endswith(".txt"):
        return False
    folder, other = os.path.dirname(picture), os.path.dirname(text)
    beside = os.path.dirname(folder) == os.path.dirname(other)
    return folder == other or (beside and _name(text) == _name(picture))


# Resolving the links of a path takes a call to the system per folder, for each example.
_is_inside = functools.lru_cache(1024)(is_inside)


def _name(path: str) -> str:
    return os.path.basename(_stem(path))


def _stem(path: str) -> str:
    return os.path.splitext(path)[0]


def _folder_name(path: str) -> str:
    """The name of the folder that contains a picture; "" at the top level.

    >>> _folder_name("animals/red_fox/1.jpg"), _folder_name("1.jpg")
    ('red fox', '')
    """
    return os.path.basename(os.path.dirname(path)).replace("_", " ")
