"""The rows of the data sets that a recipe names: files, directories, data sets of the hub.

JSON is read as strictly as JSON lines are, and the fields of CSV are text, as they stand. All else
is read by `datasets`, which runs no code of a data set's author.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rl_consistency.trainers.config.data_sections import EvalSetSection
from rl_consistency.trainers.data.examples import DataError, Rows, jsonl_rows, regular_file
from rl_consistency.trainers.data.foreign_files import explained, parse_json

SAVED = ("state.json", "dataset_dict.json")
"""One of them lies in what `save_to_disk` wrote."""
DELIMITERS = {".csv": ",", ".tsv": "\t"}
_COMMIT = re.compile("[0-9a-f]{40}")


def read_rows(source: EvalSetSection) -> tuple[Rows, str | None]:
    """The rows of a data set, and the commit that a data set of the hub has.

    DataError, with its remedy, where it is not there, is damaged, or has no rows.
    """
    path = source.path
    given = [key for key in ("name", "split", "revision") if getattr(source, key) is not None]
    if isinstance(path, Path) and not path.is_dir() and given:
        raise DataError(f"{path} is a file, which has no {' or '.join(given)}: leave it out")
    if isinstance(path, str) or of_datasets(source):
        return _from_datasets(source)
    rows, suffix = jsonl_rows(path, source.limit), path.suffix.lower()
    if suffix in DELIMITERS:
        rows = _csv_rows(path, DELIMITERS[suffix], source.limit)
    elif suffix == ".json" and _is_list(path):
        rows = _json_rows(path, source.limit)
    return rows, None


def of_datasets(source: EvalSetSection) -> bool:
    """Whether a data set is read by `datasets`."""
    path = source.path
    return isinstance(path, str) or path.is_dir() or path.suffix.lower() == ".parquet"


def _is_list(path: Path) -> bool:
    with regular_file(path) as stream:
        return stream.read(1000).lstrip()[:1] == b"["


def _json_rows(path: Path, limit: int | None) -> Rows:
    with regular_file(path) as stream:
        try:
            values = parse_json(stream.read())
        except ValueError as error:
            raise DataError(f"{path}: {error}") from error
    for index, value in enumerate(values[:limit]):
        if not isinstance(value, dict):
            raise DataError(f"{path}, item {index + 1}: an object is needed, got {value!r:.60}")
        yield f"{path}, item {index + 1}", value


def _csv_rows(path: Path, delimiter: str, limit: int | None) -> Rows:
    with regular_file(path) as stream, explained(DataError, f"{path} cannot be read as CSV"):
        text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
        reader = csv.DictReader(text, delimiter=delimiter, strict=True)
        names = reader.fieldnames or ()
        if twice := [name for name, times in Counter(names).items() if times > 1]:
            raise DataError(f"{path}: the field {twice[0]} stands more than once: rename one")
        for record in islice(reader, limit):
            place = f"{path}, line {reader.line_num}"
            if None in record or None in record.values():
                raise DataError(f"{place}: it must have the {len(names)} fields")
            yield place, record


def _from_datasets(source: EvalSetSection) -> tuple[Rows, str | None]:
    if find_spec("datasets") is None:
        remedy = "it is not installed: pip install 'rl-consistency[data]', or give JSON lines"
        raise DataError(f"{source.path} is read by datasets: {remedy}")
    dataset, commit = _loaded(source)
    columns = dataset.features.items()
    if unread := [name for name, kind in columns if hasattr(kind, "decode_example")]:
        problem = f"its column {unread[0]} is neither text nor numbers"
        raise DataError(f"{source.path}: {problem}: save the data set without it")
    rows = dataset.select(range(min(source.limit or len(dataset), len(dataset)))).to_list()
    place = f"{source.path}" + (f", {source.split}" if source.split else "")
    return [(f"{place}, row {index + 1}", row) for index, row in enumerate(rows)], commit


def _loaded(source: EvalSetSection) -> tuple[Any, str | None]:
    """A `Dataset` in memory, and its commit on the hub."""
    import datasets

    path = source.path
    given: dict[str, Any] = {"name": source.name, "split": source.split}
    if isinstance(path, str):
        name, _, revision = path.partition("@")
        revision = source.revision or revision or None
        remedy = (
            "there is no such file or directory here, and the hub gave no data set of that name. "
            "Check path, name, split and revision, and the network (HF_HUB_OFFLINE); or download "
            "it elsewhere and give its directory"
        )
        with explained(DataError, f"data {path}: {remedy}"):
            dataset = datasets.load_dataset(name, revision=revision, **given)
        return dataset, _commit_of(dataset)
    with explained(DataError, f"cannot read the data {path}"), _quiet_cache() as cache:
        held: dict[str, Any] = {"cache_dir": cache, "keep_in_memory": True}
        if path.is_file():
            return datasets.Dataset.from_parquet(str(path), **held), None
        if not any((path / file).is_file() for file in SAVED):
            return datasets.load_dataset(str(path), **given, **held), None
        dataset: Any = datasets.load_from_disk(str(path), keep_in_memory=True)
        if isinstance(dataset, Mapping):
            if source.split not in dataset:
                known = ", ".join(map(str, dataset))
                raise DataError(f"{path} has no split {source.split}: give one of {known}")
            dataset = dataset[source.split]
        return dataset, None


def _commit_of(dataset: Any) -> str | None:
    """The commit in the name of the folder of the hub's cache that a data set lies in."""
    files = [Path(file["filename"]) for file in getattr(dataset, "cache_files", None) or ()]
    return next((f.parent.name for f in files if _COMMIT.fullmatch(f.parent.name)), None)


@contextmanager
def _quiet_cache() -> Iterator[str]:
    """A cache for the length of the block: one that stays might hold what a file no longer says."""
    from datasets.utils import logging

    shown = logging.is_progress_bar_enabled()
    try:
        logging.disable_progress_bar()
        with TemporaryDirectory(prefix="rl_consistency-data-") as cache:
            yield cache
    finally:
        if shown:
            logging.enable_progress_bar()
