"""Small data sets for tests: images in tars, tables and TFDS folders."""

import io
import json
import tarfile

import numpy as np
from PIL import Image


def photograph(number: int, height: int = 40, width: int = 48) -> Image.Image:
    """Returns a smooth image whose colour encodes its number."""
    rng = np.random.default_rng(number)
    coarse = Image.fromarray(rng.integers(0, 256, (5, 6, 3), np.uint8))
    return coarse.resize((width, height), Image.Resampling.BICUBIC)


def jpeg(number: int, **options) -> bytes:
    return encoded(photograph(number), "JPEG", **options)


def encoded(image: Image.Image, file_format: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, file_format, **options)
    return file.getvalue()


def sample(number: int) -> dict[str, bytes]:
    """Returns {extension: bytes} of a sample as img2dataset writes it."""
    caption = f"picture {number}"
    fields = {"caption": caption, "url": f"https://example.com/{number}", "status": "success"}
    return {"jpg": jpeg(number), "txt": caption.encode(), "json": json.dumps(fields).encode()}


def write_tar(path, samples: dict[str, dict[str, bytes]], **options) -> None:
    """Writes {key: {extension: bytes}}."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", **options) as tar:
        for key, files in samples.items():
            for extension, data in files.items():
                add(tar, f"{key}.{extension}", data)


def add(tar: tarfile.TarFile, name: str, data: bytes = b"", **fields) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in fields.items():
        setattr(info, field, value)
    tar.addfile(info, io.BytesIO(data))


def write_tars(folder, counts: list[int], change=lambda number, files: files) -> str:
    """Writes tars with the given numbers of samples; returns the pattern of their paths."""
    number = 0
    for shard, count in enumerate(counts):
        numbers = range(number, number + count)
        samples = {f"{shard:05d}{n:04d}": change(n, sample(n)) for n in numbers}
        write_tar(folder / f"{shard:05d}.tar", samples)
        number += count
    return f"{folder}/{{00000..{len(counts) - 1:05d}}}.tar"


def write_tfds(root, name: str, split: str, features: dict, examples: list[dict]) -> None:
    """Writes a prepared TFDS data set "NAME" or "NAME/CONFIG" of one array_record file, without its code."""
    import tensorflow_datasets as tfds
    from array_record.python.array_record_module import ArrayRecordWriter

    out = root / name / "1.0.0"
    out.mkdir(parents=True)
    name = name.partition("/")[0]
    features = tfds.features.FeaturesDict(features)
    template = tfds.core.ShardedFileTemplate(
        data_dir=out, dataset_name=name, filetype_suffix="array_record"
    )
    serializer = tfds.core.example_serializer.ExampleSerializer(features.get_serialized_info())
    path = out / f"{name}-{split}.array_record-00000-of-00001"
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for example in examples:
        writer.write(serializer.serialize_example(features.encode_example(example)))
    writer.close()
    info = tfds.core.SplitInfo(
        name=split, shard_lengths=[len(examples)], num_bytes=1, filename_template=template
    )
    tfds.folder_dataset.write_metadata(
        data_dir=out, features=features, split_infos=[info], version="1.0.0",
        filename_template=template, check_data=False,
    )  # fmt: skip


def write_coco(root, split: str) -> None:
    """Writes three images with two captions each, with the config and features of TFDS's `coco_captions`."""
    import tensorflow_datasets as tfds

    features = {
        "image": tfds.features.Image(encoding_format="jpeg"),
        "image/filename": tfds.features.Text(),
        "image/id": np.int64,
        "captions": tfds.features.Sequence({"id": np.int64, "text": np.str_}),
    }
    examples = [
        {
            "image": jpeg(i),
            "image/filename": f"{i}.jpg",
            "image/id": i,
            "captions": [{"id": i, "text": f"cat {i}"}, {"id": i + 9, "text": f"pet {i}"}],
        }
        for i in range(3)
    ]
    write_tfds(root, "coco_captions/2014", split, features, examples)
