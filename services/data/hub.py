"""Reads Hugging Face data sets with the ``datasets`` library: hub names, saved folders, folders of data files."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from services.data.generated import read_generated
from services.data.readers import Bad, Row, is_plain, plain, read_file
from volley.data import FormatName, SourceSpec
from volley.errors import HostError, JobError
from volley.plugins import DATA, ReaderPlugin, plugin_of, resolved

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

FORMATS: tuple[str, ...] = get_args(FormatName)
SAVED = ("dataset_dict.json", "dataset_info.json", "state.json")  # files that save_to_disk writes


def read_source(spec: SourceSpec, bad: Bad) -> Iterator[Row]:
    """Yield the rows of a source's file, folder, hub data set or generator. Raises the same errors as `read_file`."""
    if spec.generator is not None:
        yield from read_generated(spec)
    elif spec.path is None:
        yield from _rows(_load(str(spec.hub), spec), Path(str(spec.hub)))
    elif spec.format not in FORMATS:
        yield from _plugged_in(spec.path, spec.format)
    elif not spec.path.is_dir():
        yield from read_file(spec.path, "auto" if spec.format == "datasets" else spec.format, bad)
    elif any((spec.path / name).is_file() for name in SAVED):
        yield from _rows(_saved(spec.path, spec), spec.path)
    elif _is_tree(spec):
        yield from _tree(spec.path, bad)
    else:
        yield from _rows(_load(str(spec.path), spec), spec.path)


def _plugged_in(path: Path, name: str) -> Iterator[Row]:
    """Yield the rows of a plug-in's reader, numbered from 1."""
    read = resolved(plugin_of(DATA, name, ReaderPlugin).read)
    try:
        for number, fields in enumerate(read(path), 1):
            yield Row(path, number, plain(dict(fields)))
    except (OSError, ValueError, TypeError) as error:
        raise JobError(f"data file {path}: the reader of format {name} failed: {_short(error)}") from error


def _is_tree(spec: SourceSpec) -> bool:
    """Whether the source is a recipe's folder with one JSON file per problem, as MATH and ARC were first published."""
    path = spec.path
    return (
        path is not None
        and spec.recipe is not None
        and not (path / "README.md").exists()
        and any(True for _ in path.rglob("*.json"))
    )


def _tree(folder: Path, bad: Bad) -> Iterator[Row]:
    for path in sorted(folder.rglob("*.json")):
        yield from read_file(path, "json", bad)


def _saved(folder: Path, spec: SourceSpec) -> "Dataset":
    datasets = _library()
    try:
        loaded = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError, json.JSONDecodeError) as error:
        raise JobError(f"data folder {folder} does not load: {_short(error)}") from error
    return _one_split(loaded, spec)


def _load(name: str, spec: SourceSpec) -> "Dataset":
    datasets = _library()
    try:
        loaded = datasets.load_dataset(name, spec.config, split=spec.split, revision=spec.revision)
    except (OSError, ValueError, RuntimeError, KeyError, datasets.exceptions.DatasetsError) as error:
        raise JobError(f"data set {name} does not load: {_short(error)}") from error
    return _one_split(loaded, spec)


def _one_split(loaded: "Dataset | DatasetDict", spec: SourceSpec) -> "Dataset":
    if not isinstance(loaded, dict):
        return loaded
    splits = list(loaded)
    if spec.split is not None:
        if spec.split not in loaded:
            raise JobError(f"data {spec.place} has no split {spec.split!r}; it has {', '.join(splits)}")
        return loaded[spec.split]
    if len(splits) != 1:
        raise JobError(f"data {spec.place} has the splits {', '.join(splits)}: choose one, such as split: {splits[0]}")
    return loaded[splits[0]]


def _rows(data: "Dataset", path: Path) -> Iterator[Row]:
    data = data.with_format(None)
    simple = all(is_plain(field.type) for field in data.features.arrow_schema)
    number = 0
    for batch in data.iter(batch_size=1024):
        names = list(batch)
        for values in zip(*batch.values(), strict=True):
            number += 1
            fields = dict(zip(names, values, strict=True))
            yield Row(path, number, fields if simple else plain(fields))


def _library() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise HostError("this data needs the datasets package: pip install 'volley-rl[cpu]' or datasets") from error
    datasets.disable_progress_bars()
    return datasets


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
